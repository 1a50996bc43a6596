"""Draft a tree with the MTP head whose topology follows the head's probabilities.

The value of a node is the sum of log-probabilities that the head gives to the tokens on
its path. At each level the best `width` nodes are run and their best `children` tokens
become candidates; of all candidates of all levels the best make up the tree, always of
the same number of nodes. A node is worth no more than its parent, so the tree is
connected. Li et al. (2024), EAGLE-2, arXiv:2406.16858, section 4.

Parents are data: another topology at every step and in every row compiles nothing new.
The tree is fixed by its context, so `match` is the rule of acceptance for it, and none
accepts more: there is no distribution to hand out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import pytree, sharding, slots
from treewy_jax.drafters import candidates, mtp_head


@pytree.dataclass
class DynamicDrafter:
    """The best `nodes` nodes, the root included, of the trees that the head can grow.

    Attributes:
        nodes: static; of every tree.
        depth: static; levels below the root.
        width: static; nodes run at a level.
        children: static; tokens looked at below the root and below each node run.
    """

    nodes: int = pytree.static(default=16)
    depth: int = pytree.static(default=4)
    width: int = pytree.static(default=8)
    children: int = pytree.static(default=8)

    def __post_init__(self):
        for field, least in (("nodes", 2), ("depth", 1), ("width", 1), ("children", 1)):
            value = getattr(self, field)
            if value < least:
                raise ValueError(f"{field}={value}: must be {least} or more")
        most = 1 + sum(self.level_sizes)
        if self.nodes > most:
            raise ValueError(
                f"nodes={self.nodes}: depth={self.depth}, width={self.width} and "
                f"children={self.children} have at most {most}, the root included"
            )

    @classmethod
    def of_size(cls, nodes: int, depth: int) -> "DynamicDrafter":
        """Return the drafter that looks at 8 nodes a level and 8 tokens below each.

        At more where trees of this size need it, at fewer where they cannot hold them.
        """
        depth = max(1, min(depth, nodes - 1))
        wide = 8
        while wide + (depth - 1) * wide**2 < nodes - 1:
            wide += 1
        wide = max(1, min(wide, nodes - 1))
        return cls(nodes=nodes, depth=depth, width=wide, children=wide)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Candidates of each level."""
        sizes, run = [], 1
        for _ in range(self.depth):
            sizes.append(run * self.children)
            run = min(self.width, sizes[-1])
        return tuple(sizes)

    @property
    def depth_max(self) -> int:
        """Depth of the deepest node that can be."""
        return self.depth

    @property
    def n_max(self) -> int:
        """Nodes of every tree."""
        return self.nodes

    def bind(self, target: Any) -> "BoundDynamicDrafter":
        """Return the drafter joined to the target's head."""
        return BoundDynamicDrafter(self, target.draft_head)


@dataclasses.dataclass(frozen=True)
class _Level:
    """Nodes of one depth that are run.

    Attributes:
        index: of each among the candidates, -1 the root.
        value: log-probability of its path.
        output: the head's.
        seen: which of the nodes run so far are its ancestors or itself.
    """

    index: Int[Array, "B m"]
    value: Float[Array, "B m"]
    output: Float[Array, "B m H"]
    seen: Bool[Array, "B m r"]


@dataclasses.dataclass(frozen=True)
class BoundDynamicDrafter(mtp_head.BoundHead):
    """A `DynamicDrafter` with a head to run; lives inside one traced function."""

    plan: DynamicDrafter

    def propose(self, state: mtp_head.MTPState, root, base):
        """Grow candidates level by level and keep the best tree of them."""
        plan, batch = self.plan, root.shape[0]
        level = _Level(
            index=jnp.full((batch, 1), -1),
            value=jnp.zeros((batch, 1)),
            output=state.seed[:, None],
            seen=jnp.zeros((batch, 1, 0), bool),
        )
        found, kv, total = [], None, 0
        for depth, size in enumerate(plan.level_sizes, 1):
            tokens, value = self._children(level)
            found.append((tokens, jnp.repeat(level.index, plan.children, 1), value))
            if depth < plan.depth:
                level, kv = self._run_best(
                    state, level, tokens, value, total, depth, base, kv
                )
            total += size
        tokens, parent, value = (
            jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True)
        )
        tree = candidates.best_tree(
            root, tokens, parent, value, n_max=plan.n_max, depth_max=plan.depth_max
        )
        return tree, state._replace(tokens=tree.tokens)

    def _children(self, level):
        """Return the best tokens below each node of a level, and their values."""
        logits = self.head.logits(level.output).astype(jnp.float32)
        if self.plan.children > logits.shape[-1]:
            raise ValueError(
                f"children={self.plan.children}: allowed are at most the "
                f"{logits.shape[-1]} tokens of the vocabulary"
            )
        best, tokens = sharding.top_k(logits, self.plan.children)
        total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        # Rounding must not put a child above its parent.
        value = level.value[..., None] + jnp.minimum(best - total, 0)
        batch = value.shape[0]
        return tokens.astype(jnp.int32).reshape(batch, -1), value.reshape(batch, -1)

    def _run_best(self, state, level, tokens, value, first, depth, base, kv):
        """Run the best candidates of a level, which are numbered from `first` on."""
        width = min(self.plan.width, value.shape[1])
        value, slot = lax.top_k(value, width)
        above = slot // self.plan.children
        itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (*slot.shape, width))
        seen = jnp.concatenate([slots.take(level.seen, above), itself], axis=-1)
        output, kv = self.run_level(
            state,
            slots.take(tokens, slot),
            slots.take(level.output, above),
            depth,
            base,
            seen,
            kv,
        )
        return _Level(first + slot, value, output, seen), kv
