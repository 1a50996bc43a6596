"""What a warpgroup of `mosaic_gpu` computes; mosaic_gpu_schedule says when.

All is transposed, nodes along the short side: S [K; Q]^T is [64, 2 n], R^T and U^T are
[64, n], and a sweep U^T <- R^T - U^T A^T takes U^T from the registers.
"""

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

    def prepare_tile(self, tile, records):
        """Return the products of keys, and of queries, with keys."""
        del records
        wide = self.plan.wide

        def keys(chunk):
            return self._keys(tile, 0, wide, chunk)

        return self._multiply_keys(tile, [(0, keys, wide), (wide, keys, wide)])

    def await_tile(self, tile):
        """Wait for what others have prepared for all heads of a tile."""
        if self.plan.config.separate:
            self.wait("keys_here", tile.buffer)

    def prepare_head(self, tile, turn, gates, known, grams, wait):
        """Write -A and the weights [t, i] of a head, exp(c_t) and beta_t.

        If `wait`, only when the team is done with what was there before.
        """

        def prepare():
            pl.when(wait)(lambda: self.wait("matrix_free", turn))
            self._prepare_head(tile, turn, gates, known, grams)
            plgpu.commit_smem()
            self.arrive("matrix_here", turn)

        self.for_head(turn, prepare)

    def _prepare_head(self, tile, turn, gates, known, grams):
        related, strict = (
            steps.unpack(x, (64, self.plan.wide), interpret=self.interpret)
            for x in known
        )
        self._share_gates(gates)
        steps.barrier(interpret=self.interpret)
        decay, total, strength = self._path_decay(tile, turn, related)
        self.shared[turn, 0] = jnp.exp(total)
        self.shared[turn, 1] = strength
        system = self._down(-strength) * (decay * grams[SYSTEM])
        self._write_matrix(turn, SYSTEM, jnp.where(strict, system, 0.0))
        steps.barrier(interpret=self.interpret)
        weights = decay * grams[WEIGHTS]
        self._write_matrix(turn, WEIGHTS, jnp.where(related, weights, 0.0))

    def _share_gates(self, gates):
        """Write log decay, in multiples of 1/16 and the rest, and beta to `vectors`."""
        strongest = jnp.maximum(gates, specs.STRONGEST_LOG_DECAY)
        high = lax.round(strongest * 16, lax.RoundingMethod.TO_NEAREST_EVEN) / 16
        vectors = self.vectors
        vectors[0], vectors[1], vectors[2] = high, strongest - high, gates

    def _path_decay(self, tile, turn, related):
        """Return exp(c_t - c_i) at [t, i]; c_t and beta_t by row."""
        del tile, turn
        vectors = self.vectors
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

    def _multiply_keys(self, tile, factors):
        """Multiply 64 rows of [K; Q] with others, for each of the factors.

        A factor is the first row, a function that returns a chunk of the others in
        parts, and their number.
        """
        lists = []
        for first, others, _ in factors:
            pairs = []
            for chunk in range(self.plan.chunks):
                right = [x.transpose((1, 0)) for x in others(chunk)]
                pairs += self._products(self._keys(tile, first, 64, chunk), right)
            lists.append(pairs)
        shapes = [(64, count) for *_, count in factors]
        return steps.multiply_each(lists, shapes, interpret=self.interpret)

    def _write_matrix(self, turn, which, x):
        for part, y in enumerate(self._split(x)):
            # The weights overwrite what the system leaves below its last row.
            self.matrix[turn, part, pl.ds(which * self.plan.wide, 64)] = self._pad(y)

    def rewrite(self, tile, turn, slots, found):
        """Write rows of the state, which `rows` holds: here nothing."""
        del tile, turn, slots, found

    def read_state(self, tile, turn, slots, found):
        """Wait for a head's state, and return S [K; Q]^T."""
        del turn, found
        plan = self.plan
        total, pairs = None, []
        for chunk, slot in enumerate(slots):
            right = self._keys(tile, 0, 2 * plan.wide, chunk)
            right = [x.transpose((1, 0)) for x in right]
            self.wait("rows_here", slot)
            rows = self.rows.at[slot]
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
        values = values.astype(jnp.float32)
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

    def _keys(self, tile, first, count, chunk):
        """Return rows of [K; Q], in parts."""
        rows, parts = pl.ds(first, count), range(self.plan.key_parts)
        return [self.keys.at[tile.buffer, part, chunk, rows] for part in parts]

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
