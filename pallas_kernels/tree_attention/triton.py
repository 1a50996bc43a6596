"""Tree attention as Pallas Triton kernels for NVIDIA GPUs.

A program holds query rows that share a key head: nodes times the query heads of its
group. It walks over the filled slots of the prefix in blocks, with a running maximum
and sum (flash attention, Dao 2023, arXiv 2307.08691), and then over the tree. Where
that makes too few programs, several share a prefix and a second kernel joins them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.tree_attention import config as configs
from pallas_kernels.tree_attention import spec as specs

# Bounded by the registers of the sums: [block_rows, D] in float32.
MOST_HEAD_DIM = 256
# Below every score of finite inputs, and finite: differences with it are no NaN.
LOWEST = -1e30
LOG2_E = 1.4426950408889634
# Parts of a float32 operand (see dots.py): errors of scores are magnified by the
# softmax, so q and k keep all digits; weights and v keep 16 bits, 5e-6 in the output.
SCORE_PARTS = 3
VALUE_PARTS = 2
# Elements of partial sums that a program of the joining kernel holds.
JOINED = 8192


class Rows(NamedTuple):
    """The query rows of a program and where they lie in q seen as [B, m heads, D]."""

    batch: Int[Array, ""]
    head: Int[Array, ""]
    node: Int[Array, " rows"]
    real: Bool[Array, " rows"]
    place: tuple[Int[Array, "rows 1"], Int[Array, "rows D"]]
    mask: Bool[Array, "rows D"]


class Sums(NamedTuple):
    """What is kept of the slots seen so far; scores s count in powers of two.

    maximum of s; total = sum 2^(s - maximum); mixed = sum 2^(s - maximum) v.
    """

    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    mixed: Float[Array, "rows D"]


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 16, "head_dim")
        or refusals.above(spec, MOST_HEAD_DIM, "head_dim")
        or refusals.dtypes(spec, "input", "prefix", "node")
    )


def tree_attention(
    q: Float[Array, "B m heads D"],
    prefix: tuple[Float[Array, "B S kv D"], Float[Array, "B S kv D"]],
    nodes: tuple[Float[Array, "B n kv D"], Float[Array, "B n kv D"]],
    length: Int[Array, " B"],
    mask: Bool[Array, "B m n"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "B m heads D"]:
    """Attend as the reference does; interpreted where the target is a CPU."""
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    flat = (spec.batch, spec.queries * spec.heads, spec.head_dim)
    output = jax.ShapeDtypeStruct(flat, q.dtype)
    queries = _parts(q.reshape(flat))
    split = config.splits > 1
    found = _call(
        functools.partial(_kernel, spec=spec, config=config, parts=len(queries)),
        (*queries, length.astype(jnp.int32), *prefix, *nodes, mask),
        grid=(
            pl.cdiv(spec.rows, config.block_rows),
            config.splits,
            spec.batch * spec.kv_heads,
        ),
        out_shape=_partial_sums(spec, config) if split else [output],
        options=(config.num_warps, config.num_stages),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.flops // (4 * spec.head_dim),
        ),
        name="tree_attention",
    )
    if split:
        found = _join(found, output, spec=spec, config=config, interpret=interpret)
    return found[0].reshape(q.shape)


def _parts(q) -> dots.Parts:
    """Split q as dots.split does, outside of a kernel.

    XLA takes float32(bfloat16(x)) for x, so that every part but the first would be
    zero; it does not touch reduce_precision.
    """
    if q.dtype == jnp.bfloat16:
        return (q,)
    parts = []
    for _ in range(SCORE_PARTS):
        parts.append(lax.reduce_precision(q, exponent_bits=8, mantissa_bits=7))
        q = q - parts[-1]
    return tuple(part.astype(jnp.bfloat16) for part in parts)


def _call(kernel, arrays, *, options, interpret, out_shape, **rest) -> Sequence[Array]:
    """Run a kernel that gets whole arrays and reads what it needs of them."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        in_specs=[anywhere] * len(arrays),
        out_specs=[anywhere] * len(out_shape),
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=None if interpret else gpu.compiler_params(*options),
        **rest,
    )(*arrays)


def _kernel(*refs, spec, config, parts):
    queries, (length, k, v, node_k, node_v, mask) = refs[:parts], refs[parts:][:6]
    outputs = refs[parts + 6 :]
    split, pair = pl.program_id(1), pl.program_id(2)
    rows = _rows(pl.program_id(0), pair, config.block_rows, spec)
    q = tuple(gpu.load(x.at[rows.batch, *rows.place], rows.mask) for x in queries)
    filled = jnp.minimum(length[rows.batch], spec.slots)
    sums = Sums(
        jnp.full(rows.node.shape, LOWEST, jnp.float32),
        jnp.zeros(rows.node.shape, jnp.float32),
        jnp.zeros(rows.mask.shape, jnp.float32),
    )
    over_nodes = functools.partial(
        _over_nodes, q, (node_k, node_v), mask, rows, spec, _node_block(spec, config)
    )
    here = pl.ds(pl.program_id(0) * config.block_rows, config.block_rows)
    if config.splits == 1:
        place = outputs[0].at[rows.batch, rows.place[0][:, 0], rows.node * 0]
    else:
        place = outputs[0].at[split, pair, here]
    finish = functools.partial(_finish, place)
    sums = _over_prefix(sums, q, (k, v), rows, filled, split, finish, spec, config)
    sums = _last_share(over_nodes, sums, split, filled, spec, config)
    if config.splits == 1:
        result = sums.mixed / _nonzero(sums.total)[:, None]
        gpu.store(outputs[0].at[rows.batch, *rows.place], result, rows.mask)
        return
    maximum, total, mixed = outputs
    gpu.store(maximum.at[split, pair, here], sums.maximum, rows.real)
    gpu.store(total.at[split, pair, here], sums.total, rows.real)
    gpu.store(mixed.at[split, pair, here, :], sums.mixed, rows.mask)


def _rows(block, pair, size, spec) -> Rows:
    """Locate the rows [block size, ...) of a pair (batch row, key head)."""
    head = lax.rem(pair, spec.kv_heads)
    row = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
    node, real = lax.div(row, spec.group), row < spec.rows
    place = node * spec.heads + head * spec.group + lax.rem(row, spec.group)
    shape = (size, spec.head_dim)
    return Rows(
        batch=lax.div(pair, spec.kv_heads),
        head=head,
        node=node,
        real=real,
        place=(place[:, None], lax.broadcasted_iota(jnp.int32, shape, 1)),
        mask=jnp.broadcast_to(real[:, None], shape),
    )


def _node_block(spec, config) -> int:
    """Return how many nodes are taken at a time."""
    return min(config.block_slots, gpu.power_of_two(spec.nodes))


def _over_nodes(q, nodes, mask, rows, spec, size, i, sums) -> Sums:
    """Add the i-th block of nodes, each row's own by the mask."""
    shape, block = (rows.node.shape[0], size), (size, spec.head_dim)
    column = i * size + lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = (column < spec.nodes) & rows.real[:, None]
    seen = gpu.load(mask.at[rows.batch, rows.node[:, None], column], inside) != 0
    there = gpu.row_mask(block, spec.nodes - i * size)
    here = rows.batch, pl.ds(i * size, size), rows.head, slice(None)
    keys, values = (gpu.load(ref.at[here], there) for ref in nodes)
    used = jnp.max(seen.astype(jnp.int32), axis=0) > 0
    values = jnp.where(used[:, None], values, jnp.zeros((), values.dtype))
    scores = dots.dot(q, dots.split(keys, SCORE_PARTS), 1, 1)
    return _mix(*_weigh(scores, seen, sums, spec), values, spec)


def _last_share(step: Callable, sums: Sums, split, filled, spec, config) -> Sums:
    """Run `step` over all blocks of nodes, in the last of the splits."""
    blocks = pl.cdiv(spec.nodes, _node_block(spec, config))
    if blocks > 1:
        stop = jnp.where(split == config.splits - 1, jnp.int32(blocks), jnp.int32(0))
        return lax.fori_loop(0, stop, step, sums)
    # A branch also where there is no choice, since only behind one Triton gives the
    # shared memory back: a condition that always holds, but not for the compiler.
    mine = (split == config.splits - 1) & (filled >= 0)
    return lax.cond(mine, lambda s: step(jnp.int32(0), s), lambda s: s, sums)


def _finish(place, total) -> None:
    """Make the compiler finish a softmax here: a store that never happens needs it.

    Otherwise it moves the wait for the next block above the softmax, and the two take
    turns. A total is never negative.
    """
    gpu.store(place, total, total < 0)


def _over_prefix(sums, q, prefix, rows, filled, split, finish, spec, config) -> Sums:
    """Add this split's share of the filled slots, block by block.

    With `overlap` the scores of a block are made before they are needed, so that its
    softmax runs beside two other things: the product of the block before with its
    values, which Triton leaves to the tensor cores, and the loads of the next block.
    """
    size = config.block_slots
    blocks = lax.div(filled + (size - 1), size)
    each = lax.div(blocks + (config.splits - 1), config.splits)
    first = split * each
    last = jnp.minimum(first + each, blocks)
    stop = jnp.minimum(filled, last * size)

    def read(ref, i):
        there = gpu.row_mask((size, spec.head_dim), stop - i * size)
        return gpu.load(ref.at[rows.batch, pl.ds(i * size, size), rows.head, :], there)

    def score(i):
        return dots.dot(q, dots.split(read(prefix[0], i), SCORE_PARTS), 1, 1)

    def weigh(i, scores, sums):
        seen = gpu.row_mask(scores.shape, stop - i * size, axis=1)
        return _weigh(scores, seen, sums, spec)

    def plain(i, sums):
        return _mix(*weigh(i, score(i), sums), read(prefix[1], i), spec)

    def overlapped(i, carried):
        scores, sums = carried
        weighed = weigh(i, scores, sums)
        finish(weighed[0].total)
        scores = score(i + 1)
        return scores, _mix(*weighed, read(prefix[1], i), spec)

    if not config.overlap:
        return lax.fori_loop(first, last, plain, sums)
    carried = lax.fori_loop(first, last - 1, overlapped, (score(first), sums))
    last = jnp.maximum(last - 1, first)
    return _mix(*weigh(last, *carried), read(prefix[1], last), spec)


def _weigh(products, seen, sums: Sums, spec) -> tuple[Sums, Array, Array]:
    """Return raised maxima and totals, weights, and the scale that `mixed` lacks."""
    factor = spec.head_dim**-0.5 * LOG2_E
    scores = jnp.where(seen, products * factor, -jnp.inf)
    maximum = jnp.maximum(sums.maximum, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - maximum[:, None])
    scale = jnp.exp2(sums.maximum - maximum)
    total = sums.total * scale + jnp.sum(weights, axis=1)
    return Sums(maximum, total, sums.mixed), weights, scale


def _mix(sums: Sums, weights, scale, values, spec) -> Sums:
    """Scale what was summed and add weights times values, the smallest parts first."""
    one = spec.input_dtype == "bfloat16"
    weights = dots.split(weights, 1 if one else VALUE_PARTS)
    values = dots.split(values, VALUE_PARTS)
    mixed = sums.mixed * scale[:, None]
    pairs = [(a, b) for a in range(len(weights)) for b in range(len(values))]
    for a, b in sorted(pairs, key=sum, reverse=True):
        if a + b < VALUE_PARTS:  # a product of two second parts is lost anyway
            mixed = mixed + dots.dot((weights[a],), (values[b],), 1, 0)
    return sums._replace(mixed=mixed)


def _nonzero(total):
    """Return 1 for 0: a row that sees nothing gets zeros."""
    return jnp.where(total > 0, total, 1)


def _partial_sums(spec, config) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of maximum, total and mixed of all splits."""
    row = (config.splits, spec.batch * spec.kv_heads, spec.rows)
    shapes = (row, row, (*row, spec.head_dim))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _join(found, output, *, spec, config, interpret) -> Sequence[Array]:
    """Join the splits' sums: scale each to the common maximum and add."""
    block = max(1, JOINED // (config.splits * spec.head_dim))
    return _call(
        functools.partial(_join_kernel, spec=spec, splits=config.splits, block=block),
        found,
        grid=(pl.cdiv(spec.rows, block), spec.batch * spec.kv_heads),
        out_shape=[output],
        options=(4, 1),
        interpret=interpret,
        name="tree_attention_join",
    )


def _join_kernel(maximum, total, mixed, output, *, spec, splits, block):
    pair = pl.program_id(1)
    rows = _rows(pl.program_id(0), pair, block, spec)
    here = pl.ds(pl.program_id(0) * block, block)
    shape = (splits, block, spec.head_dim)
    real = jnp.broadcast_to(rows.real[None], shape[:2])
    maxima = gpu.load(maximum.at[:, pair, here], real)
    scale = jnp.exp2(maxima - jnp.max(maxima, axis=0)[None])
    sums = jnp.sum(gpu.load(total.at[:, pair, here], real) * scale, axis=0)
    parts = gpu.load(
        mixed.at[:, pair, here, :], jnp.broadcast_to(rows.real[None, :, None], shape)
    )
    result = jnp.sum(parts * scale[:, :, None], axis=0) / _nonzero(sums)[:, None]
    gpu.store(output.at[rows.batch, *rows.place], result, rows.mask)
