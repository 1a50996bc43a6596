"""The step benchmark on a mesh; what needs several devices runs in a process apart."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import profiler

from scripts import bench_step
from scripts.benching import step_mesh, step_report, step_run, step_store
from tests import eight_devices

RESULTS = eight_devices.ROOT / "scripts/results/nvidia-h200"


@pytest.mark.timeout(900)  # some minutes on one core, mostly of compilation
def test_steps_on_eight_devices():
    eight_devices.run("scripts/mesh_steps.py")


def test_points_of_one_device_are_written_as_before():
    """Rows and entries that are kept are found again, those without a mesh, too."""
    rows = json.loads((RESULTS / "step.json").read_text())["rows"]
    store = step_store.Store(RESULTS / "step.json", {})
    for row in rows:
        fields = row["point"] | {"accept": tuple(row["point"]["accept"])}
        point = step_store.Point(**fields)
        assert store._find(row["kind"], point) == row
        if "mesh" in row["point"]:
            continue
        spread = dataclasses.replace(point, mesh="tensor=4")
        assert store._find(row["kind"], spread) is None
    entries = step_store.read_steptime(RESULTS / "steptime.json")
    assert len({step_store._key(entry) for entry in entries}) == len(entries)


def test_a_mesh_is_written_in_one_way(monkeypatch):
    monkeypatch.setattr(step_mesh.mesh_lib, "make", lambda sizes: None)
    for text in ("expert=2, data=4,tensor=1", "data=4,expert=2"):
        assert step_mesh.canonical(text) == "data=4,expert=2"
    assert step_mesh.canonical("tensor=1") is step_mesh.canonical(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", "allowed: AXIS=DEVICES"),
        ("rows=2", "'rows' is unknown; allowed are data, tensor, expert"),
        ("tensor=1000", "1000 devices are needed; there are"),
    ],
)
def test_a_wrong_mesh_is_one_line(text, message, monkeypatch, capsys):
    monkeypatch.setattr(step_run, "hold", lambda point: 1 / 0)
    assert bench_step.main(["--model", "tiny", "--mesh", text, "--trees", "none"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_on_several_devices_the_hosts_clock_alone_counts(monkeypatch):
    """JAX's CUPTI client is not made for them: it is not to be called."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(profiler, "measure", lambda *_, **__: 1 / 0)
    clock, problems = step_report.clocked(lambda: jnp.ones(()), 2, devices=2)
    assert problems == [] and clock.device_us == [] and clock.launches is None
    assert len(clock.host_us) == 2
    with pytest.raises(ZeroDivisionError):
        step_report.clocked(lambda: jnp.ones(()), 2)


def test_without_kernels_the_wall_time_counts():
    row = {"wall_ms": {"mean": 3}, "device_ms": {"mean": 2}}
    assert step_store.clock(row) == {"mean": 2}
    assert step_store.clock(row | {"device_ms": None}) == {"mean": 3}
