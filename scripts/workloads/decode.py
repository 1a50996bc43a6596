"""Workloads of decode: one token of a layer of Qwen3.5 35B-A3B."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import config, op
from pallas_kernels.decode import spec as specs
from scripts.workloads import base, draw

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CONFIGS = tuple(
    config.Config(block_v=block_v, num_warps=warps)
    for block_v, warps in (
        (4, 1), (8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (64, 8),
    )
)  # fmt: skip

TAGS = {3: ("small",), 32: ("bench", "tune", "compile")}


def cases() -> list[base.Case]:
    """Return the batches of the issue and a small one, for both dtypes of the state."""
    return [
        _case(batch, state_dtype)
        for state_dtype in ("float32", "bfloat16")
        for batch in (1, 3, 32, 256)
    ]


def _case(batch: int, state_dtype: str) -> base.Case:
    spec = specs.Spec(
        batch=batch,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        input_dtype="bfloat16",
        state_dtype=state_dtype,
        output_dtype="bfloat16",
        accumulation_dtype="float32",
    )
    return base.Case(
        op="decode",
        label=f"B={batch} S={state_dtype}",
        kind="decode",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=call,
        exact=exact,
        bounds=(4e-3, 1e-6 if state_dtype == "float32" else 4e-3),
        configs=CONFIGS,
        match=("batch", "key_heads", "value_heads", "key_dim", "state_dtype"),
        donate=(5,),
        tags=frozenset(TAGS.get(batch, ("bench", "tune"))),
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return correlated keys, decays from none to strong and a full state."""
    narrow = spec.input_dtype
    rows = (spec.batch, spec.key_heads, spec.key_dim)
    heads = (spec.batch, spec.value_heads)
    values = (*heads, spec.value_dim)
    common, q, k, v, decay, strength, state = draw.normals(
        key, rows[1:], rows, rows, values, heads, heads, (*values, spec.key_dim)
    )
    return (
        (draw.unit(q) * spec.key_dim**-0.5).astype(narrow),
        draw.unit(k + 2 * common).astype(narrow),
        v.astype(narrow),
        -jnp.exp(2 * decay - 3),
        jax.nn.sigmoid(strength),
        (0.3 * state).astype(spec.state_dtype),
    )


def call(impl: str, config: Any = None) -> Callable:
    """Return decode by an implementation, cut as `config` says."""
    return functools.partial(op.decode, impl=impl, config=config)


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return output and new state of some rows of the batch, in float64."""
    picked = (x[np.asarray(rows)] for x in arguments)
    q, k, v, log_decay, beta, state = (
        np.asarray(jax.device_get(x), np.float64) for x in picked
    )
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    state = state * np.exp(log_decay)[..., None, None]
    read = np.einsum("bhvd,bhd->bhv", state, k)
    pseudo_value = beta[..., None] * (v - read)
    state = state + pseudo_value[..., None] * k[:, :, None]
    return np.einsum("bhvd,bhd->bhv", state, q), state
