"""The attention front in plain jnp: what every implementation must return."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_front import config as configs
from pallas_kernels.attention_front import spec as specs

Table = tuple[Float[Array, "B T R2"], Float[Array, "B T R2"]]


def attention_front(
    q_and_gate: Float[Array, "B T gated"],
    k: Float[Array, "B T columns"],
    v: Float[Array, "B T columns"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, "B T"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array]:
    """Return q, k and v by head (see `op.attention_front`)."""
    rows = (spec.batch, spec.tokens)
    q = q_and_gate.reshape(*rows, spec.heads, 2 * spec.head_dim)[..., : spec.head_dim]
    k, v = (x.reshape(*rows, spec.kv_heads, spec.head_dim) for x in (k, v))
    table = rotary_table(positions, spec)
    q, k = (
        rotate(normalize(x, weight, spec.eps), table)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, v


def normalize(
    x: Float[Array, "B T heads D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "B T heads D"]:
    """Divide by the root mean square in float32, with gain `1 + weight`, and round."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def rotary_table(positions: Int[Array, "B T"], spec: specs.Spec) -> Table:
    """Return cos and sin (float32) of the rotary angles at `positions`.

    Angle i is `position * theta^(-2i / R)`.
    """
    angle = positions[..., None].astype(jnp.float32) * frequencies(spec)
    return jnp.cos(angle), jnp.sin(angle)


def frequencies(spec: specs.Spec) -> np.ndarray:
    """Return theta^(-2i / R) for i < R/2, rounded to float32: a constant."""
    exponent = np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim
    return (spec.theta**-exponent).astype(np.float32)


def rotate(x: Float[Array, "B T heads D"], table: Table) -> Float[Array, "B T heads D"]:
    """Turn pairs (i, i + R/2) of each head; channels behind R pass through."""
    cos, sin = (part[:, :, None].astype(x.dtype) for part in table)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest], axis=-1)
