"""Shape contract of residual and norm: what a call is, costs and must move."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    Attributes:
      tokens, hidden: rows of the residual stream, and their columns.
      parts: what is added up for each row.
      rows_dtype, parts_dtype, weight_dtype: of the stream, the parts and the gain.
      accumulation_dtype: of the sums.
    """

    tokens: int
    parts: int
    hidden: int
    rows_dtype: str
    parts_dtype: str
    weight_dtype: str
    accumulation_dtype: str = "float32"

    @property
    def bytes_moved(self) -> int:
        """Least traffic: the parts and rows are read once, both results written."""
        rows, parts, weight = (
            jnp.dtype(getattr(self, f"{kind}_dtype")).itemsize
            for kind in ("rows", "parts", "weight")
        )
        row = self.hidden * (3 * rows + self.parts * parts)
        return self.tokens * row + self.hidden * weight

    @property
    def flops(self) -> int:
        """Operations of each element: its parts are added, and five of the norm."""
        return self.tokens * self.hidden * (self.parts + 5)


def make_spec(
    *,
    tokens: int,
    parts: int,
    hidden: int,
    rows_dtype: DTypeLike = "bfloat16",
    parts_dtype: DTypeLike | None = None,
    weight_dtype: DTypeLike | None = None,
) -> Spec:
    """Describe a call; a dtype of None is that of the rows.

    Raises ValueError for a size below one.
    """
    sizes = {"tokens": tokens, "parts": parts, "hidden": hidden}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; 1 or more is allowed")
    names = [
        jnp.dtype(rows_dtype if dtype is None else dtype).name
        for dtype in (rows_dtype, parts_dtype, weight_dtype)
    ]
    wide = jnp.result_type(jnp.float32, *names).name
    return Spec(*sizes.values(), *names, accumulation_dtype=wide)


def spec_of(
    h: Float[Array, "..."], parts: Float[Array, "..."], weight: Float[Array, "..."]
) -> Spec:
    """Describe the call of these arrays; ValueError where shapes disagree."""
    if h.ndim < 2:
        raise ValueError(f"h has shape {h.shape}; [.., H] with rows is allowed")
    *rows, hidden = h.shape
    if parts.ndim != h.ndim + 1:
        raise ValueError(
            f"parts has shape {parts.shape}; ({', '.join(map(str, rows))}, parts, "
            f"{hidden}) is allowed"
        )
    count = parts.shape[-2]
    _check("parts", parts, (*rows, count, hidden))
    _check("weight", weight, (hidden,))
    return make_spec(
        tokens=math.prod(rows),
        parts=count,
        hidden=hidden,
        rows_dtype=h.dtype,
        parts_dtype=parts.dtype,
        weight_dtype=weight.dtype,
    )


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
