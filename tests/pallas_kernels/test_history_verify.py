"""Verification behind a history: every kernel against folding first, node by node."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.history_verify import config as configs
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import spec as verify_specs
from tests.treewy_jax import strategies
from treewy_jax import history as history_lib

KERNELS = [name for name in history_lib.IMPLEMENTATIONS.modules if name != "mosaic_gpu"]
over_kernels = pytest.mark.parametrize("impl", KERNELS)
SIZES = [(1, 1, 1), (3, 8, 2), (7, 8, 3), (39, 16, 4), (40, 32, 2)]


def parents_of(nodes):
    """A tree with chains and forks."""
    rng = np.random.default_rng(nodes)
    parents, branch = [-1], [0]
    for node in range(1, nodes):
        del branch[max(1, len(branch) - rng.integers(0, 3)) :]
        parents.append(branch[-1])
        branch.append(node)
    return parents


@functools.cache
def batch(nodes, horizon, group, dtype="float32", state_dtype="float32", records=None):
    """Return arguments of `verify`, three rows: counts 0, some, full; NaN beyond."""
    heads = (2, 2 * group)
    trees = [parents_of(nodes), parents_of(max(1, nodes - 2)), parents_of(nodes)]
    cases = [strategies.make_case(p, b, heads=heads) for b, p in enumerate(trees)]
    *rows, state, tree = strategies.batch(cases, nodes, fill=np.nan)
    past = [strategies.make_case([-1] * horizon, 9 + b, heads=heads) for b in range(3)]
    count = np.asarray([0, (horizon + 1) // 2, horizon], np.int32)
    unused = np.arange(horizon)[None] >= count[:, None]

    def stack(name):
        x = np.stack([getattr(case, name) for case in past])
        x[unused] = np.nan
        return jnp.asarray(x, jnp.float32)

    records = records or "float32"
    history = history_lib.History(
        state=state.astype(state_dtype),
        k=stack("k").astype(records),
        pseudo_values=stack("v").astype(records),
        log_decay=stack("log_decay"),
        count=jnp.asarray(count),
    )
    q, k, v, log_decay, beta = rows
    narrow = [x.astype(dtype) for x in (q, k, v)]
    return (*narrow, log_decay, beta, history), tree, trees


def exact(arguments, trees, row):
    """Return outputs and the state before the tree of a row, in float64."""
    *rows, history = arguments
    q, k, v, log_decay, beta = (np.asarray(x[row], np.float64) for x in rows)
    state = np.asarray(history.state[row], np.float64)
    group = v.shape[1] // k.shape[1]
    for j in range(int(history.count[row])):
        past_k, u, g = (
            np.asarray(x[row, j], np.float64)
            for x in (history.k, history.pseudo_values, history.log_decay)
        )
        state = np.exp(g)[:, None, None] * state
        state += u[:, :, None] * np.repeat(past_k, group, axis=0)[:, None]
    n = len(trees[row])
    case = strategies.Case(
        q[:n], k[:n], v[:n], log_decay[:n], beta[:n], state, trees[row]
    )
    return strategies.oracle(case)[0], state


@functools.partial(jax.jit, static_argnames=("impl", "precision"))
def verify(arguments, folds, tree, *, impl, precision=None):
    return history_lib.verify(*arguments, folds, tree, impl=impl, precision=precision)


@over_kernels
@pytest.mark.parametrize(("nodes", "horizon", "group"), SIZES)
def test_outputs_and_states_are_those_of_the_recurrence(impl, nodes, horizon, group):
    arguments, tree, trees = batch(nodes, horizon, group)
    folds = jnp.asarray([True, False, True])
    verified, after = verify(arguments, folds, tree, impl=impl)
    before = arguments[-1]
    for row, parents in enumerate(trees):
        outputs, state = exact(arguments, trees, row)
        n = len(parents)
        assert strategies.relative(verified.output[row, :n], outputs) < 2e-6
        assert not np.any(np.asarray(verified.output[row, n:]))
        if folds[row]:
            assert strategies.relative(after.state[row], state) < 1e-6
    assert np.array_equal(after.state[1], before.state[1])
    assert after.count.tolist() == [0, int(before.count[1]), 0]


@over_kernels
@pytest.mark.parametrize("records", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bfloat16_rows_and_records(impl, state_dtype, records):
    arguments, tree, trees = batch(7, 8, 2, "bfloat16", state_dtype, records)
    folds = jnp.asarray([False, True, True])
    verified, after = verify(arguments, folds, tree, impl=impl)
    assert verified.output.dtype == jnp.bfloat16
    assert after.state.dtype == state_dtype
    for row, parents in enumerate(trees):
        outputs, state = exact(arguments, trees, row)
        found = verified.output[row, : len(parents)]
        assert strategies.relative(found, outputs) < 1e-2
        if folds[row]:
            bound = 1e-6 if state_dtype == "float32" else 4e-3
            assert strategies.relative(after.state[row], state) < bound


@over_kernels
def test_a_fold_is_the_commit_of_its_records(impl):
    arguments, tree, _ = batch(3, 8, 2)
    _, after = verify(arguments, jnp.ones(3, bool), tree, impl=impl)
    folded = history_lib.fold(arguments[-1])
    assert strategies.relative(after.state, np.asarray(folded, np.float64)) < 1e-7


@over_kernels
def test_an_empty_history_changes_nothing(impl):
    """Row 0 has none: its outputs are those of a history with no room used at all."""
    arguments, tree, _ = batch(7, 8, 3)
    *rows, history = arguments
    none = history_lib.empty(history.state, 2, 8, "float32")
    folds = jnp.zeros(3, bool)
    one, _ = verify(arguments, folds, tree, impl=impl)
    other, _ = verify((*rows, none), folds, tree, impl=impl)
    assert np.array_equal(one.output[0], other.output[0])
    assert not np.array_equal(one.output[2], other.output[2])


@over_kernels
@pytest.mark.parametrize("wrong", ["count", "order", "row", "decay"])
def test_a_wrong_history_is_seen(impl, wrong):
    """Twins: a cursor off by one, swapped records, another row's, stronger decays."""
    arguments, tree, trees = batch(7, 8, 2)
    *rows, history = arguments
    fields = (
        vars(history)
        | {
            "count": {"count": history.count - jnp.asarray([0, 1, 1])},
            "order": {"k": history.k[:, ::-1]},
            "row": {"pseudo_values": history.pseudo_values[jnp.asarray([0, 1, 1])]},
            "decay": {"log_decay": history.log_decay - 0.5},
        }[wrong]
    )
    fields = {k: jnp.nan_to_num(v) for k, v in fields.items() if k in vars(history)}
    broken = history_lib.History(**(fields | {"count": fields["count"].astype(int)}))
    outputs, state = exact(arguments, trees, 2)
    verified, after = verify((*rows, broken), jnp.ones(3, bool), tree, impl=impl)
    assert strategies.relative(verified.output[2], outputs) > 1e-3
    assert strategies.relative(after.state[2], state) > 1e-3


def test_decays_that_underflow_leave_no_nan():
    arguments, tree, trees = batch(7, 8, 2)
    *rows, history = arguments
    strong = history_lib.History(
        history.state,
        history.k,
        history.pseudo_values,
        history.log_decay.at[:, 3].set(-1e4),
        history.count,
    )
    changed = (*rows, strong)
    for impl in KERNELS:
        verified, after = verify(changed, jnp.ones(3, bool), tree, impl=impl)
        outputs, state = exact(changed, trees, 2)
        assert strategies.relative(verified.output[2], outputs) < 2e-6
        assert strategies.relative(after.state[2], state) < 1e-6


def test_the_spec_counts_the_history():
    plain = verify_specs.make_spec(
        batch=2, nodes=4, key_heads=16, value_heads=32, key_dim=128, value_dim=128
    )
    spec = specs.extend(plain, horizon=16, record_dtype="bfloat16")
    record = 16 * 128 * 2 + 32 * (128 * 2 + 4)
    assert spec.bytes_moved - plain.bytes_moved == 2 * 16 * record
    assert spec.fold_bytes == 32 * 128 * 128 * 4
    assert spec.flops > plain.flops
    assert configs.choose(spec, "gpu", "NVIDIA H200").block_v > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(horizon=65), "takes at most 64 horizon, not 65"),
        (dict(record_dtype="float16"), "not record dtype float16"),
        (dict(key_dim=24), "key_dim to be a power of two"),
    ],
)
def test_what_triton_does_not_take(change, words):
    sizes = dict(nodes=4, key_heads=2, value_heads=2, key_dim=16, value_dim=16)
    sizes |= {k: v for k, v in change.items() if k == "key_dim"}
    past = dict(horizon=8, record_dtype="float32")
    past |= {k: v for k, v in change.items() if k in past}
    spec = specs.extend(verify_specs.make_spec(**sizes), **past)
    module = history_lib.IMPLEMENTATIONS.module("triton")
    assert words in module.supports(spec, "gpu")
