"""The attention front as Pallas kernels for TPUs (Mosaic): one for q and one for k.

A program takes one head of many rows. Cos and sin are XLA's, which are exact for large
angles too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.attention_front import config as configs
from pallas_kernels.attention_front import reference
from pallas_kernels.attention_front import spec as specs

LANES = 128
BLOCK_ROWS = 256


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, LANES, "head_dim")
        or refusals.dtypes(spec, "rows", "weight")
    )


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
    del config  # one cut
    cos, sin = (
        x.reshape(spec.rows, -1) for x in reference.rotary_table(positions, spec)
    )
    turn = functools.partial(_call, cos=cos, sin=sin, spec=spec)
    q = turn(q_and_gate, q_weight, heads=spec.heads, step=2)
    k = turn(k, k_weight, heads=spec.kv_heads, step=1)
    return q, k, v.reshape(k.shape)


def _call(rows, weight, *, heads: int, step: int, cos, sin, spec) -> Array:
    """Run over (blocks of rows, heads); head h begins at column `h * step * D`."""
    dim, size = spec.head_dim, min(spec.rows, BLOCK_ROWS)
    angles = pl.BlockSpec((size, cos.shape[1]), lambda i, h: (i, 0))
    result = pl.pallas_call(
        functools.partial(_kernel, eps=spec.eps),
        grid=(pl.cdiv(spec.rows, size), heads),
        in_specs=[
            pl.BlockSpec((size, dim), lambda i, h: (i, h * step)),
            pl.BlockSpec((1, dim), lambda i, h: (0, 0)),
            angles,
            angles,
        ],
        out_specs=pl.BlockSpec((size, dim), lambda i, h: (i, h)),
        out_shape=jax.ShapeDtypeStruct((spec.rows, heads * dim), rows.dtype),
        interpret=device.platform() == "cpu",
        name="attention_front",
    )(rows.reshape(spec.rows, -1), weight[None], cos, sin)
    return result.reshape(spec.batch, spec.tokens, heads, dim)


def _kernel(rows, weight, cos, sin, result, *, eps: float):
    def rounded(x):
        return x.astype(rows.dtype).astype(jnp.float32)

    x = rows[...].astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    normed = rounded(x * inverse * (1.0 + weight[...].astype(jnp.float32)))
    half = cos.shape[1]
    first, second = normed[:, :half], normed[:, half : 2 * half]
    c, s = rounded(cos[...]), rounded(sin[...])
    turned = [
        rounded(first * c) - rounded(second * s),
        rounded(second * c) + rounded(first * s),
    ]
    rest = [normed[:, 2 * half :]] if 2 * half < x.shape[1] else []
    result[...] = jnp.concatenate([*turned, *rest], axis=1).astype(result.dtype)
