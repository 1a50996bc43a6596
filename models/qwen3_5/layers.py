"""The pieces every Qwen3.5 layer shares: norm, linear map, rotary embedding, MLP."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from pallas_kernels import device


def linear(features_in: int, features_out: int, *, dtype, rngs) -> nnx.Linear:
    """Return a bias-free linear map, exact for float32 (no TF32 on a GPU)."""
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        param_dtype=dtype,
        precision=lax.Precision.HIGHEST,
        dot_general=product,
        rngs=rngs,
    )


def product(
    x: Float[Array, "*B H"], kernel: Float[Array, "H *I"], dimensions, **options
) -> Float[Array, "*B I"]:
    """Return `lax.dot_general`; on a GPU that of a single row as of two equal ones.

    XLA multiplies one row with a matrix element by element and may write all of that
    to memory before it sums it up: on an H200, 57 us for a matrix of 16 MiB. Of two
    rows it makes one matrix product, in the time that reading the matrix takes.
    """
    *batch, size = x.shape
    if math.prod(batch) != 1 or device.platform() != "gpu":
        return lax.dot_general(x, kernel, dimensions, **options)
    twice = jnp.broadcast_to(x, (2, *batch[1:], size))
    return lax.dot_general(twice, kernel, dimensions, **options)[:1]


def rms_normalize(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """Divide by the root mean square over the last axis, in float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with gain `1 + weight`, computed in float32.

    Checkpoints store `weight` around 0 for every norm but the gated one of GDN.
    """

    def __init__(self, size: int, *, eps: float, dtype):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        gain = 1.0 + self.weight[...].astype(jnp.float32)
        return (rms_normalize(x, self.eps) * gain).astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU feed-forward: `down(silu(gate x) * up x)`.

    `gate_up_proj` [H, 2, I] holds both matrices, so that one product is made.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype, rngs):
        init = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        shape = (hidden_size, 2, intermediate_size)
        self.gate_up_proj = nnx.Param(init(rngs.params(), shape, dtype))
        self.down_proj = linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        matrices = self.gate_up_proj[...].astype(x.dtype)
        both = jnp.tensordot(x, matrices, 1, precision=lax.Precision.HIGHEST)
        return self.down_proj(jax.nn.silu(both[..., 0, :]) * both[..., 1, :])


def rotary_table(
    positions: Int[Array, "B T"], config: config_lib.Qwen3_5Config
) -> tuple[Float[Array, "B T 1 R"], Float[Array, "B T 1 R"]]:
    """Return cos and sin (float32) of the rotary angles at `positions`.

    Angle i is `position * theta^(-2i / rotary_dim)`; pair i is (i, i + rotary_dim/2).
    """
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32)
    frequency = config.rope_theta ** (-exponent / config.rotary_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = jnp.concatenate([angle, angle], axis=-1)[:, :, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T heads D"],
    table: tuple[Float[Array, "B T 1 R"], Float[Array, "B T 1 R"]],
) -> Float[Array, "B T heads D"]:
    """Rotate the first `rotary_dim` channels of each head; the rest passes through."""
    cos, sin = (part.astype(x.dtype) for part in table)
    turned, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    first, second = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return jnp.concatenate([turned, rest], axis=-1)
