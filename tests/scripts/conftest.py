"""A small op with workloads, for the scripts that read scripts.workloads."""

import dataclasses
import sys
import types

import jax
import numpy as np
import pytest

from pallas_kernels import implementations
from scripts.workloads import all as workloads
from scripts.workloads import base


@dataclasses.dataclass(frozen=True)
class Spec:
    batch: int
    width: int
    bytes_moved: int = 10**6
    flops: int = 10**6


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


def blend(x, weight, state):
    """y = x * weight + state; state' = 2 y."""
    y = x * weight[:, None] + state
    return y, 2 * y


def supports(spec, platform, *, interpret=False):
    return None if interpret or platform == "gpu" else f"needs a GPU, not a {platform}"


def kernel(x, weight, state, *, config=None):
    if config is not None and config.block == 7:
        raise RuntimeError("7 is too much shared memory\nand more")
    y, new = blend(x, weight, state)
    return (y + (1e-2 if config is not None and config.block == 13 else 0), new)


def make_case(batch=3, width=8, **changes):
    """A case of the op `blend`; `changes` are other fields of it."""

    def inputs(key):
        x, weight, state = jax.random.split(key, 3)
        return (
            jax.random.normal(x, (batch, width)),
            jax.random.normal(weight, (batch,)),
            jax.random.normal(state, (batch, width)),
        )

    def call(impl, config):
        if impl == "reference":
            return blend
        return lambda *arrays: kernel(*arrays, config=config)

    def exact(arrays, rows):
        x, weight, state = (np.asarray(a, np.float64)[list(rows)] for a in arrays)
        y = x * weight[:, None] + state
        return y, 2 * y

    fields = dict(
        op="blend",
        label=f"B={batch} D={width}",
        kind="any",
        spec=Spec(batch, width),
        inputs=inputs,
        call=call,
        exact=exact,
        bounds=(1e-6, 1e-6),
        configs=(Config(4), Config(7), Config(13), Config(8)),
        match=("width",),
        donate=(2,),
        tags=frozenset({"bench", "tune", "compile", "small"}),
    )
    return base.Case(**(fields | changes))


@pytest.fixture
def blend_op(monkeypatch):
    """Register the op; its cases are those of the list that is returned."""
    cases = [make_case()]
    table = implementations.Implementations(
        "blend",
        {name: f"fake_blend.{name}" for name in ("triton", "mosaic_tpu")}
        | {"reference": "fake_blend.reference"},
    )
    modules = {
        "pallas_kernels.blend.op": {"IMPLEMENTATIONS": table},
        "fake_blend.triton": {"supports": supports},
        "fake_blend.mosaic_tpu": {"supports": lambda *_, **__: "needs a TPU"},
        "scripts.workloads.blend": {"cases": lambda: list(cases)},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(workloads.MODULES, "blend", "scripts.workloads.blend")
    return cases
