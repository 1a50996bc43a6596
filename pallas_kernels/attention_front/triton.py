"""The attention front as one Pallas Triton kernel for NVIDIA GPUs.

A program takes some heads of one row, of q, k or v. Angles are computed where they are
needed: libdevice's cos and sin reduce large arguments exactly.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.attention_front import config as configs
from pallas_kernels.attention_front import reference
from pallas_kernels.attention_front import spec as specs

float32 = jnp.float32


class Part(NamedTuple):
    """Some heads of a row: where they are read and written, and with what gain.

    Head h is row `first + h * step` of a [rows, places, D] array. No weight: copied.
    """

    source: Any
    first: int
    step: int
    weight: Any
    result: Any
    heads: int


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 8, "head_dim")
        or refusals.not_power_of_two(spec, 2, "rotary_dim")
        or refusals.dtypes(spec, "rows", "weight")
    )


def attention_front(
    q_and_gate: Float[Array, "B T gated"],
    k: Float[Array, "B T columns"],
    v: Float[Array, "B T columns"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, "B T"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array]:
    """Return q, k and v by head (see `op.attention_front`).

    XLA makes one product of the three projections, and would cut it into three arrays
    for a kernel. So that takes the product itself, and copies v out of it.
    """
    platform, device_kind = device.target()
    config = configs.choose(spec, device_kind, config)
    interpret = platform == "cpu"
    counts = (spec.heads, spec.kv_heads, spec.kv_heads)
    outputs = pl.pallas_call(
        functools.partial(_kernel, spec=spec, config=config),
        grid=(sum(n // configs.block(n, config) for n in counts), spec.rows),
        out_shape=[
            jax.ShapeDtypeStruct((spec.rows, n, spec.head_dim), spec.rows_dtype)
            for n in counts
        ],
        interpret=interpret,
        compiler_params=None if interpret else gpu.compiler_params(config.num_warps, 1),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.rows * spec.rotary_dim,
        ),
        name="attention_front",
    )(
        _join(q_and_gate, k, v).reshape(spec.rows, -1, spec.head_dim),
        positions.reshape(-1),
        reference.frequencies(spec),
        q_weight,
        k_weight,
    )
    return tuple(x.reshape(spec.batch, spec.tokens, *x.shape[1:]) for x in outputs)


def _join(*columns: Float[Array, "B T _"]) -> Float[Array, "..."]:
    """Put columns side by side, in the shape of XLA's product: without sizes of 1.

    In that shape XLA sees that they are the columns of one product, and copies nothing
    (but for a single row that was cut out of a product).
    """
    rows = [size for size in columns[0].shape[:2] if size > 1] or [1]
    return jnp.concatenate([x.reshape(*rows, x.shape[-1]) for x in columns], axis=-1)


def _kernel(rows, positions, frequency, q_weight, k_weight, q, k, v, *, spec, config):
    """Do what this program has to do: a block of heads of q, k or v."""
    keys = 2 * spec.heads
    parts = [
        Part(rows, 0, 2, q_weight, q, spec.heads),
        Part(rows, keys, 1, k_weight, k, spec.kv_heads),
        Part(rows, keys + spec.kv_heads, 1, None, v, spec.kv_heads),
    ]
    unit, row = pl.program_id(0), pl.program_id(1)
    begin = 0
    for part in parts:
        size = configs.block(part.heads, config)
        end = begin + part.heads // size

        @pl.when((unit >= begin) & (unit < end))
        def _(part=part, size=size, begin=begin):
            head = (unit - begin) * size + lax.iota(jnp.int32, size)
            if part.weight is None:
                _copy(part, row, head, spec)
            else:
                _turn(part, row, head, positions, frequency, spec)

        begin = end


def _copy(part: Part, row, head, spec) -> None:
    read, write = _access(part, row, head)
    channel = lax.iota(jnp.int32, spec.head_dim)
    write(channel, read(channel))


def _turn(part: Part, row, head, positions, frequency, spec) -> None:
    """Normalise heads and rotate their first channels."""
    read, write = _access(part, row, head)
    half = spec.rotary_dim // 2
    channel, pair = lax.iota(jnp.int32, spec.head_dim), lax.iota(jnp.int32, half)
    whole = read(channel)
    # Halves of the rotated channels once more: there are no slices in a kernel.
    first, second = read(pair), read(half + pair)
    angle = positions[row].astype(float32) * frequency[...]
    cos, sin = (_rounded(f(angle), whole.dtype)[None] for f in (jnp.cos, jnp.sin))
    square = jnp.sum(whole.astype(float32) ** 2, axis=1, keepdims=True)
    inverse = lax.rsqrt(square / spec.head_dim + spec.eps)

    def normed(x, channel):
        gain = 1.0 + gpu.load(part.weight.at[channel]).astype(float32)
        return _rounded(x.astype(float32) * inverse * gain[None], x.dtype)

    def turned(x, y):
        """Return x cos + y sin."""
        return _rounded(x * cos, whole.dtype) + _rounded(y * sin, whole.dtype)

    first, second = normed(first, pair), normed(second, half + pair)
    write(channel, normed(whole, channel), channel >= spec.rotary_dim)
    write(pair, turned(first, -second))
    write(half + pair, turned(second, first))


def _access(part: Part, row, head) -> tuple[Callable, Callable]:
    """Return functions that read and write channels of some heads of a row."""

    def places(first, step, channel):
        shape = (head.shape[0], channel.shape[0])
        place = lax.broadcast_in_dim(first + step * head, shape, (0,))
        return row, place, lax.broadcast_in_dim(channel, shape, (1,))

    def read(channel):
        return gpu.load(part.source.at[places(part.first, part.step, channel)])

    def write(channel, value, mask=None):
        if mask is not None:
            mask = lax.broadcast_in_dim(mask, value.shape, (1,))
        gpu.store(part.result.at[places(0, 1, channel)], value, mask)

    return read, write


def _rounded(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
    """Round float32 to the numbers of `dtype`."""
    return x.astype(dtype).astype(float32)
