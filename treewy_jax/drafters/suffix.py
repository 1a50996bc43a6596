"""Draft from the text itself: all that followed its newest tokens before, as one tree.

Places where the newest tokens occurred earlier are looked up, the longest matches first
and then the latest ones. The continuations there are merged into a trie: a node is a
distinct beginning of one, and counts how many begin so. Nodes behind a longer match
come first, then those that occurred more often, then those nearer to the root. Suffix
trees of the text as drafters: Oliaro et al. (2024), SuffixDecoding, arXiv:2411.04975.

Parents are data: another topology at every step and in every row compiles nothing new.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from treewy_jax import accept, pytree
from treewy_jax.drafters import candidates
from treewy_jax.drafters import text as text_lib


@pytree.dataclass
class SuffixDrafter:
    """Trees of at most `nodes` nodes, the root included; fewer are padded.

    Attributes:
        nodes: static; of the largest tree.
        depth: static; tokens of a continuation at most.
        match: static; tokens compared at a place.
        occurrences: static; places merged at most.
    """

    nodes: int = pytree.static(default=16)
    depth: int = pytree.static(default=8)
    match: int = pytree.static(default=8)
    occurrences: int = pytree.static(default=16)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 + (field.name == "nodes")
            if value < least:
                raise ValueError(f"{field.name}={value}: must be {least} or more")
        most = 1 + self.occurrences * self.depth
        if self.nodes > most:
            raise ValueError(
                f"nodes={self.nodes}: depth={self.depth} and occurrences="
                f"{self.occurrences} have at most {most}, the root included"
            )

    @property
    def depth_max(self) -> int:
        """Tokens of a continuation."""
        return self.depth

    @property
    def n_max(self) -> int:
        """Nodes of the largest tree."""
        return self.nodes

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
        """Merge the continuations of earlier occurrences into one tree."""
        found = jax.vmap(self._candidates)(state.text, state.length)
        tree = candidates.best_tree(
            root, *found, n_max=self.n_max, depth_max=self.depth
        )
        return tree, state._replace(tokens=tree.tokens)

    def update(self, state: text_lib.TextState, accepted: accept.Accepted, hidden):
        """Append what was emitted."""
        return text_lib.grow(state, accepted)

    def _candidates(self, text: Int[Array, " S"], length: Int[Array, ""]):
        """Return tokens, parents and scores of all nodes of one row's trie."""
        places, matched = self._places(text, length)
        level = jnp.arange(self.depth)
        place = places[:, None] + 1 + level
        known = (place <= length) & (matched > 0)[:, None]
        tokens = text[jnp.minimum(place, text.shape[0] - 1)]
        alike = _same_beginning(tokens, known)
        count = jnp.sum(alike, axis=1)
        # A trie's node is told by the first occurrence that begins so.
        first = jnp.argmax(alike, axis=1)
        number = jnp.arange(len(places))[:, None]
        score = matched[:, None] * (len(places) + 1) + count
        score = jnp.where(
            known & (first == number), score.astype(jnp.float32), -jnp.inf
        )
        # Numbered level by level, so that parents come first.
        above = jnp.roll(first, 1, axis=1) + (level - 1) * len(places)
        above = jnp.where(level == 0, -1, above).astype(jnp.int32)
        return tokens.T.reshape(-1), above.T.reshape(-1), score.T.reshape(-1)

    def _places(self, text, length):
        """Return the best places, and how many tokens match there, 0 for none."""
        at = jnp.arange(text.shape[0])
        matched = text_lib.match_length(text, length, self.match)
        score = jnp.where(at < length, matched * text.shape[0] + at, -1)
        room = max(0, self.occurrences - text.shape[0])
        score = jnp.pad(score, (0, room), constant_values=-1)
        _, places = lax.top_k(score, self.occurrences)
        return places, jnp.where(places < length, matched[places], 0)


def _same_beginning(
    tokens: Int[Array, "K D"], known: Bool[Array, "K D"]
) -> Bool[Array, "K K D"]:
    """Tell which continuations agree up to each depth."""
    same = (tokens[:, None] == tokens) & known[:, None] & known
    return jnp.cumprod(same, axis=-1).astype(bool)
