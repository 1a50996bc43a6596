"""Turn target logits into a token: temperature, top-k, top-p, reproducible draws."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample; temperature 0 is greedy.

    Attributes:
        temperature: logits are divided by it; 0 picks the argmax.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches it; 1 keeps all.

    Tokens as probable as the last one kept stay too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


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
    return scaled


def draw(
    logits: Float[Array, "B n V"],
    key: PRNGKeyArray,
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
        folded = jax.random.fold_in(jax.random.fold_in(key, row), at)
        return jax.random.categorical(folded, values)

    rows = jnp.arange(logits.shape[0])[:, None] + jnp.zeros_like(position)
    tokens = jax.vmap(jax.vmap(one))(rows, position, distribution(logits, sampling))
    return tokens.astype(jnp.int32)


def _nucleus(scaled: Float[Array, "*B V"], top_p: float) -> Float[Array, "*B V"]:
    """Drop tokens outside the smallest set of total probability >= `top_p`."""
    ordered = jnp.sort(jax.nn.softmax(scaled, axis=-1), axis=-1, descending=True)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.min(jnp.where(before < top_p, ordered, 1.0), axis=-1, keepdims=True)
    return jnp.where(jax.nn.softmax(scaled, axis=-1) < least, -jnp.inf, scaled)
