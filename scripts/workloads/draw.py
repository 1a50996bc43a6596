"""Random inputs for workloads, drawn so that XLA compiles them in seconds."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def normals(key: jax.Array, *shapes: Sequence[int]) -> list[jax.Array]:
    """Draw arrays of standard normal numbers.

    All are slices of one: each generator costs a second or two to compile, and one
    that XLA fuses with a sum over its numbers, such as a norm, costs minutes.
    """
    sizes = [math.prod(shape) for shape in shapes]
    flat = lax.optimization_barrier(jax.random.normal(key, (sum(sizes),)))
    found, begin = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        found.append(flat[begin : begin + size].reshape(shape))
        begin += size
    return found


def unit(x: jax.Array) -> jax.Array:
    """Return vectors of length 1 along the last axis."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
