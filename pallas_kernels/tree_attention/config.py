"""Block sizes of tree attention: explicit, else tuned, else heuristic."""

import dataclasses
import pathlib

from pallas_kernels import tuning
from pallas_kernels.tree_attention import spec as specs

TUNED = pathlib.Path(__file__).parent / "tuned"
# Multiprocessors of an H200; others differ little.
PROCESSORS = 132
MOST_SPLITS = 64
# What a program costs beside its slots, in blocks of slots: its start, the tree, the
# sums that it writes and that are joined.
OVERHEAD = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut; sizes are powers of two.

    Attributes:
      block_rows: query rows (nodes times query heads of a group) a program holds.
      block_slots: prefix slots, or nodes, that it takes at a time.
      splits: programs that share one prefix; a second kernel joins their sums.
      overlap: take the weighted sum of a block while the next block is scored.
      num_warps: warps of a GPU program.
      num_stages: software pipeline depth of a GPU program.
    """

    block_rows: int
    block_slots: int
    splits: int = 1
    overlap: bool = False
    num_warps: int = 4
    num_stages: int = 2


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else a heuristic.

    Raises ValueError where a size of the explicit one is no power of two.
    """
    if explicit is not None:
        for name in ("block_rows", "block_slots", "splits"):
            size = getattr(explicit, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} is {size}; a power of two is allowed")
        return explicit
    found = tuning.lookup(TUNED, device_kind, spec)
    return Config(**found) if found else heuristic(spec, platform)


def heuristic(spec: specs.Spec, platform: str) -> Config:
    """Guess: large blocks of rows, since each reads the prefix, and enough programs."""
    if platform != "gpu":
        return Config(block_rows=64, block_slots=128)
    config = _blocks(spec)
    programs = spec.batch * spec.kv_heads * -(-spec.rows // config.block_rows)
    blocks = -(-spec.slots // config.block_slots)

    def time(splits):
        waves = -(-programs * splits // PROCESSORS)
        return waves * (-(-blocks // splits) + OVERHEAD)

    splits = min((1 << i for i in range(MOST_SPLITS.bit_length())), key=time)
    return dataclasses.replace(config, splits=splits)


def _blocks(spec: specs.Spec) -> Config:
    """Fit the sums in registers, and q and two or three blocks in shared memory."""
    wide = spec.head_dim > 128
    if "float32" in (spec.input_dtype, spec.prefix_dtype, spec.node_dtype):
        return Config(64, 16 if wide else 32, num_stages=1)
    if spec.rows > 64:
        return Config(128, 64 if wide else 128, overlap=True, num_warps=8)
    return Config(64, 32 if wide else 64, num_stages=4)
