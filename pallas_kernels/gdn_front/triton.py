"""The front as one Pallas Triton kernel for NVIDIA GPUs.

A program takes a few heads' channels of q, k or v and a few nodes in turn; another
takes the gates of all heads. The rows of a node's conv window are read by their
numbers, so neither windows nor [window; rows] exist in memory; ancestors' rows that a
program reads again are in its own cache.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.gdn_front import config as configs
from pallas_kernels.gdn_front import reference
from pallas_kernels.gdn_front import spec as specs

float32 = jnp.float32

# Rows whose gates a program computes at once.
GATE_ROWS = 8


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 8, *specs.dims(spec))
        or specs.unsupported_width(spec)
        or refusals.dtypes(spec, "rows", "window", "gate")
    )


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
    keys = (spec.key_heads, spec.key_dim)
    return _call(
        _front_kernel,
        (*map(_flat, (rows, windows)), window, taps, log_rate, dt_bias),
        [keys, keys, (spec.value_heads, spec.value_dim)],
        heads=2 * spec.key_heads + spec.value_heads,
        spec=spec,
        config=config,
    )


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
    return _call(
        _heads_kernel,
        (*map(_flat, (q, k, a, b)), log_rate, dt_bias),
        [(spec.key_heads, spec.key_dim)] * 2,
        heads=2 * spec.key_heads,
        spec=spec,
        config=config,
    )


def _call(
    kernel: Callable, arrays: tuple, results: list, *, heads: int, spec, config
) -> tuple[Array, ...]:
    """Run over (the gates and blocks of heads, spans of rows).

    Rows are the nodes of all trees; `results` are the shapes of one row's, to which
    those of the gates are added.
    """
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    total = spec.batch * spec.nodes
    shapes = [jax.ShapeDtypeStruct((total, *x), spec.rows_dtype) for x in results]
    shapes += [jax.ShapeDtypeStruct((total, spec.value_heads), float32)] * 2
    outputs = pl.pallas_call(
        functools.partial(kernel, spec=spec, config=config),
        grid=(1 + heads // config.block_heads, pl.cdiv(total, config.span)),
        out_shape=shapes,
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=total * spec.channels,
        ),
        name="gdn_front",
    )(*arrays)
    return tuple(x.reshape(spec.batch, spec.nodes, *x.shape[1:]) for x in outputs)


def _flat(x: Array) -> Array:
    """Join batch and nodes."""
    return x.reshape(-1, *x.shape[2:])


def _front_kernel(
    rows, windows, window, taps, log_rate, dt_bias,
    q, k, v, log_decay, beta, *, spec, config,
):  # fmt: skip
    unit = pl.program_id(0)
    span = _span(spec, config)
    keys = spec.key_heads // config.block_heads

    def mix_each(offset, size, finish: Callable) -> None:
        """Mix the inputs of each row, of `size` channels from `offset`."""
        channels = pl.ds(offset, size)
        columns = _columns(taps, channels, spec.width)

        @functools.partial(_each, span)
        def _(row):
            total = None
            for w, column in enumerate(columns):
                x = _pick(rows, window, row, windows[row, w], channels, spec)
                total = x * column if w == 0 else _fused(x, column, total)
            finish(row, _silu(total))

    @pl.when((unit >= 1) & (unit <= 2 * keys))
    def _():
        size = config.block_heads * spec.key_dim

        def finish(row, x):
            x = x.reshape(config.block_heads, spec.key_dim)
            _store_keys(q, k, x, unit - 1, row, spec, config)

        mix_each((unit - 1) * size, size, finish)

    @pl.when(unit > 2 * keys)
    def _():
        size = config.block_heads * spec.value_dim
        block = unit - 1 - 2 * keys
        heads = pl.ds(block * config.block_heads, config.block_heads)

        def finish(row, x):
            x = x.reshape(config.block_heads, spec.value_dim)
            v[row, heads, :] = x.astype(v.dtype)

        mix_each(2 * spec.key_heads * spec.key_dim + block * size, size, finish)

    @pl.when(unit == 0)
    def _():
        b, a = (rows, spec.channels), (rows, spec.channels + spec.value_heads)
        _gates(a, b, log_rate, dt_bias, log_decay, beta, span, spec)


def _heads_kernel(
    q_in, k_in, a, b, log_rate, dt_bias, q, k, log_decay, beta, *, spec, config
):
    unit = pl.program_id(0)
    span = _span(spec, config)
    keys = spec.key_heads // config.block_heads

    @pl.when(unit > 0)
    def _():
        block = jnp.where(unit > keys, unit - 1 - keys, unit - 1)
        heads = pl.ds(block * config.block_heads, config.block_heads)

        @functools.partial(_each, span)
        def _(row):
            x = lax.cond(
                unit <= keys, lambda: q_in[row, heads, :], lambda: k_in[row, heads, :]
            )
            _store_keys(q, k, x.astype(float32), unit - 1, row, spec, config)

    @pl.when(unit == 0)
    def _():
        _gates((a, 0), (b, 0), log_rate, dt_bias, log_decay, beta, span, spec)


def _span(spec: specs.Spec, config: configs.Config) -> tuple[Array, Array]:
    """Return the first row of a program and the one behind its last."""
    first = pl.program_id(1) * config.span
    return first, jnp.minimum(first + config.span, spec.batch * spec.nodes)


def _each(span: tuple[Array, Array], visit: Callable) -> None:
    def step(row, nothing):
        visit(row)
        return nothing

    lax.fori_loop(*span, step, None)


def _columns(taps, channels, width: int) -> list[Float[Array, " C"]]:
    """Return the taps of some channels, an array for each place of the window."""
    if width & (width - 1):  # no size of a block
        return [taps[channels, w].astype(float32) for w in range(width)]
    # Taps of a channel are neighbours in memory: read them together, then sort.
    block = taps[channels, :].astype(float32)
    place = lax.broadcasted_iota(jnp.int32, block.shape, 1)
    return [jnp.sum(jnp.where(place == w, block, 0.0), axis=1) for w in range(width)]


def _pick(
    rows, window, row: Int[Array, ""], number: Int[Array, ""], channels, spec
) -> Float[Array, " C"]:
    """Read some channels of an input of `row` by its number in [window; rows]."""
    old = spec.width - 1
    number = jnp.clip(number, 0, old + spec.nodes - 1)
    tree = lax.div(row, jnp.int32(spec.nodes))
    x = lax.cond(
        number < old,
        lambda: window[tree, number, channels].astype(rows.dtype),
        lambda: rows[tree * spec.nodes + number - old, channels],
    )
    return _widen(x)


def _store_keys(q, k, x, block, row, spec, config) -> None:
    """Normalise a few heads of a row and write them to q, where also scaled, or k."""
    square = jnp.sum(x * x, axis=1, keepdims=True)
    inverse = lax.rsqrt(square + reference.EPSILON)
    blocks = spec.key_heads // config.block_heads

    @pl.when(block < blocks)
    def _():
        heads = pl.ds(block * config.block_heads, config.block_heads)
        q[row, heads, :] = (x * (inverse * spec.key_dim**-0.5)).astype(q.dtype)

    @pl.when(block >= blocks)
    def _():
        heads = pl.ds((block - blocks) * config.block_heads, config.block_heads)
        k[row, heads, :] = (x * inverse).astype(k.dtype)


def _gates(a, b, log_rate, dt_bias, log_decay, beta, span, spec) -> None:
    """Write the gates of all heads, a few rows at once.

    `a` and `b` are an array each and its column of the first head.
    """
    heads = gpu.power_of_two(spec.value_heads, least=1)
    shape = (GATE_ROWS, heads)
    head = lax.broadcasted_iota(jnp.int32, shape, 1)
    within = lax.broadcasted_iota(jnp.int32, shape, 0)
    exists = head < spec.value_heads
    rate = jnp.exp(gpu.load(log_rate.at[head], exists).astype(float32))
    bias = gpu.load(dt_bias.at[head], exists).astype(float32)
    first, last = span

    def raw(gate, row, mask):
        array, offset = gate
        return gpu.load(array.at[row, offset + head], mask).astype(float32)

    def step(block, nothing):
        row = first + block * GATE_ROWS + within
        mask = exists & (row < last)
        x = raw(a, row, mask) + bias
        softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        gpu.store(log_decay.at[row, head], -rate * softplus, mask)
        gpu.store(beta.at[row, head], _sigmoid(raw(b, row, mask)), mask)
        return nothing

    lax.fori_loop(0, pl.cdiv(last - first, GATE_ROWS), step, None)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _silu(x: Array) -> Array:
    """Return x sigmoid(x), to a few units in the last place of float32."""
    if device.platform() == "cpu":  # interpreted
        return x * _sigmoid(x)
    power = _instruction("ex2.approx.ftz.f32", x * -math.log2(math.e))
    return x * _instruction("rcp.approx.ftz.f32", 1.0 + power)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c in one instruction, which the compiler would not make of it."""
    if device.platform() == "cpu":  # interpreted
        return a * b + c
    return _instruction("fma.rn.f32", a, b, c)


def _widen(x: Array) -> Float[Array, "..."]:
    """Convert to float32; of bfloat16 pairs, each half with one instruction."""
    few = x.size < 256  # not a pair for every thread
    if x.dtype != jnp.bfloat16 or few or device.platform() == "cpu":
        return x.astype(float32)
    from jax.experimental.pallas import triton as pallas_triton

    (result,) = pallas_triton.elementwise_inline_asm(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        args=[x],
        constraints="=&r,=&r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, float32)],
    )
    return result


def _instruction(name: str, *operands: Array) -> Array:
    """Apply an instruction of PTX to each element of float32 arrays."""
    from jax.experimental.pallas import triton as pallas_triton

    operands = jnp.broadcast_arrays(*operands)
    places = ", ".join(f"${i}" for i in range(len(operands) + 1))
    (result,) = pallas_triton.elementwise_inline_asm(
        f"{name} {places};",
        args=operands,
        constraints=",".join(["=f", *("f" for _ in operands)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, float32)],
    )
    return result
