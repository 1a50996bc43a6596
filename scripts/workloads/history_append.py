"""Workloads of history_append: a path of four nodes, a layer of Qwen3.5 35B-A3B."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.history_append import config, op
from pallas_kernels.history_append import spec as specs
from scripts.workloads import base, draw, recurrent

CONFIGS = tuple(
    config.Config(pieces=pieces, num_warps=warps)
    for pieces, warps in (
        *((1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)),
        *((8, 1), (8, 2), (16, 1), (32, 1)),
    )
)
BOUNDS = {"float32": 1e-7, "bfloat16": 4e-3}


def cases() -> list[base.Case]:
    """Return appends of fused (horizon 4) and deferred lifecycles, and odd ones."""
    timed = [
        _timed(nodes, batch, horizon, record_dtype)
        for record_dtype in ("float32", "bfloat16")
        for horizon in (4, 16)
        for nodes in (4, 40)
        for batch in (1, 32, 128, 256)
    ]
    small = [
        _case({"small"}, _spec(nodes, 3, horizon, record_dtype, heads=(2, 2 * group)))
        for nodes, horizon, record_dtype, group in (
            (1, 1, "float32", 1),
            (7, 5, "bfloat16", 3),
            (39, 16, "float32", 4),
        )
    ]
    return timed + small


def _timed(nodes: int, batch: int, horizon: int, record_dtype: str) -> base.Case:
    spec = _spec(nodes, batch, horizon, record_dtype)
    label = f"n={nodes} B={batch} m={horizon} {record_dtype}"
    return dataclasses.replace(
        _case({"bench", "tune"} | ({"compile"} if batch == 32 else set()), spec),
        label=label,
        configs=CONFIGS,
        match=("batch", "path", "past_value_dtype"),
        group=label,
    )


def _case(tags: set[str], spec: specs.Spec) -> base.Case:
    bound = BOUNDS[spec.past_value_dtype]
    return base.Case(
        op="history_append",
        label=f"n={spec.nodes} m={spec.horizon} {spec.past_value_dtype}",
        kind="history_append",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=call,
        exact=exact,
        bounds=(bound, bound, BOUNDS["float32"]),
        donate=(0, 1, 2),
        tags=frozenset(tags),
    )


def _spec(nodes, batch, horizon, record_dtype, heads=None) -> specs.Spec:
    key_heads, value_heads = heads or (recurrent.KEY_HEADS, recurrent.VALUE_HEADS)
    return specs.Spec(
        batch=batch,
        horizon=horizon,
        nodes=nodes,
        path=len(recurrent.TREES[nodes]) + 1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=recurrent.DIM,
        value_dim=recurrent.DIM,
        key_dtype="bfloat16",
        value_dtype="float32",
        decay_dtype="float32",
        past_key_dtype=record_dtype,
        past_value_dtype=record_dtype,
        past_decay_dtype="float32",
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return a history with room, the records of a tree, and its last path.

    Nodes that are not on the path are NaN, as nobody may read them.
    """
    room, rows = (spec.batch, spec.horizon), (spec.batch, spec.nodes)
    keys = (spec.key_heads, spec.key_dim)
    values = (spec.value_heads, spec.value_dim)
    shapes = [
        (*lead, *rest)
        for lead in (room, rows)
        for rest in (keys, values, (spec.value_heads,))
    ]
    *past, k, u, log_decay = draw.normals(key, *shapes)
    tree = recurrent.tree(spec.nodes, spec.batch)
    path, count = tree.path(tree.size - 1)
    turn = jnp.arange(spec.batch, dtype=jnp.int32)
    past_count = turn * 5 % (spec.horizon - spec.path + 1)
    used = jnp.any(jnp.arange(spec.nodes)[:, None] == path[:, None], axis=-1)

    def poison(x, dtype):
        mask = used.reshape(used.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.nan).astype(dtype)

    return (
        past[0].astype(spec.past_key_dtype),
        past[1].astype(spec.past_value_dtype),
        past[2].astype(spec.past_decay_dtype),
        past_count,
        poison(k, spec.key_dtype),
        poison(u, spec.value_dtype),
        poison(log_decay, spec.decay_dtype),
        path,
        count,
    )


def call(impl: str, config: Any = None) -> Callable:
    """Return history_append by an implementation, cut as `config` says."""
    return functools.partial(op.history_append, impl=impl, config=config)


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the history of some rows of the batch, in float64."""
    past = recurrent.host(arguments[:3], rows)
    nodes = recurrent.host(arguments[4:7], rows)
    past_count, path, count = (
        np.asarray(arguments[i])[np.asarray(rows)] for i in (3, 7, 8)
    )
    for row, (first, steps) in enumerate(zip(past_count, count, strict=True)):
        for i in range(steps):
            for old, new in zip(past, nodes, strict=True):
                old[row, first + i] = new[row, path[row, i]]
    return tuple(past)
