"""Appending to a history as a Pallas kernel for TPUs (Mosaic): one step a record.

Path and counts are known before a step begins, so the pipeline fetches the node that
it needs and sends the record where it belongs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import custom_batching
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.history_append import config as configs
from pallas_kernels.history_append import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
        or specs.unsupported(spec)
    )


def history_append(
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B m Hk Dk"], Float[Array, "B m Hv Dv"], Float[Array, "B m Hv"]
]:
    """Return the history's arrays, in the memory of the arguments."""
    del spec, config  # the shapes say all, and nothing is cut
    past = (past_k, past_pseudo_values, past_log_decay, past_count)
    return tuple(_append(*past, k, pseudo_values, log_decay, path, count))


@custom_batching.custom_vmap
def _append(*arrays: Array) -> list[Array]:
    """Run over (rows, positions of the path)."""
    from jax.experimental.pallas import tpu as pallas_tpu

    past_k, past_values, past_decay, past_count, k, values, decay, path, count = arrays
    sizes = {"length": path.shape[1], "horizon": past_k.shape[1], "nodes": k.shape[1]}
    node, slot = _indices(**sizes)
    # A line that begins anywhere in a tile can be read alone in float32 only.
    old, new = past_decay.astype(jnp.float32), decay.astype(jnp.float32)

    def line(x, index):
        return pl.BlockSpec((None, None, *x.shape[2:]), index)

    def whole(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, 0, 0))

    def first(b, _, *scalars):
        return slot(b, 0, *scalars)

    past = (past_k, past_values, old)
    new_k, new_values, new_decay = pl.pallas_call(
        functools.partial(_kernel, **sizes),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=path.shape,
            in_specs=[line(x, first) for x in past[:2]]
            + [whole(old), line(k, node), line(values, node), whole(new)],
            out_specs=[*(line(x, slot) for x in past[:2]), whole(old)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in past],
        input_output_aliases={3: 0, 4: 1, 5: 2},  # behind the scalars
        interpret=device.platform() == "cpu",
        name="history_append",
    )(path.reshape(-1), count, past_count, *past, k, values, new)
    return [new_k, new_values, new_decay.astype(past_decay.dtype)]


def _indices(*, length: int, horizon: int, nodes: int) -> tuple[Callable, Callable]:
    """Return which node and which slot belong to position i of row b.

    Behind the last record of a path come its node and its slot again: no traffic.
    """

    def node(b, i, path, count, _):
        i = jnp.minimum(i, jnp.clip(count[b], 1, length) - 1)
        return b, jnp.clip(path[b * length + i], 0, nodes - 1), 0, 0

    def slot(b, i, _, count, past_count):
        behind = past_count[b] + jnp.clip(count[b], 0, length)
        most = jnp.clip(behind - 1, 0, horizon - 1)
        return b, jnp.clip(past_count[b] + i, 0, most), 0, 0

    return node, slot


@_append.def_vmap
def _append_layers(size, mapped, *arrays):
    """Make layers rows of one batch.

    Pallas would loop over them: counts that differ by layer are scalars of the grid.
    """
    stacked = (
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(arrays, mapped, strict=True)
    )
    rows = _append(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
    return [x.reshape(size, -1, *x.shape[1:]) for x in rows], [True] * len(rows)


def _kernel(
    path, count, past_count, past_k, past_values, past_decay, k, values, decay,
    new_k, new_values, new_decay, *, length, horizon, nodes,
):  # fmt: skip
    row, position = pl.program_id(0), pl.program_id(1)
    slot = past_count[row] + position
    written = (position < count[row]) & (slot >= 0) & (slot < horizon)

    @pl.when(position == 0)
    def _():
        # A slot without a record is sent back as well.
        new_k[...] = past_k[...]
        new_values[...] = past_values[...]
        new_decay[...] = past_decay[...]

    @pl.when(written)
    def _():
        new_k[...] = k[...].astype(new_k.dtype)
        new_values[...] = values[...].astype(new_values.dtype)
        node = jnp.clip(path[row * length + position], 0, nodes - 1)
        new_decay[pl.ds(slot, 1), :] = decay[pl.ds(node, 1), :]
