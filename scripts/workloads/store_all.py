"""Workloads of store_all: the chain and the tree of the issue, a layer of 35B-A3B."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.store_all import config, op
from pallas_kernels.store_all import spec as specs
from scripts.workloads import base, draw
from treewy_jax import tree as tree_lib

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CONFIGS = tuple(
    config.Config(block_v=block_v, resident=resident, num_warps=warps)
    for resident in (False, True)
    for block_v, warps in ((4, 1), (8, 1), (16, 1), (16, 2), (32, 4), (64, 8))
)
TREES = {4: (1, 1, 1), 7: (2, 2), 40: (3, 3, 3)}
SPARE = {7: 2}  # slots that no node of the tree needs
EMPTY = -1.0  # in slots that nobody may read
STATES = 5  # the argument that is overwritten

TAGS = {2: ("small",), 32: ("bench", "tune", "compile")}


def cases() -> list[base.Case]:
    """Return chain and tree for the batches of the issue and both state dtypes."""
    return [
        _case(nodes, batch, state_dtype)
        for nodes in TREES
        for state_dtype in ("float32", "bfloat16")
        for batch in ((2,) if nodes == 7 else (1, 32, 256))
    ]


def _case(nodes: int, batch: int, state_dtype: str) -> base.Case:
    part = 2 if batch == 2 else 1  # of the heads, where the case is to be small
    spec = specs.Spec(
        batch=batch,
        nodes=nodes,
        depth=len(TREES[nodes]),
        key_heads=KEY_HEADS // part,
        value_heads=VALUE_HEADS // part,
        key_dim=DIM,
        value_dim=DIM,
        input_dtype="bfloat16",
        state_dtype=state_dtype,
        output_dtype="bfloat16",
        accumulation_dtype="float32",
    )
    return base.Case(
        op="store_all",
        label=f"n={nodes} B={batch} S={state_dtype}",
        kind=f"n={nodes}",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=functools.partial(call, depth_max=spec.depth),
        exact=exact,
        bounds=(4e-3, 2e-6 if state_dtype == "float32" else 8e-3),
        configs=CONFIGS,
        match=("batch", "nodes", "depth", "key_dim", "state_dtype"),
        donate=(STATES,),
        group=f"n={nodes} B={batch} S={state_dtype}",
        tags=frozenset(TAGS.get(batch, ("bench", "tune"))),
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return correlated keys, decays from none to strong, a ring, and the parents."""
    narrow = spec.input_dtype
    rows = (spec.batch, spec.nodes, spec.key_heads, spec.key_dim)
    heads = (spec.batch, spec.nodes, spec.value_heads)
    common, q, k, v, decay, strength, state = draw.normals(
        key,
        (spec.batch, 1, *rows[2:]),
        rows,
        rows,
        (*heads, spec.value_dim),
        heads,
        heads,
        (spec.batch, spec.value_heads, spec.value_dim, spec.key_dim),
    )
    tree = tree_lib.DraftTree.from_widths(TREES[spec.nodes], batch=spec.batch)
    slots = spec.nodes + 1 + SPARE.get(spec.nodes, 0)
    index = jnp.arange(spec.batch, dtype=jnp.int32) % slots
    held = (index[:, None] == jnp.arange(slots))[..., None, None, None]
    state = (0.3 * state).astype(spec.state_dtype)[:, None]
    return (
        (draw.unit(q) * spec.key_dim**-0.5).astype(narrow),
        draw.unit(k + 2 * common).astype(narrow),
        v.astype(narrow),
        -jnp.exp(2 * decay - 3),
        jax.nn.sigmoid(strength),
        jnp.where(held, state, jnp.asarray(EMPTY, state.dtype)),
        index,
        tree.parents(),
    )


def call(impl: str, config: Any = None, *, depth_max: int) -> Callable:
    """Return store_all by an implementation, cut as `config` says."""
    return functools.partial(
        op.store_all, impl=impl, config=config, depth_max=depth_max
    )


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return outputs and rings of some rows of the batch, in float64."""
    picked = [np.asarray(jax.device_get(x[np.asarray(rows)])) for x in arguments]
    parent, index = picked.pop(), picked.pop()
    q, k, v, log_decay, beta, ring = (x.astype(np.float64) for x in picked)
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    every = np.arange(len(parent))
    states = [ring[every, index]]  # before the root, then after each node
    for t, above in enumerate(parent.T):
        decayed = np.stack(states)[above + 1, every]
        decayed *= np.exp(log_decay[:, t])[..., None, None]
        read = np.einsum("bhvd,bhd->bhv", decayed, k[:, t])
        pseudo_value = beta[:, t, :, None] * (v[:, t] - read)
        states.append(decayed + pseudo_value[..., None] * k[:, t, :, None])
    after = np.stack(states[1:], axis=1)
    for t in range(parent.shape[1]):
        ring[every, (index + 1 + t) % ring.shape[1]] = after[:, t]
    return np.einsum("bnhvd,bnhd->bnhv", after, q), ring
