"""Draft from a known text, with mistakes placed on purpose: the drafter for tests.

At step s the nodes on the path to `goals[s]` carry the text's own tokens, every other
node a wrong one. A target that would write the text accepts exactly that path, whatever
its length and through whichever child.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from treewy_jax import accept, pytree, slots
from treewy_jax import tree as tree_lib


class ScriptedState(NamedTuple):
    """How far into the script each row is, and in the list of goals."""

    told: Int[Array, " B"]
    step: Int[Array, " B"]
    tokens: Int[Array, "B n"]


@pytree.dataclass
class ScriptedDrafter:
    """Drafts `script` (each row's text after the prompt) in the shape of `tree`.

    Attributes:
        script: tokens; beyond its end the last one repeats.
        tree: the topology of every step.
        goals: the node to accept down to, by row and step, used in turn; 0 accepts no
            draft.
        vocab_size: static; wrong tokens stay below it.
    """

    script: Int[Array, "B S"]
    tree: tree_lib.DraftTree
    goals: Int[Array, "B G"]
    vocab_size: int = pytree.static()

    @property
    def depth_max(self) -> int:
        """Depth of the tree."""
        return self.tree.depth_max

    @property
    def n_max(self) -> int:
        """Nodes of the tree."""
        return self.tree.n_max

    def bind(self, target):
        return self

    def start(self, tokens, lengths, hidden, next_token, capacity) -> ScriptedState:
        """The first token of the script is the root."""
        zero = jnp.zeros_like(lengths)
        return ScriptedState(zero, zero, jnp.zeros_like(self.tree.tokens))

    def propose(self, state: ScriptedState, root, base):
        """Put the text on the goal's path and wrong tokens elsewhere."""
        depth = self.tree.depth()
        turn = (state.step % self.goals.shape[1])[:, None]
        goal = jnp.take_along_axis(self.goals, turn, axis=1)
        ancestors = self.tree.ancestors(include_self=True)
        on_path = jnp.take_along_axis(ancestors, goal[..., None], axis=1)[:, 0]
        place = jnp.minimum(state.told[:, None] + depth, self.script.shape[1] - 1)
        right = slots.take(self.script, place)
        wrong = (right + 1 + self.tree.rank()) % self.vocab_size
        tokens = jnp.where(on_path, right, wrong).astype(jnp.int32)
        tokens = tokens.at[:, 0].set(root)
        return self.tree.with_tokens(tokens), state._replace(tokens=tokens)

    def update(self, state: ScriptedState, accepted: accept.Accepted, hidden):
        """Move on by what was accepted."""
        moved = (accepted.count > 0).astype(jnp.int32)
        told = state.told + accepted.count
        return ScriptedState(told, state.step + moved, state.tokens)
