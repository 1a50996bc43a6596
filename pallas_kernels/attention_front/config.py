"""Block sizes of the attention front: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.attention_front import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"
# So many heads, of all rows, are enough for the device if each is a program.
MANY_HEADS = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """How a GPU kernel is cut.

    Attributes:
      block_heads: most heads of a row that a program takes, a power of two.
      num_warps: warps of a program.
    """

    block_heads: int
    num_warps: int = 1


def choose(
    spec: specs.Spec, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError for an explicit one whose heads are no power of two.
    """
    if explicit is not None:
        size = explicit.block_heads
        if size < 1 or size & (size - 1):
            raise ValueError(f"block_heads is {size}; a power of two is allowed")
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec)


def heuristic(spec: specs.Spec) -> Config:
    """Guess: a head a program while there are few, then four that share angles."""
    return Config(4 if spec.rows * spec.heads > MANY_HEADS else 1)


def block(count: int, config: Config) -> int:
    """Return how many of `count` heads a program takes: what divides them."""
    return min(config.block_heads, count & -count)
