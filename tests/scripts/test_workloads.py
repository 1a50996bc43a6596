"""What every workload promises to the scripts that read it."""

import re

import jax
import numpy as np
import pytest

from scripts.benching import chains
from scripts.compiling import kernels
from scripts.workloads import all as workloads
from scripts.workloads import base
from treewy_jax import pytree

TAGS = {"bench", "tune", "compile", "compile-cuda", "compile-tpu", "small"}
CASES = workloads.cases()


def names(case):
    return re.sub(r"\W+", "-", f"{case.op} {case.label}")


@pytest.mark.parametrize("op", workloads.MODULES)
def test_every_op_has_cases_for_every_script(op):
    cases = workloads.cases([op])
    tags = frozenset().union(*(case.tags for case in cases))
    assert {"bench", "small"} <= tags <= TAGS
    assert {"compile"} <= tags or {"compile-cuda", "compile-tpu"} <= tags
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels)
    assert {case.op for case in cases} == {op}


@pytest.mark.parametrize("case", CASES, ids=names)
def test_cases_fit_what_reads_them(case):
    hash(case)
    outputs = jax.tree.leaves(chains.output_shapes(case))
    assert len(outputs) == len(case.bounds), "a bound for each output"
    chain = chains.plan(case, "reference")
    assert chain.chained_by != "nothing"
    assert case.spec.bytes_moved > 0 and case.spec.flops > 0
    assert "reference" in case.implementations.modules
    if "tune" in case.tags:
        assert case.configs and case.match
        assert all(hasattr(case.spec, field) for field in case.match)
    for platform in ("cuda", "tpu"):
        if case.tags & {"compile", f"compile-{platform}"}:
            name = kernels.IMPLEMENTATION[platform]
            module = case.implementations.module(name)
            found = {"cuda": "gpu", "tpu": "tpu"}[platform]
            assert module.supports(case.spec, found) is None


@pytest.mark.parametrize(
    "case", [case for case in CASES if "small" in case.tags], ids=names
)
def test_small_cases_are_small_and_the_reference_is_right(case):
    assert pytree.nbytes(case.shapes()) < 32e6
    arrays = jax.jit(case.inputs)(jax.random.key(3))
    outputs = jax.jit(case.call("reference", None))(*arrays)
    size = jax.tree.leaves(outputs)[0].shape[0]
    found = base.errors(case, arrays, outputs, sorted({0, size - 1}))
    assert all(e <= b for e, b in zip(found, case.bounds, strict=True)), found


def test_cases_are_picked_by_op_and_tag(blend_op):
    assert workloads.cases(["blend"]) == blend_op
    assert workloads.cases(["blend"], ["compile-tpu", "small"]) == blend_op
    assert workloads.cases(["blend"], ["compile-tpu"]) == []
    with pytest.raises(ValueError, match="op is 'blur'; allowed: "):
        workloads.cases(["blur"])


def test_errors_are_relative_to_the_exact_result(blend_op):
    (case,) = blend_op
    arrays = case.inputs(jax.random.key(0))
    y, new = case.call("reference", None)(*arrays)
    assert max(base.errors(case, arrays, (y, new), [0, 2])) < 1e-6
    assert base.errors(case, arrays, (1.5 * y, new), [1])[0] == pytest.approx(0.5)
    assert np.isnan(base.errors(case, arrays, (y, np.nan * new), [1])[1])
