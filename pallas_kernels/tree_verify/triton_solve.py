"""The triangular system of one value head, as Triton programs solve it.

The system is solved for the whole matrix, (I + A)^-1 = I - L with L <- A - A L, and not
for every column of the right-hand side anew: then U = R - L R and O = e^c Q S^T +
(W - W L) R hang on R alone. With few nodes the tensor cores want the state's rows on
their large side, so there products are taken transposed and U is swept directly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dots

# A tensor core instruction has 64 rows: from 32 nodes on they fill at least half.
FEW_NODES = 16
MOST_UNROLLED = 4


def read(rows: Sequence[Array], tile: Sequence[Array], nodes: int) -> Array:
    """Return what rows [n, D] read from a block [bv, D]: [n, bv], or [bv, n] if few."""
    if nodes <= FEW_NODES:
        return dots.dot(tile, rows, 1, 1)
    return dots.dot(rows, tile, 1, 1)


def combine(weights: Sequence[Array], rows: Sequence[Array], nodes: int) -> Array:
    """Return weights [n, m] times rows [m, bv], laid out as `read` does."""
    if nodes <= FEW_NODES:
        return dots.dot(rows, weights, 0, 1)
    return dots.dot(weights, rows, 1, 0)


def solver(
    matrix: Float[Array, "n n"],
    weights: Float[Array, "n n"],
    from_state: Float[Array, "n 1"],
    strength: Float[Array, "n 1"],
    sweeps: Any,
    depth: int,
    split: Callable,
) -> Callable:
    """Return the solution for blocks of the state's rows: a function `solved`.

    `solved(known, seen, values)` takes two functions, which return what the keys and
    what the queries `read` before the tree, and the block of v, [n, bv]; it yields u
    and o, [n, bv]. Queries read when u is done: registers are what this is short of.
    """
    choose = _few_nodes if matrix.shape[0] <= FEW_NODES else _many_nodes
    return choose(matrix, weights, from_state, strength, sweeps, depth, split)


def column(x: Float[Array, "n H"], index: Any) -> Float[Array, "n 1"]:
    """Return a column of a 2-D value, which cannot be sliced."""
    chosen = lax.broadcasted_iota(jnp.int32, x.shape, 1) == index
    return jnp.sum(jnp.where(chosen, x, 0.0), axis=1, keepdims=True)


def _many_nodes(matrix, weights, from_state, strength, sweeps, depth, split):
    parts = split(matrix)
    solution = _sweep(
        lambda x: matrix - dots.dot(parts, split(x), 1, 0),
        matrix,
        sweeps - 1,
        depth - 1,
    )
    solution = split(solution)
    weights = split(weights - dots.dot(split(weights), solution, 1, 0))

    def solved(known, seen, values):
        right = strength * (values - from_state * known())
        rows = split(right)
        yield right - dots.dot(solution, rows, 1, 0)
        yield from_state * seen() + dots.dot(weights, rows, 1, 0)

    return solved


def _few_nodes(matrix, weights, from_state, strength, sweeps, depth, split):
    matrix, weights = split(matrix), split(weights)
    from_state, strength = (jnp.swapaxes(x, 0, 1) for x in (from_state, strength))

    def solved(known, seen, values):
        known = from_state * known()
        right = strength * (jnp.swapaxes(values, 0, 1) - known)
        u = _sweep(
            lambda u: right - dots.dot(split(u), matrix, 1, 1), right, sweeps, depth
        )
        yield jnp.swapaxes(u, 0, 1)
        output = from_state * seen() + dots.dot(split(u), weights, 1, 1)
        yield jnp.swapaxes(output, 0, 1)

    return solved


def _sweep(step, x, sweeps, most):
    """Apply `step` `sweeps` times; unrolled to `most` where that is few.

    More sweeps than the tree is deep change nothing.
    """
    if most > MOST_UNROLLED:
        return lax.fori_loop(0, sweeps, lambda _, x: step(x), x)
    for _ in range(most):
        x = step(x)
    return x
