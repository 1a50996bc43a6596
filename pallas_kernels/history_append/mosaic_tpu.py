"""Appending to a history as a Pallas kernel for TPUs (Mosaic): one step a record.

Path and counts are known before a step begins, so the pipeline fetches the node that
it needs and sends the record where it belongs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import custom_batching
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

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


def append_layers(
    pasts: Sequence[specs.Past],
    nodes: Sequence[specs.Nodes],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> list[specs.Past]:
    """Return the histories, in the memory of the arguments but for their counts.

    One call a layer: nothing is gained by one for all.
    """
    del config  # nothing is cut
    append = _appender(dataclasses.replace(spec, layers=1))
    pairs = zip(pasts, nodes, strict=True)
    return [specs.Past(*append(*past, *tree, path, count)) for past, tree in pairs]


@functools.cache
def _appender(spec: specs.Spec) -> Callable:
    """Return the call of one layer, of which jax.vmap makes one of more rows."""

    @custom_batching.custom_vmap
    def append(*arrays):
        return _append(*arrays, spec=spec)

    @append.def_vmap
    def layers(size, mapped, *arrays):
        # Pallas would loop: counts that differ by layer are scalars of the grid.
        stacked = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, mapped, strict=True)
        )
        rows = append(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
        return [x.reshape(size, -1, *x.shape[1:]) for x in rows], [True] * len(rows)

    return append


def _append(
    past_k, past_values, past_decay, past_count, k, values, decay, path, count, *, spec
):
    """Run over (rows, positions of the path)."""
    from jax.experimental.pallas import tpu as pallas_tpu

    node, slot = _indices(spec)
    # A line that begins anywhere in a tile can be read alone in float32 only.
    old, new = past_decay.astype(jnp.float32), decay.astype(jnp.float32)

    def line(x, index):
        return pl.BlockSpec((None, None, *x.shape[2:]), index)

    def whole(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, 0, 0))

    def first(b, _, *scalars):
        return slot(b, 0, *scalars)

    past = (past_k, past_values, old)
    new_k, new_values, new_decay, new_count = pl.pallas_call(
        functools.partial(_kernel, spec=spec),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=path.shape,
            in_specs=[line(x, first) for x in past[:2]]
            + [whole(old), line(k, node), line(values, node), whole(new)],
            out_specs=[
                *(line(x, slot) for x in past[:2]),
                whole(old),
                pl.BlockSpec(memory_space=pallas_tpu.SMEM),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*past, past_count)],
        input_output_aliases={3: 0, 4: 1, 5: 2},  # behind the scalars
        interpret=device.platform() == "cpu",
        name="history_append",
    )(path.reshape(-1), count, past_count, *past, k, values, new)
    return [new_k, new_values, new_decay.astype(past_decay.dtype), new_count]


def _indices(spec: specs.Spec) -> tuple[Callable, Callable]:
    """Return which node and which slot belong to position i of row b.

    Behind the last record of a path come its node and its slot again: no traffic.
    """
    length = spec.path

    def node(b, i, path, count, _):
        i = jnp.minimum(i, jnp.clip(count[b], 1, length) - 1)
        return b, jnp.clip(path[b * length + i], 0, spec.nodes - 1), 0, 0

    def slot(b, i, _, count, past_count):
        base = specs.base(past_count[b], spec)
        most = jnp.maximum(specs.behind(base, count[b], spec) - 1, 0)
        return b, jnp.minimum(base + i, most), 0, 0

    return node, slot


def _kernel(
    path, count, past_count, past_k, past_values, past_decay, k, values, decay,
    new_k, new_values, new_decay, new_count, *, spec,
):  # fmt: skip
    row, position = pl.program_id(0), pl.program_id(1)
    base = specs.base(past_count[row], spec)
    behind = specs.behind(base, count[row], spec)
    slot = base + position

    @pl.when(position == 0)
    def _():
        # A slot without a record is sent back as well.
        new_k[...] = past_k[...]
        new_values[...] = past_values[...]
        new_decay[...] = past_decay[...]
        new_count[row] = behind

    @pl.when(slot < behind)
    def _():
        new_k[...] = k[...].astype(new_k.dtype)
        new_values[...] = values[...].astype(new_values.dtype)
        node = jnp.clip(path[row * spec.path + position], 0, spec.nodes - 1)
        new_decay[pl.ds(slot, 1), :] = decay[pl.ds(node, 1), :]
