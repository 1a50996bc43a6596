"""The step benchmark on a CPU: acceptance, resuming, floors by hand, wrong input.

Times are never compared: the only clock here is the host's.
"""

import contextlib
import dataclasses
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen3_5 import published, random_weights, target
from scripts import bench_step, reporting
from scripts.benching import (
    step_fit,
    step_inject,
    step_program,
    step_run,
    step_state,
    step_store,
)
from tests.scripts import test_bench_decode
from treewy_jax import commit, generate, loop
from treewy_jax import tree as tree_lib

SMALL = dataclasses.replace(test_bench_decode.SHORT, num_hidden_layers=2)
EXPERTS = test_bench_decode.EXPERTS
SHARES = (0.8, 0.5, 0.3)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setitem(published.CONFIGS, "small", SMALL)
    monkeypatch.setitem(published.CONFIGS, "experts", EXPERTS)


def subject(config=SMALL, *, tree="2,1", name="reconstruct", batch=2, context=96):
    """Return what is timed, with shapes for weights."""
    graphdef, shapes = random_weights.graph(config, jnp.bfloat16)
    drafter = generate.default_drafter(tree, config)
    sizes = dict(depth=drafter.depth_max, nodes=drafter.n_max, horizon=8)
    lifecycle = commit.by_name(name, state_dtype="float32", **sizes)
    build = target.Builder(graphdef, lifecycle)
    build, weights = step_inject.join(build, shapes, SHARES[: drafter.depth_max])
    return step_program.Subject(
        name="small",
        config=config,
        build=build,
        drafter=drafter,
        weights=lambda: weights,
        batch=batch,
        context=context,
    )


# --- acceptance ---------------------------------------------------------------------


def accepted(shares, widths=(3, 3, 2), rows=64, steps=64, choices=step_inject.choices):
    """Walk many random trees by injected choices; returns counts and nodes."""
    tree = tree_lib.DraftTree.from_widths(widths, batch=rows)
    from treewy_jax import accept

    @jax.jit
    def one(base, key):
        tokens = jax.random.permutation(
            key, jnp.broadcast_to(jnp.arange(50), (rows, 50)), axis=1, independent=True
        )
        drawn = tree.with_tokens(tokens[:, : tree.n_max])
        logits = jax.random.normal(key, (rows, tree.n_max, 50))
        forced = choices(drawn, base, jnp.asarray(shares), 50)
        column = jnp.arange(50)
        logits = jnp.where(column == forced[..., None], jnp.inf, logits)
        found = accept.greedy(logits, drawn)
        return found.count, found.node

    base, found = jnp.full(rows, 100), []
    for step in range(steps):
        count, node = one(base, jax.random.key(step))
        found.append((np.asarray(count), np.asarray(node)))
        base = base + count
    counts, nodes = (np.concatenate(part) for part in zip(*found, strict=True))
    return counts, nodes


def sigmas(counts, shares):
    """Return how far the share of each depth is from the table."""
    measured = np.array([(counts > d).mean() for d in range(1, len(shares) + 1)])
    error = np.sqrt(np.array(shares) * (1 - np.array(shares)) / len(counts))
    return np.abs(measured - shares) / error


def test_every_depth_is_accepted_as_often_as_the_table_says():
    counts, nodes = accepted(SHARES)
    assert sigmas(counts, SHARES).max() < 3
    spread = counts.std() / len(counts) ** 0.5
    assert abs(counts.mean() - step_inject.mean_length(SHARES)) < 3 * spread
    # Children are drawn evenly: of the 18 deepest nodes none is left out.
    deepest = np.unique(nodes[counts == 4], return_counts=True)[1]
    assert len(deepest) == 18 and deepest.max() < 2.5 * deepest.min()


def test_conditional_shares_would_be_told_apart():
    """The broken twin: the table read as shares of the steps that got so far."""

    def conditional(tree, base, shares, vocabulary):
        return step_inject.choices(tree, base, jnp.cumprod(shares), vocabulary)

    counts, _ = accepted(SHARES, choices=conditional)
    assert sigmas(counts, SHARES).max() > 10


def test_all_and_nothing():
    assert (accepted((1.0, 1.0, 1.0), steps=4)[0] == 4).all()
    assert (accepted((0.0, 0.0, 0.0), steps=4)[0] == 1).all()


def test_tables_and_files(tmp_path):
    assert step_inject.rates("0.8,0.5,0.3", "2,2") == (0.8, 0.5)
    assert step_inject.rates("0.8", "none") == ()
    histogram = tmp_path / "decode.json"
    histogram.write_text('{"accept_length_histogram": {"1": 2, "2": 1, "3": 1}}')
    assert step_inject.rates(str(histogram), "1,1") == (0.5, 0.25)
    acceptance = tmp_path / "acceptance.json"
    cell = {"all": {"lengths": {"mean": 2.75}}}
    acceptance.write_text(json.dumps({"trees": {"1,1": cell}}))
    found = step_inject.rates(str(acceptance), "1,1")
    assert 1 + sum(found) == pytest.approx(2.75)
    assert found[1] == pytest.approx(found[0] ** 2)
    with pytest.raises(ValueError, match="lengths of tree 3"):
        step_inject.rates(str(acceptance), "3")


# --- one run of the command, and its continuation -----------------------------------

START = ["--model", "small", "--batch", "3", "--context", "80", "--copy-tb-s", "0.5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run two points, then again with one more; what was traced, kept and written."""
    folder = tmp_path_factory.mktemp("step")
    files = types.SimpleNamespace(
        json=folder / "s.json", steptime=folder / "t.json", plot=folder / "s.png"
    )
    arguments = [*START, "--json", str(files.json), "--steptime", str(files.steptime)]
    arguments += ["--accept", "0.7,0.4", "--state-dtype", "bfloat16", "--trees", "2,1"]
    traced, real, states = [], loop.step, []

    def traced_step(*arguments):
        traced.append(arguments)
        return real(*arguments)

    def noted(fed, *rest):
        states.append(fed)
        return clocked(fed, *rest)

    clocked = step_run.step_report.clocked
    status, printed = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(published.CONFIGS, "small", SMALL)
        patch.setattr(loop, "step", traced_step)
        patch.setattr(step_run.step_report, "clocked", noted)
        more = (
            ["--commit", "fused"],
            ["--commit", "fused", "deferred", "--horizon", "4"],
            ["--commit", "fused", "deferred", "--horizon", "4", "--plot"],
        )
        for extra in more:
            extra = extra + [str(files.plot)] * (extra[-1] == "--plot")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                status.append(bench_step.main(arguments + extra))
            printed.append(out.getvalue())
    return types.SimpleNamespace(
        status=status,
        traced=traced,
        states=states,
        printed=printed,
        written=json.loads(files.json.read_text()),
        steptime=json.loads(files.steptime.read_text()),
        plot=files.plot,
    )


def test_what_is_compiled_is_loop_step_once_a_point(run):
    assert run.status == [0, 0, 0]
    # Of three runs the second left the first point out, the third both.
    assert len(run.traced) == 2 and len(run.states) == 2
    for (bound, drafter, *_), fed in zip(run.traced, run.states, strict=True):
        assert isinstance(bound, step_inject.Target)
        assert isinstance(fed.arguments[2], loop.LoopState)
        assert drafter.plan.parent.shape == (5,)


def test_rows_say_what_was_timed(run):
    rows = run.written["rows"]
    assert [row["point"]["commit"] for row in rows] == ["fused", "deferred"]
    assert [row["point"]["horizon"] for row in rows] == [None, 4]
    assert run.written["method"] and run.written["device"]
    for row in rows:
        assert row["kind"] == "step" and row["code"] == step_store.code_key()
        assert 0 < row["wall_ms"]["least"] <= row["wall_ms"]["mean"]
        assert row["device_ms"] is None and row["launches"] is None
        assert row["accept_length"] == pytest.approx(2.1)
        assert row["tokens_per_s"] == pytest.approx(
            3 * 2.1 * 1e3 / row["wall_ms"]["mean"]
        )
        assert row["floor_ms"] == pytest.approx(row["floor_bytes"]["total"] / 0.5e9)
        assert row["peak_bytes"] > row["weight_bytes"] > 0
        assert "device_peak_bytes" in row and row["problems"] == []
        assert row["steps"] > step_run.WARM


def test_the_measured_acceptance_is_the_tables(run):
    variance = 0.7 * 0.3 + 0.4 * 0.6 + 2 * 0.4 * 0.3
    for row in run.written["rows"]:
        sigma = np.sqrt(variance / (3 * row["steps"]))
        assert abs(row["measured_accept_length"] - 2.1) < 3 * sigma


def test_the_state_is_that_of_a_running_step(run):
    for fed in run.states:
        state = fed.arguments[2]
        steps = int(state.steps)
        counts = np.asarray(state.accept_lengths)[:, :steps]
        np.testing.assert_array_equal(state.base, 80 + counts.sum(1))
        np.testing.assert_array_equal(state.cache.length, state.base)
        np.testing.assert_array_equal(state.draft.length, state.base)
        assert not state.done.any() and (counts >= 1).all()
        # Rows are not the same text.
        assert len({tuple(row) for row in np.asarray(state.tokens).tolist()}) == 3


def test_simulators_get_an_entry_a_point(run):
    assert run.steptime["schema"] == "steptime/1"
    first, second = run.steptime["entries"]
    assert (first["lifecycle"], second["lifecycle"]) == ("fused", "deferred")
    wanted = {"model": "small", "tree": "2,1", "batch": 3, "context": 80}
    assert wanted.items() <= first.items()
    assert first["ms"] == run.written["rows"][0]["wall_ms"]["mean"]
    assert first["accept"] == [0.7, 0.4] and first["device_ms"] is None


def test_tables_and_plot_are_shown(run):
    assert "deferred 4" in run.printed[1] and "fused" in run.printed[2]
    assert run.plot.stat().st_size > 1000


def test_other_code_is_measured_again(tmp_path, monkeypatch):
    point = step_store.Point(
        "small", None, "bfloat16", "float32", "none", "fused", None, (), "uniform", 9, 1
    )
    store = step_store.Store(tmp_path / "s.json", {})
    store.add("step", point, {"x": 1})
    assert step_store.Store(tmp_path / "s.json", {}).has("step", point)
    assert not store.has("largest", point) and not store.has("step", point, "parts")
    assert not store.has("step", step_store.with_batch(point, 2))
    monkeypatch.setattr(step_store, "code_key", lambda: "other")
    again = step_store.Store(tmp_path / "s.json", {})
    assert not again.has("step", point)
    again.add("step", point, {"x": 2})
    (row,) = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert (row["x"], row["code"]) == (2, "other")


def test_a_failing_write_leaves_the_file(tmp_path, monkeypatch):
    point = step_store.Point(
        "small", None, "bfloat16", "float32", "none", "fused", None, (), "uniform", 9, 1
    )
    store = step_store.Store(tmp_path / "s.json", {})
    store.add("step", point, {"x": 1})
    before = (tmp_path / "s.json").read_text()
    with pytest.raises(ValueError):
        store.add("step", point, {"x": float("nan")})
    assert (tmp_path / "s.json").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_no_point_is_started_too_late(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_run, "hold", lambda point: 1 / 0)
    path = tmp_path / "s.json"
    arguments = [*START, "--max-seconds", "0.001", "--json", str(path)]
    assert bench_step.main(arguments) == 0
    assert not path.exists()
    assert "not started" in capsys.readouterr().err


def test_memory_that_ends_is_a_row(monkeypatch, tmp_path):
    class Held:
        pass

    def fail(*_, **__):
        raise step_run.OutOfMemory("XLA counts 3 GiB")

    monkeypatch.setattr(step_run, "hold", lambda point: Held())
    monkeypatch.setattr(step_run, "lowered", lambda *_: None)
    monkeypatch.setattr(step_run, "finished", fail)
    path, times = tmp_path / "s.json", tmp_path / "t.json"
    arguments = [*START, "--trees", "none", "--json", str(path)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert bench_step.main([*arguments, "--steptime", str(times)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["problem"] == "out of memory: XLA counts 3 GiB"
    assert "out of memory" in printed.getvalue()
    assert json.loads(times.read_text())["entries"] == []


# --- the largest batch --------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 8, 64, 2048])
def test_the_largest_batch_is_found(first):
    for most in (1, 7, 64, 1000):
        tried = []

        def fits(batch, most=most, tried=tried):
            tried.append(batch)
            return batch <= most

        found = step_fit.largest(fits, first)
        assert found <= most and found >= most - max(1, most // 16)
        assert len(tried) == len(set(tried)) < 24
    assert step_fit.largest(lambda batch: False, first) == 0


def test_a_limit_is_met_and_the_formula_stands_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(step_fit, "RESOLUTION", 2)  # a compilation a try
    path = tmp_path / "s.json"
    arguments = ["--model", "small", "--find-max-batch", "--trees", "none"]
    arguments += ["--context", "80", "--json", str(path)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert bench_step.main([*arguments, "--memory-gib", "0.004"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["kind"] == "largest" and row["point"]["batch"] is None
    limit = int(0.004 * 2**30)
    peaks = {one["batch"]: one["peak_bytes"] for one in row["tried"] if one["fits"]}
    assert row["largest"] == max(peaks) and peaks[row["largest"]] <= limit
    refused = [one for one in row["tried"] if not one["fits"]]
    assert refused and all("XLA counts" in one["reason"] for one in refused)
    per_row = sum(row["row_bytes"].values())
    assert row["predicted"] == (limit - row["weight_bytes"]) // per_row
    assert row["row_bytes"]["logits"] == 64 * 4
    # Activations are left out, so it promises more, but not out of proportion.
    assert row["predicted"] / 5 < row["largest"] <= row["predicted"]
    assert "by formula" in printed.getvalue()


def test_allocation_failures_are_told_from_others():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert isinstance(step_run._memory_or(error), step_run.OutOfMemory)
    other = jax.errors.JaxRuntimeError("INTERNAL: nothing")
    assert step_run._memory_or(other) is other


# --- state and arguments ------------------------------------------------------------


def test_shapes_are_those_of_the_state():
    found = subject(name="store-all", tree="2")
    graphdef, shapes = random_weights.graph(SMALL, jnp.bfloat16)
    one = step_state.one_row("small", SMALL, graphdef)
    start = jax.eval_shape(lambda params: step_program.start(one, params), shapes)
    state = step_state.shapes(found, found.weights(), start)
    after = jax.eval_shape(
        lambda weights, state: step_program.step.__wrapped__(
            found.build, weights, found.drafter, state, step_program.rules(2)
        ),
        found.weights(),
        state,
    )
    assert jax.tree.structure(state) == jax.tree.structure(after)
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "qwen4"],
            "model 'qwen4': unknown, expected a folder or one of tiny",
        ),
        (["--model", "tiny", "--random-weights"], "model 'tiny': expected one of"),
        (["--layers", "3"], "layers is 3; small allows multiples of 2 up to 2"),
        (["--batch", "0"], "batch is 0; 1 or more"),
        (["--batch"], "batch is empty"),
        (["--trees"], "trees is empty"),
        (["--context", "1000"], "context is 1000; small allows"),
        (["--trees", "3,x"], "3,x"),
        (["--trees", "1,1,1,1"], "has 3 shares; tree 1,1,1,1 needs 4"),
        (["--accept", "0.5,0.6,0.1"], "accept is '0.5,0.6,0.1'; allowed are shares"),
        (["--accept", "1.5,0.6,0.1"], "accept is '1.5,0.6,0.1'"),
        (["--accept", "a"], "accept is 'a'"),
        (["--accept", "none.json"], "accept none.json"),
        (["--commit", "later"], "commit='later'"),
        (["--commit", "deferred", "--horizon", "2"], "horizon is 2"),
        (["--state-dtype", "int8"], "state_dtype='int8'"),
        (["--parts", "--commit", "fused"], "parts: of reconstruct only"),
        (["--find-max-batch"], "memory_gib is needed"),
        (["--first-batch", "0"], "first_batch is 0"),
        (["--max-seconds", "0"], "max_seconds is 0.0"),
        (["--copy-tb-s", "0"], "copy_tb_s is 0.0"),
        (["--json", "."], "no file in a folder that exists"),
        (["--router", "zip"], "--router"),
        (["--model", "tiny", "--layers", "4"], "layers is 4; allowed for published"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(step_run, "hold", lambda point: 1 / 0)
    monkeypatch.chdir(tmp_path)
    start = [] if "--context" in arguments else ["--context", "80"]
    start += [] if arguments[0] == "--model" else ["--model", "small"]
    assert bench_step.main([*start, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("bench_step.py: error: ")
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == "" and list(tmp_path.iterdir()) == []


def test_files_of_another_kind_are_refused_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_run, "hold", lambda point: 1 / 0)
    path = tmp_path / "other.json"
    for option in ("--json", "--steptime"):
        reporting.write_result(path, {"steps": []})
        before = path.read_text()
        assert bench_step.main([*START, option, str(path)]) == 2
        assert str(path) in capsys.readouterr().err and path.read_text() == before
