"""What a warpgroup of `mosaic_gpu` does with a history.

With W_j = e^(H - h_j) u_j of the records, keys K_h of theirs and X = [K; Q] of the
nodes, S_0 X^T = e^H S X^T + W^T (K_h X^T). K_h X^T is made once for the value heads of
a key head. Only a row that folds makes S_0 = e^H S + W^T K_h, in place and from there
to global memory.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dots
from pallas_kernels.history_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import mosaic_gpu_copies as copies
from pallas_kernels.tree_verify import mosaic_gpu_kernel as tree_verify
from pallas_kernels.tree_verify import mosaic_gpu_plan as tree_plans
from pallas_kernels.tree_verify import mosaic_gpu_steps as steps

SINCE, REMAINING = 0, 1
PAST = 3  # of the vectors: behind those of tree_verify


class Arrays(NamedTuple):
    """The arguments of `history_verify` and its outputs, in global memory."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    state: Any
    past_k: Any
    past_pseudo_values: Any
    past_log_decay: Any
    past_count: Any
    ancestors: Any
    sizes: Any
    sweeps: Any
    output: Any
    pseudo_values: Any


class Row(NamedTuple):
    """What is known of a row of the batch: its tree, records, and whether it folds."""

    size: Any
    sweeps: Any
    count: Any
    fold: Any


class Warpgroup(tree_verify.Warpgroup):
    """One warpgroup: that of tree_verify, with the records of a row at hand."""

    seen: Any  # [K; Q] K_h^T [buffers, parts, rows of K and then of Q, records]
    folds: Any  # K_h^T of a row that folds [buffers, parts, chunks, chunk, records]
    since: Any  # exp(H - h_j), and exp(H) in all places [heads, 2, 64]

    arrays_type = Arrays
    team_buffers = (*copies.TEAM_BUFFERS, "seen", "folds", "since")

    def fetch_row(self, tile):
        """Read what is to be known of the row of a tile."""
        place, arrays = self.place(tile), self.arrays
        spec = self.plan.spec
        count = lax.clamp(0, arrays.past_count[place.row], spec.horizon)
        return Row(*super().fetch_row(tile), count, count > spec.fold_above)

    def _fetch_head_gates(self, row, head):
        decays = [self.arrays.past_log_decay.at[row, :, head]] * 2
        past = steps.load_vectors(decays, interpret=self.interpret)
        return super()._fetch_head_gates(row, head), past

    def load_records(self, tile):
        """Read the keys of the records, of the chunks that the warpgroup writes."""
        key_head = lax.div(tile.place.head, self.plan.spec.group)
        source = self.arrays.past_k.at[tile.place.row, :, key_head]
        return tuple(
            self._load_transposed(source.at[:, self._columns(chunk)], tile.row.count)
            for chunk in self.own_chunks()
        )

    def fetch_head(self, tile, turn):
        """Read the pseudo-values of the records, for the lines of the warpgroup."""
        row, head, line = tile.place
        lines = pl.ds(line, self.plan.lines)
        source = self.arrays.past_pseudo_values.at[row, :, head + turn, lines]
        return self._load_transposed(source, tile.row.count)

    def _load_transposed(self, source, count):
        return steps.load(
            source,
            (64, self.plan.records),
            steps.TILE,
            transposed=True,
            count=count,
            interpret=self.interpret,
        )

    def prepare_tile(self, tile, records):
        """Write what keys and queries see of the records; else as tree_verify."""
        self._write_records(tile, records)
        plgpu.commit_smem()
        if self.plan.preparing > 1:
            self.arrive("past_here")
            self.wait("past_here")
        plan, first = self.plan, self.plan.seen_first

        def node_keys(chunk):
            return self._keys(tile, 0, plan.wide, chunk)

        def past_keys(chunk):
            parts = range(plan.past_parts)
            return [self._past(tile, part, chunk) for part in parts]

        own = [(i * plan.wide, node_keys, plan.wide) for i in range(2)]
        past = [(i, past_keys, plan.records) for i in first]
        system, weights, *seen = self._multiply_keys(tile, [*own, *past])
        if plan.preparing > 1:
            last = self.group == plan.groups - 1
            pl.when(last)(lambda: self._write_seen(tile, seen))
        else:
            self._write_seen(tile, seen)
        plgpu.commit_smem()
        self.arrive("seen_here", tile.buffer)
        return system, weights

    def await_tile(self, tile):
        """Wait for what others have prepared for all heads of a tile."""
        super().await_tile(tile)
        self.wait("seen_here", tile.buffer)

    def _write_seen(self, tile, seen):
        for i, x in zip(self.plan.seen_first, seen, strict=True):
            if i > 0:  # overwrites what lies below the last key
                steps.barrier(interpret=self.interpret)
            for part, y in enumerate(self._split(x)):
                self.seen[tile.buffer, part, pl.ds(i, 64)] = y

    def _write_records(self, tile, records):
        there = self._there(tile.row)
        zero = jnp.zeros((), records[0].dtype)
        for chunk, x in zip(self.own_chunks(), records, strict=True):
            # Of what is no record nothing may come near a product, not even times 0.
            x = jnp.where(there, x, zero)
            for part, y in enumerate(dots.split(x, self.plan.past_parts)):
                self._past(tile, part, chunk).transpose((1, 0))[...] = y
            write = functools.partial(self._write_folds, tile, chunk, x)
            pl.when(tile.row.fold)(write)

    def _write_folds(self, tile, chunk, keys):
        # wgmma takes these with records along the rows, the other ones along columns.
        for part, x in enumerate(dots.split(keys, self.plan.fold_parts)):
            self.folds[tile.buffer, part, chunk] = x

    def _past(self, tile, part, chunk):
        """Return where a part of the records' keys lies: in rows below the queries."""
        plan = self.plan
        layer, key_part = divmod(part, plan.key_parts)
        rows = pl.ds(2 * plan.wide + layer * plan.records, plan.records)
        return self.keys.at[tile.buffer, key_part, chunk, rows]

    def _share_gates(self, gates):
        """Write those of the nodes and the log decays of the records to `vectors`."""
        gates, decays = gates
        super()._share_gates(gates)
        self.vectors[PAST] = decays

    def _path_decay(self, tile, turn, related):
        """Write exp(H - h_j) and exp(H); return what tree_verify does.

        What follows a record is summed anew: a difference of sums would lose digits.
        """
        shape = (64, self.plan.records)
        each = self._by_record(self.vectors.at[PAST, 0])
        record, this = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=steps.TILE)
            for axis in (1, 0)
        )
        there = record < tile.row.count
        masks = {SINCE: there & (record > this), REMAINING: there}
        for i, mask in masks.items():
            following = jnp.sum(jnp.where(mask, each, 0.0), axis=1)
            self.since[turn, i] = jnp.exp(following)
        return super()._path_decay(tile, turn, related)

    def read_state(self, tile, turn, slots, found):
        """Return S_0 [K; Q]^T = e^H S [K; Q]^T + W^T (K_h [K; Q]^T)."""
        read = super().read_state(tile, turn, slots, found)
        nodes = pl.ds(0, 2 * self.plan.wide)
        right = [
            self.seen.at[tile.buffer, part, nodes].transpose((1, 0))
            for part in range(self.plan.parts)
        ]
        left = self._split(self._written(turn, found, tile.row))
        start = self._remaining(turn) * read
        return self._multiply(self._products(left, right), 2 * self.plan.wide, start)

    def rewrite(self, tile, turn, slots, found):
        """Write S_0 in rows that fold, over S in shared and in global memory."""
        row, head, line = tile.place

        @pl.when(tile.row.fold)
        def _():
            # The rows are operands of wgmma: all warps have to be done with them.
            steps.barrier(interpret=self.interpret)
            written = self._written(turn, found, tile.row)
            written = dots.split(written, plans.FOLD_PARTS)
            for chunk, slot in enumerate(slots):
                self._rewrite_chunk(tile, turn, written, chunk, self.rows.at[slot])
            plgpu.commit_smem()
            lines, here = self._window(line, self.plan.lines, tree_plans.LINES)
            for chunk, slot in enumerate(slots):
                columns = self._columns(chunk)
                plgpu.copy_smem_to_gmem(
                    self.rows.at[slot, here],
                    self.arrays.state.at[row, head + turn, lines, columns],
                )

    def _rewrite_chunk(self, tile, turn, written, chunk, rows):
        stored = plgpu.load(rows, layout=steps.TILE).astype(jnp.float32)
        keys = [
            self.folds.at[tile.buffer, part, chunk].transpose((1, 0))
            for part in range(self.plan.fold_parts)
        ]
        total = self._multiply(
            self._products(written, keys),
            self.plan.chunk,
            self._remaining(turn) * stored,
        )
        rows[...] = total.astype(rows.dtype)

    def refill(self, tile, turn, slots):
        """Start to copy what comes next over rows that were not rewritten."""
        refill = functools.partial(super().refill, tile, turn, slots)
        pl.when(jnp.logical_not(tile.row.fold))(refill)

    def refill_rewritten(self, tile, turn, slots):
        """Start to copy what comes next over rewritten rows, once they have left."""
        refill = functools.partial(super().refill, tile, turn, slots)

        @pl.when(tile.row.fold)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refill()

    def _written(self, turn, found, row):
        """Return W^T, 0 where there is no record."""
        since = self._by_record(self.since.at[turn, SINCE])
        return jnp.where(self._there(row), since * found.astype(jnp.float32), 0.0)

    def _remaining(self, turn):
        return self.since[turn, REMAINING, 0]

    def _there(self, row):
        shape = (64, self.plan.records)
        record = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=steps.TILE)
        return record < row.count

    def _by_record(self, ref):
        """Read a vector and repeat it in all lines."""
        ref = ref.at[pl.ds(0, self.plan.records)]
        x = plgpu.load(ref, layout=steps.COLUMN, optimized=False)
        x = lax.broadcast_in_dim(x, (64, self.plan.records), (1,))
        return plgpu.layout_cast(x, steps.TILE)

    def finish(self):
        """Wait until all that was sent has arrived."""
        plgpu.wait_smem_to_gmem(0)
