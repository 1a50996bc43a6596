"""From many candidate nodes to the best tree of a fixed size."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treewy_jax import slots
from treewy_jax import tree as tree_lib


def best_tree(
    root: Int[Array, " B"],
    tokens: Int[Array, "B M"],
    parent: Int[Array, "B M"],
    score: Float[Array, "B M"],
    *,
    n_max: int,
    depth_max: int,
) -> tree_lib.DraftTree:
    """Return the tree of the `n_max` - 1 best candidates below the root, in preorder.

    It is connected where no candidate scores above its parent: of equal scores the
    first is taken, and a parent comes before its children. Siblings keep their order.

    Args:
        parent: a candidate of a smaller index, or -1 for the root.
        score: -inf for what is no candidate; a row with too few gets padding.
    """
    most = tokens.shape[1]
    values, chosen = lax.top_k(score, n_max - 1)
    found = values > -jnp.inf
    chosen = jnp.sort(jnp.where(found, chosen, most), axis=1)
    rows = jnp.arange(tokens.shape[0])[:, None]
    kept = jnp.zeros(tokens.shape, jnp.int32).at[rows, chosen].set(1, mode="drop")
    node = jnp.cumsum(kept, axis=1)  # of each candidate kept; the root is node 0
    real = jnp.minimum(chosen, most - 1)
    above = slots.take(parent, real)
    above = jnp.where(above < 0, 0, slots.take(node, jnp.maximum(above, 0)))
    first = root[:, None]
    tree = tree_lib.DraftTree(
        tokens=jnp.concatenate([first, slots.take(tokens, real)], axis=1),
        parent=jnp.concatenate([jnp.full_like(first, -1), above], axis=1),
        size=1 + jnp.sum(found, axis=1, dtype=jnp.int32),
        depth_max=depth_max,
    )
    return in_preorder(tree)


def in_preorder(tree: tree_lib.DraftTree) -> tree_lib.DraftTree:
    """Return the same tree with its nodes in preorder.

    Takes nodes in any order in which the root is first, parents come before their
    children and padding comes last. Siblings stay in their order. A node goes to

        depth + nodes below earlier siblings, of its ancestors and its own
    """
    ancestors, parents = tree.ancestors(), tree.parents()
    below = jnp.sum(ancestors, axis=1, dtype=jnp.int32)
    earlier = jnp.tri(tree.n_max, k=-1, dtype=bool)
    earlier &= parents[:, :, None] == parents[:, None]
    before = jnp.sum(jnp.where(earlier, below[:, None], 0), axis=-1)
    before = jnp.sum(jnp.where(ancestors, before[:, None], 0), axis=-1)
    place = jnp.where(tree.valid(), tree.depth() + before, jnp.arange(tree.n_max))
    place = place.astype(jnp.int32)
    above = jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1)
    above = jnp.where(parents < 0, -1, above)
    order = jnp.argsort(place, axis=1)
    tokens, parent = (
        jnp.take_along_axis(x, order, axis=1) for x in (tree.tokens, above)
    )
    return dataclasses.replace(tree, tokens=tokens, parent=parent)
