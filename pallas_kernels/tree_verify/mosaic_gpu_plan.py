"""How the Mosaic GPU kernel is cut: configuration, choice and the sizes that follow."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from pallas_kernels.tree_verify import spec as specs

LINES = 64  # rows of the state that one warpgroup takes: the M of wgmma
CORES = 132  # of an H100 or H200
SHARED_MEMORY = 227 * 1024  # bytes, of a block
REGISTERS = 64 * 1024  # of a multiprocessor
LEAST_REGISTERS, MOST_REGISTERS = 24, 255  # of a thread
BARRIERS = 4096  # bytes of it that are kept for barriers and alignment
MOST_WARPGROUPS = 8
MOST_BARRIERS = 32  # that Mosaic keeps as one array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_v: rows of the state (of Dv) that a team takes, 64 a warpgroup.
      heads: value heads of one key head that a team takes in turn.
      teams: teams in a block.
      blocks: most blocks on the device; each takes tiles until none is left.
      staged: whether outputs are collected in shared memory and copied from there.
      ahead: chunks of 64 columns of the state that a warpgroup has buffers for beyond
        those of one head: they are filled while it is at work on that head.
      separate: whether a team has one warpgroup more, which prepares a tile while the
        others solve the one before.
      given: registers of a thread that this one leaves to those that solve.
    """

    block_v: int
    heads: int = 1
    teams: int = 1
    blocks: int = CORES
    staged: bool = False
    ahead: int = 0
    separate: bool = False
    given: int = 0


class Barriers(NamedTuple):
    """How many barriers each team has, else each warpgroup; arrivals that one takes."""

    of_team: bool
    count: int
    arrivals: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes that follow from a call and a configuration.

    FEW and MANY are configurations to try for few and for many nodes, best first.
    """

    spec: specs.Spec
    config: Config

    FEW: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"separate": True, "teams": 2},
        {"separate": True, "ahead": 2},
        {"teams": 2},
    )
    MANY: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"separate": True, "ahead": 1, "staged": True},
        {"staged": True},
    )

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
    def key_buffers(self) -> int:
        """Tiles whose keys have a buffer."""
        return 1 + self.config.separate

    @property
    def barriers(self) -> dict[str, Barriers]:
        """Barriers: of each buffer of keys, of each head's matrices, of rows, values.

        At those of keys arrive copies of chunks, or the warpgroups that write them.
        """
        keys = functools.partial(Barriers, True, self.key_buffers)
        heads = functools.partial(Barriers, True, self.config.heads)
        return {
            "keys_here": keys(2 * self.chunks if self.copied else self.preparing),
            "keys_free": keys(self.groups),
            "matrix_here": heads(1),
            "matrix_free": heads(self.groups),
            "rows_here": Barriers(False, self.stages, 1),
            "values_here": Barriers(False, 1, 1),
        }

    @property
    def chunk(self) -> int:
        """Columns of a key that shared memory permutes as one."""
        return min(64, self.spec.key_dim)

    @property
    def chunks(self) -> int:
        """Chunks of a key."""
        return self.spec.key_dim // self.chunk

    @property
    def stages(self) -> int:
        """Chunks of the state that a warpgroup has buffers for."""
        return self.chunks + self.config.ahead

    @property
    def lines(self) -> int:
        """Rows of the state that a warpgroup finds there."""
        return min(LINES, self.spec.value_dim)

    @property
    def groups(self) -> int:
        """Warpgroups of a team that solve."""
        return self.config.block_v // LINES

    @property
    def preparing(self) -> int:
        """Warpgroups of a team that prepare."""
        return 1 if self.config.separate else self.groups

    @property
    def members(self) -> int:
        """Warpgroups of a team."""
        return self.groups + self.config.separate

    @property
    def solvers(self) -> int:
        """Warpgroups of a block that solve."""
        return self.groups * self.config.teams

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.members * self.config.teams

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread that prepares, and of one that solves; None: alike."""
        if not self.config.given:
            return None
        alike = REGISTERS // (self.warpgroups * 128) // 8 * 8
        return alike - self.config.given, alike + self.config.given // self.groups

    @property
    def gives(self) -> bool:
        """Whether the hardware can divide registers so: by eights, 24 to 255."""
        if self.registers is None:
            return True
        return self.config.given % (8 * self.groups) == 0 and (
            LEAST_REGISTERS <= self.registers[0] < self.registers[1] <= MOST_REGISTERS
        )

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
    def vectors(self) -> int:
        """Pairs of vectors that a warpgroup shares with itself: gates."""
        return 3

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer of a block: of teams, their heads, and warpgroups."""
        key_dim, teams = self.spec.key_dim, self.config.teams
        heads, lines = teams * self.config.heads, self.solvers * LINES
        tiles = ["bfloat16"] if self.copied else []
        return (
            teams * self.key_buffers * self.key_parts * self.key_rows * key_dim * 2,
            heads * self.parts * (self.wide + 64) * self.deep * 2,
            heads * 2 * 64 * 4,
            lines
            * self.stages
            * self.chunk
            * jnp.dtype(self.spec.state_dtype).itemsize,
            self.warpgroups * self.vectors * 2 * 64 * 4,
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
        """Whether a block has the shared memory, the threads and the barriers."""
        return (
            self.warpgroups <= MOST_WARPGROUPS
            and self.solvers * self.stages <= MOST_BARRIERS
            and self.shared_memory <= SHARED_MEMORY
        )


def choose(
    spec: specs.Spec,
    explicit: Config | None = None,
    *,
    interpret: bool = False,
    plan: type[Plan] = Plan,
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
    return next(config for config in _guesses(spec, plan) if plan(spec, config).fits)


def _guesses(spec: specs.Spec, plan: type[Plan]) -> Iterator[Config]:
    """Yield configurations in the order of their speed on an H200.

    Few tiles are spread over all cores. Else a team shares keys and matrices among the
    heads; few nodes leave room for two teams, and too little to write to collect it.
    """
    units = spec.batch * spec.value_heads * -(-spec.value_dim // LINES)
    if units > 2 * CORES and spec.value_dim % (2 * LINES) == 0:
        few = spec.nodes <= 24
        for heads in range(min(spec.group, 4), 0, -1):
            if spec.group % heads == 0:
                for cut in plan.FEW if few else plan.MANY:
                    yield Config(2 * LINES, heads, **cut)
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
    if config.ahead < 0:
        raise ValueError(f"ahead is {config.ahead}; 0 or more is allowed")
    cut = plan(spec, config)
    if config.given and not (config.separate and cut.gives):
        raise ValueError(
            f"given is {config.given}; with separate, a multiple of {8 * cut.groups} "
            f"that leaves {LEAST_REGISTERS} is allowed"
        )
    if not cut.fits:
        raise ValueError(
            f"{config} takes {cut.shared_memory} bytes of shared memory and "
            f"{cut.warpgroups} warpgroups with {cut.stages} buffers each; "
            f"{SHARED_MEMORY}, {MOST_WARPGROUPS} and together {MOST_BARRIERS} buffers "
            "are allowed"
        )
