"""The second kind of state: attention over a prefix cache plus a tree of new nodes.

The keys and values of the tree stay outside the cache until commit, which moves those
of the accepted path to the slots behind the prefix (treewy_jax.slots).
"""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import op
from treewy_jax import sharding


@sharding.by_letters
def causal(
    q: Float[Array, "B T heads D"],
    k: Float[Array, "B T kv D"],
    v: Float[Array, "B T kv D"],
) -> Float[Array, "B T heads D"]:
    """Attend each token to itself and all before it (prefill, training)."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@sharding.by_letters
def over_tree(
    q: Float[Array, "B m heads D"],
    prefix: tuple[Float[Array, "B S kv D"], Float[Array, "B S kv D"]],
    nodes: tuple[Float[Array, "B n kv D"], Float[Array, "B n kv D"]],
    length: Int[Array, " B"],
    mask: Bool[Array, "B m n"],
    *,
    impl: str | None = None,
) -> Float[Array, "B m heads D"]:
    """Attend m queries to the first `length` prefix slots and to the nodes in `mask`.

    One softmax over both parts, in float32, or float64 for float64 inputs; query head j
    uses key head j // (heads // kv). `mask` is ancestor-or-self. Slots outside the two
    masks may hold anything, NaN included. `impl` is a name of the implementations in
    `pallas_kernels.tree_attention.op`; None or "auto" takes the best for the call.
    """
    return op.tree_attention(q, prefix, nodes, length, mask, impl=impl)
