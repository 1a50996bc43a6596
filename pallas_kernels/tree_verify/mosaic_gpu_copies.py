"""What a warpgroup of `mosaic_gpu` moves between global and shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dots
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import mosaic_gpu_steps as steps

TEAM_BUFFERS = ("keys", "matrix", "shared")


class Arrays(NamedTuple):
    """The arguments of `tree_verify` and its outputs, in global memory."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    state: Any
    ancestors: Any
    sizes: Any
    sweeps: Any
    output: Any
    pseudo_values: Any


class Row(NamedTuple):
    """What is known of a row of the batch: nodes of its tree, and depth."""

    size: Any
    sweeps: Any


class Place(NamedTuple):
    """Where a tile lies: row of the batch, first value head, line of Dv."""

    row: Any
    head: Any
    line: Any


class Tile(NamedTuple):
    """What a team is at work on.

    Attributes:
      number: of the tile.
      place: where it lies.
      row: what is known of its row of the batch.
      buffer: which buffer its keys are in.
    """

    number: Any
    place: Place
    row: Any
    buffer: Any


class Copies:
    """One warpgroup: its part of the buffers in shared memory, and what fills them.

    `buffers` are those of `mosaic_gpu`: a team has keys, matrices and most barriers in
    common; rows of the state and values belong to a warpgroup that solves.

    An op that extends `tree_verify` subclasses this, and names its arrays and what else
    a team has in common.
    """

    arrays_type: Any = Arrays
    team_buffers: tuple[str, ...] = TEAM_BUFFERS

    keys: Any  # [buffers, parts, chunks, rows of K and then of Q, chunk]
    keys_copy: Any
    rows: Any  # of the state [buffers, 64, chunk]
    values: Any  # [n, 64]
    values_copy: Any
    matrix: Any  # [heads, parts, rows of -A and then of the weights, n]
    shared: Any  # exp(c_t) and beta_t of each head [heads, 2, 64]
    vectors: Any  # scratch

    def __init__(self, plan, interpret, arrays, buffers):
        self.plan, self.interpret, self.arrays = plan, interpret, arrays
        me = lax.axis_index("group")
        self.team, self.group = lax.div(me, plan.members), lax.rem(me, plan.members)
        self.prepares = self.group == plan.groups if plan.config.separate else None
        # The last member of a separate team has no rows; its number is not used.
        self.solver = self.team * plan.groups + lax.min(self.group, plan.groups - 1)
        self.stride = plan.blocks * plan.config.teams
        self.barriers = {name: buffers.pop(name) for name in plan.barriers}
        for name, buffer in buffers.items():
            own = self.team if name in self.team_buffers else self.solver
            own = me if name == "vectors" else own
            # Some memory has a second name, for copies: see `mosaic_gpu`.
            two = buffer if name in plan.twice and not interpret else [buffer] * 2
            setattr(self, name, two[0].at[own])
            setattr(self, f"{name}_copy", two[1].at[own])

    def barrier(self, name, number=0):
        """Return one of the team's or the warpgroup's barriers of a name."""
        kind = self.plan.barriers[name]
        owner = self.team if kind.of_team else self.solver
        return self.barriers[name].at[owner * kind.count + number]

    def wait(self, name, number=0):
        """Wait at a barrier."""
        plgpu.barrier_wait(self.barrier(name, number))

    def arrive(self, name, number=0):
        """Arrive at a barrier."""
        plgpu.barrier_arrive(self.barrier(name, number))

    def place(self, tile):
        """Return where tile number `tile` lies."""
        plan = self.plan
        rest, part = lax.div(tile, plan.blocks_v), lax.rem(tile, plan.blocks_v)
        return Place(
            row=lax.div(rest, plan.turns),
            head=lax.rem(rest, plan.turns) * plan.config.heads,
            line=part * plan.config.block_v + self.group * plans.LINES,
        )

    def later(self, tile, turn, heads):
        """Return tile and turn of the head that is so many after another."""
        turns = turn + heads
        tiles = lax.div(turns, self.plan.config.heads)
        return tile + tiles * self.stride, turns - tiles * self.plan.config.heads

    def fetch_row(self, tile):
        """Read what is to be known of the row of a tile."""
        row, arrays = self.place(tile).row, self.arrays
        return Row(arrays.sizes[row], arrays.sweeps[row])

    def fetch_tile(self, tile):
        """Read gates and records of a tile."""
        return self._fetch_gates(tile.place), self.load_records(tile)

    def release_keys(self, tile, following):
        """Wait until the team has read its keys, and start to copy others."""
        self.wait("keys_free", tile.buffer)
        self.fetch_keys(following.number, following.buffer)

    def fetch_keys(self, tile, buffer):
        """Start to copy keys and queries; one warpgroup does it for its team."""
        plan, arrays = self.plan, self.arrays
        if not plan.copied:
            return
        mine = self.group == (plan.groups if plan.config.separate else 0)

        @pl.when(mine & (tile < plan.tiles))
        def _():
            row, head, _ = self.place(tile)
            key_head = lax.div(head, plan.spec.group)
            at, to = self._window(lax.min(tile, 0), plan.spec.nodes, plan.wide)
            for i, source in enumerate((arrays.k, arrays.q)):
                for chunk in range(plan.chunks):
                    plgpu.copy_gmem_to_smem(
                        source.at[row, at, key_head, self._columns(chunk)],
                        self.keys_copy.at[
                            buffer, 0, chunk, pl.ds(i * plan.wide, to.size)
                        ],
                        self.barrier("keys_here", buffer),
                    )

    def slots(self, step, turn):
        """Return the buffers in which the chunks of a head's state lie: a ring."""
        first = (step * self.plan.config.heads + turn) * self.plan.chunks
        chunks = range(self.plan.chunks)
        return [lax.rem(first + chunk, self.plan.stages) for chunk in chunks]

    def start_rows(self, tile):
        """Start to copy into all buffers, from the first head of a tile on."""
        for slot in range(self.plan.stages):
            heads, chunk = divmod(slot, self.plan.chunks)
            self._fetch_chunk(*self.later(tile, 0, heads), chunk, slot)

    def refill(self, tile, turn, slots):
        """Start to copy what comes next into the buffers of a head."""
        for chunk, slot in enumerate(slots):
            heads, chunk = divmod(chunk + self.plan.stages, self.plan.chunks)
            self._fetch_chunk(*self.later(tile.number, turn, heads), chunk, slot)

    def refill_rewritten(self, tile, turn, slots):
        """Do what `refill` left undone: here nothing."""
        del tile, turn, slots

    def _fetch_chunk(self, tile, turn, chunk, slot):
        row, head, line = self.place(tile)
        lines, here = self._window(line, self.plan.lines, plans.LINES)

        @pl.when(tile < self.plan.tiles)
        def _():
            plgpu.copy_gmem_to_smem(
                self.arrays.state.at[row, head + turn, lines, self._columns(chunk)],
                self.rows.at[slot, here],
                self.barrier("rows_here", slot),
            )

    def fetch_values(self, tile, turn):
        """Start to copy the values of a head, of the lines of the warpgroup."""
        plan = self.plan
        if not plan.copied:
            return
        row, head, line = self.place(tile)
        lines, here = self._window(line, plan.lines, plans.LINES)
        at, to = self._window(lax.min(tile, 0), plan.spec.nodes, plan.wide)

        @pl.when(tile < plan.tiles)
        def _():
            plgpu.copy_gmem_to_smem(
                self.arrays.v.at[row, at, head + turn, lines],
                self.values_copy.at[to, here],
                self.barrier("values_here"),
            )

    def _window(self, start, size, padded):
        """Return slices of source and target; zeros are read beyond the source."""
        if self.interpret or size == padded:
            return pl.ds(start, size), pl.ds(0, size)
        return pl.ds(start, padded), pl.ds(0, padded)

    def _columns(self, chunk):
        return pl.ds(chunk * self.plan.chunk, self.plan.chunk)

    def _fetch_gates(self, place):
        """Read log decay and beta, a number a thread, of the heads it prepares."""
        found = []
        for turn in self.own_turns():
            at = place.head + lax.min(turn, self.plan.config.heads - 1)
            found.append(self._fetch_head_gates(place.row, at))
        return tuple(found)

    def _fetch_head_gates(self, row, head):
        sources = [
            x.at[row, :, head] for x in (self.arrays.log_decay, self.arrays.beta)
        ]
        return steps.load_vectors(sources, interpret=self.interpret)

    def load_records(self, tile):
        """Read the records that a tile needs: here none."""
        del tile
        return ()

    def fetch_head(self, tile, turn):
        """Read what a head needs beside rows and values: here nothing."""
        del tile, turn
        return ()

    def own_turns(self):
        """Return which heads of a tile the warpgroup prepares for its team."""
        if self.plan.config.separate:
            return list(range(self.plan.config.heads))
        first = range(0, self.plan.config.heads, self.plan.groups)
        return [self.group + turn for turn in first]

    def for_head(self, turn, action):
        """Do something for one of `own_turns`, unless there is no such head."""
        if isinstance(turn, int) or self.plan.config.heads % self.plan.groups == 0:
            action()
        else:
            pl.when(turn < self.plan.config.heads)(action)

    def own_chunks(self):
        """Return which chunks of keys the warpgroup writes for its team."""
        chunks = self.plan.chunks
        if self.plan.config.separate:
            return list(range(chunks))
        first = range(0, chunks, self.plan.groups)
        return [lax.min(self.group + chunk, chunks - 1) for chunk in first]

    def fetch_ancestors(self, place):
        """Read who is an ancestor of whom, a byte each."""
        shape = (64, self.plan.wide)
        return steps.load_bytes(
            self.arrays.ancestors, place.row, shape, interpret=self.interpret
        )

    def pack_ancestors(self, square):
        """Return the masks of ancestors and of strict ones, a bit each."""
        nodes = self.plan.spec.nodes
        return steps.pack(square, nodes, interpret=self.interpret)

    def await_keys(self, tile):
        """Wait for keys and queries, or write their bfloat16 parts."""
        if not self.plan.copied:
            for chunk in self.own_chunks():
                self._convert_keys(tile, chunk)
            plgpu.commit_smem()
            self.arrive("keys_here", tile.buffer)
        self.wait("keys_here", tile.buffer)

    def _convert_keys(self, tile, chunk):
        plan, place = self.plan, tile.place
        key_head = lax.div(place.head, plan.spec.group)
        for i, source in enumerate((self.arrays.k, self.arrays.q)):
            source = source.at[place.row, :, key_head, self._columns(chunk)]
            x = steps.load(
                source, (64, plan.chunk), steps.TILE, interpret=self.interpret
            )
            if i == 1:
                steps.barrier(interpret=self.interpret)
            for part, y in enumerate(self._split(x)):
                # The queries overwrite what the keys leave below their last row.
                self.keys[tile.buffer, part, chunk, pl.ds(i * plan.wide, 64)] = y

    def read_values(self, place, turn):
        """Return V^T."""
        if self.plan.copied:
            self.wait("values_here")
            values = self.values.transpose((1, 0))
            return plgpu.load(values, layout=steps.TILE)
        lines = pl.ds(place.line, self.plan.lines)
        return steps.load(
            self.arrays.v.at[place.row, :, place.head + turn, lines],
            (64, self.plan.wide),
            steps.TILE,
            transposed=True,
            interpret=self.interpret,
        )

    def store(self, name, x, place, turn):
        """Write the transpose of a tile, if needed first to shared memory."""
        array, lines = getattr(self.arrays, name), pl.ds(place.line, self.plan.lines)
        x = x.astype(array.dtype)
        if name not in self.plan.staged:
            target = array.at[place.row, :, place.head + turn, lines]
            steps.store_transposed(target, x, interpret=self.interpret)
        elif x.dtype == jnp.float32:
            buffer = getattr(self, name)
            steps.stage_transposed(buffer, x, interpret=self.interpret)
        else:
            getattr(self, name).transpose((1, 0))[...] = x

    def send(self, place, turn):
        """Start to copy to the outputs what waits in shared memory."""
        plan = self.plan
        if not plan.staged:
            return
        plgpu.commit_smem()
        nodes, here = self._window(lax.min(turn, 0), plan.spec.nodes, plan.wide)
        for name, dtype in plan.staged.items():
            array, buffer = getattr(self.arrays, name), getattr(self, f"{name}_copy")
            width = 32 if dtype == "float32" else plans.LINES
            for i in range(0, plan.lines, width):
                source = buffer.at[i // 32] if dtype == "float32" else buffer
                size = min(width, plan.lines)
                lines, columns = self._window(place.line + i, size, width)
                plgpu.copy_smem_to_gmem(
                    source.at[here, columns],
                    array.at[place.row, nodes, place.head + turn, lines],
                )

    def finish(self):
        """Wait until all that was sent has arrived."""
        if self.plan.staged:
            plgpu.wait_smem_to_gmem(0)

    def await_sent(self):
        """Wait until the copies to the outputs have read shared memory."""
        if self.plan.staged:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _split(self, x):
        return dots.split(x, self.plan.parts)
