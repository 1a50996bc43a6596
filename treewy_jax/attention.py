"""The second kind of state: attention over a prefix cache plus a tree of new nodes.

The keys and values of the tree stay outside the cache until commit, which moves those
of the accepted path to the slots behind the prefix (treewy_jax.slots).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import typing


def causal(
    q: Float[Array, "B T heads D"],
    k: Float[Array, "B T kv D"],
    v: Float[Array, "B T kv D"],
) -> Float[Array, "B T heads D"]:
    """Attend each token to itself and all before it (prefill, training)."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def over_tree(
    q: Float[Array, "B m heads D"],
    prefix: tuple[Float[Array, "B S kv D"], Float[Array, "B S kv D"]],
    nodes: tuple[Float[Array, "B n kv D"], Float[Array, "B n kv D"]],
    length: Int[Array, " B"],
    mask: Bool[Array, "B m n"],
) -> Float[Array, "B m heads D"]:
    """Attend m queries to the first `length` prefix slots and to the nodes in `mask`.

    One softmax over both parts, in float32, or float64 for float64 inputs; query head j
    uses key head j // (heads // kv). `mask` is ancestor-or-self. Slots outside the two
    masks may hold anything, NaN included.
    """
    batch, m, heads, dim = q.shape
    grouped = q.reshape(batch, m, prefix[0].shape[2], -1, dim)
    filled = jnp.arange(prefix[0].shape[1]) < length[:, None]
    seen = jnp.any(mask, axis=1)
    scores = jnp.concatenate(
        [
            _scores(grouped, prefix[0], filled[:, None]),
            _scores(grouped, nodes[0], mask),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores * dim**-0.5, axis=-1)
    over_prefix, over_nodes = jnp.split(weights, [filled.shape[1]], axis=-1)
    out = _mix(over_prefix, prefix[1], filled) + _mix(over_nodes, nodes[1], seen)
    return out.reshape(batch, m, heads, dim).astype(q.dtype)


def _scores(grouped, keys, mask):
    """q.k in float32 or more, minus infinity where masked: [B, kv, group, m, slots]."""
    scores = jnp.einsum(
        "bmkgd,bskd->bkgms",
        grouped,
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=typing.accumulation_dtype(grouped.dtype, keys.dtype),
    )
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _mix(weights, values, used):
    """Weighted sum of the values; unused slots are zeroed, since 0 * NaN is NaN."""
    values = jnp.where(used[..., None, None], values, 0)
    return jnp.einsum(
        "bkgms,bskd->bmkgd",
        weights.astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=typing.accumulation_dtype(values.dtype),
    )
