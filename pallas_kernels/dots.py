"""Products on tensor cores, of operands written as sums of bfloat16 arrays.

Tensor cores multiply bfloat16 exactly and add in float32. A float32 operand split in
two parts keeps 16 of its 24 digits, in three parts all; a bfloat16 operand is one part
and loses nothing. So the cost is chosen operand by operand, and the interpreter on a
CPU shows the rounding that the device has.

For use inside kernels. In a program that XLA compiles for a GPU, rounding to bfloat16
and back may be left out (xla_allow_excess_precision), and the later parts would be 0:
round with lax.reduce_precision there.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Parts = tuple[Array, ...]


def split(x: Array, parts: int) -> Parts:
    """Write `x` as the sum of at most `parts` bfloat16 arrays, the largest first."""
    if x.dtype == jnp.bfloat16:
        return (x,)
    found = []
    rest = x.astype(jnp.float32)
    for _ in range(parts - 1):
        found.append(rest.astype(jnp.bfloat16))
        rest = rest - found[-1].astype(jnp.float32)
    return (*found, rest.astype(jnp.bfloat16))


def dot(a: Sequence[Array], b: Sequence[Array], a_axis: int, b_axis: int) -> Array:
    """Contract an axis of each 2-D operand, given in parts, into a float32 array.

    Products of small parts with small parts are left out: with two parts a side the
    relative error is at most about 2^-16, that of BF16x3 (Henry et al., arXiv
    1904.06376). The smallest products come first, so that the sum keeps them.
    """
    most = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    total = None
    for i, j in sorted(pairs, key=sum, reverse=True):
        product = lax.dot_general(
            a[i],
            b[j],
            (((a_axis,), (b_axis,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        total = product if total is None else total + product
    return total
