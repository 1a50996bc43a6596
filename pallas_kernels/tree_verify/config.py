"""Block sizes of the tree verification: explicit, else tuned, else heuristic."""

import dataclasses
import functools
import json
import pathlib
import re

from pallas_kernels.tree_verify import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"


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
    return tuned(spec, device_kind) or heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess a configuration: split Dv on a GPU, where registers are the limit."""
    if platform != "gpu":
        return Config(block_v=spec.value_dim)
    # float32 operands are split into bfloat16 pairs: twice the registers a column.
    widest = 32 if spec.precision == "high" or spec.nodes > 64 else 64
    warps = 8 if spec.nodes > 64 else 4
    return Config(block_v=min(spec.value_dim, widest), num_warps=warps)


def tuned(spec: specs.Spec, device_kind: str) -> Config | None:
    """Look the call up in tuned/<device kind>.json; None where it is not listed.

    A file holds a list of entries {"match": {field of Spec: value, ...}, "config":
    {field of Config: value, ...}}; the first whose fields all agree is taken.
    """
    for entry in _table(re.sub("[^a-z0-9]+", "_", device_kind.lower()), TUNED):
        match = entry["match"].items()
        if all(getattr(spec, field) == value for field, value in match):
            return Config(**entry["config"])
    return None


@functools.cache
def _table(device: str, folder: pathlib.Path) -> list[dict]:
    file = folder / f"{device}.json"
    return json.loads(file.read_text()) if file.exists() else []
