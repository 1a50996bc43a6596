"""Turn logits into a token: penalties, temperature, top-k, top-p, reproducible draws.

Every draw has a key of its own, folded from (the row's key, position, ...), so a row's
text depends neither on the batch around it nor on the padding of the tree.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

# What is drawn at a position besides the token of `draw`: one stream of keys each.
DRAFT, TEST, NEXT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample; temperature 0 is greedy.

    Attributes:
        temperature: logits are divided by it; 0 picks the argmax.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches it; 1 keeps all.
        min_p: keep tokens at least this times as probable as the best; 0 keeps all.
        repetition_penalty: logits of tokens that occurred before are divided by it
            where positive and multiplied by it elsewhere; 1 is none.
        presence_penalty: taken off the logits of tokens that occurred before; 0 is
            none.

    Penalties come first, then temperature, top-k, top-p of what is left, min-p.
    "Before" means in the prompt, in the emitted text or on the path to the node. Tokens
    as probable as the last one kept stay too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must lie in [0, 1]")
        repetition, presence = self.repetition_penalty, self.presence_penalty
        if not (math.isfinite(repetition) and repetition > 0):
            raise ValueError(f"repetition_penalty={repetition}: must be above 0")
        if not math.isfinite(presence):
            raise ValueError(f"presence_penalty={presence}: must be finite")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Does a draw depend on the tokens before it?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0


def distribution(
    logits: Float[Array, "*B V"], sampling: Sampling
) -> Float[Array, "*B V"]:
    """Return the log-probabilities (unnormalised) that a draw uses, float32."""
    logits = logits.astype(jnp.float32)
    # Below zero throughout, a tiny temperature drives logits to -inf and never to inf.
    below_best = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below_best / max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = jax.lax.top_k(scaled, sampling.top_k)[0][..., -1:]
        scaled = jnp.where(scaled < kth, -jnp.inf, scaled)
    if sampling.top_p < 1:
        scaled = _nucleus(scaled, sampling.top_p)
    if sampling.min_p > 0:
        scaled = jnp.where(scaled < math.log(sampling.min_p), -jnp.inf, scaled)
    return scaled


def log_probabilities(
    logits: Float[Array, "*B V"], sampling: Sampling
) -> Float[Array, "*B V"]:
    """Return normalised log-probabilities, float32; greedy: all on the argmax."""
    if sampling.greedy:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    return jax.nn.log_softmax(distribution(logits, sampling), axis=-1)


def penalise(
    logits: Float[Array, "B n V"], seen: Bool[Array, "B n V"], sampling: Sampling
) -> Float[Array, "B n V"]:
    """Lower the logits of tokens that were seen, float32.

    Repetition as in Keskar et al. (2019), CTRL, section 4.1; then presence.
    """
    logits, factor = logits.astype(jnp.float32), sampling.repetition_penalty
    lower = jnp.where(logits > 0, logits / factor, logits * factor)
    return jnp.where(seen, lower - sampling.presence_penalty, logits)


def see(
    seen: Bool[Array, "*B V"], tokens: Int[Array, "*B m"], valid: Bool[Array, "*B m"]
) -> Bool[Array, "*B V"]:
    """Add the valid ones of `tokens` to the set `seen`, for every leading index."""
    vocab = seen.shape[-1]
    rows = seen.reshape(-1, vocab)
    # A token past the end is dropped, which is how others are kept out.
    put = jnp.where(valid, tokens, vocab).reshape(rows.shape[0], -1)
    add = jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))
    return add(rows, put).reshape(seen.shape)


def seen_on_paths(
    seen: Bool[Array, "B V"],
    tokens: Int[Array, "B n"],
    ancestors: Bool[Array, "#B m n"],
) -> Bool[Array, "B m V"]:
    """Return what each of m nodes sees: the text, its ancestors and itself."""
    shape = (tokens.shape[0], *ancestors.shape[1:])
    start = jnp.broadcast_to(seen[:, None], (*shape[:2], seen.shape[-1]))
    on_path = jnp.broadcast_to(ancestors, shape)
    return see(start, jnp.broadcast_to(tokens[:, None], shape), on_path)


def row_keys(key: PRNGKeyArray | Key[Array, " B"], batch: int) -> Key[Array, " B"]:
    """Return a key for each row: those given, or one key folded with the row."""
    if key.ndim == 1:
        return key
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def draw(
    logits: Float[Array, "B n V"],
    key: PRNGKeyArray | Key[Array, " B"],
    position: Int[Array, "B n"],
    sampling: Sampling,
) -> Int[Array, "B n"]:
    """Draw one token a node from `distribution`, or the argmax if greedy.

    The key of a draw is folded from (row, position), so the text does not depend on the
    tree: siblings share their noise, and at most one of them is on the path.
    """
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def one(row, at, values):
        return jax.random.categorical(jax.random.fold_in(row, at), values)

    keys = row_keys(key, logits.shape[0])
    over_nodes = jax.vmap(one, (None, 0, 0))
    tokens = jax.vmap(over_nodes)(keys, position, distribution(logits, sampling))
    return tokens.astype(jnp.int32)


class Draws(NamedTuple):
    """What one step draws from: a key a row, and the settings of the request.

    Attributes:
        keys: folded from (row, position of the root); `at` makes them.
        sampling: static.
        seen: tokens of the text so far, with a penalty only.
    """

    keys: Key[Array, " B"]
    sampling: Sampling
    seen: Bool[Array, "B V"] | None

    @classmethod
    def at(cls, key, base, sampling, seen=None) -> "Draws":
        """Return the draws of the step whose root is at position `base`."""
        rows = row_keys(key, base.shape[0])
        return cls(jax.vmap(jax.random.fold_in)(rows, base), sampling, seen)

    def uniform(self, stream: int, nodes: Int[Array, " m"]) -> Float[Array, "B m"]:
        """Return one number in [0, 1) a node."""
        return jax.vmap(jax.vmap(jax.random.uniform))(self._fold(stream, nodes))

    def gumbel(
        self, stream: int, nodes: Int[Array, " m"], vocab: int
    ) -> Float[Array, "B m V"]:
        """Return the noise by which the argmax of log-probabilities is a sample."""
        one = lambda key: jax.random.gumbel(key, (vocab,))  # noqa: E731
        return jax.vmap(jax.vmap(one))(self._fold(stream, nodes))

    def _fold(self, stream, nodes):
        # The index of a node in preorder does not depend on the padding behind it.
        def one(key, node):
            return jax.random.fold_in(jax.random.fold_in(key, stream), node)

        return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(self.keys, nodes)


def _nucleus(scaled: Float[Array, "*B V"], top_p: float) -> Float[Array, "*B V"]:
    """Drop tokens outside the smallest set of total probability >= `top_p`."""
    ordered = jnp.sort(jax.nn.softmax(scaled, axis=-1), axis=-1, descending=True)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.min(jnp.where(before < top_p, ordered, 1.0), axis=-1, keepdims=True)
    return jnp.where(jax.nn.softmax(scaled, axis=-1) < least, -jnp.inf, scaled)
