"""Tree verification as a Pallas kernel for TPUs (Mosaic): one program a value head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.tree_verify import body
from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

# Bounded by the vector memory: a program holds a few n x n matrices.
MOST_NODES = 256


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
        or refusals.above(spec, MOST_NODES, "nodes")
        or specs.unsupported_dtype(spec)
    )


def tree_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and float32 pseudo-values, 0 in rows from `sizes` on.

    Those rows are not used. `ancestors` is true at [t, i] for i = t and for the
    ancestors i of t, `sweeps` the depth of each row's tree. Interpreted where the
    target is a CPU.
    """
    from jax.experimental.pallas import tpu as pallas_tpu

    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    nodes = -(-spec.nodes // 16) * 16  # the rows of a bfloat16 tile
    rows = tree_rows(q, k, v, log_decay, beta, ancestors, sizes, nodes)
    in_specs, value = block_specs(spec, config, nodes)
    in_specs.append(pl.BlockSpec(memory_space=pallas_tpu.SMEM))
    output, pseudo_values = pl.pallas_call(
        functools.partial(_kernel, precision=spec.precision),
        grid=(spec.batch, spec.value_heads, spec.value_dim // config.block_v),
        in_specs=in_specs,
        out_specs=[value, value],
        out_shape=[
            jax.ShapeDtypeStruct(rows[2].shape, spec.output_dtype),
            jax.ShapeDtypeStruct(rows[2].shape, jnp.float32),
        ],
        interpret=platform == "cpu",
        cost_estimate=specs.cost_estimate(spec),
        name="tree_verify",
    )(*rows, state, sweeps)
    output, pseudo_values = (jnp.swapaxes(x, 1, 2) for x in (output, pseudo_values))
    return output[:, : spec.nodes], pseudo_values[:, : spec.nodes]


def tree_rows(q, k, v, log_decay, beta, ancestors, sizes, nodes):
    """Return the inputs but the state, padded to `nodes` rows, 0 from `sizes` on.

    Heads come before nodes in memory: the last two axes of a block are a tile.
    """
    q, k, v, log_decay, beta = (
        jnp.swapaxes(_pad(_zeroed(x, sizes), nodes, (1,)), 1, 2)
        for x in (q, k, v, log_decay, beta)
    )
    ancestors = _pad(ancestors, nodes, (1, 2)).astype(jnp.int32)
    return q, k, v, log_decay[..., None, :], beta[..., None], ancestors


def _kernel(
    q, k, v, log_decay, beta, ancestors, state, sweeps, output, pseudo_values,
    *, precision,
):  # fmt: skip
    dot = functools.partial(product, fast=precision == "fast")
    queries, keys, tile, strength = q[...], k[...], state[...], beta[...]
    related = ancestors[...] != 0
    decay, from_state = body.path_decay(log_decay[...], related)
    matrix, weights = body.system(
        dot(keys, keys, 1, 1), dot(queries, keys, 1, 1), decay, strength
    )
    known = from_state * dot(keys, tile, 1, 1)
    right = strength * (v[...].astype(jnp.float32) - known)
    # A loop bound is a scalar, and scalars live in SMEM.
    solved = lax.fori_loop(
        0, sweeps[pl.program_id(0)], lambda _, u: right - dot(matrix, u, 1, 0), right
    )
    seen = from_state * dot(queries, tile, 1, 1) + dot(weights, solved, 1, 0)
    output[...] = seen.astype(output.dtype)
    pseudo_values[...] = solved


def product(a, b, a_axis, b_axis, *, fast):
    """Contract an axis of each operand; Mosaic splits float32 operands by itself."""
    if fast:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    precision = None
    if not a.dtype == b.dtype == jnp.bfloat16:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        precision = lax.Precision.HIGHEST
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _zeroed(x, sizes):
    used = jnp.arange(x.shape[1]) < sizes[:, None]
    return jnp.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), x, 0)


def _pad(x, nodes, axes):
    """Append zeros along `axes` up to `nodes`: rows without ancestors or beta."""
    widths = [(0, nodes - size if i in axes else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def block_specs(spec, config, nodes):
    """Return the blocks of the inputs, in the order of `_kernel`, and of an output."""
    group, block_v = spec.group, config.block_v
    key = pl.BlockSpec(
        (None, None, nodes, spec.key_dim), lambda b, h, i: (b, h // group, 0, 0)
    )
    value = pl.BlockSpec((None, None, nodes, block_v), lambda b, h, i: (b, h, 0, i))
    row = pl.BlockSpec((None, None, 1, nodes), lambda b, h, i: (b, h, 0, 0))
    column = pl.BlockSpec((None, None, nodes, 1), lambda b, h, i: (b, h, 0, 0))
    square = pl.BlockSpec((None, nodes, nodes), lambda b, h, i: (b, 0, 0))
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda b, h, i: (b, h, i, 0)
    )
    return [key, key, value, row, column, square, tile], value
