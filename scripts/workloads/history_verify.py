"""Workloads of history_verify: a tree behind records, a layer of Qwen3.5 35B-A3B."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import spec as verify_specs
from scripts.workloads import base, draw, recurrent, tree_verify
from treewy_jax import history, wy

# The part of the rows that folds: every one of so many; 0 stands for none.
FOLDS = {"none": 0, "all": 1, "1 in 4": 4}
STATE = 5  # the argument that the new state overwrites


@dataclasses.dataclass(frozen=True)
class Call(specs.Spec):
    """A call of which is known how many records there are and how many rows fold."""

    records: int
    folding: int

    @property
    def bytes_moved(self) -> int:
        """Least traffic: the records that there are read, the states that fold."""
        tree = super(specs.Spec, self).bytes_moved
        record = (super().bytes_moved - tree) // (self.batch * self.horizon)
        return tree + self.records * record + self.folding * self.fold_bytes


def cases() -> list[base.Case]:
    """Return calls of a deferred lifecycle, of a fused one, and odd ones.

    Horizon 4 is fused: all rows fold one path. Of the others 1 row in 4 folds, as at
    horizon 16; the calls where none and all do tell what a fold costs.
    """
    deferred = [(16, "1 in 4", batch) for batch in (1, 32, 128, 256)]
    fused = [(4, "all", batch) for batch in (1, 32, 128, 256)]
    more = [(16, "none", 128), (16, "all", 128), (32, "1 in 4", 128)]
    timed = [
        _timed(nodes, state_dtype, *how)
        for nodes in (4, 15, 40)
        for state_dtype in ("bfloat16", "float32")
        for how in (*deferred, *fused, *more)
    ]
    compiled = [
        _case({"compile"}, _spec(nodes, 32, state_dtype, horizon, "1 in 4", **rows))
        for state_dtype, horizon, rows in (
            ("bfloat16", 8, {"record_dtype": "bfloat16"}),
            ("float32", 32, {"input_dtype": "float32"}),
        )
        for nodes in (4, 40)
    ]
    small = [
        _case({"small"}, _spec(nodes, 4, state, horizon, folds, heads=heads, **rows))
        for nodes, heads, state, horizon, folds, rows in (
            (1, (2, 2), "float32", 1, "all", {"input_dtype": "float32"}),
            (4, (2, 4), "bfloat16", 4, "all", {}),
            (7, (2, 6), "float32", 5, "none", {"record_dtype": "bfloat16"}),
            (15, (1, 4), "float32", 16, "1 in 4", {"input_dtype": "float32"}),
            (39, (2, 4), "bfloat16", 13, "1 in 4", {"record_dtype": "bfloat16"}),
        )
    ]
    return timed + compiled + small


def _timed(nodes, state_dtype, horizon, folds, batch) -> base.Case:
    case = _case({"bench", "tune"}, _spec(nodes, batch, state_dtype, horizon, folds))
    compiled = batch == 32 or (batch == 128 and horizon == 32)
    return dataclasses.replace(
        case,
        label=f"n={nodes} B={batch} S={state_dtype} m={horizon} folds {folds}",
        configs=tree_verify.CONFIGS,
        match=("batch", "nodes", "horizon", "key_dim", "state_dtype", "precision"),
        tags=case.tags | ({"compile"} if compiled else set()),
        group=f"n={nodes} B={batch} S={state_dtype}",
    )


def _case(tags: set[str], spec: Call) -> base.Case:
    rows, nodes = spec.input_dtype, spec.nodes
    bound = tree_verify.BOUNDS[spec.precision]
    every = spec.folding and spec.batch // spec.folding
    return base.Case(
        op="history_verify",
        label=f"n={nodes} S={spec.state_dtype} m={spec.horizon} {spec.record_dtype} "
        f"{rows} rows {spec.group} a key head",
        kind=f"{rows} rows n<={16 if nodes <= 16 else 64}",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec, every=every),
        call=functools.partial(call, spec=spec),
        exact=functools.partial(exact, nodes=nodes, fold_above=spec.fold_above),
        bounds=(bound, bound, 1e-6 if spec.state_dtype == "float32" else 4e-3),
        donate=(STATE,),
        tags=frozenset(tags),
        table="treewy_jax.history",
    )


def _spec(
    nodes,
    batch,
    state_dtype,
    horizon,
    folds,
    *,
    input_dtype="bfloat16",
    record_dtype="float32",
    heads=(recurrent.KEY_HEADS, recurrent.VALUE_HEADS),
) -> Call:
    precision = "high" if input_dtype == "float32" else "fast"
    spec = verify_specs.make_spec(
        batch=batch,
        nodes=nodes,
        depth=len(recurrent.TREES[nodes]),
        key_heads=heads[0],
        value_heads=heads[1],
        key_dim=recurrent.DIM,
        value_dim=recurrent.DIM,
        input_dtype=input_dtype,
        state_dtype=state_dtype,
        output_dtype="bfloat16" if precision == "fast" else "float32",
        precision=precision,
    )
    folding = _folding(batch, FOLDS[folds])
    counts = _counts(folding, horizon, spec.depth)
    extended = specs.extend(
        spec,
        horizon=horizon,
        record_dtype=record_dtype,
        fold_above=_room(horizon, spec.depth),
    )
    return Call(
        **dataclasses.asdict(extended),
        records=int(counts.sum()),
        folding=int(folding.sum()),
    )


def _folding(batch: int, every: int) -> np.ndarray:
    """Return which rows fold: the first, and each so many behind it."""
    return (np.arange(batch) % every == 0) if every else np.zeros(batch, bool)


def _room(horizon: int, depth: int) -> int:
    """Return the most records of a row that has room for a path more."""
    return max(0, horizon - depth - 1)


def _counts(folding: np.ndarray, horizon: int, depth: int) -> np.ndarray:
    """Return records of each row: few enough for a path more, else too many."""
    room = _room(horizon, depth)
    turn = np.arange(folding.size)
    many = room + 1 + turn % (horizon - room)
    return np.where(folding, many, turn * 5 % (room + 1)).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("spec", "every"))
def inputs(key: jax.Array, *, spec: Call, every: int) -> tuple[jax.Array, ...]:
    """Return the arguments of a kernel: rows, gates, state, history, and the tree.

    What lies behind the records of a row is NaN, as nobody may read it.
    """
    rows = recurrent.inputs(
        key,
        batch=spec.batch,
        nodes=spec.nodes,
        heads=(spec.key_heads, spec.value_heads),
        dims=(spec.key_dim, spec.value_dim),
        input_dtype=spec.input_dtype,
        state_dtype=spec.state_dtype,
    )
    room = (spec.batch, spec.horizon)
    k, u, decay = draw.normals(
        jax.random.fold_in(key, 1),
        (*room, spec.key_heads, spec.key_dim),
        (*room, spec.value_heads, spec.value_dim),
        (*room, spec.value_heads),
    )
    folding = _folding(spec.batch, every)
    count = _counts(folding, spec.horizon, spec.depth)
    there = np.arange(spec.horizon) < count[:, None]
    past = (
        draw.unit(k).astype(spec.record_key_dtype),
        (0.3 * u).astype(spec.record_dtype),
        -jnp.exp(2 * decay - 3),
    )
    masks = (there.reshape(there.shape + (1,) * (x.ndim - 2)) for x in past)
    past = [jnp.where(m, x, jnp.nan) for m, x in zip(masks, past, strict=True)]
    tree = recurrent.tree(spec.nodes, spec.batch)
    sweeps = jnp.full((spec.batch,), spec.depth, jnp.int32)
    return (*rows, *past, jnp.asarray(count), tree.ancestors(), tree.size, sweeps)


def call(impl: str, config: Any = None, *, spec: Call) -> Callable:
    """Return the kernel of an implementation, cut as `config` says.

    The tree's arrays come ready, as they are made once a step for all layers.
    """
    name = history.IMPLEMENTATIONS.choose(spec, impl).name
    if name == "reference":
        return functools.partial(_reference, spec=spec)
    kernel = history.IMPLEMENTATIONS.module(name).history_verify
    return functools.partial(kernel, spec=spec, config=config)


def _reference(
    q, k, v, log_decay, beta, state, past_k, past_pseudo_values, past_log_decay,
    past_count, ancestors, sizes, sweeps, *, spec,
):  # fmt: skip
    del sizes  # the trees here have no padding
    past = (past_k, past_pseudo_values, past_log_decay)
    wide = (x.astype(jnp.float32) for x in (state, *past))
    before = history.fold(history.History(*wide, past_count), impl="reference")
    arrays = (q, k, v, log_decay, beta, before, ancestors)
    output, values = wy.verify_reference(*arrays, jnp.max(sweeps))
    written = before.astype(state.dtype)
    folds = history.folding(past_count, spec)[:, None, None, None]
    return output, values, jnp.where(folds, written, state)


def exact(
    arguments: tuple, rows: Sequence[int], *, nodes: int, fold_above: int
) -> tuple[np.ndarray, ...]:
    """Return outputs, pseudo-values and states of some rows, in float64."""
    found = recurrent.host(arguments[:9], rows)
    state, past = found[STATE], found[STATE + 1 :]
    count = np.asarray(arguments[9])[np.asarray(rows)]
    before = np.stack(
        [after(*(x[i] for x in (state, *past)), count[i]) for i in range(len(rows))]
    )
    parent = np.asarray(recurrent.tree(nodes, 1).parents())[0]
    output, values, _ = recurrent.every_node(*found[:STATE], before, parent)
    folds = (count > fold_above)[:, None, None, None]
    return output, values, np.where(folds, before, state)


def after(
    state: np.ndarray, k: np.ndarray, u: np.ndarray, log_decay: np.ndarray, count: int
) -> np.ndarray:
    """Return a state [Hv, Dv, Dk] with the first `count` records written into it."""
    k = np.repeat(k, u.shape[1] // k.shape[1], axis=1)
    for j in range(count):
        outer = u[j, :, :, None] * k[j, :, None, :]
        state = np.exp(log_decay[j])[:, None, None] * state + outer
    return state
