"""How the expert layer is cut: explicit, else tuned, else heuristic."""

import dataclasses
import math
import pathlib

from pallas_kernels import tuning
from pallas_kernels.grouped_matmul import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of the two products. A row block holds rows of one expert.

    Attributes:
      rows: rows of a block.
      least_rows: of a listed block with fewer rows the tile is halved as long as it
        holds them, down to so many; None: it is not.
      up_columns, up_depth: columns of gate and of up that a program makes, and of x
        that it reads at a time.
      up_warps, up_stages: warps of such a GPU program, tiles it loads ahead.
      down_columns, down_depth, down_warps, down_stages: the same of the second product.
      weights_first: the expert's columns are the rows of the tensor cores' product.
      searched: of up to so many pairs each GPU program finds the rows of its block;
        those of more are listed by a kernel of its own.
    """

    rows: int
    up_columns: int
    up_depth: int
    down_columns: int
    down_depth: int
    up_warps: int = 4
    up_stages: int = 4
    down_warps: int = 4
    down_stages: int = 4
    weights_first: bool = False
    searched: int = 512
    least_rows: int | None = None

    @property
    def tiles(self) -> tuple[int, ...]:
        """Rows of the tiles that a block is computed in, the largest first."""
        found = [self.rows]
        while self.least_rows is not None and found[-1] > self.least_rows:
            found.append(found[-1] // 2)
        return tuple(found)


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where the explicit one does not divide the sizes.
    """
    if explicit is not None:
        return _checked(spec, explicit)
    tuned = tuning.lookup(TUNED, device_kind, spec)
    if tuned is None:
        return heuristic(spec, platform)
    config = Config(**tuned)
    # The shared expert may be narrower than those it was tuned for.
    fitting = {
        name: divisor(size, getattr(config, name)) for name, size in _cuts(spec).items()
    }
    return dataclasses.replace(config, **fitting)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess: rows for the mean expert, and the largest tiles that divide the sizes."""
    mean = spec.pairs / spec.experts
    if platform == "tpu":
        wide = 128 if spec.expert_dtype == "float32" else 256
        columns = divisor(spec.inner, wide)
        rows = 16 if mean <= 8 else 32 if mean <= 24 else 64
        return Config(rows, columns, spec.hidden, spec.hidden, spec.inner)
    rows = 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 48 else 128
    warps, stages = (8, 3) if rows == 128 else (4, 4)
    # float32 takes twice the bytes. Few pairs make few programs: smaller tiles.
    narrow = spec.expert_dtype == "float32"
    depth = 32 if narrow else 64
    inner = _cuts(spec)["up_columns"]
    return Config(
        rows=rows,
        up_columns=divisor(inner, 64 if narrow or spec.pairs <= 64 else 128),
        up_depth=divisor(spec.hidden, depth),
        down_columns=divisor(spec.hidden, 128),
        down_depth=divisor(inner, depth),
        up_warps=warps,
        up_stages=stages,
        down_warps=warps,
        down_stages=stages,
        least_rows=64 if rows == 128 else None,
    )


def divisor(size: int, most: int) -> int:
    """Return the largest power of two that divides `size`, at most `most`."""
    return min(most, size & -size)


def _cuts(spec: specs.Spec) -> dict[str, int]:
    """Return what each tile has to divide, by its name in `Config`."""
    inner = math.gcd(spec.inner, spec.shared)
    return dict(
        up_columns=inner,
        up_depth=spec.hidden,
        down_columns=spec.hidden,
        down_depth=inner,
    )


def _checked(spec: specs.Spec, config: Config) -> Config:
    for name, size in _cuts(spec).items():
        tile = getattr(config, name)
        if tile < 1 or size % tile:
            raise ValueError(f"{name} is {tile}; a divisor of {size} is allowed")
    for name, least in (("rows", 1), ("searched", 0)):
        if getattr(config, name) < least:
            raise ValueError(
                f"{name} is {getattr(config, name)}; {least} or more is allowed"
            )
    least = config.least_rows
    if least is not None and not 1 <= least <= config.rows:
        raise ValueError(f"least_rows is {least}; 1 to {config.rows} is allowed")
    return config
