"""Sum, residual and norm in plain jnp: what every implementation must return."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def residual_norm(
    h: Float[Array, "*T H"],
    parts: Float[Array, "*T P H"],
    weight: Float[Array, " H"],
    *,
    eps: float,
) -> tuple[Float[Array, "*T H"], Float[Array, "*T H"]]:
    """Return the stream with the parts added, and its norm (see `op.residual_norm`)."""
    wide = jnp.result_type(jnp.float32, h, parts, weight)
    h = h + jnp.sum(parts.astype(wide), axis=-2).astype(h.dtype)
    x = h.astype(wide)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return h, (x * (1 + weight.astype(wide))).astype(h.dtype)
