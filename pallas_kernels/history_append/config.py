"""How the append is cut: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import gpu, tuning
from pallas_kernels.history_append import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"

# Elements of a thread that are on their way at once.
FEWEST, MOST = 16, 64


@dataclasses.dataclass(frozen=True)
class Config:
    """How the GPU kernel is cut: a program has one row of a layer.

    Attributes:
      records: records that it asks for before it writes any; a power of two.
      num_warps: warps of a program.
      num_stages: software pipeline depth of a program.
    """

    records: int
    num_warps: int = 16
    num_stages: int = 1


def choose(
    spec: specs.Spec, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError for an explicit one whose records are no power of two.
    """
    if explicit is not None:
        records = explicit.records
        if records < 1 or records & (records - 1):
            raise ValueError(f"records is {records}; a power of two is allowed")
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec)


def heuristic(spec: specs.Spec) -> Config:
    """Guess: a path at once, by as many threads as find some elements each.

    Of a longer path as many records as the registers of these threads hold.
    """
    widths = (spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim)
    record = sum(map(gpu.power_of_two, widths))
    records, warps = gpu.power_of_two(spec.path, least=1), 16
    while warps > 1 and records * record < FEWEST * 32 * warps:
        warps //= 2
    while records > 1 and records * record > MOST * 32 * warps:
        records //= 2
    return Config(records, num_warps=warps)
