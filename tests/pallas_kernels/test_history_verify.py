"""Verification behind a history: every kernel against folding first, node by node."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.history_verify import config as configs
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import spec as verify_specs
from scripts.workloads import history_verify as workload
from tests.treewy_jax import strategies
from treewy_jax import history as history_lib

# A CPU interprets every kernel; elsewhere a kernel runs on its own device alone.
DEVICES = {"triton": "gpu", "mosaic_tpu": "tpu", "reference": jax.default_backend()}
KERNELS = [
    name
    for name in history_lib.IMPLEMENTATIONS.modules
    if jax.default_backend() in ("cpu", DEVICES.get(name)) and name != "mosaic_gpu"
]
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
        k=stack("k").astype(specs.key_dtype(dtype, records)),
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


@functools.partial(jax.jit, static_argnames=("fold_above", "impl", "precision"))
def verify(arguments, fold_above, tree, *, impl, precision=None):
    options = dict(impl=impl, precision=precision)
    return history_lib.verify(*arguments, fold_above, tree, **options)


@over_kernels
@pytest.mark.parametrize(("nodes", "horizon", "group"), SIZES)
def test_outputs_and_states_are_those_of_the_recurrence(impl, nodes, horizon, group):
    arguments, tree, trees = batch(nodes, horizon, group)
    before = arguments[-1]
    most = int(before.count[1]) - (horizon == 1)  # one record is a full history, too
    folds = [False, horizon == 1, True]
    verified, after = verify(arguments, most, tree, impl=impl)
    for row, parents in enumerate(trees):
        outputs, state = exact(arguments, trees, row)
        n = len(parents)
        assert strategies.relative(verified.output[row, :n], outputs) < 2e-6
        assert not np.any(np.asarray(verified.output[row, n:]))
        if folds[row]:
            assert strategies.relative(after.state[row], state) < 1e-6
        else:
            assert np.array_equal(after.state[row], before.state[row])
    assert after.count.tolist() == [0, 0 if folds[1] else int(before.count[1]), 0]


@over_kernels
def test_rows_of_more_records_than_fold_above_fold(impl):
    """Any number tells some rows from others; one below moves the line."""
    arguments, tree, _ = batch(3, 8, 2)
    before = arguments[-1]
    assert before.count.tolist() == [0, 4, 8]
    want = {0: (1, 2), 3: (1, 2), 4: (2,), 7: (2,), 8: (), 100: ()}
    for fold_above, folds in want.items():
        _, after = verify(arguments, fold_above, tree, impl=impl)
        changed = jnp.any(after.state != before.state, axis=(1, 2, 3))
        assert tuple(np.flatnonzero(changed)) == folds
        kept = [0 if b in folds else c for b, c in enumerate((0, 4, 8))]
        assert after.count.tolist() == kept


@over_kernels
@pytest.mark.parametrize("wild", [2**31 - 1, -(2**31)])
def test_a_wild_count_is_taken_for_the_nearest_that_may_be(impl, wild):
    arguments, tree, _ = batch(3, 8, 2)
    *rows, history = arguments
    counts = (wild, 4, 8), (8 if wild > 0 else 0, 4, 8)
    one, other = (
        verify(
            (*rows, dataclasses.replace(history, **_filled(history), count=x)),
            4,
            tree,
            impl=impl,
        )
        for x in map(jnp.asarray, counts)
    )
    assert np.array_equal(one[0].output, other[0].output)
    assert np.array_equal(one[1].state, other[1].state)


def _filled(history):
    names = ("k", "pseudo_values", "log_decay")
    return {name: jnp.nan_to_num(getattr(history, name)) for name in names}


@over_kernels
@pytest.mark.parametrize("records", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bfloat16_rows_and_records(impl, state_dtype, records):
    arguments, tree, trees = batch(7, 8, 2, "bfloat16", state_dtype, records)
    folds = [False, True, True]
    verified, after = verify(arguments, 0, tree, impl=impl)
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
    _, after = verify(arguments, 0, tree, impl=impl)
    folded = history_lib.fold(arguments[-1])
    assert strategies.relative(after.state, np.asarray(folded, np.float64)) < 1e-7


@over_kernels
def test_an_empty_history_changes_nothing(impl):
    """Row 0 has none: its outputs are those of a history with no room used at all."""
    arguments, tree, _ = batch(7, 8, 3)
    *rows, history = arguments
    none = history_lib.empty(history.state, 2, 8, "float32")
    one, _ = verify(arguments, 8, tree, impl=impl)
    other, _ = verify((*rows, none), 8, tree, impl=impl)
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
    verified, after = verify((*rows, broken), 0, tree, impl=impl)
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
        verified, after = verify(changed, 0, tree, impl=impl)
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
    wide = specs.extend(plain, horizon=16, record_dtype="float32")
    assert wide.record_key_dtype == plain.input_dtype
    assert spec.fold_bytes == 32 * 128 * 128 * 4
    assert spec.flops > plain.flops
    assert spec.fold_above == 0  # as `fused`, unless it is told
    with pytest.raises(ValueError, match="fold_above is -1; 0 or more is allowed"):
        specs.extend(plain, horizon=4, record_dtype="float32", fold_above=-1)
    assert configs.choose(spec, "gpu", "NVIDIA H200").block_v > 0


def test_which_rows_fold_is_nothing_to_tune_for(monkeypatch, tmp_path):
    plain = verify_specs.make_spec(
        batch=2, nodes=4, key_heads=16, value_heads=32, key_dim=128, value_dim=128
    )
    timed = [x for x in workload.cases() if "tune" in x.tags]
    assert timed and not any("fold_above" in x.match for x in timed)
    match = {name: getattr(timed[0].spec, name) for name in timed[0].match}
    match |= {"nodes": 4, "batch": 2, "horizon": 16, "state_dtype": "float32"}
    match["precision"] = plain.precision
    best = {"block_v": 16, "num_warps": 8}
    entry = [{"match": match, "config": best}]
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(entry))
    monkeypatch.setattr(configs, "TUNED", tmp_path)
    for fold_above in (0, 12):
        spec = specs.extend(
            plain, horizon=16, record_dtype="float32", fold_above=fold_above
        )
        found = configs.choose(spec, "gpu", "NVIDIA H200")
        assert (found.block_v, found.num_warps) == (16, 8)


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
