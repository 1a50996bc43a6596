"""The expert layer in two Pallas Triton kernels for NVIDIA GPUs, of many rows in three.

A block holds rows of one expert (blocks.py). `_gate_up` and `_down` have a program a
block and tile of columns. No sorted copy of x is made; an expert's matrices are read
once a block. The shared expert has blocks as the others, and its own matrices.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.grouped_matmul import blocks, reference, routes
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import spec as specs

# Sizes are cut in tiles of this many at least, the depth of a tensor core's product.
LEAST_TILE = 16
# Of more tokens XLA computes a shared expert that is narrower than the others, whose
# tiles do not fit it. A launch or two more are little beside so many rows.
MOST_TOGETHER = 1280


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernels cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernels are interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, LEAST_TILE, "hidden", "inner", "shared")
        or specs.unsupported_dtype(spec)
    )


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its experts; interpreted where the target is a CPU."""
    if 0 < spec.shared < spec.inner and spec.tokens > MOST_TOGETHER:
        alone = reference.swiglu(x, *shared) * weights[:, -1:].astype(x.dtype)
        without = dataclasses.replace(spec, shared=0)
        arrays = (x, gate_up, down, experts, weights[:, :-1])
        return swiglu_experts(*arrays, spec=without, config=config) + alone
    arrays = (x, gate_up, down, experts, weights, shared)
    by_token = swiglu_parts(*arrays, spec=spec, config=config)
    known = experts < spec.experts  # of the others nothing is written
    if spec.shared:
        known = jnp.pad(known, ((0, 0), (0, 1)), constant_values=True)
    by_token = jnp.where(known[..., None], by_token, 0)
    return jnp.sum(by_token, axis=1, dtype=jnp.float32).astype(x.dtype)


def swiglu_parts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "T K H"]:
    """Return what is added up for every row; those of no expert are not written."""
    config = configs.choose(spec, "gpu", device.target()[1], config)
    found = blocks.find(experts, spec=spec, config=config)
    alike = ((), ()) if shared is None else tuple((each[None],) for each in shared)
    options = dict(spec=spec, config=config)
    inner = _gate_up(x, (gate_up, *alike[0]), found, **options)
    by_slot = _down(inner, (down, *alike[1]), weights, found, **options)
    return by_slot.reshape(spec.tokens, spec.slots, spec.hidden)


def _gate_up(x, matrices, found, *, spec, config):
    """Return silu(gate x) * up x of every token and expert of it: [T slots, I].

    I is that of the widest; beyond the end of a narrower one nothing is written.
    """
    width = max(spec.inner, spec.shared)
    [inner] = routes.launch(
        functools.partial(_gate_up_kernel, spec=spec, config=config),
        name="grouped_matmul_up",
        grid=(width // config.up_columns, found.shared + found.routed),
        inputs=[(each, each.shape) for each in (x, *matrices)] + list(found.inputs),
        outputs=[((spec.tokens * spec.slots, width), x.dtype)],
        options=(config.up_warps, config.up_stages),
    )
    return inner


def _gate_up_kernel(x, *refs, spec, config):
    columns, depth = config.up_columns, config.up_depth
    first = pl.program_id(0) * columns
    *refs, inner = refs
    gate_up, alike, lists = _named(refs, spec)

    def body(matrices, expert, row, live):
        token, size = row // spec.slots, matrices.shape[2] // 2

        def step(i, sums):
            rows = _gather(x, token, live, i * depth, depth)
            products = (
                _product(
                    rows,
                    matrices[expert, pl.ds(i * depth, depth), pl.ds(column, columns)],
                    config.weights_first,
                )
                for column in (first, size + first)
            )
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        @pl.when(first < size)
        def _():
            zero = _zeros(len(row), columns, config.weights_first)
            gate, up = lax.fori_loop(0, spec.hidden // depth, step, (zero, zero))
            value = gate * up / (1 + jnp.exp(-gate))
            _scatter(inner, row, live, first, value, config.weights_first)

    blocks.for_each(body, gate_up, alike, lists, spec=spec, config=config)


def _down(inner, matrices, weights, found, *, spec, config):
    """Return weight * down(inner) of every token and expert of it: [T slots, H]."""
    scales = weights.reshape(-1).astype(jnp.float32)
    arrays = (inner, scales, *matrices)
    [by_slot] = routes.launch(
        functools.partial(_down_kernel, spec=spec, config=config),
        name="grouped_matmul_down",
        grid=(spec.hidden // config.down_columns, found.shared + found.routed),
        inputs=[(each, each.shape) for each in arrays] + list(found.inputs),
        outputs=[((spec.tokens * spec.slots, spec.hidden), inner.dtype)],
        options=(config.down_warps, config.down_stages),
    )
    return by_slot


def _down_kernel(inner, scales, *refs, spec, config):
    columns, depth = config.down_columns, config.down_depth
    first = pl.program_id(0) * columns
    *refs, by_slot = refs
    down, alike, lists = _named(refs, spec)

    def body(matrices, expert, row, live):
        scale = gpu.load(scales.at[row], live)

        def step(i, total):
            rows = _gather(inner, row, live, i * depth, depth)
            tile = matrices[expert, pl.ds(i * depth, depth), pl.ds(first, columns)]
            return total + _product(rows, tile, config.weights_first)

        zero = _zeros(len(row), columns, config.weights_first)
        total = lax.fori_loop(0, matrices.shape[1] // depth, step, zero)
        value = total * (scale[None, :] if config.weights_first else scale[:, None])
        _scatter(by_slot, row, live, first, value, config.weights_first)

    blocks.for_each(body, down, alike, lists, spec=spec, config=config)


def _named(refs, spec):
    """Return the experts' matrices, the shared expert's or None, and the lists."""
    matrices, *rest = refs
    return matrices, rest.pop(0) if spec.shared else None, tuple(rest)


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
