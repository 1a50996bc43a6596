"""The path that a step accepts: what commit, cache and drafter go by."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

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
