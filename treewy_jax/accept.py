"""Walk the verified tree: which drafted tokens does the target agree with?

Both rules here are target-only: at every node the target names one token, its argmax or
a sample, and the walk goes to the child that carries it. With samples this is
sample-and-match, lossless for any tree, since a draw never depends on the draft.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib


class Accepted(NamedTuple):
    """The accepted path of each row.

    Attributes:
        node: index of the last accepted node; the root at least.
        path: node indices from the root on; entries from `count` on repeat `node`.
        count: how many nodes of `path` are accepted, root included; 0: no step.
        next_token: the target's own token after `node`.
    """

    node: Int[Array, " B"]
    path: Int[Array, "B P"]
    count: Int[Array, " B"]
    next_token: Int[Array, " B"]

    def emitted(self, tokens: Int[Array, "B n"]) -> Int[Array, "B P"]:
        """Return the tokens this step adds to the text: `count` of them are valid."""
        follow = jnp.roll(self.path, -1, axis=1)
        drafted = jnp.take_along_axis(tokens, follow, axis=1)
        last = jnp.arange(self.path.shape[1]) >= self.count[:, None] - 1
        return jnp.where(last, self.next_token[:, None], drafted)

    def shorten(
        self, count: Int[Array, " B"], emitted: Int[Array, "B P"]
    ) -> "Accepted":
        """Keep the first `count` nodes; the token emitted last becomes `next_token`.

        `emitted` is what the whole path emits. Count 0 stands for no step at all.
        """
        last = jnp.maximum(count - 1, 0)[:, None]
        node = jnp.take_along_axis(self.path, last, axis=1)
        place = jnp.arange(self.path.shape[1])
        path = jnp.where(place < count[:, None], self.path, node)
        next_token = jnp.take_along_axis(emitted, last, axis=1)
        return Accepted(node[:, 0], path, count, next_token[:, 0])


def nothing(tree: tree_lib.DraftTree) -> Accepted:
    """Return the value that stands for no step."""
    zero = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    path = jnp.zeros((tree.tokens.shape[0], tree.depth_max + 1), jnp.int32)
    return Accepted(zero, path, zero, zero)


def greedy(logits: Float[Array, "B n V"], tree: tree_lib.DraftTree) -> Accepted:
    """Accept a child where it equals the argmax of the target at its parent."""
    return walk(jnp.argmax(logits, axis=-1).astype(jnp.int32), tree)


def sample_and_match(
    logits: Float[Array, "B n V"],
    tree: tree_lib.DraftTree,
    key: PRNGKeyArray | Key[Array, " B"],
    base: Int[Array, " B"],
    sampling: sampling_lib.Sampling,
) -> Accepted:
    """Accept a child where it equals a sample of the target at its parent.

    The draw at a node depends on (key, row, position) and its logits alone; `base` is
    the position of the root. For a tree fixed by its context no lossless rule accepts
    more.
    """
    position = base[:, None] + tree.depth()
    return walk(sampling_lib.draw(logits, key, position, sampling), tree)


def walk(chosen: Int[Array, "B n"], tree: tree_lib.DraftTree) -> Accepted:
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
    return Accepted(node, path, count, next_token)
