"""The expert layer in one Pallas kernel for TPUs (Mosaic).

The pairs of a token and one of its experts are sorted by expert and cut in blocks of
rows. A step of the grid takes one block, one expert with rows in it and one tile of the
intermediate; steps that share a block follow each other and add to it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul import spec as specs

# Columns of a tile of vector registers.
LANES = 128
# Of the vector memory, 64 MB on the smallest (v5p): two of each tile must fit.
MOST_BYTES = 48 * 2**20


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, LANES, "hidden", "inner")
        or specs.unsupported_dtype(spec)
    )


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its experts; interpreted where the target is a CPU.

    The shared expert is left to XLA, whose products are as good for all rows.
    """
    by_token = _by_choice(x, gate_up, down, experts, spec=spec, config=config)
    weights = weights.astype(jnp.float32)
    scaled = by_token * weights[:, : spec.per_token, None]
    total = jnp.sum(scaled, axis=1)
    if shared is not None:
        alike = reference.swiglu(x, *shared).astype(jnp.float32)
        total += alike * weights[:, -1:]
    return total.astype(x.dtype)


def swiglu_parts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "T K H"]:
    """Return what is added up for every row, the shared expert's last."""
    parts = _by_choice(x, gate_up, down, experts, spec=spec, config=config)
    if shared is not None:
        alike = reference.swiglu(x, *shared).astype(jnp.float32)
        parts = jnp.concatenate([parts, alike[:, None]], axis=1)
    return (parts * weights[..., None].astype(jnp.float32)).astype(x.dtype)


def _by_choice(x, gate_up, down, experts, *, spec, config):
    """Return the rows of each token's experts in float32: [T, k, H]; of none, 0."""
    config = configs.choose(spec, "tpu", device.target()[1], config)
    flat = experts.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True)
    padding = -spec.pairs % config.rows
    rows = jnp.pad(x[order // spec.per_token], ((0, padding), (0, 0)))
    visits = list_visits(flat, spec=spec, rows=config.rows)
    by_rank = _products(rows, gate_up, down, visits, spec=spec, config=config)
    by_pair = by_rank[jnp.argsort(order)]
    known = (experts < spec.experts)[..., None]  # of the others nothing is written
    return jnp.where(known, by_pair.reshape(*experts.shape, spec.hidden), 0)


class Visits(NamedTuple):
    """Blocks and the experts with rows in them, by block and then expert.

    Attributes:
      block, expert: which block of rows meets which expert.
      start, end: the rows of the block, counted from its first, that are the expert's.
        None where the list is longer than needed.
    """

    block: Int[Array, " V"]
    expert: Int[Array, " V"]
    start: Int[Array, " V"]
    end: Int[Array, " V"]


def list_visits(
    experts: Int[Array, " pairs"], *, spec: specs.Spec, rows: int
) -> Visits:
    """List the visits of pairs sorted by expert; there are never more than listed.

    Pairs of no expert come last and are in no visit.
    """
    blocks = pl.cdiv(spec.pairs, rows)
    visit = jnp.arange(blocks + min(spec.experts, spec.pairs) - 1)
    sizes = jnp.bincount(experts, length=spec.experts)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // rows
    counts = jnp.where(sizes > 0, (ends - 1) // rows - first + 1, 0)
    listed = jnp.cumsum(counts)
    # Beyond the end of the list the last expert's last block stays, with no rows.
    used = visit < listed[-1]
    visit = jnp.clip(visit, 0, jnp.maximum(listed[-1] - 1, 0))
    expert = jnp.searchsorted(listed, visit, side="right")
    expert = jnp.minimum(expert, spec.experts - 1)  # where no pair has an expert
    block = first[expert] + visit - (listed - counts)[expert]
    start = jnp.maximum(starts[expert] - block * rows, 0)
    end = jnp.minimum(ends[expert] - block * rows, rows)
    found = (block, expert, start, jnp.where(used, end, start))
    return Visits(*(array.astype(jnp.int32) for array in found))


def _products(rows, gate_up, down, visits, *, spec, config):
    """Return down(silu(gate row) * up row) of every sorted row in float32."""
    from jax.experimental.pallas import tpu as pallas_tpu

    columns = config.up_columns
    tiles = spec.inner // columns
    tile = (None, spec.hidden, columns)
    by_block = pl.BlockSpec(
        (config.rows, spec.hidden), lambda v, j, block, *_: (block[v], 0)
    )
    interpret = device.platform() == "cpu"
    return pl.pallas_call(
        functools.partial(_kernel, precision=_precision(spec)),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(visits.block.shape[0], tiles),
            in_specs=[
                by_block,
                pl.BlockSpec(tile, lambda v, j, _, expert, *__: (expert[v], 0, j)),
                pl.BlockSpec(
                    tile, lambda v, j, _, expert, *__: (expert[v], 0, tiles + j)
                ),
                pl.BlockSpec(
                    (None, columns, spec.hidden),
                    lambda v, j, _, expert, *__: (expert[v], j, 0),
                ),
            ],
            out_specs=by_block,
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        interpret=interpret,
        compiler_params=None
        if interpret
        else pallas_tpu.CompilerParams(vmem_limit_bytes=MOST_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.pairs * spec.inner,
        ),
        name="grouped_matmul",
    )(*visits, rows, gate_up, gate_up, down)


def _kernel(
    block, expert, start, end, rows, gate, up, down, output, *, precision
):  # fmt: skip
    visit, tile = pl.program_id(0), pl.program_id(1)
    before = block[jnp.maximum(visit - 1, 0)]

    @pl.when((tile == 0) & ((visit == 0) | (block[visit] != before)))
    def _():
        output[...] = jnp.zeros_like(output)

    @pl.when(end[visit] > start[visit])
    def _():
        def product(a, b):
            return lax.dot_general(
                a,
                b,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        left = rows[...]
        gates = product(left, gate[...])
        inner = gates * jax.nn.sigmoid(gates) * product(left, up[...])
        result = product(inner.astype(down.dtype), down[...])
        row = lax.broadcasted_iota(jnp.int32, result.shape, 0)
        mine = (row >= start[visit]) & (row < end[visit])
        output[...] += jnp.where(mine, result, 0.0)


def _precision(spec):
    # HIGHEST is refused for bfloat16 operands, whose products are exact anyway.
    return lax.Precision.HIGHEST if spec.input_dtype == "float32" else None
