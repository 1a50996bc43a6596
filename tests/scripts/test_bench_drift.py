"""The drift study: what is replayed, what is called drift, and twins that must be."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from scripts import bench_drift
from scripts.drifting import figures, replay, streams
from treewy_jax import commit, deferred
from treewy_jax import tree as tree_lib

TOKENS, CHECKPOINTS = 320, 8
TREE = tree_lib.DraftTree.from_widths((2, 1, 1))
CHOSEN = bench_drift.Options(
    tokens=TOKENS, checkpoints=CHECKPOINTS, source=("synthetic",), heads=2, width=8
)


@pytest.fixture(scope="module")
def drawn():
    return streams.synthetic(TOKENS, 2, 8, seed=1)


def measure(drawn, owner, state_dtype="float32", tree=TREE):
    setting = figures.Setting("deferred", state_dtype, "float32", 16)
    return bench_drift.measure({setting: owner}, drawn, tree, CHOSEN)[0]


# --- what is replayed ---------------------------------------------------------------


def test_every_row_commits_the_stream_in_order():
    rows = 5
    steps = replay.plan(TREE, TOKENS, CHECKPOINTS, rows, seed=3)
    assert steps.reached.tolist() == [TOKENS * (i + 1) // 8 for i in range(8)]
    read = [[] for _ in range(rows)]
    counts = set()
    for span, reached in zip(range(CHECKPOINTS), steps.reached, strict=True):
        for node, token in zip(steps.node[span], steps.token[span], strict=True):
            path, count = map(np.asarray, _paths(jnp.asarray(node)))
            for row in range(rows):
                read[row] += token[row][path[row, : count[row]]].tolist()
            counts.add(tuple(count))
        assert all(tokens == list(range(reached)) for tokens in read)
    assert any(len(set(count)) > 1 for count in counts)  # rows differ
    assert {0, 1, 4} <= {number for count in counts for number in count}


@jax.jit
def _paths(node):
    rows = jnp.zeros((len(node), TREE.n_max), jnp.int32)
    return TREE.with_tokens(rows).path(node)


def test_other_nodes_read_other_tokens():
    steps = replay.plan(TREE, TOKENS, CHECKPOINTS, 2, seed=3)
    ahead = steps.token[0, :, 0, 1:] - steps.token[0, :, 0, :1]
    assert np.mean((ahead < 0) | (ahead > 3)) > 0.3


def test_recorded_inputs_lead_to_the_states_of_the_model():
    """The recurrence over what was recorded ends where the model's prefill ends."""
    recorded = streams.recorded(48, 2)
    assert recorded.names == tuple(f"layer {n}" for n in (0, 1, 2, 4, 5, 6))
    shapes = [x.shape for x in recorded.inputs]
    assert shapes == [(6, 48, 1, 128)] * 2 + [(6, 48, 2, 128)] + [(6, 48, 2)] * 2
    model = models.load("tiny", dtype="float32")
    (text,) = streams.texts(model, 1, 48)
    builder = model.builder(commit.Reconstruct())

    @jax.jit
    def prefill(params, tokens):
        return builder(params).prefill(tokens, jnp.array([48]), 48)[1].recurrent

    found = prefill(model.params, jnp.asarray(text)[None])
    expected = np.concatenate(found)[:, :2]
    (found,) = replay.sequential(recorded.inputs, np.array([48]), "float32")
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_float64_is_computed_as_such(drawn):
    exact, single = (
        replay.sequential(drawn.inputs, np.array([64]), dtype)
        for dtype in ("float64", "float32")
    )
    assert (exact.dtype, single.dtype) == (np.float64, np.float32)
    error = figures.errors(single, exact)
    assert np.all((error > 1e-9) & (error < 2e-6))


# --- what is called drift -----------------------------------------------------------


def test_float32_is_as_exact_as_the_sequence(drawn):
    owners = dict(bench_drift.settings(CHOSEN, TREE))
    kept = {s: o for s, o in owners.items() if s.float32 and s.horizon in (None, 8)}
    assert [s.lifecycle for s in kept] == [*commit.LIFECYCLES]
    found, base, reached = bench_drift.measure(kept, drawn, TREE, CHOSEN)
    assert reached[-1] == TOKENS
    assert len(found) == len(kept) * len(drawn.names)
    assert {row.mark for row in found} == {""}
    assert max(row.ratio for row in found) < figures.RATIO
    for row in found:
        if row.setting.lifecycle == "store-all":  # the same operations
            assert (row.from_float32, row.ratio, row.error) == (0, 1, base[row.name])


def test_a_rounded_state_drifts_where_it_hardly_decays():
    wide = streams.synthetic(TOKENS, 1, 48, seed=1)
    rows = measure(wide, commit.Reconstruct(state_dtype="bfloat16"), "bfloat16")
    marks = {row.name: row.mark for row in rows}
    assert marks["no decay"] == "drifts"
    assert marks["strong decay"] == "inexact"


class Halved(deferred.Deferred):
    """A broken twin: committed pseudo-values have the precision of float16."""

    def verify(self, state, inputs, tree):
        output, records = super().verify(state, inputs, tree)
        u = records.pseudo_values.astype(jnp.float16).astype(jnp.float32)
        return output, dataclasses.replace(records, pseudo_values=u)


class Skipping(deferred.Deferred):
    """A broken twin: of a path of four nodes, the last is not committed."""

    def commit(self, state, records, accepted):
        count = jnp.minimum(accepted.count, 3)
        return super().commit(state, records, accepted._replace(count=count))


class Late(deferred.Deferred):
    """A broken twin: rows that fold keep their records, too."""

    def verify(self, state, inputs, tree):
        output, records = super().verify(state, inputs, tree)
        return output, dataclasses.replace(records, fold_above=self.horizon)


@pytest.mark.parametrize("twin", [Halved, Skipping, Late])
def test_broken_twins_are_marked(drawn, twin):
    rows = measure(drawn, twin(impl="reference"))
    # A strong decay forgets mistakes before the next checkpoint.
    lasting = [row for row in rows if row.name != "strong decay"]
    assert len(lasting) == 4 and all(row.mark for row in lasting)
    assert min(row.ratio for row in lasting) > 50


def made(growth, scale=1e-3):
    """Rows whose error is `scale` t**growth, beside a sequence with constant 1e-7."""
    reached = np.arange(1, 33) * 256
    exact = np.ones((32, 1, 2, 4, 4))
    error = scale * (reached / reached[-1]) ** growth
    states = exact * (1 + error[:, None, None, None, None])
    setting = figures.Setting("reconstruct", "float32")
    rows = figures.rows(setting, ["x"], reached, states, exact, exact * (1 + 1e-7))
    return rows[0]


@pytest.mark.parametrize(
    ("growth", "scale", "mark"),
    [
        (0, 1.5e-7, ""),
        (0, 3e-7, "inexact"),
        (0.2, 1e-3, "inexact"),
        (0.5, 1e-3, "drifts"),
        (1, 1e-3, "drifts"),
        (0.5, 1e-7, "drifts"),  # not inexact yet
        (-0.5, 1e-7, ""),
    ],
)
def test_marks(growth, scale, mark):
    row = made(growth, scale)
    assert row.mark == mark
    np.testing.assert_allclose(row.slope, growth, atol=0.01)
    np.testing.assert_allclose(row.last_over_first, 32.0**growth, rtol=0.01)
    np.testing.assert_allclose(row.error[-1], scale, rtol=0.01)
    np.testing.assert_allclose(row.from_float32, abs(scale - 1e-7), rtol=0.02)


# --- the command --------------------------------------------------------------------

SMALL = "--source synthetic --tokens 64 --checkpoints 4 --heads 1 --width 8".split()
ONE = "--lifecycles deferred --state-dtypes float32 --horizons 8".split()


def test_writes_rows_and_plot(tmp_path, capsys):
    files = tmp_path / "drift.json", tmp_path / "drift.png"
    paths = ["--json", str(files[0]), "--plot", str(files[1])]
    assert bench_drift.main([*SMALL, *ONE, "--quick", *paths]) == 0
    out, err = capsys.readouterr()
    assert "no decay" in out and "times the error of sequential float32" in out
    result = json.loads(files[0].read_text())
    assert result["options"]["json"] == "drift.json"
    assert result["tokens"] == [16, 32, 48, 64]
    assert sorted(result["sequential_float32"]) == sorted(streams.GATES)
    assert [(row["record_dtype"], row["horizon"]) for row in result["rows"]] == (
        [("float32", 8)] * 5 + [("bfloat16", 8)] * 5
    )
    assert all(len(row["error"]) == 4 for row in result["rows"])
    assert {row["inexact"] for row in result["rows"][5:]} == {True}
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "tokens is 100; 128 or more are allowed"),
        (["--checkpoints", "2"], "checkpoints is 2; 4 or more are allowed"),
        (["--horizons", "3"], "horizon is 3; a path of this tree has up to 4"),
        (["--lifecycles", "fussed"], "commit='fussed': allowed are"),
        (["--state-dtypes", "float64"], "state_dtypes: 'float64'; allowed are"),
        (["--record-dtypes", "int8"], "record_dtypes: 'int8'; allowed are"),
        (["--width", "64"], "width 64; the model allows up to 4 and 128"),
        (["--heads", "3"], "heads is 3; 1 or an even number is allowed"),
        (["--heads", "6"], "heads is 6 and width 128; the model allows up to 4"),
        (["--heads", "0"], "heads is 0; 1 or more is allowed"),
        (["--tree", "3,x"], "tree '3,x': level 2 is 'x'"),
        (["--impl", "cuda"], "cuda"),
        (["--horizons"], "horizons is empty"),
        (["--source", "modell"], "modell"),
        (["--json", "no/such/folder.json"], "is no file in a folder that exists"),
        (["--tokens", "many"], "many"),
        (["--nothing"], "--nothing"),
    ],
)
def test_wrong_input_is_refused(arguments, message, capsys):
    assert bench_drift.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("bench_drift.py: error: ") and message in err


def test_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_drift.main(["--plot", "drift.png"]) == 2
    assert "plot needs matplotlib" in capsys.readouterr().err


def test_quick_commits_less(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_drift, "draw", lambda chosen: seen.append(chosen))
    monkeypatch.setattr(bench_drift, "measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench_drift.main(["--quick"])
    assert seen == [dataclasses.replace(bench_drift.Options(), tokens=1024, quick=True)]
