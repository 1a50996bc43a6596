"""Tree attention as a Pallas kernel for TPUs (Mosaic).

The grid walks over the blocks of a row's prefix. The block after the last filled one
is that block again, which costs no copy, so what lies beyond the length is not read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.tree_attention import config as configs
from pallas_kernels.tree_attention import spec as specs

# Bounded by the vector memory: sums of all query rows of a batch row lie there.
MOST_BYTES = 4 * 2**20
# Below every score of finite inputs, and finite: differences with it are no NaN.
LOWEST = -1e30


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 128, "head_dim")
        or _too_large(spec)
        or refusals.dtypes(spec, "input", "prefix", "node")
    )


def _too_large(spec: specs.Spec) -> str | None:
    held = 4 * spec.kv_heads * _padded(spec.rows) * spec.head_dim
    if held > MOST_BYTES:
        return f"keeps {held} bytes of sums a batch row; {MOST_BYTES} fit"
    return None


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
    from jax.experimental.pallas import tpu as pallas_tpu

    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    size, rows = config.block_slots, _padded(spec.rows)
    packed, seen, node_k, node_v = _head_major(q, nodes, mask, spec, rows)

    def block(b, i, length):
        return b, jnp.minimum(i, jnp.maximum(pl.cdiv(length[b], size) - 1, 0)), 0, 0

    def whole(array):
        rest = array.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, *_: (b, *(0,) * len(rest)))

    slot = pl.BlockSpec((None, size, spec.kv_heads, spec.head_dim), block)
    column = pallas_tpu.VMEM((spec.kv_heads, rows, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, spec=spec, size=size),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(spec.batch, pl.cdiv(spec.slots, size)),
            in_specs=[whole(packed), slot, slot]
            + [whole(x) for x in (node_k, node_v, seen)],
            out_specs=whole(packed),
            scratch_shapes=[
                column,
                column,
                pallas_tpu.VMEM(packed.shape[1:], jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        interpret=platform == "cpu",
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.flops // (4 * spec.head_dim),
        ),
        name="tree_attention",
    )(length.astype(jnp.int32), packed, *prefix, node_k, node_v, seen)
    out = out[:, :, : spec.rows].reshape(
        spec.batch, spec.kv_heads, spec.queries, spec.group, spec.head_dim
    )
    return jnp.moveaxis(out, 1, 2).reshape(q.shape)


def _padded(rows: int) -> int:
    """Return the next multiple of 16, the rows of a bfloat16 tile."""
    return -(-rows // 16) * 16


def _head_major(q, nodes, mask, spec, rows):
    """Return q [B, kv, rows, D], mask [B, rows, n], node keys and values [B, kv, n, D].

    Rows and nodes are padded; values of nodes that nobody sees are zero.
    """
    q = q.reshape(spec.batch, spec.queries, spec.kv_heads, spec.group, spec.head_dim)
    q = jnp.moveaxis(q, 1, 2).reshape(
        spec.batch, spec.kv_heads, spec.rows, spec.head_dim
    )
    more = _padded(spec.nodes) - spec.nodes
    seen = jnp.repeat(mask.astype(jnp.int32), spec.group, axis=1)
    used = jnp.any(mask, axis=1)[..., None, None]
    k, v = nodes[0], jnp.where(used, nodes[1], 0)
    k, v = (
        jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, more), (0, 0)))
        for x in (k, v)
    )
    below = rows - spec.rows
    q = jnp.pad(q, ((0, 0), (0, 0), (0, below), (0, 0)))
    return q, jnp.pad(seen, ((0, 0), (0, below), (0, more))), k, v


def _kernel(
    length, q, k, v, node_k, node_v, seen, output, maximum, total, mixed, *, spec, size
):
    b, i = pl.program_id(0), pl.program_id(1)
    filled = length[b]

    @pl.when(i == 0)
    def _():
        maximum[...] = jnp.full(maximum.shape, LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    def attend(head, keys, values, visible):
        scores = _dot(q[head], keys, 1) * spec.head_dim**-0.5
        scores = jnp.where(visible, scores, -jnp.inf)
        before = maximum[head]
        raised = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, scale = jnp.exp(scores - raised), jnp.exp(before - raised)
        maximum[head] = raised
        total[head] = total[head] * scale + jnp.sum(weights, axis=1, keepdims=True)
        weights = weights.astype(q.dtype)
        mixed[head] = mixed[head] * scale + _dot(weights, values, 0)

    @pl.when(i * size < filled)
    def _():
        left = filled - i * size
        there = lax.broadcasted_iota(jnp.int32, (size, spec.head_dim), 0) < left
        visible = lax.broadcasted_iota(jnp.int32, (q.shape[1], size), 1) < left
        for head in range(spec.kv_heads):
            values = jnp.where(there, v[:, head, :], jnp.zeros((), v.dtype))
            attend(head, k[:, head, :], values, visible)

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        for head in range(spec.kv_heads):
            attend(head, node_k[head], node_v[head], seen[...] != 0)
            sums = total[head]
            output[head] = (mixed[head] / jnp.where(sums > 0, sums, 1.0)).astype(
                output.dtype
            )


def _dot(a, b, b_axis: int):
    """Contract the last axis of `a` in float32; products of bfloat16 are exact."""
    precision = None
    if not a.dtype == b.dtype == jnp.bfloat16:
        a, b, precision = (
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            lax.Precision.HIGHEST,
        )
    return lax.dot_general(
        a,
        b,
        (((1,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
