"""Verification behind a history as a Pallas kernel for TPUs (Mosaic).

One program a value head, as in tree_verify. The new state stays where it is: a program
sends its rows there only if its row folds, so that other rows move their state once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device
from pallas_kernels.commit import mosaic_tpu as commit
from pallas_kernels.history_verify import config as configs
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import body
from pallas_kernels.tree_verify import mosaic_tpu as tree_verify
from pallas_kernels.tree_verify import spec as verify_specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return tree_verify.supports(
        spec, platform, interpret=interpret
    ) or specs.unsupported(spec)


def history_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B n Hv Dv"],
    Float[Array, "B n Hv Dv"],
    Float[Array, "B Hv Dv Dk"],
]:
    """Return outputs, float32 pseudo-values, and the state, in the memory of `state`.

    As tree_verify behind the first `past_count` records of each row; the state of rows
    with more than `spec.fold_above` takes them in, that of others keeps its bits. Other
    records are not used.
    """
    from jax.experimental.pallas import tpu as pallas_tpu

    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    nodes = -(-spec.nodes // 16) * 16  # the rows of a bfloat16 tile
    rows = tree_verify.tree_rows(q, k, v, log_decay, beta, ancestors, sizes, nodes)
    past = _past_rows(past_k, past_pseudo_values, past_log_decay, past_count)
    tree_specs, value = tree_verify.block_specs(spec, config, nodes)
    small = pl.BlockSpec(memory_space=pallas_tpu.SMEM)
    output, pseudo_values, new_state = pl.pallas_call(
        functools.partial(_kernel, spec=spec, sync_copy=pallas_tpu.sync_copy),
        grid=(spec.batch, spec.value_heads, spec.value_dim // config.block_v),
        in_specs=[*tree_specs, *_past_specs(spec, config, past), small, small],
        out_specs=[value, value, pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=[
            jax.ShapeDtypeStruct(rows[2].shape, spec.output_dtype),
            jax.ShapeDtypeStruct(rows[2].shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        scratch_shapes=[pallas_tpu.VMEM((config.block_v, spec.key_dim), state.dtype)],
        input_output_aliases={len(rows): 2},
        interpret=platform == "cpu",
        cost_estimate=verify_specs.cost_estimate(spec),
        name="history_verify",
    )(*rows, state, *past, past_count, sweeps)
    output, pseudo_values = (jnp.swapaxes(x, 1, 2) for x in (output, pseudo_values))
    return output[:, : spec.nodes], pseudo_values[:, : spec.nodes], new_state


def _past_rows(past_k, past_pseudo_values, past_log_decay, past_count):
    """Return keys, weighted pseudo-values and exp(H), heads before records.

    S_0 = e^H S + sum_j (e^(H - h_j) u_j) k_j^T. Records beyond the last are 0; their
    number is a multiple of 16, the rows of a bfloat16 tile.
    """
    records = jnp.arange(past_k.shape[1], dtype=jnp.int32)
    path = jnp.broadcast_to(records, past_k.shape[:2])
    written, keys, total = commit.path_rows(
        past_k, past_pseudo_values, past_log_decay, path, past_count, multiple=16
    )
    return keys, written, total


def _kernel(
    q, k, v, log_decay, beta, ancestors, state, past_k, written, remaining, past_count,
    sweeps, output, pseudo_values, new_state, folded, *, spec, sync_copy,
):  # fmt: skip
    dot = functools.partial(tree_verify.product, fast=spec.precision == "fast")
    queries, keys, tile, strength = q[...], k[...], state[...], beta[...]
    records, written = past_k[...], written[...]
    decay, from_state = body.path_decay(log_decay[...], ancestors[...] != 0)
    matrix, weights = body.system(
        dot(keys, keys, 1, 1), dot(queries, keys, 1, 1), decay, strength
    )

    def read(rows):
        behind = dot(dot(rows, records, 1, 1), written, 1, 0)
        return remaining[...] * dot(rows, tile, 1, 1) + behind

    right = strength * (v[...].astype(jnp.float32) - from_state * read(keys))
    row, head, block = (pl.program_id(axis) for axis in range(3))
    # A loop bound is a scalar, and scalars live in SMEM.
    solved = lax.fori_loop(
        0, sweeps[row], lambda _, u: right - dot(matrix, u, 1, 0), right
    )
    seen = from_state * read(queries) + dot(weights, solved, 1, 0)
    output[...] = seen.astype(output.dtype)
    pseudo_values[...] = solved

    @pl.when(specs.records(past_count[row], spec) > spec.fold_above)
    def _():
        exact = tree_verify.product(written, records, 0, 0, fast=False)
        new = remaining[...] * tile.astype(jnp.float32) + exact
        folded[...] = new.astype(folded.dtype)
        lines = pl.ds(block * folded.shape[0], folded.shape[0])
        sync_copy(folded, new_state.at[row, head, lines, :])


def _past_specs(spec, config, past):
    """Return the blocks of what `_past_rows` makes."""
    group, block_v = spec.group, config.block_v
    records = past[0].shape[2]
    key = pl.BlockSpec(
        (None, None, records, spec.key_dim), lambda b, h, i: (b, h // group, 0, 0)
    )
    value = pl.BlockSpec((None, None, records, block_v), lambda b, h, i: (b, h, 0, i))
    one = pl.BlockSpec((None, None, 1, 1), lambda b, h, i: (b, h, 0, 0))
    return [key, value, one]
