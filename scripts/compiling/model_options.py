"""Options of `compile_check.py --model`, apart from what imports models."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Options:
    """With --model: the decode step of a published size instead of kernels."""

    target: str | None = None
    """The devices, such as H200, B200x8 or v5p:2x2x2."""
    mesh: str | None = None
    """Sizes of the mesh, such as data=2,tensor=4; by default tensor over all."""
    layers: int | None = None
    """First layers of the model, a multiple of 4; by default all."""
    tree: tuple[str, ...] = ("3,3,3",)
    """Widths of each tree; none is the root alone."""
    batch: int = 64
    """Rows."""
    context: int = 32768
    """Tokens that the state covers."""
    commit: tuple[str, ...] = ("reconstruct",)
    """Lifecycles: reconstruct, store-all, fused, deferred."""
    horizon: int = 16
    """Of deferred."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights."""
    state_dtype: str = "float32"
    """Storage of the recurrent state."""
    alone: bool = False
    """Without store-all beside them."""
