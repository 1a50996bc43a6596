"""Walk the verified tree: which drafted tokens does the target agree with?

Both rules here are target-only: at every node the target names one token, its argmax or
a sample, and the walk goes to the child that carries it. With samples this is
sample-and-match, lossless for any tree, since a draw never depends on the draft.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import path as path_lib


def greedy(
    logits: Float[Array, "B n V"], tree: tree_lib.DraftTree
) -> path_lib.Accepted:
    """Accept a child where it equals the argmax of the target at its parent."""
    return walk(jnp.argmax(logits, axis=-1).astype(jnp.int32), tree)


def sample_and_match(
    logits: Float[Array, "B n V"],
    tree: tree_lib.DraftTree,
    key: PRNGKeyArray | Key[Array, " B"],
    base: Int[Array, " B"],
    sampling: sampling_lib.Sampling,
) -> path_lib.Accepted:
    """Accept a child where it equals a sample of the target at its parent.

    The draw at a node depends on (key, row, position) and its logits alone; `base` is
    the position of the root. For a tree fixed by its context no lossless rule accepts
    more.
    """
    position = base[:, None] + tree.depth()
    return walk(sampling_lib.draw(logits, key, position, sampling), tree)


def walk(chosen: Int[Array, "B n"], tree: tree_lib.DraftTree) -> path_lib.Accepted:
    """Follow the child that carries `chosen[node]`, from the root until none does."""
    parent, valid = tree.parents(), tree.valid()

    def advance(carry, _):
        node, count = carry
        target = jnp.take_along_axis(chosen, node[:, None], axis=1)
        fits = (parent == node[:, None]) & (tree.tokens == target) & valid
        found = jnp.any(fits, axis=1)
        child = jnp.argmax(fits, axis=1).astype(jnp.int32)
        node = jnp.where(found, child, node)
        return (node, count + found), node

    root = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    (node, count), rest = lax.scan(advance, (root, root + 1), length=tree.depth_max)
    path = jnp.concatenate([root[:, None], rest.T], axis=1)
    next_token = jnp.take_along_axis(chosen, node[:, None], axis=1)[:, 0]
    return path_lib.Accepted(node, path, count, next_token)
