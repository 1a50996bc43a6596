"""Tree attention in plain JAX: the contract of the kernels."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    q: Float[Array, "B m heads D"],
    prefix: tuple[Float[Array, "B S kv D"], Float[Array, "B S kv D"]],
    nodes: tuple[Float[Array, "B n kv D"], Float[Array, "B n kv D"]],
    length: Int[Array, " B"],
    mask: Bool[Array, "B m n"],
) -> Float[Array, "B m heads D"]:
    """Attend m queries to the first `length` prefix slots and to the nodes in `mask`.

    softmax(q.k / sqrt(D)) v over both parts at once, in float32, or float64 where any
    input is; query head j uses key head j // (heads // kv). Slots that are not filled
    and nodes that nobody sees may hold anything, NaN included; a query that sees
    nothing has no defined result.
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
        preferred_element_type=_wide(grouped, keys),
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
        preferred_element_type=_wide(values),
    )


def _wide(*arrays):
    """Return float64 if any array has it, else float32."""
    double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.float64 if double else jnp.float32
