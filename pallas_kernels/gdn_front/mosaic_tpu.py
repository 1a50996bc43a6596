"""The front as a Pallas kernel for TPUs (Mosaic).

A program takes one row of the batch. [window; rows] is laid out in vector memory only,
where single rows are read by number.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.gdn_front import config as configs
from pallas_kernels.gdn_front import reference
from pallas_kernels.gdn_front import spec as specs

LANES = 128
# Float32 copies of the rows and their mixtures, and blocks of the arrays themselves.
MOST_ELEMENTS = 1 << 19


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, *specs.dims(spec))
        or _too_large(spec)
        or specs.unsupported_width(spec)
        or refusals.dtypes(spec, "rows", "window", "gate")
    )


def _too_large(spec: specs.Spec) -> str | None:
    if spec.nodes * spec.channels > MOST_ELEMENTS:
        return (
            f"takes at most {MOST_ELEMENTS} elements a row of the batch, not "
            f"{spec.nodes} x {spec.channels}"
        )
    return None


def gdn_front(
    rows: Float[Array, "B n columns"],
    window: Float[Array, "B W1 C"],
    taps: Float[Array, "C W"],
    log_rate: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    windows: Int[Array, "B n W"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return q, k, v and the gates of every node (see `op.gdn_front`)."""
    from jax.experimental.pallas import tpu as pallas_tpu

    del config  # one cut
    numbers = pl.BlockSpec(
        (None, *windows.shape[1:]), lambda i: (i, 0, 0), memory_space=pallas_tpu.SMEM
    )
    inputs = spec.width - 1 + spec.nodes
    q, k, v, *gates = _call(
        _front_kernel,
        (windows, rows, window, taps.T, log_rate[None], dt_bias[None]),
        [spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim],
        spec=spec,
        first=[numbers, _leading_columns(rows, spec.columns)],
        scratch=[
            pallas_tpu.VMEM((count, spec.channels), jnp.float32)
            for count in (inputs, spec.nodes)
        ],
    )
    keys = (spec.batch, spec.nodes, spec.key_heads, spec.key_dim)
    values = (spec.batch, spec.nodes, spec.value_heads, spec.value_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(values), *gates


def normalize_and_gate(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    a: Float[Array, "B n Hv"],
    b: Float[Array, "B n Hv"],
    log_rate: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return normalised q and k and the gates (see `op.normalize_and_gate`)."""
    del config  # one cut
    size = spec.key_heads * spec.key_dim
    flat = [x.reshape(spec.batch, spec.nodes, size) for x in (q, k)]
    new_q, new_k, *gates = _call(
        _heads_kernel,
        (*flat, a, b, log_rate[None], dt_bias[None]),
        [size, size],
        spec=spec,
    )
    return new_q.reshape(q.shape), new_k.reshape(k.shape), *gates


def _call(kernel, arrays, sizes, *, spec, first=(), scratch=()):
    """Run over the batch; `sizes` are the columns of the results before the gates.

    `first` are the blocks of the first arrays, where those are no whole rows.
    """
    rows = (spec.batch, spec.nodes)
    results = [jax.ShapeDtypeStruct((*rows, x), spec.rows_dtype) for x in sizes]
    gates = jax.ShapeDtypeStruct((*rows, spec.value_heads), jnp.float32)
    results += [gates, gates]
    blocks = [*first, *(_block(x) for x in arrays[len(first) :])]
    return pl.pallas_call(
        functools.partial(kernel, spec=spec),
        grid=(spec.batch,),
        in_specs=blocks,
        out_specs=[_block(x) for x in results],
        out_shape=results,
        scratch_shapes=list(scratch),
        interpret=device.platform() == "cpu",
        name="gdn_front",
    )(*arrays)


def _block(array) -> pl.BlockSpec:
    """Return one row of the batch of an array [B, n, x], all of a parameter."""
    if array.ndim == 2:
        return pl.BlockSpec(array.shape, lambda i: (0, 0))
    return pl.BlockSpec((None, *array.shape[1:]), lambda i: (i, 0, 0))


def _leading_columns(array, columns: int) -> pl.BlockSpec:
    """Return one row of the batch of an array [B, n, x] up to some column or beyond.

    What is copied of an array are whole lanes, or all of it.
    """
    size = min(array.shape[-1], pl.cdiv(columns, LANES) * LANES)
    return pl.BlockSpec((None, array.shape[1], size), lambda i: (i, 0, 0))


def _front_kernel(
    windows, rows, window, taps, log_rate, dt_bias,
    q, k, v, log_decay, beta, inputs, mixed, *, spec,
):  # fmt: skip
    old = spec.width - 1
    inputs[:old] = window[...].astype(rows.dtype).astype(jnp.float32)
    inputs[old:] = rows[:, : spec.channels].astype(jnp.float32)

    def mix(node, nothing):
        total = jnp.zeros((1, spec.channels), jnp.float32)
        for w in range(spec.width):
            number = jnp.clip(windows[node, w], 0, old + spec.nodes - 1)
            row = inputs[pl.ds(number, 1), :]
            total += row * taps[w : w + 1, :].astype(jnp.float32)
        mixed[pl.ds(node, 1), :] = total * _sigmoid(total)
        return nothing

    lax.fori_loop(0, spec.nodes, mix, None)
    size = spec.key_heads * spec.key_dim
    _normalize(mixed, 0, q, spec.key_dim**-0.5, spec)
    _normalize(mixed, size, k, 1.0, spec)
    v[...] = mixed[:, 2 * size :].astype(v.dtype)
    gates = rows[:, spec.channels : spec.columns]
    b, a = gates[:, : spec.value_heads], gates[:, spec.value_heads :]
    _gates(a, b, log_rate, dt_bias, log_decay, beta)


def _heads_kernel(q_in, k_in, a, b, log_rate, dt_bias, q, k, log_decay, beta, *, spec):
    _normalize(q_in, 0, q, spec.key_dim**-0.5, spec)
    _normalize(k_in, 0, k, 1.0, spec)
    _gates(a, b, log_rate, dt_bias, log_decay, beta)


def _normalize(rows, offset: int, result, scale: float, spec: specs.Spec) -> None:
    """Write columns from `offset` on to `result`, each head of length `scale`."""
    for head in range(spec.key_heads):
        begin = head * spec.key_dim
        end = begin + spec.key_dim
        x = rows[:, offset + begin : offset + end].astype(jnp.float32)
        square = jnp.sum(x * x, axis=1, keepdims=True)
        unit_length = x * lax.rsqrt(square + reference.EPSILON)
        result[:, begin:end] = (unit_length * scale).astype(result.dtype)


def _gates(a, b, log_rate, dt_bias, log_decay, beta) -> None:
    x = a[...].astype(jnp.float32) + dt_bias[...].astype(jnp.float32)
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    log_decay[...] = -jnp.exp(log_rate[...].astype(jnp.float32)) * softplus
    beta[...] = _sigmoid(b[...].astype(jnp.float32))


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))
