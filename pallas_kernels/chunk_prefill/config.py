"""How the chunked prefill is cut: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.chunk_prefill import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"
# Programs of the walk that keep a large GPU (132 processors) busy.
MANY = 128


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are cut; on a TPU only `chunk` counts.

    Attributes:
      chunk: tokens of a chunk.
      block_v: rows of the state (of Dv) that a program of the walk holds.
      solve_warps: warps of a program that solves one chunk.
      solve_stages: depth of its software pipeline.
      scan_warps: warps of a program that walks over the chunks.
      scan_stages: depth of its software pipeline.
    """

    chunk: int = 64
    block_v: int = 64
    solve_warps: int = 4
    solve_stages: int = 1
    scan_warps: int = 4
    scan_stages: int = 3


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where the explicit one does not fit the call.
    """
    if explicit is not None:
        return _checked(explicit, spec)
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found is not None else heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess a configuration: as many rows a program as leave enough programs.

    More rows share the loads of a chunk, but the walk is sequential, so that programs
    are all the parallelism there is. Float32 operands are held in two parts and need
    the registers of eight warps.
    """
    if platform != "gpu":
        return Config(block_v=spec.value_dim)
    if spec.parts > 1:
        block_v = min(64, spec.value_dim)
        return Config(block_v=block_v, scan_warps=_warps(block_v, 8), scan_stages=1)
    heads = spec.batch * spec.value_heads
    widest = 128 if heads >= MANY else 32
    block_v = min(widest, spec.value_dim)
    return Config(block_v=block_v, scan_warps=_warps(block_v, 16))


def _warps(block_v: int, rows: int) -> int:
    """Return a warp for so many rows of the state, four at least and eight at most."""
    return min(8, max(4, block_v // rows))


def _checked(config: Config, spec: specs.Spec) -> Config:
    for name in ("chunk", "block_v"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            raise ValueError(f"{name} is {size}; allowed: a power of two, at least 16")
    if config.block_v > spec.value_dim:
        raise ValueError(
            f"block_v is {config.block_v}; allowed: at most Dv = {spec.value_dim}"
        )
    return config
