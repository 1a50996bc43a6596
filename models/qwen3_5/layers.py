"""The pieces every Qwen3.5 layer shares: norm, linear map, MLP."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import device
from pallas_kernels.residual_norm import op as residual_norm
from treewy_jax import sharding


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
    to memory before it sums it up: on an H200, 29 us for a matrix of 16 MiB. Of two
    rows it makes one matrix product, 10 us with the sum of its parts.
    """
    *batch, size = x.shape
    if math.prod(batch) != 1 or device.platform() != "gpu":
        return lax.dot_general(x, kernel, dimensions, **options)
    twice = jnp.broadcast_to(x, (2, *batch[1:], size))
    return lax.dot_general(twice, kernel, dimensions, **options)[:1]


def in_parts(
    linear: nnx.Linear, x: Float[Array, "B T K"]
) -> Float[Array, "B T *parts H"]:
    """Apply a linear map, of few rows on a GPU in parts that `add_and_norm` adds up.

    Their sums over K are cut to fill the device; XLA does so too, and then needs a
    launch to add the parts up.
    """
    kernel, (batch, length, terms) = linear.kernel[...], x.shape
    rows = batch * length
    parts = residual_norm.parts_of_product(rows, terms, kernel.shape[1], x.dtype)
    if parts == 1 or sharding.active() is not None:
        return linear(x)
    cut = jnp.einsum(
        "tpk,pkh->tph",
        x.reshape(rows, parts, -1),
        kernel.reshape(parts, -1, kernel.shape[1]),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return cut.reshape(batch, length, parts, -1)


def add_and_norm(
    h: Float[Array, "B T H"],
    y: Float[Array, "B T *parts H"],
    weight: Float[Array, " H"],
    eps: float,
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Return h + y and its RMSNorm with gain `1 + weight`; y may come in parts."""
    parts = y if y.ndim > h.ndim else y[:, :, None]
    return _add_and_norm(h, parts, weight, eps)


@sharding.by_letters
def _add_and_norm(
    h: Float[Array, "B T H"],
    parts: Float[Array, "B T P H"],
    weight: Float[Array, " H"],
    eps: float,
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    return residual_norm.residual_norm(h, parts, weight, eps=eps)


def look_up(
    table: Float[Array, "V H"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T H"]:
    """Return the rows of some tokens.

    Of a spread table each device takes those that it has, and they are added up: of a
    few tokens XLA by itself would gather the whole table.
    """
    axes = sharding.split({"B": tokens.shape[:1], "V": table.shape[:1]})
    over = axes["V"]
    if not over:
        return sharding.constrain(table[tokens], "B T H")

    def on_part(table, tokens):
        here = tokens - len(table) * lax.axis_index(over)
        own = (here >= 0) & (here < len(table))
        rows = jnp.where(own[..., None], table[jnp.where(own, here, 0)], 0)
        return sharding.total(rows, over)

    return sharding.run(on_part, (table, tokens), ("V H", "B T"), "B T H", axes)


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
        return self.down_proj(self._inner(x))

    def parts(self, x: Float[Array, "B T H"]) -> Float[Array, "B T *parts H"]:
        """Return the rows of `self(x)`, or parts of them (`in_parts`)."""
        return in_parts(self.down_proj, self._inner(x))

    def _inner(self, x: Float[Array, "*B H"]) -> Float[Array, "*B I"]:
        matrices = self.gate_up_proj[...].astype(x.dtype)
        both = jnp.tensordot(x, matrices, 1, precision=lax.Precision.HIGHEST)
        return jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
