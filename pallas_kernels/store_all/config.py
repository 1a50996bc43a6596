"""How the store-all kernel is cut: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.store_all import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"

# The code of a resident path is one copy of the step a level, and each level above
# the node's keeps a state in registers.
MOST_RESIDENT = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How a GPU kernel is cut.

    Attributes:
      block_v: rows of the state (of Dv) a program holds.
      resident: keep the states of the whole path from the root in registers; else
        only the last one, and a parent that is not the previous node is read again.
      num_warps: warps of a program.
      num_stages: software pipeline depth of a program.
    """

    block_v: int
    resident: bool = False
    num_warps: int = 1
    num_stages: int = 1


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where the explicit one does not divide the value dimension, or
    keeps a path resident that may be too long.
    """
    if explicit is not None:
        if explicit.block_v < 1 or spec.value_dim % explicit.block_v:
            raise ValueError(
                f"block_v is {explicit.block_v}; a divisor of Dv = {spec.value_dim} "
                "is allowed"
            )
        if explicit.resident and spec.depth > MOST_RESIDENT:
            raise ValueError(
                f"resident is True; only a depth_max of at most {MOST_RESIDENT} is "
                f"allowed then, not {spec.depth}"
            )
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess: keep the path of a tree resident where it is short; a chain needs none.

    Rows are few enough to stay in registers, on a B200 too. On a H200 a chain in
    bfloat16 took 467 us with 32 rows, 611 with 8 (n = 4, B = 256), in float32 713 with
    16, 772 with 8; a tree in float32 983 us with 16, 1,110 with 8 (n = 40, B = 32).
    """
    if platform == "tpu":
        return Config(block_v=spec.value_dim)
    chain = spec.depth == spec.nodes - 1
    resident = not chain and spec.depth <= MOST_RESIDENT
    rows = 16 if spec.state_dtype == "float32" else 32 if chain else 8
    return Config(block_v=min(spec.value_dim, rows), resident=resident)
