"""Workloads of attention_front: rows of an attention layer of Qwen3.5, by batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_front import config, op
from pallas_kernels.attention_front import spec as specs
from scripts.workloads import base, draw

# Query heads, key heads, D, R: Qwen3.5 35B-A3B, the tiny model, odd counts.
LARGE, TINY, ODD = (16, 2, 256, 64), (4, 2, 128, 32), (6, 3, 128, 128)
THETA, EPSILON = 1e7, 1e-6
POSITIONS = 262144
# Relative errors of q and k; v is copied.
BOUNDS = {"bfloat16": 5e-3, "float32": 2e-6}
COPIED = 1e-9
CONFIGS = tuple(
    config.Config(block_heads=heads, num_warps=warps)
    for heads, warps in (
        (1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4),
        (16, 2), (16, 4),
    )
)  # fmt: skip


def cases() -> list[base.Case]:
    """Return trees, single tokens and a prompt, then the tiny model, then odd sizes."""
    trees = [_case(batch, n, LARGE) for n in (1, 4, 15, 40) for batch in (1, 32, 256)]
    return [
        *trees,
        _case(8, 2048, LARGE),
        _case(8, 40, LARGE, "float32", ("compile",)),
        _case(1, 40, TINY, "float32", ("compile",)),
        _case(3, 7, TINY, "float32", ("small",)),
        _case(2, 1, LARGE, tags=("small",)),
        _case(1, 5, ODD, tags=("small",)),
    ]


def _case(
    batch: int,
    tokens: int,
    sizes: tuple[int, int, int, int],
    dtype: str = "bfloat16",
    tags: Sequence[str] = ("bench", "tune"),
) -> base.Case:
    heads, kv_heads, dim, rotary = sizes
    spec = specs.Spec(
        batch=batch,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        theta=THETA,
        eps=EPSILON,
        rows_dtype=dtype,
        weight_dtype=dtype,
        accumulation_dtype="float32",
    )
    compiled = "tune" in tags and (batch, tokens) in ((1, 4), (256, 40), (8, 2048))
    return base.Case(
        op="attention_front",
        label=f"T={tokens} B={batch} heads={heads} D={dim} {dtype}",
        kind=dtype,
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=functools.partial(call, spec),
        exact=functools.partial(exact, spec),
        bounds=(BOUNDS[dtype],) * 2 + (COPIED,),
        configs=CONFIGS,
        match=("batch", "tokens", "heads", "kv_heads", "head_dim"),
        tags=frozenset(tags) | ({"compile"} if compiled else set()),
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return rows, the weights of both norms, and positions up to the longest context.

    Rows are those of one product, as XLA makes it of a layer: q and gate, k, v.
    """
    columns = sum(_columns(spec))
    shapes = [(spec.batch, spec.tokens, columns), (spec.head_dim,), (spec.head_dim,)]
    rows, *weights = draw.normals(key, *shapes)
    positions = jax.random.randint(
        jax.random.fold_in(key, 1), rows.shape[:2], 0, POSITIONS, jnp.int32
    )
    weights = [(0.2 * x).astype(spec.weight_dtype) for x in weights]
    return rows.astype(spec.rows_dtype), *weights, positions


def call(spec: specs.Spec, impl: str, config: Any = None) -> Callable:
    """Return attention_front by an implementation, cut as `config` says."""

    def run(rows, q_weight, k_weight, positions):
        # As of a product: XLA sees through to it where no size is 1.
        sizes = [size for size in rows.shape if size > 1]
        parts = jnp.split(rows.reshape(sizes), np.cumsum(_columns(spec))[:-1], axis=-1)
        return op.attention_front(
            *(x.reshape(*rows.shape[:2], -1) for x in parts),
            q_weight,
            k_weight,
            positions,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            rotary_dim=spec.rotary_dim,
            theta=spec.theta,
            eps=spec.eps,
            impl=impl,
            config=config,
        )

    return run


def exact(
    spec: specs.Spec, arguments: tuple, rows: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Return q, k and v of some rows of the batch, in float64, of float32 angles."""
    picked = np.asarray(rows)
    columns, q_weight, k_weight, positions = arguments
    columns = np.asarray(jax.device_get(columns[picked]), np.float64)
    weights = (np.asarray(x, np.float64) for x in (q_weight, k_weight))
    q, k, v = np.split(columns, np.cumsum(_columns(spec))[:-1], axis=-1)
    shape = (*columns.shape[:2], -1, spec.head_dim)
    q = q.reshape(*columns.shape[:2], spec.heads, -1)[..., : spec.head_dim]
    angles = _angles(np.asarray(positions)[picked], spec)

    def front(x, weight):
        root = np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps)
        return _turned(x / root * (1 + weight), angles)

    q, k = (front(*pair) for pair in zip((q, k.reshape(shape)), weights, strict=True))
    return q, k, v.reshape(shape)


def _columns(spec: specs.Spec) -> tuple[int, int, int]:
    """Return the columns of q with its gate, of k and of v."""
    keys = spec.kv_heads * spec.head_dim
    return 2 * spec.heads * spec.head_dim, keys, keys


def _angles(positions: np.ndarray, spec: specs.Spec) -> np.ndarray:
    """Return angles [B, T, 1, R/2], rounded as the op rounds them."""
    exponent = np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim
    frequency = (spec.theta**-exponent).astype(np.float32)
    angle = positions[..., None, None].astype(np.float32) * frequency
    return angle.astype(np.float64)


def _turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = angles.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate([*turned, rest], axis=-1)
