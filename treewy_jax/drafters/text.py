"""The text so far, for drafters that look tokens up in it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from treewy_jax import accept, slots


class TextState(NamedTuple):
    """The text so far, the root included: `length` + 1 tokens of `text` are valid."""

    text: Int[Array, "B S"]
    length: Int[Array, " B"]
    tokens: Int[Array, "B n"]


def start(
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    next_token: Int[Array, " B"],
    *,
    capacity: int,
    nodes: int,
) -> TextState:
    """Keep the prompt and the first token; `nodes` are those of a drafted tree."""
    text = jnp.pad(tokens, ((0, 0), (0, capacity + 1 - tokens.shape[1])))
    one = jnp.ones_like(lengths)
    text = slots.append(text, next_token[:, None], one, lengths)
    drafted = jnp.zeros((tokens.shape[0], nodes), jnp.int32)
    return TextState(text, lengths, drafted)


def grow(state: TextState, accepted: accept.Accepted) -> TextState:
    """Append what was emitted."""
    emitted = accepted.emitted(state.tokens)
    text = slots.append(state.text, emitted, accepted.count, state.length + 1)
    return TextState(text, state.length + accepted.count, state.tokens)


def match_length(
    text: Int[Array, " S"], length: Int[Array, ""], most: int
) -> Int[Array, " S"]:
    """Return how many tokens up to each place equal those up to `length`.

    Places before `length` are meant; `most` tokens are compared.
    """
    run = jnp.ones(text.shape[0], bool)
    total = jnp.zeros(text.shape[0], jnp.int32)
    for back in range(most):
        newest = text[jnp.maximum(length - back, 0)]
        here = jnp.roll(text, back)
        run &= (here == newest) & (jnp.arange(text.shape[0]) >= back)
        run &= length >= back
        total += run
    return total
