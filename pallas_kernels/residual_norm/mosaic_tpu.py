"""Sum, residual and norm as one Pallas kernel for TPUs (Mosaic); a program, 8 rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, refusals
from pallas_kernels.residual_norm import spec as specs

# Rows and columns of a tile of vector registers.
ROWS, LANES = 8, 128
# A program's parts, of which two blocks and a float32 copy are in vector memory.
MOST_ELEMENTS = 1 << 20


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, LANES, "hidden")
        or refusals.dtypes(spec, "rows", "parts", "weight")
        or _too_large(spec)
    )


def _too_large(spec: specs.Spec) -> str | None:
    if ROWS * spec.parts * spec.hidden > MOST_ELEMENTS:
        return (
            f"takes at most {MOST_ELEMENTS} elements of {ROWS} rows, not "
            f"{spec.parts} x {spec.hidden} of each"
        )
    return None


def residual_norm(
    h: Float[Array, "T H"],
    parts: Float[Array, "T parts H"],
    weight: Float[Array, " H"],
    *,
    spec: specs.Spec,
    eps: float,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """Return h' and x; interpreted where the target is a CPU."""
    count = min(ROWS, spec.tokens)

    def rows(*size):
        return pl.BlockSpec((count, *size), lambda i: (i,) + (0,) * len(size))

    gain = pl.BlockSpec((1, spec.hidden), lambda i: (0, 0))
    blocks = [rows(spec.hidden), rows(spec.parts, spec.hidden), gain]
    new_h, x = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(pl.cdiv(spec.tokens, count),),
        in_specs=blocks,
        out_specs=blocks[:1] * 2,
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype)] * 2,
        interpret=device.platform() == "cpu",
        name="residual_norm",
    )(h, parts, weight[None])
    return new_h, x


def _kernel(h, parts, weight, new_h, x, *, eps):
    found = parts[...].astype(jnp.float32)
    total = jnp.zeros(h.shape, jnp.float32)
    for p in range(parts.shape[1]):
        total += found[:, p, :]
    row = h[...] + total.astype(h.dtype)
    new_h[...] = row
    row = row.astype(jnp.float32)
    square = jnp.mean(row * row, axis=1, keepdims=True)
    gain = 1 + weight[...].astype(jnp.float32)
    x[...] = (row * lax.rsqrt(square + eps) * gain).astype(x.dtype)
