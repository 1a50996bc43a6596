"""What all drafters with an MTP head share: its state, its start, and its catching up.

The head maps pairs (x_{t+1}, h_t) to outputs m_t, of which the tokens after x_{t+1} are
read. It has run all pairs of the text with the target's hidden states h. While drafting
its own m takes the place of h; after acceptance it is rerun over the accepted tokens
with the target's hidden states, which overwrites what drafting only guessed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import accept, slots
from treewy_jax.drafters import protocol


class MTPState(NamedTuple):
    """The head's own decode state.

    Attributes:
        key: rotated keys of the head's attention layer; `length` slots are filled.
        value: their values.
        length: pairs run with the target's hidden states, as many as tokens verified.
        seed: the head's output for the newest pair; level 1 is its top tokens.
        tokens: the tree proposed last.
    """

    key: Float[Array, "B S kv D"]
    value: Float[Array, "B S kv D"]
    length: Int[Array, " B"]
    seed: Float[Array, "B H"]
    tokens: Int[Array, "B n"]


@dataclasses.dataclass(frozen=True)
class BoundHead:
    """A drafter (`plan`) with a head to run; lives inside one traced function.

    A subclass adds `propose`, which leaves the tree's tokens in the state.
    """

    plan: Any
    head: protocol.DraftHead

    def bind(self, target):
        return self

    def start(self, tokens, lengths, hidden, next_token, capacity) -> MTPState:
        """Run the head over the prompt's pairs (x_{t+1}, h_t), t < length."""
        batch, length = tokens.shape
        last = lengths[:, None] - 1
        at = jnp.arange(length)[None]
        shifted = jnp.roll(tokens, -1, axis=1)
        follow = jnp.where(at == last, next_token[:, None], shifted)
        positions = jnp.broadcast_to(at, tokens.shape)
        m, kv = self.head.prefill(follow, hidden, positions)
        spare = ((0, 0), (0, capacity - length), (0, 0), (0, 0))
        key, value = (jnp.pad(rows, spare) for rows in kv)
        seed = jnp.take_along_axis(m, last[..., None], axis=1)[:, 0]
        drafted = jnp.zeros((batch, self.plan.n_max), jnp.int32)
        return MTPState(key, value, lengths, seed, drafted)

    def update(self, state: MTPState, accepted: accept.Accepted, hidden) -> MTPState:
        """Rerun the head over the accepted pairs with the target's hidden states."""
        path, count = accepted.path, accepted.count
        rows = path.shape[1]
        tokens = accepted.emitted(state.tokens)
        hidden = jnp.take_along_axis(hidden, path[..., None], axis=1)
        positions = state.length[:, None] + jnp.arange(rows)
        mask = jnp.broadcast_to(jnp.tri(rows, dtype=bool), (path.shape[0], rows, rows))
        prefix = (state.key, state.value)
        m, kv = self.head.extend(tokens, hidden, positions, prefix, state.length, mask)
        key, value = (
            slots.append(old, new, count, state.length)
            for old, new in zip(prefix, kv, strict=True)
        )
        newest = jnp.maximum(count - 1, 0)[:, None, None]
        seed = jnp.take_along_axis(m, newest, axis=1)[:, 0]
        seed = jnp.where((count > 0)[:, None], seed, state.seed)
        return MTPState(key, value, state.length + count, seed, state.tokens)

    def run_level(
        self,
        state: MTPState,
        tokens: Int[Array, "B m"],
        above: Float[Array, "B m H"],
        depth: int,
        base: Int[Array, " B"],
        mask: Bool[Array, "B m n"],
        kv: tuple[Array, Array] | None,
    ) -> tuple[Float[Array, "B m H"], tuple[Array, Array]]:
        """Run nodes of one depth >= 1; returns their outputs and all KV rows so far.

        `above` are the outputs of their parents; `mask` names, of the nodes run so far
        (those of `kv`) and these, the ancestors of each and itself.
        """
        positions = jnp.broadcast_to((base + depth - 1)[:, None], tokens.shape)
        prefix = (state.key, state.value)
        return self.head.extend(
            tokens, above, positions, prefix, state.length, mask, kv
        )
