"""Which implementation runs, and which measured block sizes it takes."""

import dataclasses
import sys
import types

import jax
import pytest

from pallas_kernels import device, implementations, tuning


@pytest.fixture
def table(monkeypatch):
    """An op with a kernel that never runs here, one that does, and a reference."""
    for name, reason in (("fake_gpu", "needs a moon"), ("fake_any", None)):
        module = types.ModuleType(name)
        module.supports = lambda *_, reason=reason, **__: reason  # pyright: ignore
        monkeypatch.setitem(sys.modules, name, module)
    modules = {"moon": "fake_gpu", "any": "fake_any", "reference": "fake_any"}
    return implementations.Implementations("op", modules)


def test_the_first_that_supports_the_call(table):
    choice = table.choose(None)
    assert choice == ("any", "")
    assert table.explain(None) == "op runs impl=any"


def test_a_named_one_runs_or_raises(table):
    assert table.choose(None, "any").name == "any"
    with pytest.raises(NotImplementedError, match="impl='moon' .* needs a moon"):
        table.choose(None, "moon")
    with pytest.raises(ValueError, match="impl is 'x'; allowed: auto, moon, any"):
        table.check("x")


def test_optional_ones_are_only_run_by_name(table):
    table = dataclasses.replace(table, optional=("any",))
    assert table.choose(None) == ("reference", "moon needs a moon")
    assert table.choose(None, "any").name == "any"


def test_another_ops_choice(table):
    assert table.nearest("any") == "any"
    assert table.nearest("deferred") is None and table.nearest(None) is None


def test_an_abstract_device_comes_before_the_real_one():
    abstract = jax.sharding.AbstractDevice("NVIDIA H200", 1, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        assert device.target() == ("gpu", "NVIDIA H200")
        assert device.platform() == "gpu"


@dataclasses.dataclass(frozen=True)
class Spec:
    nodes: int
    dtype: str


def test_the_first_entry_that_agrees(tmp_path):
    (tmp_path / "nvidia_h200.json").write_text(
        '[{"match": {"nodes": {"most": 16}}, "config": {"block": 1}},'
        ' {"match": {"nodes": [40, 64], "dtype": "f"}, "config": {"block": 2}}]'
    )
    look = lambda *spec: tuning.lookup(tmp_path, "NVIDIA H200", Spec(*spec))  # noqa: E731
    assert look(4, "x") == {"block": 1}
    assert look(64, "f") == {"block": 2}
    assert look(40, "g") is None and look(39, "f") is None
    assert tuning.lookup(tmp_path, "NVIDIA B200", Spec(4, "x")) is None
