"""Chunked prefill as a Pallas kernel for TPUs (Mosaic).

The grid walks over the chunks of one head in order, the state in vector memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.chunk_prefill import body
from pallas_kernels.chunk_prefill import config as configs
from pallas_kernels.chunk_prefill import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
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
    from jax.experimental.pallas import tpu as pallas_tpu

    platform, device_kind = device.target()
    chunk = configs.choose(spec, platform, device_kind, config).chunk
    chunks = -(-spec.tokens // chunk)
    output, last = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, spec=spec),
        grid=(spec.batch, spec.value_heads, chunks),
        **_blocks(spec, chunk),
        out_shape=[
            jax.ShapeDtypeStruct(
                (spec.batch, spec.value_heads, spec.tokens, spec.value_dim),
                spec.output_dtype,
            ),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        scratch_shapes=[pallas_tpu.VMEM((spec.value_dim, spec.key_dim), jnp.float32)],
        compiler_params=pallas_tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=platform == "cpu",
        name="chunk_prefill",
    )(
        # A block has rows and features last, as the tiles of a TPU do.
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)),
        *_gates(log_decay, beta, chunks, chunk),
        state,
    )
    return jnp.swapaxes(output, 1, 2), last


def _kernel(
    q, k, v, beta, coarse, coarse_row, fine, fine_row, state, output, last, carried,
    *, chunk, spec,
):  # fmt: skip
    """(I + A) U = diag(beta) (V - e^c K S^T), then outputs and the next state."""
    index, parts = pl.program_id(2), spec.parts

    @pl.when(index == 0)
    def _():
        carried[...] = state[...].astype(jnp.float32)

    def load(ref):
        rows = gpu.row_mask(ref.shape, spec.tokens - index * chunk)
        return dots.split(jnp.where(rows, ref[...], jnp.zeros((), ref.dtype)), parts)

    queries, keys, old = load(q), load(k), dots.split(carried[...], parts)
    between = body.decay_between(
        (coarse[...], fine[...]), (coarse_row[...], fine_row[...])
    )
    start = jnp.exp(coarse[...] + fine[...])
    lower = body.strictly_lower(beta[...] * dots.dot(keys, keys, 1, 1) * between)
    inverse = body.unit_lower_inverse(lower, parts)
    values = sum(x.astype(jnp.float32) for x in load(v))
    right = beta[...] * (values - start * dots.dot(keys, old, 1, 1))
    pseudo = dots.dot(dots.split(inverse, parts), dots.split(right, parts), 1, 0)
    read = dots.dot(queries, keys, 1, 1) * between
    out = start * dots.dot(queries, old, 1, 1)
    out += dots.dot(dots.split(read, parts), dots.split(pseudo, parts), 1, 0)
    output[...] = out.astype(output.dtype)
    end = jnp.exp(
        (coarse[chunk - 1 :, :] - coarse[...]) + (fine[chunk - 1 :, :] - fine[...])
    )
    written = dots.dot(dots.split(end * pseudo, parts), keys, 0, 0)
    carried[...] = start[chunk - 1 :, :] * carried[...] + written

    @pl.when(index == pl.num_programs(2) - 1)
    def _():
        last[...] = carried[...].astype(last.dtype)


def _gates(
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    chunks: int,
    chunk: int,
) -> list[Array]:
    """Return beta and both parts of c, [B, Hv, chunks, C, 1], c [..., 1, C] too.

    Rows beyond T are zero: such tokens do nothing.
    """

    def cut(x):
        x = jnp.swapaxes(x, 1, 2).astype(jnp.float32)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, chunks * chunk - x.shape[2])))
        return x.reshape(*x.shape[:2], chunks, chunk)

    sums = [jnp.cumsum(x, axis=-1) for x in body.coarse_and_fine(cut(log_decay))]
    both = [y for x in sums for y in (x[..., :, None], x[..., None, :])]
    return [cut(beta)[..., :, None], *both]


def _blocks(spec: specs.Spec, chunk: int) -> dict:
    """Return the blocks of inputs and outputs, in the order of `_kernel`."""
    group = spec.group
    key = pl.BlockSpec(
        (None, None, chunk, spec.key_dim), lambda b, h, n: (b, h // group, n, 0)
    )
    value = pl.BlockSpec(
        (None, None, chunk, spec.value_dim), lambda b, h, n: (b, h, n, 0)
    )
    tile = pl.BlockSpec(
        (None, None, spec.value_dim, spec.key_dim), lambda b, h, n: (b, h, 0, 0)
    )
    gates = [
        pl.BlockSpec((None, None, None, *shape), lambda b, h, n: (b, h, n, 0, 0))
        for shape in ((chunk, 1), (1, chunk))
    ]
    column, row = gates
    return dict(
        in_specs=[key, key, value, column, column, row, column, row, tile],
        out_specs=[value, tile],
    )
