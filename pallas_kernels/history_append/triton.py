"""Appending to a history as one Pallas Triton kernel for NVIDIA GPUs.

A pure copy: a program takes a piece of one record, the same part of its key, its
pseudo-values and its decays, and asks for all of it before it writes any.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.history_append import config as configs
from pallas_kernels.history_append import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return refusals.device("gpu", platform, interpret=interpret) or specs.unsupported(
        spec
    )


def history_append(
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B m Hk Dk"], Float[Array, "B m Hv Dv"], Float[Array, "B m Hv"]
]:
    """Return the history's arrays, in the memory of the arguments."""
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    # A record is one line of memory, whatever its heads.
    past = tuple(map(_lines, (past_k, past_pseudo_values, past_log_decay)))
    nodes = tuple(map(_lines, (k, pseudo_values, log_decay)))
    # Blocks just say where a sequence begins.
    lines = [
        pl.BlockSpec((None, *x.shape[1:]), lambda i, b: (b, 0, 0))
        for x in (*past, *nodes)
    ]
    scalar = pl.BlockSpec((None,), lambda i, b: (b,))
    row = pl.BlockSpec((None, spec.path), lambda i, b: (b, 0))
    written = pl.pallas_call(
        functools.partial(_kernel, pieces=config.pieces),
        grid=(spec.path * config.pieces, spec.batch),
        in_specs=[*lines, row, scalar, scalar],
        out_specs=lines[:3],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in past],
        input_output_aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops, bytes_accessed=spec.bytes_moved, transcendentals=0
        ),
        name="history_append",
    )(*past, *nodes, path, count, past_count)
    new_k, new_values, new_decay = written
    return (
        new_k.reshape(past_k.shape),
        new_values.reshape(past_pseudo_values.shape),
        new_decay,
    )


def _lines(x: Float[Array, "B S ..."]) -> Float[Array, "B S D"]:
    """Join heads and dimensions."""
    return x.reshape(*x.shape[:2], -1)


def _kernel(
    past_k, past_values, past_decay, k, values, decay, path, count, past_count,
    new_k, new_values, new_decay, *, pieces,
):  # fmt: skip
    del past_k, past_values, past_decay  # where the new ones are
    position = lax.div(pl.program_id(0), jnp.int32(pieces))
    piece = lax.rem(pl.program_id(0), jnp.int32(pieces))
    horizon, nodes = new_k.shape[0], k.shape[0]
    # None of the three waits for another.
    node = jnp.clip(gpu.load(path.at[position]), 0, nodes - 1)
    slot = gpu.load(past_count.at[...]) + position
    exists = position < gpu.load(count.at[...])

    @pl.when(exists & (slot >= 0) & (slot < horizon))
    def _():
        pairs = ((k, new_k), (values, new_values), (decay, new_decay))
        parts = [_part(rows.shape[1], piece, pieces) for rows, _ in pairs]
        read = [
            gpu.load(rows.at[node, columns], mask)
            for (rows, _), (columns, mask) in zip(pairs, parts, strict=True)
        ]
        for (_, new), (columns, mask), x in zip(pairs, parts, read, strict=True):
            gpu.store(new.at[slot, columns], x, mask)


def _part(
    width: int, piece: Int[Array, ""], pieces: int
) -> tuple[pl.Slice, Array | None]:
    """Return the columns of a piece, and which of them exist where not all do."""
    size = gpu.power_of_two(pl.cdiv(width, pieces), least=1)
    begin = piece * size
    mask = gpu.row_mask((size,), width - begin) if size * pieces != width else None
    return pl.ds(begin, size), mask
