"""The step benchmark on meshes of eight devices (run by test_bench_step_mesh.py)."""

import concurrent.futures
import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from models.qwen3_5 import published
from scripts import bench_step, room
from scripts.benching import (
    step_fit,
    step_floor,
    step_gate,
    step_mesh,
    step_run,
    step_store,
)
from tests.models import golden
from tests.scripts import test_bench_decode
from treewy_jax import commit, loop

SMALL = dataclasses.replace(test_bench_decode.SHORT, num_hidden_layers=2)
EXPERTS = dataclasses.replace(
    test_bench_decode.EXPERTS, full_attention_interval=2, num_hidden_layers=2
)
START = ["--context", "80", "--copy-tb-s", "0.5", "--accept", "0.7,0.4"]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setitem(published.CONFIGS, "small", SMALL)
    monkeypatch.setitem(published.CONFIGS, "experts", EXPERTS)


def run(*arguments):
    """Run the command; returns its status and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return bench_step.main([*START, *map(str, arguments)]), printed.getvalue()


def point(model="small", mesh="tensor=2", name="reconstruct", **changes):
    fields = dict(
        model=str(model), layers=None, dtype="float32", state_dtype="float32",
        tree="2", commit=name, horizon=8 if name == "deferred" else None,
        accept=(0.7,), router="uniform", context=80, batch=2, mesh=mesh,
    )  # fmt: skip
    return step_store.Point(**(fields | changes))


# --- the command --------------------------------------------------------------------


def test_rows_of_a_mesh_stand_beside_those_of_one_device(tmp_path, monkeypatch):
    path, times = tmp_path / "s.json", tmp_path / "t.json"
    fixed = ["--model", "small", "--batch", 2, "--trees", "2,1", "--json", path]
    fixed += ["--steptime", times]
    assert run(*fixed)[0] == 0
    before = json.loads(path.read_text())["rows"]
    assert run(*fixed, "--mesh", "tensor=2")[0] == 0
    traced, real = [], loop.step
    monkeypatch.setattr(loop, "step", lambda *args: traced.append(0) or real(*args))
    assert run(*fixed)[0] == run(*fixed, "--mesh", "tensor=2,data=1")[0] == 0
    assert not traced
    alone, spread = json.loads(path.read_text())["rows"]
    assert [alone] == before and "mesh" not in alone["point"]
    assert spread["point"] == alone["point"] | {"mesh": "tensor=2"}
    assert "devices" not in alone and spread["devices"] == 2
    assert alone["code"] != spread["code"]
    assert spread["problems"] == [] and 0 < spread["verify_error"] < 3e-3
    assert spread["floor_bytes"]["state"] * 2 == alone["floor_bytes"]["state"]
    assert spread["weight_bytes"] < 0.7 * alone["weight_bytes"]
    assert spread["peak_bytes"] < alone["peak_bytes"]
    entries = json.loads(times.read_text())["entries"]
    assert [entry.get("mesh") for entry in entries] == [None, "tensor=2"]


def test_rows_heads_and_experts_are_spread(tmp_path):
    path = tmp_path / "s.json"
    options = ["--model", "experts", "--batch", 4, "--trees", "none", "--json", path]
    mesh = "data=2,tensor=2,expert=2"
    assert run(*options, "--mesh", mesh, "--commit", "deferred")[0] == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["devices"] == 8 and row["point"]["mesh"] == mesh
    # Of 8 experts each device has 2; the rows of its part touch some of them.
    touched = 8 * (1 - (1 - 2 / 8) ** 2) / 4
    assert row["floor_bytes"]["experts"] == pytest.approx(
        2 * 2 * touched * 3 * 32 * 16, abs=2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data=2", "--batch", "3"], "data is 2, the batch has 3 rows"),
        (["--mesh", "tensor=16"], "16 devices are needed; there are 8"),
        (["--mesh", "tensor=2", "--parts"], "parts: on one device only, not on mesh"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(step_run, "hold", lambda point: 1 / 0)
    assert run("--model", "small", "--trees", "2", *arguments)[0] == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_failing_gate_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(step_gate, "verify_error", lambda case, mesh: 0.1)
    path = tmp_path / "s.json"
    options = ["--model", "small", "--trees", "none", "--batch", 1, "--json", path]
    assert run(*options, "--mesh", "tensor=2")[0] == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["problems"] == ["verify on the mesh: error 1.0e-01, 3e-03 allowed"]


# --- numbers ------------------------------------------------------------------------


def stepped(one, steps=5):
    """Take some steps; returns the state after them."""
    here = step_run.hold(one)
    built = step_run.compiled(one, here, None)
    return step_run.running(built, here, steps).arguments[2]


@pytest.mark.parametrize(
    ("mesh", "name"), [("tensor=2", "reconstruct"), ("data=2,tensor=2", "deferred")]
)
def test_tokens_and_states_are_those_of_one_device(mesh, name):
    folder = golden.FOLDER / "dense"
    scheme = commit.by_name(name, horizon=8)
    alone, spread = (
        stepped(point(folder, where, name, accept=(0.8,))) for where in (None, mesh)
    )
    np.testing.assert_array_equal(spread.tokens, alone.tokens)
    np.testing.assert_array_equal(spread.accept_lengths, alone.accept_lengths)
    assert int(np.max(alone.accept_lengths)) == 2
    for ours, other in zip(spread.cache.recurrent, alone.cache.recurrent, strict=True):
        state = jax.tree.leaves(ours)[0]
        assert len(state.sharding.device_set) == step_mesh.make(mesh).size
        assert not state.is_fully_replicated
        ours, other = (jax.device_get(scheme.materialize(x)) for x in (ours, other))
        np.testing.assert_allclose(ours, other, atol=golden.HIDDEN)


def subject_of(one):
    here = step_run.hold(one)
    return step_run.subject_of(one, here.config, here.graphdef, here.params), here


@pytest.mark.parametrize("name", commit.LIFECYCLES)
def test_bytes_of_a_row_are_those_of_a_devices_arrays(name):
    one = point(mesh="data=2,tensor=2", name=name, batch=4)
    found, here = subject_of(one)
    _, state, _ = step_mesh.shapes(found, found.weights(), here.start, here.mesh)
    row = step_floor.per_row(found, "float32", here.mesh)
    rows = 4 // 2
    cache, draft = state.cache, state.draft
    assert step_mesh.nbytes(cache.recurrent) == rows * row["recurrent"]
    assert step_mesh.nbytes(cache.window) == rows * row["conv"]
    assert step_mesh.nbytes((cache.key, cache.value)) == rows * row["kv"]
    assert step_mesh.nbytes((draft.key, draft.value)) == rows * row["mtp_kv"]


def test_the_largest_batch_fills_the_data_axis(monkeypatch):
    one = point(mesh="data=4", batch=None)
    here = step_run.hold(one)
    batches = []

    def side_by_side(points, held, limit):
        batches.extend(point.batch for point in points)
        made = [concurrent.futures.Future() for _ in points]
        return made

    def attempt(batch, made, held):
        return step_fit.Tried(batch, batch <= 38, None, None)

    monkeypatch.setattr(step_run, "side_by_side", side_by_side)
    monkeypatch.setattr(step_fit, "attempt", attempt)
    limit = 2 * step_mesh.nbytes(here.params)
    found = step_fit.search(one, here, limit, None)
    assert found["largest"] == 36 and not any(batch % 4 for batch in batches)
    left = found["weight_bytes"] // sum(found["row_bytes"].values())
    assert found["predicted"] == 4 * left > 0


# --- the gate -----------------------------------------------------------------------


def gate(name="reconstruct", dtype="float32", mesh="tensor=2", lifecycle=None):
    sizes = dict(depth=2, nodes=7, horizon=8)
    case = step_gate.Case(
        heads=(2, 4),
        dims=(8, 8),
        dtype=dtype,
        lifecycle=lifecycle or commit.by_name(name, **sizes),
        parents=(-1, 0, 1, 1, 0, 4, 4),
        batch=4,
    )
    return step_gate.verify_error(case, step_mesh.make(mesh)) / step_gate.bound(case)


@pytest.mark.parametrize("mesh", ["tensor=2", "data=4", "data=2,tensor=2,expert=2"])
@pytest.mark.parametrize("dtype", step_gate.BOUNDS)
@pytest.mark.parametrize("name", commit.LIFECYCLES)
def test_a_layer_on_a_mesh_is_that_of_the_reference(name, dtype, mesh):
    assert gate(name, dtype, mesh) < 1


@dataclasses.dataclass(frozen=True)
class Doubtful(commit.Reconstruct):
    """The broken twin: outputs that are a hundredth too large."""

    def verify(self, state, inputs, tree):
        output, records = super().verify(state, inputs, tree)
        return 1.01 * output, records


@pytest.mark.parametrize("dtype", step_gate.BOUNDS)
def test_wrong_outputs_do_not_pass_the_gate(dtype):
    assert gate(dtype=dtype, lifecycle=Doubtful()) > 1


def test_keys_of_other_heads_do_not_pass_the_gate(monkeypatch):
    """The broken twin: the second device gets what belongs to the first."""
    spread = step_gate._spread

    def turned(state, rows, tree, mesh):
        rows = rows._replace(k=jax.numpy.roll(rows.k, 1, axis=2))
        return spread(state, rows, tree, mesh)

    monkeypatch.setattr(step_gate, "_spread", turned)
    assert gate("fused", mesh="tensor=2,data=2") > 10


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_devices_of_a_cpu_share_the_room_for_a_model(platform, monkeypatch):
    """Key heads and norms are on more than one device: eight hold more than one."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    one = room.weight_bytes(published.get("qwen3.5-35b-a3b"), "bfloat16", None)
    eight = room.weight_bytes(
        published.get("qwen3.5-35b-a3b"), "bfloat16", step_mesh.make("tensor=8")
    )
    eight *= 1 if platform == "cpu" else 8
    assert one < eight < 1.1 * one


def test_devices_of_other_processes_have_memories_of_their_own(monkeypatch):
    """Two of eight devices are this process's: a quarter lies in its memory."""
    eight = step_mesh.make("tensor=2,data=4")
    whole = room.weight_bytes(SMALL, "bfloat16", eight)
    monkeypatch.setitem(vars(eight), "local_devices", eight.local_devices[:2])
    assert room.weight_bytes(SMALL, "bfloat16", eight) == whole // 4
