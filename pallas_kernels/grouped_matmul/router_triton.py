"""The best experts of every token in Pallas Triton kernels for NVIDIA GPUs.

XLA would take a softmax, a sort, slices and a second softmax, each a launch. Here a
warp takes a token, and its choices follow each other as maxima over all experts. It
also adds up the parts of the logits: those of few tokens are products too short to
fill the device, so each program of `_scores` sums over a part of the hidden channels.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import dots, gpu, refusals
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import reference, router, routes

# The program holds a number an expert in its registers, and repeats itself a choice.
MOST_EXPERTS = 1024
MOST_CHOICES = 32
WARPS = 1
# Of more tokens XLA computes the logits. Experts that a program takes, channels that
# it reads at a time, parts of the sum; warps, and tiles that are loaded ahead.
MOST_TOKENS = 64
COLUMNS, DEPTH, PARTS = 32, 128, 8
OPTIONS = (4, 2)
LEAST_TILE = 16


def supports(
    spec: router.Spec, platform: str, *, interpret: bool = False
) -> str | None:
    """Return why the kernels cannot run this call, or None.

    `interpret` also accepts a CPU, where they are interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.above(spec, MOST_EXPERTS, "experts")
        or refusals.above(spec, MOST_CHOICES, "per_token")
        or refusals.not_multiple(spec, LEAST_TILE, "hidden")
        or refusals.dtypes(spec, "input")
    )


def route(
    x: Float[Array, "T H"], weight: Float[Array, "E H"], *, spec: router.Spec
) -> tuple[Float[Array, "T K"], Int[Array, "T k"]]:
    """Return weights and experts; interpreted where the target is a CPU."""
    if spec.tokens > MOST_TOKENS:
        return route_top_k(reference.scores(x, weight), spec=spec)
    return _top_k(_scores(x, weight, spec=spec), spec=spec)


def route_top_k(
    logits: Float[Array, "T E"], *, spec: router.Spec
) -> tuple[Float[Array, "T K"], Int[Array, "T k"]]:
    """Return weights and experts; interpreted where the target is a CPU."""
    return _top_k(logits[None], spec=spec)


def _scores(x, weight, *, spec):
    """Return the logits [P, T, E], each part summed over some of the channels."""
    depth = configs.divisor(spec.hidden, DEPTH)
    parts = configs.divisor(spec.hidden // depth, PARTS)
    [logits] = routes.launch(
        functools.partial(_scores_kernel, spec=spec, depth=depth, parts=parts),
        name="grouped_matmul_scores",
        grid=(pl.cdiv(spec.columns, COLUMNS), parts),
        inputs=[(x, x.shape), (weight, weight.shape)],
        outputs=[((parts, spec.tokens, spec.columns), jnp.float32)],
        options=OPTIONS,
    )
    return logits


def _scores_kernel(x, weight, logits, *, spec, depth, parts):
    part, tokens = pl.program_id(1), gpu.power_of_two(spec.tokens)
    expert = pl.program_id(0) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
    token = lax.iota(jnp.int32, tokens)
    steps = spec.hidden // depth // parts

    def step(i, total):
        first = (part * steps + i) * depth
        left = _rows(weight, expert, spec.columns, first, depth)
        right = _rows(x, token, spec.tokens, first, depth)
        return total + dots.dot(dots.split(left, 3), dots.split(right, 3), 1, 1)

    zero = jnp.zeros((COLUMNS, tokens), jnp.float32)
    total = lax.fori_loop(0, steps, step, zero)
    row = lax.broadcast_in_dim(token, total.shape, (1,))
    column = lax.broadcast_in_dim(expert, total.shape, (0,))
    written = (row < spec.tokens) & (column < spec.columns)
    # The interpreter drops rows beyond the end; a GPU does not touch masked ones.
    row = jnp.where(written, row, spec.tokens)
    gpu.store(logits.at[jnp.full_like(row, part), row, column], total, written)


def _rows(ref, row, count, first, depth):
    """Read `depth` channels of rows; those beyond `count` are 0."""
    shape = (row.shape[0], depth)
    row = lax.broadcast_in_dim(row, shape, (0,))
    channel = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    return gpu.load(ref.at[row, channel], row < count)


def _top_k(logits, *, spec):
    """Return weights and experts by logits in parts, [P, T, E]."""
    weights, experts = routes.launch(
        functools.partial(_top_k_kernel, spec=spec),
        name="grouped_matmul_top_k",
        grid=(spec.tokens,),
        inputs=[(logits, logits.shape)],
        outputs=[
            ((spec.tokens, spec.weights), jnp.float32),
            ((spec.tokens, spec.per_token), jnp.int32),
        ],
        options=(WARPS, 1),
    )
    return weights, experts


def _top_k_kernel(logits, weights, experts, *, spec):
    token = pl.program_id(0)
    expert = lax.iota(jnp.int32, gpu.power_of_two(spec.experts))
    known = expert < spec.experts
    parts = range(logits.shape[0])
    # No 0 is added: that would take the sign of -0 and of NaN.
    row = functools.reduce(
        jnp.add,
        (
            gpu.load(logits.at[part, token, expert], known).astype(jnp.float32)
            for part in parts
        ),
    )
    choice = lax.iota(jnp.int32, gpu.power_of_two(spec.weights))
    best, chosen = _choose(row, known, choice, spec.per_token)
    weight = jnp.exp(best - jnp.max(best))
    weight = weight / jnp.sum(weight)
    if spec.shared:
        gate = sum(
            logits[part, token, spec.experts].astype(jnp.float32) for part in parts
        )
        weight = jnp.where(choice == spec.per_token, 1 / (1 + jnp.exp(-gate)), weight)
    _store_row(weights, token, choice, weight, spec.weights)
    _store_row(experts, token, choice, chosen, spec.per_token)


def _choose(row, known, choice, count):
    """Return logits and numbers of the best experts, in the places of `choice`.

    Logits in places behind the last one are -inf.
    """
    least = jnp.iinfo(jnp.int32).min
    expert = lax.iota(jnp.int32, row.shape[0])
    keys = jnp.where(known, jnp.maximum(_order(row), least + 1), least)
    best = jnp.full(choice.shape, -jnp.inf, jnp.float32)
    chosen = jnp.zeros(choice.shape, jnp.int32)
    for k in range(count):
        found = lax.argmax(keys, 0, jnp.int32)
        value = jnp.sum(jnp.where(expert == found, row, 0.0))
        best = jnp.where(choice == k, value, best)
        chosen = jnp.where(choice == k, found, chosen)
        keys = jnp.where(expert == found, least, keys)
    return best, chosen


def _order(x):
    """Return integers in the order of `lax.top_k`: -NaN, -inf, ..., -0, 0, ..., NaN."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _store_row(ref, token, column, value, count):
    # The interpreter drops columns beyond the end; a GPU does not touch masked ones.
    written = column < count
    gpu.store(ref.at[token, jnp.where(written, column, ref.shape[1])], value, written)
