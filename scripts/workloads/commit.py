"""Workloads of commit: a path of four nodes over one layer of Qwen3.5 35B-A3B."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.commit import config, op
from pallas_kernels.commit import spec as specs
from scripts.workloads import base, recurrent

CONFIGS = tuple(
    config.Config(block_v=block_v, num_warps=warps)
    for block_v, warps in ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4))
)


def cases() -> list[base.Case]:
    """Return the batches of the issue, for both dtypes of the state, and small ones."""
    timed = [
        _timed(nodes, batch, state_dtype)
        for state_dtype in ("float32", "bfloat16")
        for nodes in (4, 40)
        for batch in (1, 32, 256)
    ]
    small = [
        _case({"small"}, _spec(nodes, 2, state_dtype, heads=(2, 2 * group)))
        for state_dtype in ("float32", "bfloat16")
        for nodes, group in ((1, 1), (7, 3), (39, 4))
    ]
    return timed + small


def _timed(nodes: int, batch: int, state_dtype: str) -> base.Case:
    case = _case({"bench", "tune"}, _spec(nodes, batch, state_dtype))
    return dataclasses.replace(
        case,
        label=f"n={nodes} B={batch} S={state_dtype}",
        configs=CONFIGS,
        match=("batch", "key_dim", "state_dtype"),
        tags=case.tags | ({"compile"} if batch == 32 else set()),
        group=f"n={nodes} B={batch} S={state_dtype}",
    )


def _case(tags: set[str], spec: specs.Spec) -> base.Case:
    state_dtype = spec.state_dtype
    return base.Case(
        op="commit",
        label=f"n={spec.nodes} S={state_dtype} {spec.group} a key head",
        kind="commit",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=call,
        exact=exact,
        bounds=(1e-6 if state_dtype == "float32" else 4e-3,),
        donate=(0,),
        tags=frozenset(tags),
    )


def _spec(nodes, batch, state_dtype, heads=None) -> specs.Spec:
    key_heads, value_heads = heads or (recurrent.KEY_HEADS, recurrent.VALUE_HEADS)
    return specs.Spec(
        batch=batch,
        nodes=nodes,
        path=len(recurrent.TREES[nodes]) + 1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=recurrent.DIM,
        value_dim=recurrent.DIM,
        key_dtype="bfloat16",
        state_dtype=state_dtype,
        accumulation_dtype="float32",
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return a state, the records of a tree, and its last path."""
    _, k, v, log_decay, _, state = recurrent.inputs(
        key,
        batch=spec.batch,
        nodes=spec.nodes,
        heads=(spec.key_heads, spec.value_heads),
        dims=(spec.key_dim, spec.value_dim),
        input_dtype=spec.key_dtype,
        state_dtype=spec.state_dtype,
    )
    tree = recurrent.tree(spec.nodes, spec.batch)
    path, count = tree.path(tree.size - 1)
    return state, k, v.astype(jnp.float32), log_decay, path, count


def call(impl: str, config: Any = None) -> Callable:
    """Return commit by an implementation, cut as `config` says."""
    return functools.partial(op.commit, impl=impl, config=config)


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the new state of some rows of the batch, in float64."""
    state, k, values, log_decay = recurrent.host(arguments[:4], rows)
    k = np.repeat(k, values.shape[2] // k.shape[2], axis=2)
    for node in np.asarray(arguments[4])[0]:
        outer = values[:, node, :, :, None] * k[:, node, :, None, :]
        state = np.exp(log_decay[:, node])[..., None, None] * state + outer
    return (state,)
