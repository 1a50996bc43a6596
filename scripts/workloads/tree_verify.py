"""Workloads of tree_verify: chains and trees over one layer of Qwen3.5 35B-A3B."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.tree_verify import config
from pallas_kernels.tree_verify import spec as specs
from scripts.workloads import base, recurrent
from treewy_jax import verify, wy

BOUNDS = {"fast": 3e-3, "high": 5e-6}
CONFIGS = tuple(
    config.Config(block_v=block_v, blocks=blocks, heads=heads)
    for block_v, blocks, heads in (
        (32, 1, 1), (32, 4, 1), (64, 1, 1), (64, 2, 1), (64, 2, 2), (128, 1, 1),
    )
)  # fmt: skip


def cases() -> list[base.Case]:
    """Return every size of the issue as `fast`, the largest batch as `high` too.

    Beside them calls that are only compiled, of other inputs and more nodes, and small
    ones of odd sizes.
    """
    sizes = itertools.product(
        ("bfloat16", "float32"), (4, 15, 40), (1, 32, 256), ("fast", "high")
    )
    timed = [
        _timed(nodes, batch, state_dtype, precision)
        for state_dtype, nodes, batch, precision in sizes
        if precision == "fast" or (batch == 256 and nodes != 15)
    ]
    compiled = [
        _case({"compile"}, _spec(nodes, 32, state_dtype, input_dtype))
        for state_dtype in ("bfloat16", "float32")
        for nodes, input_dtype in ((4, "float32"), (40, "float32"), (64, "bfloat16"))
    ]
    small = [
        _case({"small"}, _spec(nodes, 2, "float32", dtype, heads=(2, 2 * group)))
        for dtype in ("float32", "bfloat16")
        for nodes, group in ((1, 1), (3, 3), (7, 2), (39, 4))
    ]
    return timed + compiled + small


def _timed(nodes: int, batch: int, state_dtype: str, precision: str) -> base.Case:
    spec = _spec(nodes, batch, state_dtype, "bfloat16", precision)
    compiled = batch == 32 or precision == "high"
    case = _case({"bench", "tune"} | ({"compile"} if compiled else set()), spec)
    return dataclasses.replace(
        case,
        label=f"n={nodes} B={batch} S={state_dtype} {precision}",
        kind=f"{precision} n<={16 if nodes <= 16 else 64}",
        configs=CONFIGS,
        match=("batch", "nodes", "key_dim", "state_dtype", "precision"),
        group=f"n={nodes} B={batch} S={state_dtype}",
    )


def _case(tags: set[str], spec: specs.Spec) -> base.Case:
    rows, nodes = spec.input_dtype, spec.nodes
    bound = BOUNDS[spec.precision]
    return base.Case(
        op="tree_verify",
        label=f"n={nodes} S={spec.state_dtype} {rows} rows {spec.group} a key head",
        kind=f"{rows} rows n<={16 if nodes <= 16 else 64}",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=functools.partial(call, spec=spec),
        exact=functools.partial(exact, nodes=nodes),
        bounds=(bound, bound),
        tags=frozenset(tags),
        table="treewy_jax.verify",
    )


def _spec(
    nodes, batch, state_dtype, input_dtype, precision=None, heads=None
) -> specs.Spec:
    precision = precision or ("high" if input_dtype == "float32" else "fast")
    key_heads, value_heads = heads or (recurrent.KEY_HEADS, recurrent.VALUE_HEADS)
    return specs.make_spec(
        batch=batch,
        nodes=nodes,
        depth=len(recurrent.TREES[nodes]),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=recurrent.DIM,
        value_dim=recurrent.DIM,
        input_dtype=input_dtype,
        state_dtype=state_dtype,
        output_dtype="bfloat16" if precision == "fast" else "float32",
        precision=precision,
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return the arguments of a kernel: rows, gates, state, and the tree's arrays."""
    rows = recurrent.inputs(
        key,
        batch=spec.batch,
        nodes=spec.nodes,
        heads=(spec.key_heads, spec.value_heads),
        dims=(spec.key_dim, spec.value_dim),
        input_dtype=spec.input_dtype,
        state_dtype=spec.state_dtype,
    )
    tree = recurrent.tree(spec.nodes, spec.batch)
    sweeps = jax.numpy.full((spec.batch,), spec.depth, jax.numpy.int32)
    return (*rows, tree.ancestors(), tree.size, sweeps)


def call(impl: str, config: Any = None, *, spec: specs.Spec) -> Callable:
    """Return the kernel of an implementation, cut as `config` says.

    The tree's arrays come ready, as they are made once a step for all layers.
    """
    name = verify.choose(spec, impl).name
    if name == "reference":
        return _reference
    kernel = verify.IMPLEMENTATIONS.module(name).tree_verify
    return functools.partial(kernel, spec=spec, config=config)


def _reference(q, k, v, log_decay, beta, state, ancestors, sizes, sweeps):
    del sizes  # the trees here have no padding
    arrays = (q, k, v, log_decay, beta, state, ancestors)
    return wy.verify_reference(*arrays, jax.numpy.max(sweeps))


def exact(
    arguments: tuple, rows: Sequence[int], *, nodes: int
) -> tuple[np.ndarray, ...]:
    """Return outputs and pseudo-values of some rows of the batch, in float64."""
    parent = np.asarray(recurrent.tree(nodes, 1).parents())[0]
    return recurrent.every_node(*recurrent.host(arguments[:6], rows), parent)[:2]
