"""What a warpgroup of `mosaic_gpu` moves between global and shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dots
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import mosaic_gpu_steps as steps

TEAM_BUFFERS = (
    "keys",
    "matrix",
    "shared",
    "keys_here",
    "keys_free",
    "matrix_here",
    "matrix_free",
)


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


class Copies:
    """One warpgroup: its part of the buffers in shared memory, and what fills them.

    `buffers` are those of `mosaic_gpu`: a team has keys, matrices and barriers in
    common; rows of the state, values and vectors belong to a warpgroup.

    An op that extends `tree_verify` subclasses this, and names its arrays and what else
    a team has in common.
    """

    arrays_type: Any = Arrays
    team_buffers: tuple[str, ...] = TEAM_BUFFERS

    keys: Any  # [parts, chunks, rows of K and then of Q, chunk]
    keys_copy: Any
    rows: Any  # of the state [64, Dk]
    values: Any  # [n, 64]
    values_copy: Any
    matrix: Any  # [heads, parts, rows of -A and then of the weights, n]
    shared: Any  # exp(c_t) and beta_t of each head [heads, 2, 64]
    vectors: Any  # scratch
    rows_here: Any  # barriers
    keys_here: Any
    keys_free: Any
    matrix_here: Any
    matrix_free: Any

    def __init__(self, plan, interpret, arrays, buffers):
        self.plan, self.interpret, self.arrays = plan, interpret, arrays
        me = lax.axis_index("group")
        self.team, self.group = lax.div(me, plan.groups), lax.rem(me, plan.groups)
        for name, buffer in buffers.items():
            own = self.team if name in self.team_buffers else me
            # Some memory has a second name, for copies: see `mosaic_gpu`.
            two = buffer if name in plan.twice and not interpret else [buffer] * 2
            setattr(self, name, two[0].at[own])
            setattr(self, f"{name}_copy", two[1].at[own])

    def place(self, tile):
        """Return where tile number `tile` lies."""
        plan = self.plan
        rest, part = lax.div(tile, plan.blocks_v), lax.rem(tile, plan.blocks_v)
        return Place(
            row=lax.div(rest, plan.turns),
            head=lax.rem(rest, plan.turns) * plan.config.heads,
            line=part * plan.config.block_v + self.group * plans.LINES,
        )

    def fetch_row(self, tile):
        """Read what has to be known of the row of a tile ahead: here nothing."""
        del tile
        return ()

    def row(self, place, known):
        """Return what is known of the row of a tile; `known` is of `fetch_row`."""
        del known
        arrays = self.arrays
        return Row(arrays.sizes[place.row], arrays.sweeps[place.row])

    def fetch_keys(self, tile):
        """Start to copy keys and queries; the first warpgroup does it for its team."""
        plan, arrays = self.plan, self.arrays
        if not plan.copied:
            return

        @pl.when(self.group == 0)
        def _():
            row, head, _ = self.place(tile)
            key_head = lax.div(head, plan.spec.group)
            at, to = self._window(lax.min(tile, 0), plan.spec.nodes, plan.wide)
            for i, source in enumerate((arrays.k, arrays.q)):
                for chunk in range(plan.chunks):
                    plgpu.copy_gmem_to_smem(
                        source.at[row, at, key_head, self._columns(chunk)],
                        self.keys_copy.at[0, chunk, pl.ds(i * plan.wide, to.size)],
                        self.keys_here,
                    )

    def fetch_rows(self, tile, turn):
        """Start to copy rows of a head's state, and its values."""
        plan, arrays = self.plan, self.arrays
        row, head, line = self.place(tile)
        lines, here = self._window(line, plan.lines, plans.LINES)
        plgpu.copy_gmem_to_smem(
            arrays.state.at[row, head + turn, lines], self.rows.at[here], self.rows_here
        )
        if plan.copied:
            at, to = self._window(lax.min(tile, 0), plan.spec.nodes, plan.wide)
            plgpu.copy_gmem_to_smem(
                arrays.v.at[row, at, head + turn, lines],
                self.values_copy.at[to, here],
                self.rows_here,
            )

    def _window(self, start, size, padded):
        """Return slices of source and target; zeros are read beyond the source."""
        if self.interpret or size == padded:
            return pl.ds(start, size), pl.ds(0, size)
        return pl.ds(start, padded), pl.ds(0, padded)

    def _columns(self, chunk):
        return pl.ds(chunk * self.plan.chunk, self.plan.chunk)

    def fetch_gates(self, tile):
        """Read log decay and beta, a number a thread, of the heads it prepares."""
        row, head, _ = self.place(tile)
        found = []
        for turn in self._own_turns():
            at = head + lax.min(turn, self.plan.config.heads - 1)
            found.append(self._fetch_head_gates(row, at))
        return tuple(found)

    def _fetch_head_gates(self, row, head):
        sources = [
            x.at[row, :, head] for x in (self.arrays.log_decay, self.arrays.beta)
        ]
        return steps.load_vectors(sources, interpret=self.interpret)

    def load_records(self, place, row):
        """Read what a team needs of a tile beside its tree: here nothing."""
        del place, row
        return ()

    def fetch_head(self, tile, turn, row, known):
        """Read what a head needs beside rows and values: here nothing.

        `row` is that of the tile before where `turn` is 0; then `known` is that of
        `fetch_row`.
        """
        del tile, turn, row, known
        return ()

    def _own_turns(self):
        """Return which heads of a tile the warpgroup prepares for its team."""
        first = range(0, self.plan.config.heads, self.plan.groups)
        return [self.group + turn for turn in first]

    def load_ancestors(self, place):
        """Read who is an ancestor of whom, and who a strict one, as bits."""
        shape = (64, self.plan.wide)
        source = self.arrays.ancestors.at[place.row]
        return steps.load_bits(source, shape, interpret=self.interpret)

    def await_keys(self, place, step):
        """Wait for keys and queries, or write their bfloat16 parts."""
        if not self.plan.copied:

            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(self.keys_free)

            for chunk in range(self.plan.chunks):
                pl.when(self.group == chunk % self.plan.groups)(
                    lambda chunk=chunk: self._convert_keys(place, chunk)
                )
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.keys_here)
        plgpu.barrier_wait(self.keys_here)

    def _convert_keys(self, place, chunk):
        plan = self.plan
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
                self.keys[part, chunk, pl.ds(i * plan.wide, 64)] = y

    def release_keys(self, more, tile):
        """Wait until the team has read its keys, and start to copy others."""
        if self.plan.copied:
            plgpu.barrier_wait(self.keys_free)
            pl.when(more)(lambda: self.fetch_keys(tile))

    def read_values(self, place, turn):
        """Return V^T."""
        if self.plan.copied:
            values = self.values.transpose((1, 0))
            return plgpu.load(values, layout=steps.TILE).astype(jnp.float32)
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
