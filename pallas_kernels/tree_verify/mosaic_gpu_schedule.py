"""The kernel of `mosaic_gpu`: in which order warpgroups prepare and solve tiles.

A team takes one tile after the other: some value heads of a key head. Preparing a tile
yields the matrices of its heads, made of keys, gates and the tree; solving a head reads
its state. Either the same warpgroups do both in turn, or one more of the team prepares
the next tile meanwhile. While a head is solved, the rows of the state that come next
are on their way.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_verify import mosaic_gpu_copies as copies


def kernel(*refs, plan, interpret, warpgroup, **buffers):
    """Take the team's tiles in turn; the class `warpgroup` says what is done."""
    arrays = warpgroup.arrays_type(*refs)
    group = warpgroup(plan, interpret, arrays, buffers)
    if not plan.config.separate:
        _prepare_and_solve(group)
        return
    few, many = (None, None) if interpret else plan.registers or (None, None)

    @pl.when(group.prepares)
    def _():
        if few is not None:
            plgpu.set_max_registers(few, action="decrease")
        _prepare_ahead(group)

    @pl.when(jnp.logical_not(group.prepares))
    def _():
        if many is not None:
            plgpu.set_max_registers(many, action="increase")
        _solve(group)


def _prepare_and_solve(group):
    def begin(tile):
        group.fetch_keys(tile.number, tile.buffer)
        _start_state(group, tile)
        return group.fetch_tile(tile)

    def one_tile(step, tile, following, fetched):
        fetched = _prepare_tile(group, step, tile, following, fetched)
        group.await_tile(tile)
        _solve_tile(group, step, tile, following)
        return fetched

    count = _each_tile(group, begin, one_tile)
    group.finish()
    _await_matrices_free(group, count)


def _prepare_ahead(group):
    def begin(tile):
        group.fetch_keys(tile.number, tile.buffer)
        return group.fetch_tile(tile)

    def one_tile(step, tile, following, fetched):
        def fetch_keys():
            pl.when(step > 0)(lambda: group.wait("keys_free", following.buffer))
            group.fetch_keys(following.number, following.buffer)

        return _prepare_tile(group, step, tile, following, fetched, fetch_keys)

    count = _each_tile(group, begin, one_tile)
    last = lax.rem(count + 1, group.plan.key_buffers)
    pl.when(count > 0)(lambda: group.wait("keys_free", last))
    _await_matrices_free(group, count)


def _solve(group):
    def begin(tile):
        _start_state(group, tile)

    def one_tile(step, tile, following, _):
        group.await_tile(tile)
        _solve_tile(group, step, tile, following)

    _each_tile(group, begin, one_tile)
    group.finish()


def _each_tile(group, begin, one_tile):
    """Run `one_tile` on the team's tiles and return their number.

    It takes the number of the step, the tile, the one that follows, and what `begin`
    or it itself returned last.
    """
    plan = group.plan
    first = lax.axis_index("block") * plan.config.teams + group.team

    def tile_at(step, number, row=None):
        readable = lax.min(number, plan.tiles - 1)
        row = group.fetch_row(readable) if row is None else row
        buffer = lax.rem(step, plan.key_buffers)
        return copies.Tile(number, group.place(readable), row, buffer)

    def step_on(carry):
        step, number, row, ahead = carry
        tile = tile_at(step, number, row)
        following = tile_at(step + 1, number + group.stride)
        ahead = one_tile(step, tile, following, ahead)
        return step + 1, following.number, following.row, ahead

    tile = tile_at(jnp.int32(0), first)
    start = (jnp.int32(0), first, tile.row, begin(tile))
    step, *_ = lax.while_loop(lambda carry: carry[1] < plan.tiles, step_on, start)
    return step


def _start_state(group, tile):
    group.start_rows(tile.number)
    group.fetch_values(tile.number, 0)


def _prepare_tile(group, step, tile, following, fetched, fetch_keys=lambda: None):
    """Prepare the heads of a tile; return what is fetched of the one that follows.

    `fetch_keys` is called when others have most likely read those of the tile before.
    """
    gates, records = fetched
    square = group.fetch_ancestors(tile.place)
    group.await_keys(tile)
    grams = group.prepare_tile(tile, records)
    known = group.pack_ancestors(square)
    ahead = group.fetch_tile(following)
    for i, (turn, own) in enumerate(zip(group.own_turns(), gates, strict=True)):
        group.prepare_head(tile, turn, own, known, grams, step > 0)
        if i == 0:
            fetch_keys()
    return ahead


def _solve_tile(group, step, tile, following):
    """Solve the heads of a tile."""
    heads = group.plan.config.heads

    def one_head(turn, _):
        last = turn == heads - 1
        ahead = jax.tree.map(functools.partial(jnp.where, last), following, tile)
        next_turn = jnp.where(last, 0, turn + 1)
        slots = group.slots(step, turn)
        found = group.fetch_head(tile, turn)
        group.wait("matrix_here", turn)
        read = group.read_state(tile, turn, slots, found)
        group.rewrite(tile, turn, slots, found)
        values = group.read_values(tile.place, turn)
        pl.when(last)(lambda: group.arrive("keys_free", tile.buffer))
        # A fence too: a barrier alone lets the copy engine overtake plain loads of what
        # it is about to overwrite, and then a value in a million is wrong.
        plgpu.commit_smem()
        group.refill(tile, turn, slots)
        group.fetch_values(ahead.number, next_turn)
        if not group.plan.config.separate:
            pl.when(last)(lambda: group.release_keys(tile, following))
        solved, there, start = group.solve(turn, read, values, tile.row)
        group.await_sent()
        group.refill_rewritten(tile, turn, slots)
        group.store("pseudo_values", solved, tile.place, turn)
        seen = group.look(turn, solved, there, start)
        group.arrive("matrix_free", turn)
        group.store("output", seen, tile.place, turn)
        group.send(tile.place, turn)
        return ()

    lax.fori_loop(0, heads, one_head, ())


def _await_matrices_free(group, count):
    """Wait until the team is done with the heads of the last tile that it prepared.

    Only there has it waited before: a warpgroup that skips a phase of a barrier waits
    for one of the other parity, which may never come.
    """

    @pl.when(count > 0)
    def _():
        for turn in group.own_turns():
            group.for_head(turn, lambda turn=turn: group.wait("matrix_free", turn))
