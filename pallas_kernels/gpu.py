"""What every Pallas Triton kernel here needs: padded rows, masks, compiler options.

Array sizes in such a kernel are powers of two, and JAX 0.11.2 neither masks a block
that reaches beyond its array nor pads it, so every access to such a block has a mask.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


def power_of_two(size: int, least: int = 16) -> int:
    """Return the next power of two, at least `least` (the rows of a tensor core)."""
    return max(least, 1 << (size - 1).bit_length())


def row_mask(shape: tuple[int, ...], rows: Any, axis: int = 0) -> Bool[Array, "..."]:
    """Return where the index along `axis` is below `rows` (a number or a scalar)."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) < rows


def load(ref: Any, mask: Array | None = None) -> Array:
    """Read a block; what `mask` leaves out is 0 and is not touched in memory."""
    from jax.experimental.pallas import triton as pallas_triton

    if mask is None:
        return pallas_triton.load(ref)
    return pallas_triton.load(ref, mask=mask, other=0)


def store(ref: Any, value: Array, mask: Array | None = None) -> None:
    """Write a block, except where `mask` is false."""
    from jax.experimental.pallas import triton as pallas_triton

    pallas_triton.store(ref, value.astype(ref.dtype), mask=mask)


def compiler_params(num_warps: int, num_stages: int) -> Any:
    """Return the options of Pallas Triton."""
    from jax.experimental.pallas import triton as pallas_triton

    return pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
