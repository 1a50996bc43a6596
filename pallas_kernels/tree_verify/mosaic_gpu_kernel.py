"""The kernel of `mosaic_gpu`: what a warpgroup does with the tiles of its team.

All is transposed, nodes along the short side: S [K; Q]^T is [64, 2 n], R^T and U^T are
[64, n], and a sweep U^T <- R^T - U^T A^T takes U^T from the registers.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_verify import mosaic_gpu_copies as copies
from pallas_kernels.tree_verify import mosaic_gpu_steps as steps
from pallas_kernels.tree_verify import spec as specs

SYSTEM, WEIGHTS = 0, 1  # the two matrices


class Warpgroup(copies.Copies):
    """One warpgroup: how it solves its part of a head."""

    def prepare(self, gates, records, bits, row, wait):
        """Write -A and the weights [t, i] of every head, exp(c_t) and beta_t.

        `records` are those of `load_records`. The warpgroups of a team share the heads
        out. All wait until the team is done with what was prepared before.
        """
        pl.when(wait)(lambda: plgpu.barrier_wait(self.matrix_free))
        heads = self.plan.config.heads
        grams = self._grams(records, row)
        for turn, own in zip(self._own_turns(), gates, strict=True):
            prepare = functools.partial(self._prepare_head, turn, own, bits, grams, row)
            if heads % self.plan.groups == 0:
                prepare()
            else:
                pl.when(turn < heads)(prepare)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.matrix_here)

    def _prepare_head(self, turn, gates, bits, grams, row):
        del row
        related, strict = (
            steps.unpack(x, (64, self.plan.wide), interpret=self.interpret)
            for x in bits
        )
        decay, total, strength = self._path_decay(gates, related)
        self.shared[turn, 0] = jnp.exp(total)
        self.shared[turn, 1] = strength
        system = self._down(-strength) * (decay * grams[SYSTEM])
        self._write_matrix(turn, SYSTEM, jnp.where(strict, system, 0.0))
        steps.barrier(interpret=self.interpret)
        weights = decay * grams[WEIGHTS]
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

    def _grams(self, records, row):
        """Return the products of keys, and of queries, with keys."""
        del records, row
        wide, keys = self.plan.wide, functools.partial(self._keys, 0, self.plan.wide)
        return self._multiply_keys([(0, keys, wide), (wide, keys, wide)])

    def _multiply_keys(self, factors):
        """Multiply 64 rows of [K; Q] with others, for each of the factors.

        A factor is the first row, a function that returns a chunk of the others in
        parts, and their number.
        """
        lists = []
        for first, others, _ in factors:
            pairs = []
            for chunk in range(self.plan.chunks):
                right = [x.transpose((1, 0)) for x in others(chunk)]
                pairs += self._products(self._keys(first, 64, chunk), right)
            lists.append(pairs)
        shapes = [(64, count) for *_, count in factors]
        return steps.multiply_each(lists, shapes, interpret=self.interpret)

    def _write_matrix(self, turn, which, x):
        for part, y in enumerate(self._split(x)):
            # The weights overwrite what the system leaves below its last row.
            self.matrix[turn, part, pl.ds(which * self.plan.wide, 64)] = self._pad(y)

    def read_before(self, turn, found, row):
        """Return what keys and queries read elsewhere: here nothing."""
        del turn, found, row

    def rewrite(self, place, turn, found, row):
        """Write rows of the state, which `rows` holds: here nothing."""
        del place, turn, found, row

    def read_state(self, turn, before):
        """Return S [K; Q]^T."""
        del turn, before
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

    def solve(self, turn, read, values, row):
        """Return U^T, where nodes are no padding, and what they read from the state."""
        wide = self.plan.wide
        there = self._across(self._nodes() < row.size)
        from_state, strength = (
            self._across(self._column(self.shared.at[turn, i])) for i in range(2)
        )
        right = strength * (values - from_state * read[:, :wide])
        right = jnp.where(there, right, 0.0)
        solved = lax.fori_loop(
            0,
            row.sweeps,
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


def kernel(*refs, plan, interpret, warpgroup=Warpgroup, **buffers):
    """Take the team's tiles in turn, and the value heads of each.

    While a head is solved, the next one's rows and values are on their way. `warpgroup`
    says what is done, in the order that this function gives.
    """
    arrays = warpgroup.arrays_type(*refs)
    group = warpgroup(plan, interpret, arrays, buffers)
    team = lax.axis_index("block") * plan.config.teams + group.team
    stride = plan.blocks * plan.config.teams

    def one_tile(step, ahead):
        gates, known, first = ahead
        tile = team + step * stride
        next_tile = jnp.where(tile + stride < plan.tiles, tile + stride, tile)
        place = group.place(tile)
        row, known = group.row(place, known), group.fetch_row(next_tile)
        bits, records = group.load_ancestors(place), group.load_records(place, row)
        group.await_keys(place, step)
        group.prepare(gates, records, bits, row, step > 0)
        plgpu.barrier_wait(group.matrix_here)
        gates = group.fetch_gates(next_tile)

        def one_head(turn, found):
            last = turn == plan.config.heads - 1
            more = jnp.logical_not(last) | (next_tile > tile)
            following = jnp.where(last, next_tile, tile), jnp.where(last, 0, turn + 1)
            before = group.read_before(turn, found, row)
            plgpu.barrier_wait(group.rows_here)
            read = group.read_state(turn, before)
            values = group.read_values(place, turn)
            group.rewrite(place, turn, found, row)
            pl.when(last)(lambda: plgpu.barrier_arrive(group.keys_free))
            # A fence too: a barrier alone lets the copy engine overtake plain loads
            # of what it is about to overwrite, and then a value in a million is wrong.
            plgpu.commit_smem()
            pl.when(more)(lambda: group.fetch_rows(*following))
            # Only now: the fence waits for loads that are on their way.
            found = group.fetch_head(*following, row, known)
            pl.when(last)(lambda: group.release_keys(more, next_tile))
            solved, there, start = group.solve(turn, read, values, row)
            group.await_sent()
            group.store("pseudo_values", solved, place, turn)
            seen = group.look(turn, solved, there, start)
            pl.when(last)(lambda: plgpu.barrier_arrive(group.matrix_free))
            group.store("output", seen, place, turn)
            group.send(place, turn)
            return found

        found = lax.fori_loop(0, plan.config.heads, one_head, first)
        return gates, known, found

    @pl.when(team < plan.tiles)
    def _():
        group.fetch_keys(team)
        group.fetch_rows(team, 0)

    count = lax.div(plan.tiles - team + stride - 1, stride)
    first = lax.min(team, plan.tiles - 1)
    known = group.fetch_row(first)
    ahead = group.fetch_gates(first), known, group.fetch_head(first, 0, None, known)
    lax.fori_loop(0, count, one_tile, ahead)
    group.finish()

    @pl.when(count > 0)
    def _():
        plgpu.barrier_wait(group.matrix_free)
        if not plan.copied:
            plgpu.barrier_wait(group.keys_free)
