"""Draft a tree with the model's MTP head, level by level.

Level d+1 holds the top tokens of every level-d node that has children. A node at depth
d >= 1 runs the head on (its token, the head's output at its parent), one position
further than its parent, over the head's KV of the text and of the node's ancestors.
Leaves are not run. A sampled tree draws the children of a node without replacement in
place of the best ones (`gumbel`), with the settings of the request. What goes on before
and after drafting is in `mtp_head`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from treewy_jax import pytree, sharding
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.drafters import gumbel, mtp_head

MTPState = mtp_head.MTPState


@pytree.dataclass
class MTPDrafter:
    """Tree drafting of a given topology; build it with `from_tree`.

    Attributes:
        parent: the topology, preorder, -1 for the root and for padding.
        size: how many nodes are real.
        rank: each node's place among its siblings; rank r takes the r-th best token.
        ancestors: ancestor-or-self.
        levels: for each depth, the nodes there that have children, padded with n.
        rank_max: static; tokens looked at a node.
        sampled: static; draw the children in place of taking the best.
    """

    parent: Int[Array, " n"]
    size: Int[Array, ""]
    rank: Int[Array, " n"]
    ancestors: Bool[Array, "n n"]
    levels: tuple[Int[Array, " m"], ...]
    rank_max: int = pytree.static()
    sampled: bool = pytree.static(default=False)

    @classmethod
    def from_tree(
        cls,
        tree: tree_lib.DraftTree,
        level_sizes: tuple[int, ...] | None = None,
        rank_max: int | None = None,
        *,
        sampled: bool = False,
    ) -> "MTPDrafter":
        """Take the topology of `tree` (row 0, concrete values).

        `level_sizes` and `rank_max` widen the static envelope, so that several
        topologies share one compiled loop; by default they fit `tree` exactly.

        Raises:
            ValueError: the envelope is too small for the tree.
        """
        parent = np.asarray(tree.parents())[0]
        depth, size = np.asarray(tree.depth())[0], int(tree.size[0])
        ranks = [int(np.sum(parent[:i] == parent[i])) for i in range(size)]
        inner = np.array([i in parent[:size] for i in range(len(parent))])
        found = [np.flatnonzero((depth == d) & inner) for d in range(tree.depth_max)]
        sizes = level_sizes or tuple(max(1, len(level)) for level in found)
        rank_max = rank_max or max(ranks, default=0) + 1
        fits = len(sizes) == len(found) and max(ranks) < rank_max
        if not fits or any(len(f) > s for f, s in zip(found, sizes, strict=True)):
            raise ValueError(
                f"level_sizes={sizes}, rank_max={rank_max}: the tree needs at least "
                f"{tuple(map(len, found))} and {max(ranks) + 1}"
            )
        n = len(parent)
        pad = lambda level, m: np.pad(level, (0, m - len(level)), constant_values=n)  # noqa: E731
        return cls(
            parent=jnp.asarray(parent, jnp.int32),
            size=jnp.int32(size),
            rank=jnp.asarray(ranks + [0] * (n - size), jnp.int32),
            ancestors=jnp.asarray(tree.ancestors(include_self=True)[0]),
            levels=tuple(
                jnp.asarray(pad(level, m), jnp.int32)
                for level, m in zip(found, sizes, strict=True)
            ),
            rank_max=rank_max,
            sampled=sampled,
        )

    @property
    def depth_max(self) -> int:
        """Depth of the tree: nodes of each level but the last are run."""
        return len(self.levels)

    @property
    def n_max(self) -> int:
        """Nodes of the tree."""
        return len(self.parent)

    def bind(self, target: Any) -> "BoundMTPDrafter":
        """Return the drafter joined to the target's head."""
        return BoundMTPDrafter(self, target.draft_head)


@dataclasses.dataclass(frozen=True)
class BoundMTPDrafter(mtp_head.BoundHead):
    """An `MTPDrafter` with a head to run; lives inside one traced function."""

    plan: MTPDrafter

    @property
    def sampled(self) -> bool:
        """Are children drawn?"""
        return self.plan.sampled

    def propose(self, state: MTPState, root, base):
        """Expand the topology breadth-first into preorder slots."""
        tree, _, state = self._expand(state, root, base, None)
        return tree, state

    def propose_sampled(self, state: MTPState, root, base, draws: sampling_lib.Draws):
        """The same with drawn children, and what they were drawn from."""
        return self._expand(state, root, base, draws)

    def _expand(self, state, root, base, draws):
        plan, batch = self.plan, root.shape[0]
        n = plan.n_max
        tokens = jnp.zeros((batch, n), jnp.int32).at[:, 0].set(root)
        outputs = jnp.zeros((batch, n, state.seed.shape[-1]), state.seed.dtype)
        outputs = outputs.at[:, 0].set(state.seed)
        seen, kv, log_probs = jnp.zeros(0, jnp.int32), None, None
        for depth, level in enumerate(plan.levels):
            m = outputs[:, level]
            if depth > 0:
                seen = jnp.concatenate([seen, level])
                m, kv = self._run(state, level, seen, depth, tokens, outputs, base, kv)
                outputs = outputs.at[:, level].set(m, mode="drop")
            scores = self.head.logits(m)
            if draws is not None:
                ancestors = plan.ancestors[level][None]
                scores, drawn_from = gumbel.perturb(
                    scores, tokens, ancestors, level, draws
                )
                if log_probs is None:
                    log_probs = jnp.zeros((batch, n, scores.shape[-1]))
                log_probs = log_probs.at[:, level].set(drawn_from, mode="drop")
            tokens = self._choose_children(tokens, level, scores)
        tree = tree_lib.DraftTree(
            tokens=tokens,
            parent=plan.parent,
            size=jnp.broadcast_to(plan.size, (batch,)),
            depth_max=plan.depth_max,
        )
        return tree, log_probs, state._replace(tokens=tokens)

    def _run(self, state, level, seen, depth, tokens, outputs, base, kv):
        """Run the head on one level's nodes; `kv` and `seen` grow level by level."""
        plan = self.plan
        mask = plan.ancestors[level][:, seen]
        mask &= (level < plan.n_max)[:, None]
        mask = jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape))
        above = outputs[:, plan.parent[level]]
        return self.run_level(state, tokens[:, level], above, depth, base, mask, kv)

    def _choose_children(self, tokens, level, logits):
        """Give the children of `level`'s nodes the best tokens by their rank."""
        plan = self.plan
        best = sharding.top_k(logits, plan.rank_max)[1].astype(jnp.int32)
        is_parent = (plan.parent[:, None] == level) & (plan.parent >= 0)[:, None]
        row = jnp.argmax(is_parent, axis=1)
        chosen = best[:, row, plan.rank]
        return jnp.where(jnp.any(is_parent, axis=1), chosen, tokens)
