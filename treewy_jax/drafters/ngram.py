"""Draft from the text itself: what followed the newest tokens when they last occurred.

Prompt lookup in the sense of Saxena (2023), made a tree: the root's children start the
most recent continuations whose first tokens differ, each a chain.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from treewy_jax import accept, pytree
from treewy_jax import tree as tree_lib
from treewy_jax.drafters import text as text_lib


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

    def start(
        self, tokens, lengths, hidden, next_token, capacity
    ) -> text_lib.TextState:
        """Keep the prompt and the first token."""
        return text_lib.start(
            tokens, lengths, next_token, capacity=capacity, nodes=self.n_max
        )

    def propose(self, state: text_lib.TextState, root, base):
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

    def update(self, state: text_lib.TextState, accepted: accept.Accepted, hidden):
        """Append what was emitted."""
        return text_lib.grow(state, accepted)

    def _branches(self, text: Int[Array, " S"], length: Int[Array, ""]):
        """Return [branches, depth] tokens and how many branches were found."""
        at = jnp.arange(text.shape[0])
        score = text_lib.match_length(text, length, self.match) * text.shape[0] + at
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
