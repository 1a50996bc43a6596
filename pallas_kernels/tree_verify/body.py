"""The kernel shared by Triton and Mosaic TPU: one program a value head and Dv block.

A program holds block_v rows of one head's state and all nodes of one tree, so the
state is read once. The equations are those of treewy_jax.wy in the same order. Values
stay two-dimensional and are never sliced, which is what both compilers accept.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

Dot = Callable[[Any, Any, int, int], Any]


def dot(a, b, a_axis: int, b_axis: int, *, fast: bool, precision) -> Any:
    """Contract one axis of each 2-D operand, accumulating in float32.

    `fast` rounds the operands to bfloat16. Otherwise `precision` is used, except for
    two bfloat16 operands, whose products are exact in float32 anyway.
    """
    if fast:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if a.dtype == b.dtype == jnp.bfloat16:
        precision = None
    else:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def verify_block(
    q: Float[Array, "n Dk"],
    k: Float[Array, "n Dk"],
    v: Float[Array, "n bv"],
    high: tuple[Float[Array, "n 1"], Float[Array, "1 n"]],
    low: tuple[Float[Array, "n 1"], Float[Array, "1 n"]],
    beta: Float[Array, "n 1"],
    ancestors: Bool[Array, "n n"],
    state: Float[Array, "bv Dk"],
    sweeps: Int[Array, ""],
    *,
    dot: Dot,
) -> tuple[Float[Array, "n bv"], Float[Array, "n bv"]]:
    """Return outputs and pseudo-values of one head for block_v rows of its state."""
    node = lax.broadcasted_iota(jnp.int32, ancestors.shape, 0)
    other = lax.broadcasted_iota(jnp.int32, ancestors.shape, 1)
    difference = (high[0] - high[1]) + (low[0] - low[1])
    decay = jnp.where(ancestors, jnp.exp(jnp.minimum(difference, 0.0)), 0.0)
    from_state = jnp.exp(high[0] + low[0])

    strict = ancestors & (node != other)
    matrix = jnp.where(strict, beta * (decay * dot(k, k, 1, 1)), 0.0)
    known = from_state * dot(k, state, 1, 1)
    right = beta * (v.astype(jnp.float32) - known)
    pseudo_values = lax.fori_loop(
        0, sweeps, lambda _, u: right - dot(matrix, u, 1, 0), right
    )

    weights = jnp.where(ancestors, decay * dot(q, k, 1, 1), 0.0)
    output = from_state * dot(q, state, 1, 1) + dot(weights, pseudo_values, 1, 0)
    return output, pseudo_values


def _kernel(
    q, k, v, high, high_row, low, low_row, beta, ancestors, state, sweeps,
    output, pseudo_values, *, dot, read_sweeps,
):  # fmt: skip
    out, u = verify_block(
        q[...],
        k[...],
        v[...],
        (high[...], high_row[...]),
        (low[...], low_row[...]),
        beta[...],
        ancestors[...] != 0,
        state[...],
        read_sweeps(sweeps),
        dot=dot,
    )
    output[...] = out.astype(output.dtype)
    pseudo_values[...] = u.astype(pseudo_values.dtype)


def pad_nodes(x: Array, nodes: int, axes: tuple[int, ...]) -> Array:
    """Append zeros along `axes` up to `nodes`: rows without ancestors or beta."""
    widths = [(0, nodes - size if i in axes else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def call(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    high: Float[Array, "B Hv n"],
    low: Float[Array, "B Hv n"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config,
    nodes: int,
    head_major: bool,
    ancestors_dtype: Any,
    sweeps_spec: pl.BlockSpec,
    read_sweeps: Callable,
    precision: Any,
    interpret: bool,
    compiler_params: Any,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Pad the tree to `nodes`, run the kernel over (B, Hv, Dv / block_v), cut back.

    `head_major` moves the heads before the nodes in memory, as a TPU's block rules
    ask; a GPU reads rows of the token-major arrays in place.
    """
    q, k, v, beta = (pad_nodes(x, nodes, (1,)) for x in (q, k, v, beta))
    high, low = (pad_nodes(x, nodes, (2,)) for x in (high, low))
    ancestors = pad_nodes(ancestors, nodes, (1, 2)).astype(ancestors_dtype)
    beta = jnp.swapaxes(beta, 1, 2)
    if head_major:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    specs_in, spec_out = _block_specs(spec, config, nodes, head_major, sweeps_spec)
    shape = v.shape
    output, pseudo_values = pl.pallas_call(
        functools.partial(
            _kernel,
            dot=functools.partial(
                dot, fast=spec.precision == "fast", precision=precision
            ),
            read_sweeps=read_sweeps,
        ),
        grid=(spec.batch, spec.value_heads, spec.value_dim // config.block_v),
        in_specs=specs_in,
        out_specs=[spec_out, spec_out],
        out_shape=[
            jax.ShapeDtypeStruct(shape, spec.output_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        interpret=interpret,
        compiler_params=compiler_params,
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.batch * spec.value_heads * nodes * (nodes + 1),
        ),
        name="tree_verify",
    )(
        q,
        k,
        v,
        high[..., :, None],
        high[..., None, :],
        low[..., :, None],
        low[..., None, :],
        beta[..., :, None],
        ancestors,
        state,
        sweeps,
    )
    if head_major:
        output, pseudo_values = (jnp.swapaxes(x, 1, 2) for x in (output, pseudo_values))
    return output[:, : spec.nodes], pseudo_values[:, : spec.nodes]


def _block_specs(spec, config, nodes, head_major, sweeps_spec):
    """Return the blocks of the inputs, in the order of `_kernel`, and of an output."""
    group, block_v = spec.group, config.block_v
    if head_major:
        key = pl.BlockSpec(
            (None, None, nodes, spec.key_dim), lambda b, h, i: (b, h // group, 0, 0)
        )
        value = pl.BlockSpec((None, None, nodes, block_v), lambda b, h, i: (b, h, 0, i))
    else:
        key = pl.BlockSpec(
            (None, nodes, None, spec.key_dim), lambda b, h, i: (b, 0, h // group, 0)
        )
        value = pl.BlockSpec((None, nodes, None, block_v), lambda b, h, i: (b, 0, h, i))
    column = pl.BlockSpec((None, None, nodes, 1), lambda b, h, i: (b, h, 0, 0))
    row = pl.BlockSpec((None, None, 1, nodes), lambda b, h, i: (b, h, 0, 0))
    square = pl.BlockSpec((None, nodes, nodes), lambda b, h, i: (b, 0, 0))
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda b, h, i: (b, h, i, 0)
    )
    inputs = [key, key, value, column, row, column, row, column, square, tile]
    return [*inputs, sweeps_spec], value
