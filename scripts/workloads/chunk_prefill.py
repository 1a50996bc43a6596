"""Workloads of chunk_prefill: whole prompts of one layer of Qwen3.5 35B-A3B."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.chunk_prefill import config as configs
from pallas_kernels.chunk_prefill import op
from pallas_kernels.chunk_prefill import spec as specs
from scripts.workloads import base, recurrent

DIM = 128
MATCH = ("batch", "tokens", "value_heads", "key_dim", "value_dim", "input_dtype")
# Relative errors of outputs and last state.
BOUNDS = {"bfloat16": (5e-3, 5e-3), "float32": (1e-5, 1e-5)}
ALL = ("bench", "tune", "compile")


def cases() -> list[base.Case]:
    """Return the peers' sizes (as many key as value heads), the model's, small ones."""
    return [
        _case(1, 4096, 32, "bfloat16", ALL),
        _case(8, 4096, 32, "bfloat16", ("bench", "tune")),
        _case(1, 4096, 16, "bfloat16", ("bench", "tune")),
        _case(4, 1000, 16, "bfloat16", ("bench", "compile")),
        _case(1, 1024, 16, "float32", ALL),
        _case(2, 100, 1, "float32", ("small",), value_heads=3),
        _case(2, 65, 2, "bfloat16", ("small",), value_heads=2),
    ]


def _case(
    batch: int,
    tokens: int,
    key_heads: int,
    dtype: str,
    tags: Sequence[str],
    value_heads: int = recurrent.VALUE_HEADS,
) -> base.Case:
    spec = specs.Spec(
        batch=batch,
        tokens=tokens,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=DIM,
        value_dim=DIM,
        chunk=64,
        input_dtype=dtype,
        state_dtype="float32",
        output_dtype=dtype,
    )
    return base.Case(
        op="chunk_prefill",
        label=f"{batch}x{tokens} Hk={key_heads} {dtype}",
        kind=dtype,
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=call,
        exact=exact,
        bounds=BOUNDS[dtype],
        configs=tuple(candidates(spec)),
        match=MATCH,
        tags=frozenset(tags),
    )


def candidates(spec: specs.Spec) -> Iterator[configs.Config]:
    """Yield the configurations worth measuring: cuts of the walk, then of the solve."""
    if spec.input_dtype == "float32":
        cuts = ((32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1))
    else:
        cuts = ((32, 4, 2), (32, 4, 3), (64, 4, 3), (128, 8, 2), (128, 8, 3))
    for block_v, warps, stages in cuts:
        options = dict(block_v=block_v, scan_warps=warps, scan_stages=stages)
        yield configs.Config(**options)
        yield configs.Config(**options, solve_warps=8)


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return keys that share a part, decays from none to strong and a full state."""
    return recurrent.inputs(
        key,
        batch=spec.batch,
        nodes=spec.tokens,
        heads=(spec.key_heads, spec.value_heads),
        dims=(spec.key_dim, spec.value_dim),
        input_dtype=spec.input_dtype,
        state_dtype=spec.state_dtype,
    )


def call(impl: str, config: Any = None) -> Callable:
    """Return the op with an implementation and a configuration."""
    return functools.partial(op.chunk_prefill, impl=impl, config=config)


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return outputs and last state of some rows of the batch, in float64.

    Chunks of 64 are solved with LAPACK: the recurrence would take a minute a row.
    """
    picked = (x[np.asarray(rows)] for x in arguments)
    arrays = [np.asarray(jax.device_get(x), np.float64) for x in picked]
    state = arrays.pop()
    group = arrays[2].shape[2] // arrays[1].shape[2]
    arrays[:2] = (np.repeat(x, group, axis=2) for x in arrays[:2])
    arrays = [np.moveaxis(x, 2, 1) for x in arrays]
    outputs = []
    for begin in range(0, arrays[0].shape[2], 64):
        chunk = (x[:, :, begin : begin + 64] for x in arrays)
        output, state = _exact_chunk(*chunk, state)
        outputs.append(output)
    return np.moveaxis(np.concatenate(outputs, axis=2), 1, 2), state


def _exact_chunk(q, k, v, log_decay, beta, state):
    """(I + A) U = diag(beta) (V - e^c K S^T), outputs and next state of one chunk."""
    size = q.shape[2]
    total = np.cumsum(log_decay, axis=-1)
    keep = np.tril(np.ones((size, size), bool))
    difference = np.where(keep, total[..., :, None] - total[..., None, :], -np.inf)
    between, start = np.exp(difference), np.exp(total)[..., None]
    keys = np.swapaxes(k, -1, -2)
    matrix = np.eye(size) + beta[..., None] * np.tril(k @ keys * between, -1)
    known = start * (k @ np.swapaxes(state, -1, -2))
    pseudo_values = np.linalg.solve(matrix, beta[..., None] * (v - known))
    output = start * (q @ np.swapaxes(state, -1, -2))
    output += (q @ keys * between) @ pseudo_values
    end = np.exp(total[..., -1:] - total)[..., None]
    added = np.swapaxes(end * pseudo_values, -1, -2) @ k
    return output, start[..., -1:, :] * state + added
