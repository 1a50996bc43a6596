"""Block sizes of the tree verification: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.tree_verify import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"
# Two on each multiprocessor of an H200, about.
ENOUGH_PROGRAMS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut: many small programs, or few that share the Grams.

    Attributes:
      block_v: rows of the state (of Dv) that are in the registers at a time.
      blocks: how many such blocks a program does one after the other.
      heads: value heads of one key head that a program does one after the other.
      num_warps: warps of a GPU program.
      num_stages: software pipeline depth of a GPU program.
    """

    block_v: int
    blocks: int = 1
    heads: int = 1
    num_warps: int = 4
    num_stages: int = 1


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where the explicit one does not divide the call evenly.
    """
    if explicit is not None:
        _check(spec, explicit)
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return heuristic(spec, platform) if found is None else fit(spec, Config(**found))


def fit(spec: specs.Spec, config: Config) -> Config:
    """Cut a configuration that was measured at one size down to a smaller one."""
    block_v = min(config.block_v, spec.value_dim)
    return dataclasses.replace(
        config,
        block_v=block_v,
        blocks=min(config.blocks, spec.value_dim // block_v),
        heads=_most_heads(spec, config.heads),
    )


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess a configuration: small programs until there are enough to fill a GPU."""
    if platform != "gpu":
        return Config(block_v=spec.value_dim)
    warps = 8 if spec.nodes > 64 else 4
    if spec.batch * spec.key_heads < ENOUGH_PROGRAMS:
        return Config(block_v=min(spec.value_dim, 32), num_warps=warps)
    block_v = min(spec.value_dim, 64)
    # float32 operands in parts take the registers that a second head would need.
    heads = 1 if spec.precision == "high" else _most_heads(spec, 2)
    blocks = min(2, spec.value_dim // block_v)
    return Config(block_v=block_v, blocks=blocks, heads=heads, num_warps=warps)


def _most_heads(spec: specs.Spec, heads: int) -> int:
    while spec.group % heads:
        heads //= 2
    return heads


def _check(spec: specs.Spec, config: Config) -> None:
    rows = config.block_v * config.blocks
    if min(config.block_v, config.blocks) < 1 or spec.value_dim % rows:
        raise ValueError(
            f"block_v is {config.block_v}, blocks {config.blocks}; a product that "
            f"divides Dv = {spec.value_dim} is allowed"
        )
    if config.heads < 1 or spec.group % config.heads:
        raise ValueError(
            f"heads is {config.heads}; a divisor of the {spec.group} value heads of "
            "a key head is allowed"
        )
