"""The expert layer in three Pallas Triton kernels for NVIDIA GPUs.

`routes.route` sorts the pairs of a token and one of its experts by expert and lists
blocks of rows; `_gate_up` and `_down` run over that list, a program a block and tile of
columns. No sorted copy of x is made; an expert's matrices are read once a block.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import routes
from pallas_kernels.grouped_matmul import spec as specs

# Sizes are cut in tiles of this many at least, the depth of a tensor core's product.
LEAST_TILE = 16


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernels cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernels are interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, LEAST_TILE, "hidden", "inner")
        or specs.unsupported_dtype(spec)
    )


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its experts; interpreted where the target is a CPU."""
    config = configs.choose(spec, "gpu", device.target()[1], config)
    order, blocks = routes.route(experts.reshape(-1), spec=spec, rows=config.rows)
    inner = _gate_up(x, gate_up, order, blocks, spec=spec, config=config)
    scales = weights.reshape(-1).astype(jnp.float32)
    by_pair = _down(inner, down, scales, order, blocks, spec=spec, config=config)
    by_token = by_pair.reshape(spec.tokens, spec.per_token, spec.hidden)
    known = (experts < spec.experts)[..., None]  # of the others nothing is written
    by_token = jnp.where(known, by_token, 0)
    return jnp.sum(by_token, axis=1, dtype=jnp.float32).astype(x.dtype)


def _gate_up(x, gate_up, order, blocks, *, spec, config):
    """Return silu(gate x) * up x of every pair, sorted by expert: [P, I]."""
    kernel = functools.partial(_gate_up_kernel, spec=spec, config=config)
    [inner] = routes.launch(
        kernel,
        name="grouped_matmul_up",
        grid=(spec.inner // config.up_columns, blocks.shape[0]),
        inputs=[(array, array.shape) for array in (x, gate_up, order, blocks)],
        outputs=[((spec.pairs, spec.inner), x.dtype)],
        options=(config.up_warps, config.up_stages),
    )
    return inner


def _gate_up_kernel(x, gate_up, order, blocks, inner, *, spec, config):
    columns, depth = config.up_columns, config.up_depth
    first = pl.program_id(0) * columns
    block = pl.program_id(1)
    count = blocks[block, routes.COUNT]

    @pl.when(count > 0)
    def _():
        expert = blocks[block, routes.EXPERT]
        slot = blocks[block, routes.START] + lax.iota(jnp.int32, config.rows)
        live = lax.iota(jnp.int32, config.rows) < count
        token = gpu.load(order.at[slot], live) // spec.per_token

        def step(i, sums):
            rows = _gather(x, token, live, i * depth, depth)
            products = (
                _product(
                    rows,
                    gate_up[expert, pl.ds(i * depth, depth), pl.ds(column, columns)],
                    config.weights_first,
                )
                for column in (first, spec.inner + first)
            )
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        zero = _zeros(config.rows, columns, config.weights_first)
        gate, up = lax.fori_loop(0, spec.hidden // depth, step, (zero, zero))
        value = gate * up / (1 + jnp.exp(-gate))
        _scatter(inner, slot, live, first, value, config.weights_first)


def _down(inner, down, scales, order, blocks, *, spec, config):
    """Return weight * down(inner) of every pair, in the order of the tokens: [P, H]."""
    kernel = functools.partial(_down_kernel, spec=spec, config=config)
    arrays = (inner, down, scales, order, blocks)
    [by_pair] = routes.launch(
        kernel,
        name="grouped_matmul_down",
        grid=(spec.hidden // config.down_columns, blocks.shape[0]),
        inputs=[(array, array.shape) for array in arrays],
        outputs=[((spec.pairs, spec.hidden), inner.dtype)],
        options=(config.down_warps, config.down_stages),
    )
    return by_pair


def _down_kernel(inner, down, scales, order, blocks, by_pair, *, spec, config):
    columns, depth = config.down_columns, config.down_depth
    first = pl.program_id(0) * columns
    block = pl.program_id(1)
    count = blocks[block, routes.COUNT]

    @pl.when(count > 0)
    def _():
        expert = blocks[block, routes.EXPERT]
        slot = blocks[block, routes.START] + lax.iota(jnp.int32, config.rows)
        live = lax.iota(jnp.int32, config.rows) < count
        pair = gpu.load(order.at[slot], live)
        scale = gpu.load(scales.at[pair], live)

        def step(i, total):
            rows = _gather(inner, slot, live, i * depth, depth)
            tile = down[expert, pl.ds(i * depth, depth), pl.ds(first, columns)]
            return total + _product(rows, tile, config.weights_first)

        zero = _zeros(config.rows, columns, config.weights_first)
        total = lax.fori_loop(0, spec.inner // depth, step, zero)
        value = total * (scale[None, :] if config.weights_first else scale[:, None])
        _scatter(by_pair, pair, live, first, value, config.weights_first)


def _gather(ref, rows, live, first, size):
    """Read `size` columns of some rows: [rows, size]; rows that are not live are 0."""
    shape = (rows.shape[0], size)
    row = lax.broadcast_in_dim(rows, shape, (0,))
    column = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    return gpu.load(ref.at[row, column], lax.broadcast_in_dim(live, shape, (0,)))


def _scatter(ref, rows, live, first, value, weights_first):
    """Write `value` to columns from `first` on of the live rows."""
    by_row, by_column = (1, 0) if weights_first else (0, 1)
    # The interpreter drops rows beyond the end; a GPU does not touch masked ones.
    rows = jnp.where(live, rows, ref.shape[0])
    row = lax.broadcast_in_dim(rows, value.shape, (by_row,))
    column = first + lax.broadcasted_iota(jnp.int32, value.shape, by_column)
    mask = lax.broadcast_in_dim(live, value.shape, (by_row,))
    gpu.store(ref.at[row, column], value, mask)


def _product(rows, tile, weights_first):
    """Return rows @ tile in float32, transposed where `weights_first`."""
    left, right = (dots.split(x, 3) for x in (rows, tile))
    if weights_first:
        return dots.dot(right, left, 0, 1)
    return dots.dot(left, right, 1, 0)


def _zeros(rows, columns, weights_first):
    shape = (columns, rows) if weights_first else (rows, columns)
    return jnp.zeros(shape, jnp.float32)
