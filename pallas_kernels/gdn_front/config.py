"""Block sizes of the front: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.gdn_front import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Config:
    """How a GPU kernel is cut.

    Attributes:
      block_heads: heads a program computes at once, a power of two.
      span: nodes it takes in turn, also of several trees.
      num_warps: warps of a program.
      num_stages: software pipeline depth of a program.
    """

    block_heads: int
    span: int = 1
    num_warps: int = 1
    num_stages: int = 1


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError for an explicit one that does not divide the heads.
    """
    if explicit is not None:
        most = most_heads(spec)
        if explicit.block_heads < 1 or most % explicit.block_heads:
            raise ValueError(
                f"block_heads is {explicit.block_heads}; a divisor of {most} is "
                "allowed, the largest power of two in Hk and Hv"
            )
        if explicit.span < 1:
            raise ValueError(f"span is {explicit.span}; 1 or more is allowed")
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec)


def most_heads(spec: specs.Spec) -> int:
    """Return the largest power of two that divides key heads and value heads."""
    both = spec.key_heads | spec.value_heads
    return both & -both


def heuristic(spec: specs.Spec) -> Config:
    """Guess: as many nodes a program as leave a few thousand programs."""
    rows = spec.batch * spec.nodes
    if spec.width:
        span, heads = min(40, max(1, rows // 128)), 2
    else:
        span, heads = min(8, max(1, rows // 128)), 4
    return Config(block_heads=min(heads, most_heads(spec)), span=span)
