"""Which expert and which rows a program of the two products takes, on a GPU.

A pair is a token and one of its choices. Of few pairs each program looks at all and
finds the rows of its block itself; those of many are listed beforehand (routes.py).
The blocks of the shared expert, which takes all tokens, come before the others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from pallas_kernels import gpu
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import routes
from pallas_kernels.grouped_matmul import spec as specs

# Pairs times rows of a block that a program compares at most.
MOST_COMPARED = 8192


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a call: how many, and the arrays that programs read.

    Attributes:
      inputs: arrays, each with the shape it is seen in; one array is that of the
        experts, two are the list of `routes.route`.
      routed, shared: number of blocks.
    """

    inputs: tuple[tuple[Array, tuple[int, ...]], ...]
    routed: int
    shared: int


def find(
    experts: Int[Array, "T k"], *, spec: specs.Spec, config: configs.Config
) -> Blocks:
    """Return the blocks of a call."""
    flat = experts.reshape(-1).astype(jnp.int32)
    shared = pl.cdiv(spec.tokens, config.rows) if spec.shared else 0
    padded = gpu.power_of_two(spec.pairs)
    few = spec.pairs <= config.searched
    if few and padded * gpu.power_of_two(config.rows) <= MOST_COMPARED:
        return Blocks(((flat, (padded,)),), spec.pairs, shared)
    listed = routes.route(flat, spec=spec, rows=config.rows)
    inputs = tuple((array, array.shape) for array in listed)
    return Blocks(inputs, listed[1].shape[0], shared)


def for_each(
    body: Callable[[Any, Any, Int[Array, " R"], Bool[Array, " R"]], None],
    matrices: Any,
    alike: Any,
    lists: tuple[Any, ...],
    *,
    spec: specs.Spec,
    config: configs.Config,
) -> None:
    """Call `body` for the block of this program, the second number of the grid.

    Args:
      body: of the matrices [.., I or H, columns], the number of the expert in them,
        the rows of the result, t slots + choice, and which of them are there.
      matrices, alike: references, of the routed experts and of the shared one; the
        latter has a leading axis of one, and is None without a shared expert.
      lists: references to the inputs of `Blocks`.
    """
    block, shared, rows = pl.program_id(1), 0, config.rows
    if alike is not None:
        shared = pl.cdiv(spec.tokens, rows)

        @pl.when(block < shared)
        def _():
            token = block * rows + lax.iota(jnp.int32, rows)
            row = token * spec.slots + spec.per_token
            body(alike, 0, row, token < spec.tokens)

    def run(expert, pair, count):
        token, choice = pair // spec.per_token, pair % spec.per_token
        live = lax.iota(jnp.int32, len(pair)) < count
        body(matrices, expert, token * spec.slots + choice, live)

    @pl.when(block >= shared)
    def _():
        if len(lists) == 1:
            found = _searched(*lists, block - shared, spec=spec, rows=rows)
            pl.when(found[-1] > 0)(lambda: run(*found))
            return
        count = lists[1][block - shared, routes.COUNT]
        # A tile for each range of counts: the tensor cores compute empty rows, too.
        for size, less in zip(config.tiles, (*config.tiles[1:], 0), strict=True):
            listed = functools.partial(_listed, *lists, block - shared, rows=size)
            pl.when((less < count) & (count <= size))(lambda f=listed: run(*f()))


def _listed(order, blocks, block, *, rows):
    """Return expert, pairs and their number from the list."""
    count = blocks[block, routes.COUNT]
    slot = blocks[block, routes.START] + lax.iota(jnp.int32, rows)
    live = lax.iota(jnp.int32, rows) < count
    return blocks[block, routes.EXPERT], gpu.load(order.at[slot], live), count


def _searched(experts, block, *, spec, rows):
    """Return expert, pairs and their number: those from pair `block` of its expert on.

    A block begins at the first pair of an expert and at every `rows`-th further one;
    at other pairs none does: their number is 0.
    """
    size = gpu.power_of_two(spec.pairs)
    pair = lax.iota(jnp.int32, size)
    expert = experts[block]
    all_experts = gpu.load(experts.at[pl.ds(0, size)], pair < spec.pairs)
    mine = (all_experts == expert) & (pair < spec.pairs)
    ones = mine.astype(jnp.int32)
    before = jnp.sum(jnp.where(pair < block, ones, 0))
    begins = (expert < spec.experts) & (before % rows == 0)
    count = jnp.where(begins, jnp.minimum(jnp.sum(ones) - before, rows), 0)
    place = jnp.where(mine, jnp.cumsum(ones) - 1 - before, -1)
    shape = (rows, size)
    found = lax.broadcast_in_dim(place, shape, (1,)) == lax.broadcasted_iota(
        jnp.int32, shape, 0
    )
    pairs = jnp.where(found, lax.broadcast_in_dim(pair, shape, (1,)), 0)
    return expert, jnp.sum(pairs, axis=1), count
