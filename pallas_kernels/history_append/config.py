"""How the append is cut: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from jax.experimental import pallas as pl

from pallas_kernels import gpu, tuning
from pallas_kernels.history_append import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"

# A GPU runs about so many small programs at once.
PROGRAMS = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """How the GPU kernel is cut.

    Attributes:
      pieces: programs that share one record.
      num_warps: warps of a program.
      num_stages: software pipeline depth of a program, which has no loop.
    """

    pieces: int
    num_warps: int = 1
    num_stages: int = 1


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError for an explicit one that makes no piece.
    """
    if explicit is not None:
        if explicit.pieces < 1:
            raise ValueError(f"pieces is {explicit.pieces}; 1 or more is allowed")
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess: pieces for one wave of programs, none too small for a warp.

    Programs of one warp need no barrier where a cast changes who holds what.
    """
    if platform != "gpu":
        return Config(pieces=1)
    records, values = spec.batch * spec.path, spec.value_heads * spec.value_dim
    pieces = 16
    while pieces > 1 and (records * pieces > PROGRAMS or values < 128 * pieces):
        pieces //= 2
    # At most 32 pseudo-values a thread are on their way at once.
    warps = pl.cdiv(values, 1024 * pieces)
    return Config(pieces, num_warps=min(8, gpu.power_of_two(warps, least=1)))
