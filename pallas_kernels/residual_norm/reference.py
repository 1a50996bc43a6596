"""Sum, residual and norm in plain jnp: what every implementation must return."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def residual_norm(
    h: Float[Array, "*T H"],
    parts: Float[Array, "*T parts H"],
    weight: Float[Array, " H"],
    *,
    eps: float,
) -> tuple[Float[Array, "*T H"], Float[Array, "*T H"]]:
    """Return the stream with the parts added, and its norm (see `op.residual_norm`)."""
    wide = jnp.result_type(jnp.float32, h, parts, weight)
    added = rounded(jnp.sum(parts.astype(wide), axis=-2), h.dtype)
    x = rounded(h.astype(wide) + added, h.dtype)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x.astype(h.dtype), (normed * (1 + weight.astype(wide))).astype(h.dtype)


def rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Round to the numbers of `dtype`; of two conversions XLA may make none."""
    kept = jnp.finfo(dtype)
    return lax.reduce_precision(x, kept.nexp, kept.nmant)
