"""Draft from the text itself: what followed the newest tokens when they last occurred.

Prompt lookup in the sense of Saxena (2023), made a tree: the root's children start the
most recent continuations whose first tokens differ, each a chain.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from treewy_jax import accept, pytree, slots
from treewy_jax import tree as tree_lib


class NgramState(NamedTuple):
    """The text so far, the root included: `length` + 1 tokens of `text` are valid."""

    text: Int[Array, "B S"]
    length: Int[Array, " B"]
    tokens: Int[Array, "B n"]


@pytree.dataclass
class NgramDrafter:
    """`branches` chains of `depth` tokens; `match` tokens are compared at most.

    Longer matches win, then later ones. Fewer branches than asked are padding.
    """

    branches: int = pytree.static(default=2)
    depth: int = pytree.static(default=4)
    match: int = pytree.static(default=3)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name}={value}: must be 1 or more")

    @property
    def depth_max(self) -> int:
        """Tokens of a chain."""
        return self.depth

    @property
    def n_max(self) -> int:
        """The root and all chains."""
        return 1 + self.branches * self.depth

    def bind(self, target):
        return self

    def start(self, tokens, lengths, hidden, next_token, capacity) -> NgramState:
        """Keep the prompt and the first token."""
        text = jnp.pad(tokens, ((0, 0), (0, capacity + 1 - tokens.shape[1])))
        one = jnp.ones_like(lengths)
        text = slots.append(text, next_token[:, None], one, lengths)
        drafted = jnp.zeros((tokens.shape[0], self.n_max), jnp.int32)
        return NgramState(text, lengths, drafted)

    def propose(self, state: NgramState, root, base):
        """Find the best continuations of the newest tokens and chain them."""
        find = jax.vmap(lambda text, length: self._branches(text, length))
        chains, found = find(state.text, state.length)
        tokens = jnp.concatenate(
            [root[:, None], chains.reshape(root.shape[0], -1)], axis=1
        )
        chain = jnp.arange(self.n_max - 1)
        parent = jnp.where(chain % self.depth == 0, 0, chain)
        tree = tree_lib.DraftTree(
            tokens=tokens,
            parent=jnp.concatenate([jnp.full(1, -1), parent]).astype(jnp.int32),
            size=1 + found * self.depth,
            depth_max=self.depth,
        )
        return tree, state._replace(tokens=tokens)

    def update(self, state: NgramState, accepted: accept.Accepted, hidden):
        """Append what was emitted."""
        emitted = accepted.emitted(state.tokens)
        text = slots.append(state.text, emitted, accepted.count, state.length + 1)
        return NgramState(text, state.length + accepted.count, state.tokens)

    def _branches(self, text: Int[Array, " S"], length: Int[Array, ""]):
        """Return [branches, depth] tokens and how many branches were found."""
        at = jnp.arange(text.shape[0])
        score = self._match_length(text, length) * text.shape[0] + at
        fits = (at < length) & (score >= text.shape[0])
        first = jnp.roll(text, -1)
        chains, found = [], jnp.int32(0)
        for _ in range(self.branches):
            best = jnp.argmax(jnp.where(fits, score, -1))
            chain = text[best + 1 + jnp.arange(self.depth)]
            chains.append(chain)
            found += jnp.any(fits).astype(jnp.int32)
            fits &= first != chain[0]
        return jnp.stack(chains), found

    def _match_length(self, text, length):
        """How many tokens up to each place equal those at the end of the text."""
        run = jnp.ones(text.shape[0], bool)
        total = jnp.zeros(text.shape[0], jnp.int32)
        for back in range(self.match):
            newest = text[jnp.maximum(length - back, 0)]
            here = jnp.roll(text, back)
            run &= (here == newest) & (jnp.arange(text.shape[0]) >= back)
            run &= length >= back
            total += run
        return total
