"""Attention for training: causal, with a few extra keys of each row's own.

Same function as `treewy_jax.attention.causal`, arranged for gradients: cotangents of
the score and value dots stay in the operand type (tensor cores in bfloat16), later
keys are not computed, and scores are recomputed in the backward pass, not kept.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.chunk_prefill import linear

Pair = tuple[Float[Array, "B T kv D"], Float[Array, "B T kv D"]]


def causal(
    q: Float[Array, "B T heads D"],
    prefix: Pair,
    own: Sequence[Pair] = (),
    *,
    rows: int = 256,
    cudnn: bool = False,
) -> Float[Array, "B T heads D"]:
    """Attend row t to prefix rows 0..t and to row t of each pair in `own`.

    Query head j uses key head j // (heads // kv); scores are scaled by D^-0.5 and
    normalised together in float32. `rows` queries are worked on at a time. `cudnn`
    uses the vendor's fused kernel where there are no `own` pairs.
    """
    if cudnn and not own:
        return jax.nn.dot_product_attention(
            q, *prefix, is_causal=True, implementation="cudnn"
        )
    block = jax.checkpoint(_rows, static_argnums=3)
    parts = []
    for start in range(0, q.shape[1], rows):
        end = min(start + rows, q.shape[1])
        seen = tuple(x[:, :end] for x in prefix)
        beside = [tuple(x[:, start:end] for x in pair) for pair in own]
        parts.append(block(q[:, start:end], seen, beside, start))
    return jnp.concatenate(parts, axis=1)


def _rows(q: Array, prefix: Pair, own: Sequence[Pair], start: int) -> Array:
    """One softmax of rows `start` onward over both kinds of keys."""
    batch, count, heads, dim = q.shape
    low, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    keys, values = prefix
    grouped = q.reshape(batch, count, keys.shape[2], -1, dim)
    scale = dim**-0.5
    scores = linear.einsum("btkgd,bskd->bkgts", grouped, keys, low, wide) * scale
    visible = start + jnp.arange(count)[:, None] >= jnp.arange(keys.shape[1])
    scores = jnp.where(visible, scores, -jnp.inf)
    beside = [_beside(grouped, k, scale, wide) for k, _ in own]
    top = jnp.max(scores, axis=-1)
    for score in beside:
        top = jnp.maximum(top, score)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    mixed = linear.einsum("bkgts,bskd->bkgtd", weights, values, low, wide)
    for score, (_, value) in zip(beside, own, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight
        value = jnp.moveaxis(value.astype(wide), 1, 2)[:, :, None]
        mixed = mixed + weight[..., None] * value
    mixed = jnp.moveaxis(mixed / total[..., None], 3, 1)
    return mixed.reshape(batch, count, heads, dim).astype(low)


def _beside(grouped: Array, keys: Array, scale: float, wide: jnp.dtype) -> Array:
    """Scores of each row with its own key: [B, kv, group, T]."""
    product = grouped.astype(wide) * keys.astype(wide)[:, :, :, None]
    return jnp.moveaxis(jnp.sum(product, axis=-1), 1, -1) * scale
