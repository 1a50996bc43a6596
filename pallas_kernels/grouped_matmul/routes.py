"""Which rows meet which expert: pairs sorted by expert and cut in blocks, on a GPU.

A pair is a token and one of its experts. XLA would take a sort, a count, two sums and a
scatter, each a launch; this is one launch of a program an expert.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels import device, gpu
from pallas_kernels.grouped_matmul import spec as specs

# Pairs that a program looks at together, and its warps.
CHUNK = 2048
WARPS = 4
# Blocks that it lists together.
LISTED = 16
# Columns of a row of the list of blocks: expert, first row, number of rows, unused.
EXPERT, START, COUNT, FIELDS = 0, 1, 2, 4


def list_length(spec: specs.Spec, rows: int) -> int:
    """Return the most blocks that any routes can need, with the gaps of `route`."""
    return min(spec.pairs, spec.pairs // rows + spec.experts)


def route(
    experts: Int[Array, " pairs"], *, spec: specs.Spec, rows: int
) -> tuple[Int[Array, " pairs"], Int[Array, "S F"]]:
    """Return the pairs sorted by expert, and the blocks of at most `rows` of them.

    An expert knows the place of its blocks in the list from the number of pairs that
    go to earlier experts alone, so all experts work at once. That leaves gaps: blocks
    of no rows. Pairs of no expert are in no block, and their places in the order are
    not written.
    """
    chunk = min(CHUNK, gpu.power_of_two(spec.pairs))
    padded = pl.cdiv(spec.pairs, chunk) * chunk
    length = list_length(spec, rows)
    kernel = functools.partial(
        _route,
        pairs=spec.pairs,
        last_expert=spec.experts - 1,
        chunk=chunk,
        rows=rows,
        by_pair=length == spec.pairs,
    )
    order, blocks = launch(
        kernel,
        name="grouped_matmul_route",
        grid=(spec.experts,),
        inputs=[(experts.astype(jnp.int32), (padded,))],
        outputs=[((spec.pairs,), jnp.int32), ((length, FIELDS), jnp.int32)],
        options=(WARPS, 1),
    )
    return order, blocks


def _route(experts, order, blocks, *, pairs, last_expert, chunk, rows, by_pair):
    expert = pl.program_id(0)
    chunks = pl.cdiv(pairs, chunk)
    lane = lax.iota(jnp.int32, chunk)

    def read(i):
        pair = i * chunk + lane
        known = pair < pairs
        found = gpu.load(experts.at[pl.ds(i * chunk, chunk)], known)
        return pair, known & (found == expert), known & (found < expert)

    def count(i, sums):
        _, mine, earlier = read(i)
        return tuple(
            total + mask.astype(jnp.int32)
            for total, mask in zip(sums, (earlier, mine), strict=True)
        )

    zeros = jnp.zeros((chunk,), jnp.int32)
    counts = lax.fori_loop(0, chunks, count, (zeros, zeros))
    start, size = (jnp.sum(each) for each in counts)
    zero = jnp.int32(0)

    def place(i, done):
        pair, mine, _ = read(i)
        rank = jnp.cumsum(mine.astype(jnp.int32))
        # Where `mine` is false nothing is written, and the interpreter drops the index.
        slot = jnp.where(mine, start + done + rank - 1, pairs)
        gpu.store(order.at[slot], pair, mine)
        return done + jnp.sum(mine.astype(jnp.int32))

    if by_pair:
        first, last = start, start + size
    else:
        first = start // rows + expert
        last = (start + size) // rows + expert + 1
    # Pairs of no expert leave the end of the list to be filled.
    last = jnp.where(expert == last_expert, blocks.shape[0], last)

    def list_blocks(i, nothing):
        block = i * LISTED + lax.iota(jnp.int32, LISTED)
        listed = first + block < last
        slot = jnp.where(listed, first + block, blocks.shape[0])
        fields = (
            (EXPERT, jnp.full_like(block, expert)),
            (START, start + block * rows),
            (COUNT, jnp.clip(size - block * rows, 0, rows)),
        )
        for field, value in fields:
            column = jnp.full_like(slot, field)
            gpu.store(blocks.at[slot, column], value, listed)
        return nothing

    @pl.when(size > 0)
    def _():
        lax.fori_loop(0, chunks, place, zero)

    lax.fori_loop(0, pl.cdiv(last - first, LISTED), list_blocks, zero)


def launch(
    kernel: Callable,
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[tuple[Array, tuple[int, ...]]],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    options: tuple[int, int],
) -> list[Array]:
    """Run a kernel whose programs see whole arrays; interpreted on a CPU.

    Args:
      kernel: of references to the inputs and outputs.
      name: that it is launched under.
      grid: number of programs.
      inputs: arrays, each with the shape it is seen in, padded at the ends.
      outputs: shapes and dtypes.
      options: warps of a program, and tiles it loads ahead.
    """
    interpret = device.platform() == "cpu"

    def whole(shape):
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    run = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole(shape) for _, shape in inputs],
        out_specs=[whole(shape) for shape, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        interpret=interpret,
        compiler_params=None if interpret else gpu.compiler_params(*options),
        name=name,
    )
    return list(run(*(array for array, _ in inputs)))
