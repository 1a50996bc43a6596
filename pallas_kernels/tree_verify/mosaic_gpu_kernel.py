"""The kernel of `mosaic_gpu`: what a warpgroup does with the tiles of its team.

All is transposed, nodes along the short side: S [K; Q]^T is [64, 2 n], R^T and U^T are
[64, n], and a sweep U^T <- R^T - U^T A^T takes U^T from the registers.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dots
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import mosaic_gpu_steps as steps
from pallas_kernels.tree_verify import spec as specs

SYSTEM, WEIGHTS = 0, 1  # the two matrices
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


class Place(NamedTuple):
    """Where a tile lies: row of the batch, first value head, line of Dv."""

    row: Any
    head: Any
    line: Any


class Warpgroup:
    """One warpgroup: its part of the buffers in shared memory, and its steps.

    `buffers` are those of `mosaic_gpu`: a team has keys, matrices and barriers in
    common; rows of the state, values and vectors belong to a warpgroup.
    """

    def __init__(self, plan, interpret, arrays, buffers):
        self.plan, self.interpret, self.arrays = plan, interpret, arrays
        me = lax.axis_index("group")
        self.team, self.group = lax.div(me, plan.groups), lax.rem(me, plan.groups)
        for name, buffer in buffers.items():
            own = self.team if name in TEAM_BUFFERS else me
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
            sources = (self.arrays.log_decay, self.arrays.beta)
            sources = [x.at[row, :, at] for x in sources]
            found.append(steps.load_vectors(sources, interpret=self.interpret))
        return tuple(found)

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

    def prepare(self, gates, bits, wait):
        """Write -A and the weights [t, i] of every head, exp(c_t) and beta_t.

        The warpgroups of a team share the heads out. All wait until the team is done
        with what was prepared before.
        """
        pl.when(wait)(lambda: plgpu.barrier_wait(self.matrix_free))
        heads = self.plan.config.heads
        for turn, own in zip(self._own_turns(), gates, strict=True):
            if heads % self.plan.groups == 0:
                self._prepare_head(turn, own, bits)
            else:
                prepare = functools.partial(self._prepare_head, turn, own, bits)
                pl.when(turn < heads)(prepare)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.matrix_here)

    def _prepare_head(self, turn, gates, bits):
        related, strict = (
            steps.unpack(x, (64, self.plan.wide), interpret=self.interpret)
            for x in bits
        )
        decay, total, strength = self._path_decay(gates, related)
        self.shared[turn, 0] = jnp.exp(total)
        self.shared[turn, 1] = strength
        system = self._down(-strength) * (decay * self._gram(SYSTEM))
        self._write_matrix(turn, SYSTEM, jnp.where(strict, system, 0.0))
        steps.barrier(interpret=self.interpret)
        weights = decay * self._gram(WEIGHTS)
        self._write_matrix(turn, WEIGHTS, jnp.where(related, weights, 0.0))

    def _path_decay(self, gates, related):
        """Return exp(c_t - c_i) at [t, i]; c_t and beta_t by row."""
        strongest = jnp.maximum(gates, specs.STRONGEST_LOG_DECAY)
        high = lax.round(strongest * 16, lax.RoundingMethod.TO_NEAREST_EVEN) / 16
        vectors = self.vectors
        vectors[0], vectors[1], vectors[2] = high, strongest - high, gates
        steps.barrier(interpret=self.interpret)
        by_row = []
        for i in range(2):
            x = self._across(self._column(vectors.at[i, 0]))
            by_row.append(jnp.sum(jnp.where(related, x, 0.0), axis=1))
            vectors[i, 1] = by_row[-1]
        strength = plgpu.load(vectors.at[2, 1], layout=steps.ROW, optimized=False)
        steps.barrier(interpret=self.interpret)
        high, low = (
            self._down(x) - self._across(self._column(vectors.at[i, 1]))
            for i, x in enumerate(by_row)
        )
        # Between unrelated nodes the difference may be large, and is not used.
        return jnp.exp(high + low), sum(by_row), strength

    def _gram(self, which):
        """Return the products of keys (or queries, for the weights) with keys."""
        pairs = []
        for chunk in range(self.plan.chunks):
            left = self._keys(which * self.plan.wide, 64, chunk)
            right = self._keys(0, self.plan.wide, chunk)
            pairs += self._products(left, [x.transpose((1, 0)) for x in right])
        return self._multiply(pairs, self.plan.wide)

    def _write_matrix(self, turn, which, x):
        for part, y in enumerate(self._split(x)):
            # The weights overwrite what the system leaves below its last row.
            self.matrix[turn, part, pl.ds(which * self.plan.wide, 64)] = self._pad(y)

    def read_state(self):
        """Return S [K; Q]^T."""
        plan = self.plan
        total, pairs = None, []
        for chunk in range(plan.chunks):
            right = self._keys(0, 2 * plan.wide, chunk)
            right = [x.transpose((1, 0)) for x in right]
            rows = self.rows.at[:, self._columns(chunk)]
            if self.rows.dtype == jnp.bfloat16:
                pairs += self._products([rows], right)
                continue
            rows = self._split(plgpu.load(rows, layout=steps.TILE))
            total = self._multiply(self._products(rows, right), 2 * plan.wide, total)
        return self._multiply(pairs, 2 * plan.wide) if total is None else total

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

    def solve(self, place, turn, read, values):
        """Return U^T, where nodes are no padding, and what they read from the state."""
        wide, arrays = self.plan.wide, self.arrays
        there = self._across(self._nodes() < arrays.sizes[place.row])
        from_state, strength = (
            self._across(self._column(self.shared.at[turn, i])) for i in range(2)
        )
        right = strength * (values - from_state * read[:, :wide])
        right = jnp.where(there, right, 0.0)
        solved = lax.fori_loop(
            0,
            arrays.sweeps[place.row],
            lambda _, u: self._times(u, turn, SYSTEM, right),
            right,
        )
        return solved, there, from_state * read[:, wide:]

    def look(self, turn, solved, there, start):
        """Return the outputs O^T; columns of padding are 0."""
        return jnp.where(there, self._times(solved, turn, WEIGHTS, start), 0.0)

    def _times(self, x, turn, which, start):
        """Return start + x M^T of one of the matrices."""
        rows = pl.ds(which * self.plan.wide, self.plan.wide)
        right = [
            self.matrix.at[turn, part, rows].transpose((1, 0))
            for part in range(self.plan.parts)
        ]
        left = [self._pad(y) for y in self._split(x)]
        return self._multiply(self._products(left, right), self.plan.wide, start)

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

    def await_sent(self):
        """Wait until the copies to the outputs have read shared memory."""
        if self.plan.staged:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _split(self, x):
        return dots.split(x, self.plan.parts)

    def _products(self, left, right):
        """Pair the parts of two operands as pallas_kernels.dots does."""
        most = max(len(left), len(right))
        pairs = [(i, j) for i in range(len(left)) for j in range(len(right))]
        pairs = sorted((p for p in pairs if sum(p) < most), key=sum, reverse=True)
        return [(left[i], right[j]) for i, j in pairs]

    def _multiply(self, pairs, columns, start=None):
        return steps.multiply(pairs, (64, columns), start, interpret=self.interpret)

    def _keys(self, first, count, chunk):
        """Return rows of [K; Q], in parts."""
        parts = range(self.plan.key_parts)
        return [self.keys.at[part, chunk, pl.ds(first, count)] for part in parts]

    def _column(self, ref):
        ref = ref.at[pl.ds(0, self.plan.wide)]
        return plgpu.load(ref, layout=steps.COLUMN, optimized=False)

    def _nodes(self):
        return plgpu.layout_cast(lax.iota(jnp.int32, self.plan.wide), steps.COLUMN)

    def _down(self, x):
        return self._spread(x, 0)

    def _across(self, x):
        return self._spread(x, 1)

    def _spread(self, x, axis):
        x = lax.broadcast_in_dim(x, (64, self.plan.wide), (axis,))
        return plgpu.layout_cast(x, steps.TILE)

    def _pad(self, x):
        """Append columns of 0 up to the K of wgmma."""
        room = self.plan.deep - self.plan.wide
        if room == 0:
            return x
        zeros = plgpu.layout_cast(jnp.zeros((64, room), x.dtype), steps.TILE)
        return jnp.concatenate([x, zeros], axis=1)


def kernel(*refs, plan, interpret, **buffers):
    """Take the team's tiles in turn, and the value heads of each.

    While a head is solved, the next one's rows and values are on their way.
    """
    arrays = Arrays(*refs)
    group = Warpgroup(plan, interpret, arrays, buffers)
    team = lax.axis_index("block") * plan.config.teams + group.team
    stride = plan.blocks * plan.config.teams

    def one_tile(step, gates):
        tile = team + step * stride
        next_tile = jnp.where(tile + stride < plan.tiles, tile + stride, tile)
        place = group.place(tile)
        bits = group.load_ancestors(place)
        group.await_keys(place, step)
        group.prepare(gates, bits, step > 0)
        plgpu.barrier_wait(group.matrix_here)
        gates = group.fetch_gates(next_tile)

        def one_head(turn, _):
            last = turn == plan.config.heads - 1
            more = jnp.logical_not(last) | (next_tile > tile)
            plgpu.barrier_wait(group.rows_here)
            read, values = group.read_state(), group.read_values(place, turn)
            pl.when(last)(lambda: plgpu.barrier_arrive(group.keys_free))
            steps.barrier(interpret=interpret)
            pl.when(more)(
                lambda: group.fetch_rows(
                    jnp.where(last, next_tile, tile), jnp.where(last, 0, turn + 1)
                )
            )
            solved, there, start = group.solve(place, turn, read, values)
            group.await_sent()
            group.store("pseudo_values", solved, place, turn)
            pl.when(last)(lambda: group.release_keys(more, next_tile))
            seen = group.look(turn, solved, there, start)
            pl.when(last)(lambda: plgpu.barrier_arrive(group.matrix_free))
            group.store("output", seen, place, turn)
            group.send(place, turn)

        lax.fori_loop(0, plan.config.heads, one_head, None)
        return gates

    @pl.when(team < plan.tiles)
    def _():
        group.fetch_keys(team)
        group.fetch_rows(team, 0)

    count = lax.div(plan.tiles - team + stride - 1, stride)
    gates = group.fetch_gates(lax.min(team, plan.tiles - 1))
    lax.fori_loop(0, count, one_tile, gates)

    if plan.staged:
        plgpu.wait_smem_to_gmem(0)

    @pl.when(count > 0)
    def _():
        plgpu.barrier_wait(group.matrix_free)
        if not plan.copied:
            plgpu.barrier_wait(group.keys_free)
