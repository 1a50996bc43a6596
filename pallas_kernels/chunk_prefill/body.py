"""What the Triton and the TPU kernel share: decays of a chunk and its inverse.

Values are two-dimensional, of sizes that are powers of two, and are never sliced.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dots


def coarse_and_fine(
    log_decay: Float[Array, "*B"],
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Split off multiples of 1/16, whose sums are exact in float32 up to a million.

    One rounded sum would lose a small decay after a large one: -0.1 after -300.
    """
    coarse = jnp.floor(log_decay * 16) / 16
    return coarse, log_decay - coarse


def decay_between(
    later: Sequence[Float[Array, "C 1"]], earlier: Sequence[Float[Array, "1 C"]]
) -> Float[Array, "C C"]:
    """Return D[t, i] = exp(c_t - c_i) for i <= t, else 0, from both parts of c."""
    high, low = (a - b for a, b in zip(later, earlier, strict=True))
    difference = high + low
    row = lax.broadcasted_iota(jnp.int32, difference.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, difference.shape, 1)
    return jnp.where(row >= column, jnp.exp(jnp.minimum(difference, 0.0)), 0.0)


def strictly_lower(square: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """Zero the diagonal and what is above it."""
    row = lax.broadcasted_iota(jnp.int32, square.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, square.shape, 1)
    return jnp.where(row > column, square, 0.0)


def unit_lower_inverse(lower: Float[Array, "C C"], parts: int) -> Float[Array, "C C"]:
    """Invert I + L for strictly lower L: block doubling, then Newton steps.

    Two inverted diagonal blocks A, B and the block O below A give the inverse of twice
    the size: [[A, 0], [-B O A, B]]. No powers of L appear, which grow like binomials
    for correlated keys and cancel. Bfloat16 operands leave an error of 1 % there at
    most, which a step X + X (I - (I + L) X) squares: one step for one of `parts`, two
    for more.
    """
    row = lax.broadcasted_iota(jnp.int32, (lower.shape[0], 1), 0)
    column = lax.broadcasted_iota(jnp.int32, (1, lower.shape[0]), 1)

    def joined_at(level):
        # The highest bit in which row and column differ is the level that joins them.
        return ((row >> level) ^ (column >> level)) == 1

    def join(level, inverse):
        off = jnp.where(joined_at(level), exact[0], jnp.zeros((), jnp.bfloat16))
        half = dots.dot((inverse,), (off,), 1, 0).astype(jnp.bfloat16)
        corner = dots.dot((half,), (inverse,), 1, 0)
        return (inverse.astype(jnp.float32) - corner).astype(jnp.bfloat16)

    def refine(whole, exact):
        """`whole` and `exact` are the parts of the inverse and of L."""
        inverse = sum(x.astype(jnp.float32) for x in reversed(whole))
        residual = jnp.where(row == column, 1 - inverse, -inverse)
        residual = residual - dots.dot(exact, whole, 1, 0)
        return inverse + dots.dot(whole, dots.split(residual, parts), 1, 0)

    exact = dots.split(lower, parts + 1)
    # Blocks of one row are their own inverse: no product at the first level. A loop and
    # not an unrolled one: the masks of all levels at once would spill.
    pairs = jnp.where(row == column, 1.0, jnp.where(joined_at(0), -lower, 0.0))
    levels = (lower.shape[0] - 1).bit_length()
    first = lax.fori_loop(1, levels, join, pairs.astype(jnp.bfloat16))
    inverse = refine((first,), exact[:2])
    return inverse if parts == 1 else refine(dots.split(inverse, 3), exact)
