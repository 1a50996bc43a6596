"""Block sizes of the decoded token: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.decode import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Config:
    """How a GPU kernel is cut.

    Attributes:
      block_v: rows of the state (of Dv) a program holds.
      num_warps: warps of a program.
      num_stages: software pipeline depth of a program.
    """

    block_v: int
    num_warps: int = 4
    num_stages: int = 1


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where the explicit one does not divide the value dimension.
    """
    if explicit is not None:
        if explicit.block_v < 1 or spec.value_dim % explicit.block_v:
            raise ValueError(
                f"block_v is {explicit.block_v}; a divisor of Dv = {spec.value_dim} "
                "is allowed"
            )
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess: small blocks, so that many programs keep the memory busy."""
    if platform != "gpu":
        return Config(block_v=spec.value_dim)
    return Config(block_v=min(spec.value_dim, 8), num_warps=1)
