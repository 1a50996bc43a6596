"""How the Mosaic GPU kernel is cut: configuration, choice and the sizes that follow."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.tree_verify import spec as specs

LINES = 64  # rows of the state that one warpgroup takes: the M of wgmma
CORES = 132  # of an H100 or H200
SHARED_MEMORY = 227 * 1024  # bytes, of a block
BARRIERS = 4096  # bytes of it that are kept for barriers and alignment
MOST_WARPGROUPS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_v: rows of the state (of Dv) that a team takes, 64 a warpgroup.
      heads: value heads of one key head that a team takes in turn.
      teams: teams in a block.
      blocks: most blocks on the device; each takes tiles until none is left.
      staged: whether outputs are collected in shared memory and copied from there.
    """

    block_v: int
    heads: int = 1
    teams: int = 1
    blocks: int = CORES
    staged: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes that follow from a call and a configuration."""

    spec: specs.Spec
    config: Config

    @property
    def wide(self) -> int:
        """Nodes, rounded up to what the N of wgmma is a multiple of."""
        return -(-self.spec.nodes // 8) * 8

    @property
    def deep(self) -> int:
        """Nodes, rounded up to what the K of wgmma is a multiple of."""
        return -(-self.spec.nodes // 16) * 16

    @property
    def copied(self) -> bool:
        """Whether keys, queries and values are operands of wgmma as they come."""
        return self.spec.input_dtype == "bfloat16"

    @property
    def parts(self) -> int:
        """As pallas_kernels.dots counts them: two of float32, three if all is."""
        if self.spec.precision == "fast":
            return 1
        return 2 if self.copied else 3

    @property
    def key_parts(self) -> int:
        """Bfloat16 arrays of which a key is the sum."""
        return 1 if self.copied else self.parts

    @property
    def key_rows(self) -> int:
        """Rows of the buffer of keys and queries: 64 are read where each begins."""
        return self.wide + 64

    @property
    def key_arrivals(self) -> int:
        """Arrivals at the barrier of the keys: copies of chunks, or warpgroups."""
        return 2 * self.chunks if self.copied else self.groups

    @property
    def chunk(self) -> int:
        """Columns of a key that shared memory permutes as one."""
        return min(64, self.spec.key_dim)

    @property
    def chunks(self) -> int:
        """Chunks of a key."""
        return self.spec.key_dim // self.chunk

    @property
    def lines(self) -> int:
        """Rows of the state that a warpgroup finds there."""
        return min(LINES, self.spec.value_dim)

    @property
    def groups(self) -> int:
        """Warpgroups of a team."""
        return self.config.block_v // LINES

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.groups * self.config.teams

    @property
    def blocks_v(self) -> int:
        """Tiles along Dv."""
        return -(-self.spec.value_dim // self.config.block_v)

    @property
    def turns(self) -> int:
        """Tiles along the value heads."""
        return self.spec.value_heads // self.config.heads

    @property
    def tiles(self) -> int:
        """Tiles of the call."""
        return self.spec.batch * self.turns * self.blocks_v

    @property
    def blocks(self) -> int:
        """Blocks that are launched."""
        return min(-(-self.tiles // self.config.teams), self.config.blocks)

    @property
    def staged(self) -> dict[str, str]:
        """Outputs that are collected in shared memory, and their dtypes."""
        if not self.config.staged:
            return {}
        return {"pseudo_values": "float32", "output": self.spec.output_dtype}

    @property
    def twice(self) -> tuple[str, ...]:
        """Buffers that have a second name, for copies; see `mosaic_gpu`."""
        staged = [name for name, dtype in self.staged.items() if dtype != "float32"]
        return ("keys", "values", *staged)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer of a block: of teams, their heads, and warpgroups."""
        key_dim, teams = self.spec.key_dim, self.config.teams
        heads, lines = teams * self.config.heads, self.warpgroups * LINES
        tiles = ["bfloat16"] if self.copied else []
        return (
            teams * self.key_parts * self.key_rows * key_dim * 2,
            heads * self.parts * (self.wide + 64) * self.deep * 2,
            heads * 2 * 64 * 4,
            lines * key_dim * jnp.dtype(self.spec.state_dtype).itemsize,
            self.warpgroups * 3 * 2 * 64 * 4,
            *(
                lines * self.wide * jnp.dtype(dtype).itemsize
                for dtype in (*tiles, *self.staged.values())
            ),
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        return sum(self.buffers) + BARRIERS

    @property
    def fits(self) -> bool:
        """Whether a block has the shared memory and the threads."""
        warpgroups = self.warpgroups <= MOST_WARPGROUPS
        return warpgroups and self.shared_memory <= SHARED_MEMORY


def choose(
    spec: specs.Spec,
    explicit: Config | None = None,
    *,
    interpret: bool = False,
    plan: Callable[[Any, Config], Plan] = Plan,
) -> Config:
    """Return the explicit configuration, else the first heuristic one that fits.

    `plan` makes the sizes that have to fit. Interpreted warpgroups that wait for each
    other occupy all threads of a CPU with few cores, so the interpreter gets one.

    Raises ValueError where the explicit one does not divide the call or fit.
    """
    if explicit is not None:
        _check(spec, explicit, plan)
        return explicit
    if interpret:
        return Config(LINES, heads=spec.group)
    return next(config for config in _guesses(spec) if plan(spec, config).fits)


def _guesses(spec: specs.Spec) -> Iterator[Config]:
    """Yield configurations in the order of their speed on an H200.

    Few tiles are spread over all cores. Else a team shares keys and matrices among the
    heads; few nodes leave room for two teams, and too little to write to collect it.
    """
    units = spec.batch * spec.value_heads * -(-spec.value_dim // LINES)
    if units > 2 * CORES and spec.value_dim % (2 * LINES) == 0:
        few = spec.nodes <= 24
        for heads in range(min(spec.group, 4), 0, -1):
            if spec.group % heads == 0:
                yield Config(2 * LINES, heads, teams=2 if few else 1, staged=not few)
                yield Config(2 * LINES, heads)
    yield Config(LINES, blocks=max(CORES, min(units, 4 * CORES)))


def _check(spec, config, plan) -> None:
    lines = max(spec.value_dim, LINES)
    if config.block_v < LINES or config.block_v % LINES or lines % config.block_v:
        raise ValueError(
            f"block_v is {config.block_v}; a multiple of {LINES} that divides "
            f"Dv = {lines} is allowed"
        )
    if config.heads < 1 or spec.group % config.heads:
        raise ValueError(
            f"heads is {config.heads}; a divisor of the {spec.group} value heads of "
            "a key head is allowed"
        )
    if min(config.teams, config.blocks) < 1:
        raise ValueError(
            f"teams is {config.teams}, blocks {config.blocks}; 1 or more is allowed"
        )
    cut = plan(spec, config)
    if not cut.fits:
        raise ValueError(
            f"{config} takes {cut.shared_memory} bytes of shared memory and "
            f"{cut.warpgroups} warpgroups; {SHARED_MEMORY} and {MOST_WARPGROUPS} are "
            "allowed"
        )
