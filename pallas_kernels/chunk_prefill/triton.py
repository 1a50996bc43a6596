"""Chunked prefill as two Pallas Triton kernels for NVIDIA GPUs.

The first is parallel over chunks and forms what does not need the state (formulas in
the reference). The second walks over the chunks with a tile of the state in registers;
every product there has the state or the pseudo-values on its left, [Dv, ...], so that
the result of one product is the register operand of the next.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.chunk_prefill import body
from pallas_kernels.chunk_prefill import config as configs
from pallas_kernels.chunk_prefill import spec as specs

# Columns of K or V at a time in the first launch: bounds the registers in use.
BLOCK = 64


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernels cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernels are interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 16, "key_dim", "value_dim")
        or refusals.dtypes(spec, "input", "state", "output")
    )


def chunk_prefill(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Return outputs and last state; interpreted where the target is a CPU."""
    config = configs.choose(spec, *device.target(), config)
    x, m, start, end, rate = _solve(q, k, log_decay, beta, spec, config)
    return _scan((k, v, x, start, end, rate, state, q, m, start), spec, config)


# --- first launch: one chunk of one head


def _solve_kernel(q, k, log_decay, beta, x, m, start, end, rate, *, chunk, spec):
    """X = (I + A)^-1, M = Q K^T o D, the decays and beta of one chunk."""
    rows = spec.tokens - pl.program_id(1) * chunk
    ragged = spec.tokens % chunk != 0
    flat = gpu.row_mask((chunk,), rows) if ragged else None

    def load(ref, i):
        size = min(ref.shape[1], BLOCK)
        mask = gpu.row_mask((chunk, size), rows) if ragged else None
        return dots.split(gpu.load(ref.at[:, _slice(i, size)], mask), spec.parts)

    def add_grams(i, sums):
        keys, queries = load(k, i), load(q, i)
        gram, query_gram = sums
        gram += dots.dot(keys, keys, 1, 1)
        return gram, query_gram + dots.dot(queries, keys, 1, 1)

    zeros = jnp.zeros((chunk, chunk), jnp.float32)
    blocks = k.shape[1] // min(k.shape[1], BLOCK)
    gram, query_gram = lax.fori_loop(0, blocks, add_grams, (zeros, zeros))
    strength = gpu.load(beta.at[...], flat).astype(jnp.float32)
    gpu.store(rate.at[...], strength)
    log = gpu.load(log_decay.at[...], flat).astype(jnp.float32)
    steps = body.coarse_and_fine(log)
    sums = [jnp.cumsum(x) for x in steps]
    rest = sum(jnp.sum(x) - total for x, total in zip(steps, sums, strict=True))
    between = body.decay_between([c[:, None] for c in sums], [c[None, :] for c in sums])
    gpu.store(m.at[...], query_gram * between)
    gpu.store(start.at[...], jnp.exp(sum(sums)))
    gpu.store(end.at[...], jnp.exp(jnp.minimum(rest, 0.0)))
    lower = body.strictly_lower(strength[:, None] * gram * between)
    gpu.store(x.at[...], body.unit_lower_inverse(lower, spec.parts))


def _slice(index: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(index * size, size), size)


def _solve(q, k, log_decay, beta, spec, config):
    """Launch the first kernel; returns X, M, e^c, e^(c_C - c) and beta by chunk.

    Their last chunk is whole: the second launch reads them without masks.
    """
    chunk = config.chunk
    shapes = [
        ((chunk, chunk), spec.part_dtype),
        ((chunk, chunk), spec.part_dtype),
        *[((chunk,), jnp.float32)] * 3,
    ]
    heads = (spec.batch, spec.value_heads, _chunks(spec, config))
    group = spec.group
    key = pl.BlockSpec(
        (None, chunk, None, spec.key_dim), lambda b, n, h: (b, n, h // group, 0)
    )
    gate = pl.BlockSpec((None, chunk, None), lambda b, n, h: (b, n, h))
    square = pl.BlockSpec(
        (None, None, None, chunk, chunk), lambda b, n, h: (b, h, n, 0, 0)
    )
    row = pl.BlockSpec((None, None, None, chunk), lambda b, n, h: (b, h, n, 0))
    return _call(
        functools.partial(_solve_kernel, chunk=chunk, spec=spec),
        "chunk_prefill_solve",
        (spec.batch, _chunks(spec, config), spec.value_heads),
        [key, key, gate, gate],
        [square, square, row, row, row],
        [jax.ShapeDtypeStruct((*heads, *shape), kind) for shape, kind in shapes],
        (config.solve_warps, config.solve_stages),
    )(q, k, log_decay, beta)


def _chunks(spec: specs.Spec, config: configs.Config) -> int:
    return -(-spec.tokens // config.chunk)


# --- second launch: the walk over the chunks of one head, block_v rows of the state


def _scan_kernel(
    k, v, x, start, end, rate, state, q, m, start_again, output, last, *, chunk, spec
):  # fmt: skip
    """U^T = (beta (V^T - e^c S K^T)) X^T, then O^T and the next S, chunk by chunk."""
    chunks, parts = x.shape[0], spec.parts

    def mask(i, shape):
        if spec.tokens % chunk:
            return gpu.row_mask(shape, spec.tokens - i * chunk)
        return None

    def load(ref, i):
        return gpu.load(ref.at[_slice(i, chunk), :], mask(i, (chunk, ref.shape[1])))

    def step(i, carried):
        s, whole = carried
        # Read a chunk ahead, so that nothing waits for it.
        following = start[jnp.minimum(i + 1, chunks - 1), chunk - 1]
        from_start = gpu.load(start.at[i])[None, :]
        # Only what a product reads is loaded a chunk ahead: e^c for the output is not.
        # From a second reference, or the first load would not be either.
        scale = gpu.load(start_again.at[i])[None, :]
        keys, old = dots.split(load(k, i), parts), dots.split(s, parts)
        known = from_start * dots.dot(old, keys, 1, 1)
        right = load(v, i).astype(jnp.float32).T - known
        right = dots.split(gpu.load(rate.at[i])[None, :] * right, parts)
        pseudo = dots.dot(right, dots.split(gpu.load(x.at[i]), parts), 1, 1)
        queries, read = dots.split(load(q, i), parts), gpu.load(m.at[i])
        out = scale * dots.dot(old, queries, 1, 1)
        out += dots.dot(dots.split(pseudo, parts), dots.split(read, parts), 1, 1)
        out = out.T
        gpu.store(output.at[_slice(i, chunk), :], out, mask(i, out.shape))
        scaled = dots.split(pseudo * gpu.load(end.at[i])[None, :], parts)
        return whole * s + dots.dot(scaled, keys, 1, 0), following

    first = (gpu.load(state.at[...]).astype(jnp.float32), start[0, chunk - 1])
    gpu.store(last.at[...], lax.fori_loop(0, chunks, step, first)[0])


def _scan(arrays, spec, config):
    """Launch the second kernel over (B, Hv, Dv / block_v): outputs and last state."""
    chunk, block_v, group = config.chunk, config.block_v, spec.group
    chunks = _chunks(spec, config)
    key = pl.BlockSpec(
        (None, chunks * chunk, None, spec.key_dim),
        lambda b, h, i: (b, 0, h // group, 0),
    )
    value = pl.BlockSpec(
        (None, chunks * chunk, None, block_v), lambda b, h, i: (b, 0, h, i)
    )
    square = pl.BlockSpec(
        (None, None, chunks, chunk, chunk), lambda b, h, i: (b, h, 0, 0, 0)
    )
    gate = pl.BlockSpec((None, None, chunks, chunk), lambda b, h, i: (b, h, 0, 0))
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda b, h, i: (b, h, i, 0)
    )
    state = (spec.batch, spec.value_heads, spec.value_dim, spec.key_dim)
    output = (spec.batch, spec.tokens, spec.value_heads, spec.value_dim)
    return _call(
        functools.partial(_scan_kernel, chunk=chunk, spec=spec),
        "chunk_prefill_scan",
        (spec.batch, spec.value_heads, spec.value_dim // block_v),
        [key, value, square, gate, gate, gate, tile, key, square, gate],
        [value, tile],
        [
            jax.ShapeDtypeStruct(output, spec.output_dtype),
            jax.ShapeDtypeStruct(state, spec.state_dtype),
        ],
        (config.scan_warps, config.scan_stages),
    )(*arrays)


def _call(kernel, name, grid, in_specs, out_specs, out_shape, options) -> Any:
    interpret = device.platform() == "cpu"
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=None if interpret else gpu.compiler_params(*options),
        name=name,
    )
