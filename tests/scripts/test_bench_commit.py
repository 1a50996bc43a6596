"""The lifecycle benchmark on a CPU: what is timed, what is refused, what is written.

Times are never compared: the host's clock here is a CPU's.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import bench_commit
from scripts.benching import (
    code,
    lifecycle_report,
    lifecycle_runs,
    lifecycles,
    timing,
)
from treewy_jax import deferred

COPY = ["--copy-tb-s", "4"]


def group(nodes=4, batch=2, state_dtype="float32", accept=3.0, sizes=lifecycles.SMALL):
    return lifecycles.Group(nodes, batch, state_dtype, accept, sizes)


# --- what is accepted ---------------------------------------------------------------


@pytest.mark.parametrize("nodes", lifecycles.WIDTHS)
def test_accepted_paths_lead_from_the_root_down_and_have_the_mean_asked(nodes):
    sizes = dataclasses.replace(lifecycles.SMALL, steps=50)
    subject = group(nodes, batch=200, accept=3.3, sizes=sizes)
    found = lifecycles.schedule(subject, np.random.default_rng(0))
    assert found.path.shape == (50, 200, 4)
    assert found.count.min() == 1 and found.count.max() == 4
    assert found.count.mean() == pytest.approx(3.3, abs=0.03)
    parents = np.asarray(subject.parents)
    for level in range(1, 4):
        there = found.count > level
        node, above = found.path[..., level], found.path[..., level - 1]
        assert (parents[node] == above)[there].all()
        assert (node == found.node)[~there].all()
    assert set(found.node.ravel()) == set(range(nodes)), "every node is accepted"


def test_rows_that_skip_accept_nothing():
    rng = np.random.default_rng(0)
    found = lifecycles.schedule(group(batch=100), rng, skip=0.5)
    skipped = found.count == 0
    assert skipped.mean() == pytest.approx(0.5, abs=0.1)
    assert not found.path[skipped].any() and not found.node[skipped].any()


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.2, 4.0])
def test_the_probability_of_a_child_gives_the_mean(mean):
    p = lifecycles.probability(mean, 3)
    assert 1 + p + p**2 + p**3 == pytest.approx(mean)


@pytest.mark.parametrize(
    ("label", "folds", "records"),
    [("reconstruct", 0, 0), ("fused", 2, 8), ("deferred-8", 1, 12)],
)
def test_rows_fold_as_often_as_their_histories_fill(label, folds, records):
    subject = group(accept=4.0)
    steps = lifecycles.schedule(subject, np.random.default_rng(0))
    found = lifecycles.cadence(lifecycles.cell(subject, label), steps)
    # Four tokens a step: fused always has 4 records; deferred-8 has 4, 8, folds.
    assert found == pytest.approx((folds, records), rel=0.01)


def test_a_layer_waits_for_the_one_before_and_changes_nothing():
    x = jnp.arange(3.0)
    assert (lifecycles.behind(x, jnp.ones((1, 1, 1, 1))) == x).all()
    assert jnp.isnan(lifecycles.behind(x, jnp.full((1, 1, 1, 1), jnp.nan))).all()


# --- the ideal ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "moves"),
    [("store-all", 5.1), ("reconstruct", 3.2), ("fused", 2.2), ("deferred-16", 1.4)],
)
def test_the_ideal_of_a_chain_is_that_of_the_byte_model(label, moves):
    subject = group(batch=64, accept=3.2, sizes=lifecycles.Sizes())
    cell = lifecycles.cell(subject, label)
    steps = lifecycles.schedule(subject, np.random.default_rng(0))
    cell.folds, cell.records = lifecycles.cadence(cell, steps)
    cell.accepted = float(steps.count.mean())
    found = lifecycle_report.ideal_bytes(cell) / subject.state_bytes
    assert found == pytest.approx(moves, abs=0.1)


def test_a_copy_of_the_states_is_two_moves():
    cell = lifecycles.cell(group(), "fused")
    us = 1e6 * 2 * cell.group.state_bytes / 4e12
    assert lifecycle_report.moves_equivalent(cell, us, 4e12) == pytest.approx(2)
    assert lifecycle_report.moves_equivalent(cell, None, 4e12) is None


# --- the gate -----------------------------------------------------------------------


class CursorOff(deferred.Deferred):
    """Broken: the history is a record shorter than what was accepted."""

    def commit_layers(self, states, records, accepted):
        found = super().commit_layers(states, records, accepted)
        return tuple(
            dataclasses.replace(x, count=jnp.maximum(x.count - (accepted.count > 1), 0))
            for x in found
        )


class WrongRow(deferred.Deferred):
    """Broken: every row keeps its neighbour's pseudo-values."""

    def commit_layers(self, states, records, accepted):
        records = [
            dataclasses.replace(x, pseudo_values=jnp.roll(x.pseudo_values, 1, axis=0))
            for x in records
        ]
        return super().commit_layers(states, records, accepted)


def test_broken_lifecycles_do_not_pass_the_gate():
    subject = group(15, batch=3)
    good = lifecycles.cell(subject, "deferred_8")
    broken = [
        lifecycles.Cell(subject, "broken", x(horizon=8)) for x in (CursorOff, WrongRow)
    ]
    lifecycle_runs.run([good, *broken], 1)
    assert good.problem is None and max(good.errors) < 1e-2
    assert len(good.wall_us) == 1 and good.layers == lifecycles.SMALL.layers
    for cell in broken:
        assert "wrong: relative errors" in cell.problem
        assert not cell.wall_us and max(cell.errors) > 0.05


def test_what_cannot_run_is_a_problem_of_its_cell():
    cell = lifecycles.cell(group(), "reconstruct")

    class Refusing(type(cell.lifecycle)):
        def verify(self, state, inputs, tree):
            raise NotImplementedError("no kernel for this\nand more")

    cell.lifecycle = Refusing()
    lifecycle_runs.run([cell], 1)
    assert cell.problem == "NotImplementedError: no kernel for this"
    assert lifecycle_report.record(cell, 4e12)["state"] == cell.problem


# --- layers, clocks -----------------------------------------------------------------


def test_as_many_layers_as_fit_together():
    cells = [lifecycles.cell(group(), x) for x in ("store-all", "reconstruct")]
    state = cells[0].group.state_bytes
    # Twice store-all's five states, and each layer's six; rows and records are one.
    assert lifecycle_runs.layers_that_fit(cells, 1e12) == lifecycles.SMALL.layers == 2
    assert lifecycle_runs.layers_that_fit(cells, (10 + 2 * 6 + 2) * state) == 2
    assert lifecycle_runs.layers_that_fit(cells, (10 + 2 * 6) * state) == 1
    assert lifecycle_runs.layers_that_fit(cells, 0) == 1


def test_kernels_that_only_chain_layers_are_not_counted(monkeypatch):
    cell = lifecycles.cell(group(), "reconstruct")
    text = """
  %loop_add_fusion.1 = f32[4]{0} fusion(%x), metadata={op_name="jit(run)/bridge/add"}
  %commit.1 = f32[4]{0} custom-call(%x), metadata={op_name="jit(run)/jit(commit)"}
"""
    cell.layers, cell.bridges = 2, lifecycle_runs.bridges(text)
    kernels = [("tree_verify", 3.0), ("loop_add_fusion_1", 1.0), ("commit", 2.0)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "host_us", lambda *_: 120.0)
    monkeypatch.setattr(timing, "kernels", lambda *_: [kernels * 12])
    turn = lifecycle_runs.Turn.__new__(lifecycle_runs.Turn)
    turn.cell, turn.calls = cell, 1
    turn.take()
    assert cell.device_us == [5.0] and cell.wall_us == [10.0]
    assert cell.kernels == {"tree_verify": 3.0, "commit": 2.0}
    assert cell.launches == 4


# --- the command --------------------------------------------------------------------


def test_cells_are_checked_timed_and_written(tmp_path, capsys):
    file, image = tmp_path / "commit.json", tmp_path / "commit.png"
    arguments = ["--lifecycles", "reconstruct", "deferred-8", "--nodes", "4"]
    arguments += ["--batch", "2", "--quick", "--state-dtype", "bfloat16", *COPY]
    paths = ["--json", str(file), "--plot", str(image)]
    assert bench_commit.main([*arguments, *paths]) == 0
    found = json.loads(file.read_text())
    assert (found["clock"], found["rows"][0]["rounds"]) == ("host", 2)
    first, second = found["rows"]
    assert (first["lifecycle"], second["lifecycle"]) == ("reconstruct", "deferred-8")
    for row in found["rows"]:
        assert row["state"] == "ok" and row["wall_us"]["samples"] == 2
        assert (row["nodes"], row["batch"], row["state_dtype"]) == (4, 2, "bfloat16")
        assert (row["layers"], row["model_layers"]) == (2, 2)
        moves = 1e-6 * row["wall_us"]["median"] * 4e12 / row["state_bytes"]
        assert row["moves_equivalent"] == pytest.approx(moves)
        assert row["times_ideal"] == pytest.approx(moves / row["ideal_moves"])
        assert isinstance(row["xla_moves"], list)
    assert second["options"]["horizon"] == 8 and 0 < second["folds_a_step"] < 2
    assert image.stat().st_size > 0
    assert "deferred-8" in capsys.readouterr().out


def test_a_run_is_resumed_where_it_ended(monkeypatch, tmp_path, capsys):
    file = tmp_path / "commit.json"
    arguments = ["--lifecycles", "reconstruct", "--nodes", "4", "--quick", *COPY]
    arguments += ["--json", str(file), "--resume"]
    assert bench_commit.main([*arguments, "--batch", "1", "--max-seconds", "0"]) == 0
    assert not file.exists() and "out of time" in capsys.readouterr().err
    assert bench_commit.main([*arguments, "--batch", "1"]) == 0
    (first,) = json.loads(file.read_text())["rows"]
    assert bench_commit.main([*arguments, "--batch", "1", "2"]) == 0
    kept, second = json.loads(file.read_text())["rows"]
    assert kept == first and second["batch"] == 2
    monkeypatch.setattr(code, "digest", lambda *parts: "other kernels")
    assert bench_commit.main([*arguments, "--batch", "1"]) == 0
    other, again = json.loads(file.read_text())["rows"]
    assert other == second
    assert again["kernels"] == "other kernels" != first["kernels"]
    file.write_text("[]")
    assert bench_commit.main(arguments) == 2
    assert "no such result" in capsys.readouterr().err


def test_a_wrong_lifecycle_fails_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(lifecycle_runs.BOUNDS, "float32", (0.0, 0.0))
    file = tmp_path / "commit.json"
    arguments = ["--lifecycles", "fused", "--nodes", "4", "--batch", "1"]
    assert bench_commit.main([*arguments, "--json", str(file), *COPY]) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert "wrong: relative errors" in row["state"]
    assert row["wall_us"] is None and row["moves_equivalent"] is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lifecycles", "eager"], "lifecycles names 'eager'; allowed: store-all"),
        (["--lifecycles", "deferred-2"], "horizon is 2"),
        (["--lifecycles"], "lifecycles is empty"),
        (["--nodes", "5"], "nodes is 5; allowed: 4, 15, 40"),
        (["--batch", "0"], "batch is 0"),
        (["--state-dtype", "float16"], "state_dtype is 'float16'"),
        (["--accept", "4.5"], "accept is 4.5; 1 to 4"),
        (["--impl", "cuda"], "impl is 'cuda'"),
        (["--copy-tb-s", "0"], "copy_tb_s is 0.0"),
        (["--json", "."], "is no file in a folder that exists"),
        (["--resume"], "resume is True; with --json"),
        (["--rounds", "3"], "--rounds"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, reason, capsys):
    assert bench_commit.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and reason in captured.err
    assert captured.err.startswith("bench_commit.py: error: ")
    assert not captured.out
