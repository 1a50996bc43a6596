"""Verification behind a history as a Pallas Triton kernel for NVIDIA GPUs.

tree_verify, with two additions. The history joins what keys and queries read from the
state: S_0 x = e^H S x + sum_j e^(H - h_j) u_j (k_j . x), so S_0 is never formed. In a
row that folds, the program also writes S_0 over the rows of S that it holds, record by
record as the commit kernel does; the others write nothing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.history_verify import config as configs
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import body, triton_solve
from pallas_kernels.tree_verify import spec as verify_specs
from pallas_kernels.tree_verify import triton as tree_verify

MOST_RECORDS = 64


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        tree_verify.supports(spec, platform, interpret=interpret)
        or refusals.above(spec, MOST_RECORDS, "horizon")
        or specs.unsupported(spec)
    )


def history_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B n Hv Dv"],
    Float[Array, "B n Hv Dv"],
    Float[Array, "B Hv Dv Dk"],
]:
    """Return outputs, float32 pseudo-values, and the state, in the memory of `state`.

    As tree_verify behind the first `past_count` records of each row; the state of rows
    with more than `spec.fold_above` takes them in, that of others keeps its bits. Other
    records are not read.
    """
    platform, device_kind = device.target()
    config = _choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    tree_specs, value = tree_verify.block_specs(spec, config)
    tile, scalar = tree_specs[5], tree_specs[-1]
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec, config=config),
        grid=(
            spec.value_dim // (config.block_v * config.blocks),
            spec.value_heads // config.heads,
            spec.batch,
        ),
        in_specs=[
            *tree_specs[:6],
            *_past_specs(spec, config),
            scalar,
            *tree_specs[6:],
        ],
        out_specs=[value, value, tile],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={5: 2},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=verify_specs.cost_estimate(spec),
        name="history_verify",
    )(
        q, k, v, log_decay, beta, state, past_k, past_pseudo_values, past_log_decay,
        past_count, ancestors, sizes, sweeps,
    )  # fmt: skip


def _choose(spec, platform, device_kind, explicit):
    """Return the configuration; one block a program where dots are exact.

    Operands in three parts, kept from block to block, fill more than the shared memory.
    """
    config = configs.choose(spec, platform, device_kind, explicit)
    if explicit is None and spec.precision == "high":
        return dataclasses.replace(config, blocks=1)
    return config


class _Past(NamedTuple):
    """The history as a program sees it: references, and how many records there are."""

    k: Any
    pseudo_values: Any
    log_decay: Any
    count: Any

    def rows(self, ref, shape):
        """Read the records that there are, else 0."""
        return gpu.load(ref, gpu.row_mask(shape, self.count))

    def decays(self, head):
        """Return exp(H - h_j) of each record, 0 beyond the last, and exp(H)."""
        shape = self.log_decay.shape
        each = triton_solve.column(
            self.rows(self.log_decay.at[:, :], shape).astype(jnp.float32), head
        )
        # What follows a record is summed anew: a difference of sums would lose digits.
        square = (shape[0], shape[0])
        later = gpu.row_mask(square, self.count, axis=1) & (
            lax.broadcasted_iota(jnp.int32, square, 1)
            > lax.broadcasted_iota(jnp.int32, square, 0)
        )
        following = jnp.where(later, jnp.swapaxes(each, 0, 1), 0.0)
        since = jnp.exp(jnp.sum(following, axis=1, keepdims=True))
        since = jnp.where(gpu.row_mask(since.shape, self.count), since, 0.0)
        return since, jnp.exp(jnp.sum(each, axis=0, keepdims=True))


def _kernel(
    q, k, v, log_decay, beta, state, past_k, past_pseudo_values, past_log_decay,
    past_count, ancestors, sizes, sweeps, output, pseudo_values, new_state,
    *, spec, config,
):  # fmt: skip
    split = body.splitter(spec)
    nodes, heads = q.shape[0], config.heads
    size = sizes[...]
    read = functools.partial(tree_verify.read_rows, nodes=spec.nodes, size=size)
    queries, keys = (split(read(x.at[...], x.shape)) for x in (q, k))
    related = tree_verify.read_square(ancestors, nodes=spec.nodes, size=size)
    gates = [read(x.at[:, :], (nodes, heads)) for x in (log_decay, beta)]
    count = specs.records(past_count[...], spec)
    past = _Past(past_k, past_pseudo_values, past_log_decay, count)
    # Narrow keys stay in registers otherwise than wide ones, and others are spilled.
    records = past.rows(past_k.at[...], past_k.shape).astype(jnp.float32)
    records = split(records)

    def one_head(head, _):
        decays, strength = (
            triton_solve.column(x.astype(jnp.float32), head) for x in gates
        )
        decay, from_state = body.path_decay(jnp.swapaxes(decays, 0, 1), related)
        grams = dots.dot(keys, keys, 1, 1), dots.dot(queries, keys, 1, 1)
        system = body.system(*grams, decay, strength)
        solved = triton_solve.solver(
            *system, from_state, strength, sweeps[...], spec.depth, split
        )
        since, remaining = past.decays(head)

        def one_block(i, _):
            lines = pl.ds(i * config.block_v, config.block_v)
            stored = gpu.load(state.at[head, lines, :])
            folds = specs.records(past_count[...], spec) > spec.fold_above
            pl.when(folds)(lambda: _fold(stored, past, new_state, head, lines))
            tile = split(stored)
            values = (past_k.shape[0], config.block_v)
            written = past.rows(past_pseudo_values.at[:, head, lines], values)
            written = split(since * written.astype(jnp.float32))

            def reads(rows):
                seen = split(dots.dot(rows, records, 1, 1))
                behind = triton_solve.combine(seen, written, nodes)
                return remaining * triton_solve.read(rows, tile, nodes) + behind

            block = (nodes, config.block_v)
            values = read(v.at[:, head, lines], block).astype(jnp.float32)
            # Rows beyond the array are not there to be written.
            there = gpu.row_mask(block, spec.nodes)
            results = solved(lambda: reads(keys), lambda: reads(queries), values)
            for ref, result in zip((pseudo_values, output), results, strict=True):
                gpu.store(ref.at[:, head, lines], result, there)

        lax.fori_loop(0, config.blocks, one_block, None)

    lax.fori_loop(0, heads, one_head, None)


def _fold(stored, past, new_state, head, lines):
    """Write exp(g_j) S + u_j k_j^T for every record: the arithmetic of the commit."""

    def write(j, tile):
        u = gpu.load(past.pseudo_values.at[j, head, lines]).astype(jnp.float32)
        key = gpu.load(past.k.at[j, :]).astype(jnp.float32)
        decay = jnp.exp(gpu.load(past.log_decay.at[j, head]).astype(jnp.float32))
        return decay * tile + u[:, None] * key[None, :]

    tile = lax.fori_loop(0, past.count, write, stored.astype(jnp.float32))
    gpu.store(new_state.at[head, lines, :], tile)


def _past_specs(spec, config):
    """Return the blocks of the history's keys, pseudo-values and log decays."""
    records = gpu.power_of_two(spec.horizon)
    heads, lines = config.heads, config.block_v * config.blocks
    programs = spec.group // heads  # of one key head
    key = pl.BlockSpec(
        (None, records, None, spec.key_dim), lambda i, h, b: (b, 0, h // programs, 0)
    )
    value = pl.BlockSpec((None, records, heads, lines), lambda i, h, b: (b, 0, h, i))
    gate = pl.BlockSpec((None, records, heads), lambda i, h, b: (b, 0, h))
    return [key, value, gate]
