"""Workloads of history_append: paths of four nodes, layers of Qwen3.5 35B-A3B."""

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

LAYERS = 30
CONFIGS = tuple(
    config.Config(records=records, num_warps=warps)
    for records, warps in ((1, 4), (1, 8), (2, 8), (2, 16), (4, 8), (4, 16))
)
BOUNDS = {"float32": 1e-7, "bfloat16": 4e-3}


def cases() -> list[base.Case]:
    """Return appends of fused (horizon 4) and deferred lifecycles, and odd ones.

    Those that are timed are of all layers at once.
    """
    timed = [
        _timed(40, batch, horizon, record_dtype)
        for record_dtype in ("float32", "bfloat16")
        for horizon in (4, 16)
        for batch in (1, 32, 128, 256)
    ]
    small = [
        _case(
            {"small"},
            _spec(nodes, 3, horizon, record_dtype, layers, heads=(2, 2 * group)),
        )
        for nodes, horizon, record_dtype, group, layers in (
            (1, 1, "float32", 1, 1),
            (7, 5, "bfloat16", 3, 3),
            (39, 16, "float32", 4, 2),
        )
    ]
    alone = [_case({"compile"}, _spec(40, 32, 16, dtype, 1)) for dtype in BOUNDS]
    return timed + small + alone


def _timed(nodes: int, batch: int, horizon: int, record_dtype: str) -> base.Case:
    spec = _spec(nodes, batch, horizon, record_dtype, LAYERS)
    label = f"n={nodes} B={batch} m={horizon} {record_dtype} layers={LAYERS}"
    return dataclasses.replace(
        _case({"bench", "tune"} | ({"compile"} if batch == 32 else set()), spec),
        label=label,
        configs=CONFIGS,
        match=("layers", "batch", "path", "past_value_dtype"),
        group=label,
    )


def _case(tags: set[str], spec: specs.Spec) -> base.Case:
    bound = BOUNDS[spec.past_value_dtype]
    return base.Case(
        op="history_append",
        label=f"n={spec.nodes} m={spec.horizon} {spec.past_value_dtype} "
        f"layers={spec.layers}",
        kind="history_append",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=functools.partial(call, fold_above=spec.fold_above),
        exact=functools.partial(exact, fold_above=spec.fold_above),
        bounds=(bound, bound, BOUNDS["float32"], 0.0) * spec.layers,
        donate=(0,),
        tags=frozenset(tags),
    )


def _spec(nodes, batch, horizon, record_dtype, layers, heads=None) -> specs.Spec:
    key_heads, value_heads = heads or (recurrent.KEY_HEADS, recurrent.VALUE_HEADS)
    path = len(recurrent.TREES[nodes]) + 1
    return specs.Spec(
        layers=layers,
        batch=batch,
        horizon=horizon,
        nodes=nodes,
        path=path,
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
        fold_above=horizon - path,
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[Any, ...]:
    """Return histories, of which some rows fold, records of a tree, and its last path.

    Nodes that are not on the path are NaN, as nobody may read them.
    """
    tree = recurrent.tree(spec.nodes, spec.batch)
    path, count = tree.path(tree.size - 1)
    used = jnp.any(jnp.arange(spec.nodes)[:, None] == path[:, None], axis=-1)
    layers = [
        _layer(jax.random.fold_in(key, number), number, used, spec)
        for number in range(spec.layers)
    ]
    pasts, nodes = (list(x) for x in zip(*layers, strict=True))
    return pasts, nodes, path, count


def _layer(key, number, used, spec):
    """Return the history and the nodes of a layer."""
    room, rows = (spec.batch, spec.horizon), (spec.batch, spec.nodes)
    keys = (spec.key_heads, spec.key_dim)
    values = (spec.value_heads, spec.value_dim)
    shapes = [
        (*lead, *rest)
        for lead in (room, rows)
        for rest in (keys, values, (spec.value_heads,))
    ]
    *past, k, u, log_decay = draw.normals(key, *shapes)
    turn = jnp.arange(spec.batch, dtype=jnp.int32)

    def poison(x, dtype):
        mask = used.reshape(used.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.nan).astype(dtype)

    history = op.Past(
        past[0].astype(spec.past_key_dtype),
        past[1].astype(spec.past_value_dtype),
        past[2].astype(spec.past_decay_dtype),
        (turn * 5 + number) % (spec.horizon + 1),
    )
    nodes = op.Nodes(
        poison(k, spec.key_dtype),
        poison(u, spec.value_dtype),
        poison(log_decay, spec.decay_dtype),
    )
    return history, nodes


def call(impl: str, config: Any = None, *, fold_above: int) -> Callable:
    """Return append_layers by an implementation, cut as `config` says."""
    options = dict(fold_above=fold_above, impl=impl, config=config)
    return functools.partial(op.append_layers, **options)


def exact(
    arguments: tuple, rows: Sequence[int], *, fold_above: int
) -> tuple[np.ndarray, ...]:
    """Return the histories of some rows of the batch, in float64; layer by layer."""
    pasts, nodes, *paths = arguments
    path, count = (np.asarray(x)[np.asarray(rows)] for x in paths)
    found = []
    for past, tree in zip(pasts, nodes, strict=True):
        *records, past_count = recurrent.host(past, rows)
        base = np.where(past_count > fold_above, 0, past_count).astype(int)
        tree = recurrent.host(tree, rows)
        for row, (first, steps) in enumerate(zip(base, count, strict=True)):
            for i in range(steps):
                for old, new in zip(records, tree, strict=True):
                    old[row, first + i] = new[row, path[row, i]]
        found += [*records, base + count]
    return tuple(found)
