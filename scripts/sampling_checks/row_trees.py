"""A drafter whose tree is another one in every row and at every step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from treewy_jax import drafters, pytree
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib


@pytree.dataclass
class RowTrees:
    """Drafts the tree of `plan` and keeps a part: row b at position t takes b + t.

    Which nodes a part keeps must not depend on what was drawn.

    Attributes:
        kept: nodes of the plan's tree that a part has, in preorder, padded with 0.
        parent: their parents within the part, -1 for the root and for padding.
        size: how many there are.
    """

    plan: drafters.MTPDrafter
    kept: Int[Array, "K m"]
    parent: Int[Array, "K m"]
    size: Int[Array, " K"]

    @classmethod
    def of(
        cls, plan: drafters.MTPDrafter, parts: Sequence[tuple[int, ...]]
    ) -> "RowTrees":
        """Take these parts of the plan's tree, each with every ancestor of a node."""
        most = max(map(len, parts))
        above = np.asarray(plan.parent)
        kept = np.zeros((len(parts), most), np.int32)
        parent = np.full_like(kept, -1)
        for row, part in enumerate(parts):
            kept[row, : len(part)] = part
            parent[row, 1 : len(part)] = [part.index(above[node]) for node in part[1:]]
        sizes = jnp.asarray([len(part) for part in parts], jnp.int32)
        return cls(plan, jnp.asarray(kept), jnp.asarray(parent), sizes)

    @property
    def depth_max(self) -> int:
        return self.plan.depth_max

    @property
    def n_max(self) -> int:
        return self.kept.shape[1]

    @property
    def sampled(self) -> bool:
        return self.plan.sampled

    def bind(self, target: Any) -> "BoundRowTrees":
        return BoundRowTrees(self, self.plan.bind(target))


@dataclasses.dataclass(frozen=True)
class BoundRowTrees:
    """A `RowTrees` whose plan has its head."""

    trees: RowTrees
    inner: drafters.SampledDrafter

    @property
    def sampled(self) -> bool:
        return self.inner.sampled

    def start(self, tokens, lengths, hidden, next_token, capacity):
        state = self.inner.start(tokens, lengths, hidden, next_token, capacity)
        return state._replace(tokens=state.tokens[:, : self.trees.n_max])

    def propose(self, state, root, base):
        whole, state = self.inner.propose(state, root, base)
        tree, _ = self._part(whole, base)
        return tree, state._replace(tokens=tree.tokens)

    def propose_sampled(self, state, root, base, draws: sampling_lib.Draws):
        whole, log_probs, state = self.inner.propose_sampled(state, root, base, draws)
        tree, kept = self._part(whole, base)
        log_probs = jnp.take_along_axis(log_probs, kept[..., None], axis=1)
        return tree, log_probs, state._replace(tokens=tree.tokens)

    def update(self, state, accepted, hidden):
        return self.inner.update(state, accepted, hidden)

    def _part(self, whole, base):
        trees = self.trees
        which = (base + jnp.arange(base.shape[0])) % trees.kept.shape[0]
        kept = trees.kept[which]
        tree = tree_lib.DraftTree(
            tokens=jnp.take_along_axis(whole.tokens, kept, axis=1),
            parent=trees.parent[which],
            size=trees.size[which],
            depth_max=whole.depth_max,
        )
        return tree, kept
