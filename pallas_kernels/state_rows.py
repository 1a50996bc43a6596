"""How kernels are cut that hold some rows of one head's state and move little else.

Decode and commit: bound by the traffic of the state, so programs are small and many.
"""

import dataclasses
import pathlib
from typing import Any

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut.

    Attributes:
      block_v: rows of the state (of Dv) a program holds.
      num_warps: warps of a GPU program.
      num_stages: software pipeline depth of a GPU program.
    """

    block_v: int
    num_warps: int = 4
    num_stages: int = 1


def choose(
    tuned: pathlib.Path,
    spec: Any,
    platform: str,
    device_kind: str,
    explicit: Config | None = None,
) -> Config:
    """Return the explicit configuration, else that of a table in `tuned`, else a guess.

    Raises ValueError where the explicit one does not divide the value dimension.
    """
    if explicit is not None:
        if explicit.block_v < 1 or spec.value_dim % explicit.block_v:
            raise ValueError(
                f"block_v is {explicit.block_v}; a divisor of Dv = {spec.value_dim} "
                "is allowed"
            )
        return explicit
    found = tuning.lookup(tuned, device_kind, spec)
    return Config(**found) if found else heuristic(spec, platform)


def heuristic(spec: Any, platform: str) -> Config:
    """Guess: small blocks, so that many programs keep the memory busy."""
    if platform != "gpu":
        return Config(block_v=spec.value_dim)
    return Config(block_v=min(spec.value_dim, 32), num_warps=4)
