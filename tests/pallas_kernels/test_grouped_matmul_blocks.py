"""Blocks of the expert layer on a GPU, and the expert that all tokens go to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import blocks, op, reference, routes
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import spec as specs
from tests.pallas_kernels import test_grouped_matmul as base

SHARED = base.make_spec(shared=True)
SEARCHED = 512
run = jax.jit(op.swiglu_experts, static_argnames=("impl", "config"))
on_gpus = pytest.mark.skipif("triton" not in base.KERNELS, reason="a kernel of GPUs")


def inputs(spec, seed=0):
    """Return the arrays of a call but the routes, the shared expert among them."""
    arrays = base.inputs(spec, seed)
    if not spec.shared:
        return arrays
    one = dataclasses.replace(spec, experts=1)
    other = base.inputs(one, seed + 1)
    random = np.random.default_rng(seed)
    weights = np.asarray(random.random((spec.tokens, spec.slots)), spec.input_dtype)
    shared = (other["gate_up"][0], other["down"][0])
    return arrays | {"weights": weights, "shared": shared}


def looped(x, gate_up, down, weights, experts, shared):
    """The shared expert is one more, which every token names."""
    count, tokens = len(gate_up), len(x)
    known = np.where(experts < count, experts, count + 1)
    every = np.concatenate([known, np.full((tokens, 1), count)], axis=1)
    stacked = (
        np.concatenate([many, one[None]])
        for many, one in zip((gate_up, down), shared, strict=True)
    )
    return base.looped(x, *stacked, weights, every)


def cut(spec, **changes):
    return dataclasses.replace(configs.heuristic(spec, "gpu"), **changes)


# --- the shared expert --------------------------------------------------------------


@base.over_impls
@pytest.mark.parametrize("route", ["spread", "half of no expert", "one takes all"])
def test_every_token_meets_the_shared_expert(route, impl):
    arrays, experts = inputs(SHARED), base.routed(route)
    output = base.call(arrays, experts, impl)
    assert base.relative(output, looped(**arrays, experts=experts)) < 1e-6


@base.over_impls
def test_it_is_seen_in_bfloat16_and_in_more_than_a_block(impl):
    spec = base.make_spec(
        tokens=39, per_token=3, experts=7, input_dtype="bfloat16", shared=True
    )
    shape = (spec.tokens, spec.per_token)
    experts = np.random.default_rng(1).integers(0, 8, shape).astype(np.int32)
    arrays = inputs(spec)
    output = base.call(arrays, experts, impl)
    assert output.dtype == jnp.bfloat16
    assert base.relative(output, looped(**arrays, experts=experts)) < 8e-3


@base.over_impls
def test_tokens_of_no_other_expert_still_meet_it(impl):
    arrays = inputs(SHARED)
    none = np.full((SHARED.tokens, SHARED.per_token), SHARED.experts, np.int32)
    output = base.call(arrays, none, impl)
    gates = np.asarray(arrays["weights"], np.float64)[:, -1:]
    x, shared = jax.tree.map(jnp.asarray, (arrays["x"], arrays["shared"]))
    alone = gates * np.asarray(reference.swiglu(x, *shared))
    assert base.relative(output, alone) < 1e-6


@base.over_impls
@pytest.mark.parametrize("fault", ["weight", "matrices"])
def test_a_wrong_shared_expert_is_seen(fault, impl):
    arrays, experts = inputs(SHARED), base.routed("spread")
    output = base.call(arrays, experts, impl)
    if fault == "weight":
        arrays["weights"] = np.roll(arrays["weights"], 1, axis=1)
    else:
        arrays["shared"] = (arrays["gate_up"][0], arrays["down"][0])
    assert base.relative(output, looped(**arrays, experts=experts)) > 1e-2


@pytest.mark.parametrize("impl", base.KERNELS)
def test_its_gradients_are_those_of_the_reference(impl):
    arrays, experts = inputs(SHARED), jnp.asarray(base.routed("half of no expert"))
    expected = base.gradient(arrays, experts, "reference")
    found = base.gradient(arrays, experts, impl)
    leaves = jax.tree.leaves_with_path(expected)
    assert len(leaves) == 6
    for (path, array), ours in zip(leaves, jax.tree.leaves(found), strict=True):
        assert base.relative(ours, np.asarray(array)) < 1e-5, path


# --- terms of the sum ---------------------------------------------------------------

parts_of = jax.jit(op.swiglu_parts, static_argnames=("impl", "config"))


@base.over_impls
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_terms_add_up(dtype, impl):
    """A term a choice, in their order, and the shared expert's behind them."""
    spec = dataclasses.replace(SHARED, input_dtype=dtype, expert_dtype=dtype)
    arrays, experts = inputs(spec), base.routed("spread")
    found = np.asarray(base.call(arrays, experts, impl, parts_of), np.float64)
    assert found.shape == (spec.tokens, spec.slots, spec.hidden)
    bound = 1e-6 if dtype == "float32" else 8e-3
    for slot in range(spec.slots):
        only = np.where(np.arange(spec.slots) == slot, arrays["weights"], 0)
        wanted = looped(**arrays | {"weights": only}, experts=experts)
        assert base.relative(found[:, slot], wanted) < bound
    whole = base.call(arrays, experts, impl)
    assert base.relative(found.sum(1), np.asarray(whole, np.float64)) < bound


@base.over_impls
def test_terms_of_many_pairs_come_added_up(impl, monkeypatch):
    arrays, experts = inputs(SHARED), base.routed("spread")
    monkeypatch.setattr(op, "MOST_PAIRS", SHARED.pairs - 1)
    again = jax.jit(functools.partial(op.swiglu_parts, impl=impl))
    found = again(**jax.tree.map(jnp.asarray, arrays), experts=jnp.asarray(experts))
    assert found.shape == (SHARED.tokens, 1, SHARED.hidden)
    assert base.relative(found[:, 0], looped(**arrays, experts=experts)) < 1e-6


@pytest.mark.parametrize("impl", base.KERNELS)
def test_gradients_of_terms_are_those_of_the_reference(impl):
    arrays, experts = inputs(SHARED), jnp.asarray(base.routed("spread"))

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def gradient(arrays, impl):
        parts = op.swiglu_parts(**arrays, experts=experts, impl=impl)
        return jnp.sum(jnp.sin(parts))

    expected, found = (gradient(arrays, name) for name in ("reference", impl))
    leaves = jax.tree.leaves_with_path(expected)
    assert len(leaves) == 6
    for (path, array), ours in zip(leaves, jax.tree.leaves(found), strict=True):
        assert base.relative(ours, np.asarray(array)) < 1e-5, path


def test_shapes_that_do_not_belong_together():
    arrays = jax.tree.map(jnp.asarray, inputs(SHARED))
    arrays["experts"] = jnp.asarray(base.routed("spread"))
    gate_up, down = arrays["shared"]
    for shared, message in (
        ((gate_up[:, 1:], down), r"shared gate_up has shape .* \(128, 256\)"),
        ((gate_up, down[1:]), r"shared down has shape .* \(128, 128\)"),
        ((gate_up, down.astype(jnp.bfloat16)), "shared down has dtype bfloat16"),
        (None, r"weights has shape \(9, 3\); \(9, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            specs.spec_of(**arrays | {"shared": shared})


def test_the_floor_counts_it():
    one = dataclasses.replace(SHARED, shared=False)
    matrices = 3 * base.HIDDEN * base.INNER * 4
    routes_of_it = 4 * base.TOKENS
    assert SHARED.bytes_moved - one.bytes_moved == matrices + routes_of_it
    assert SHARED.flops / one.flops == 3 / 2


# --- blocks -------------------------------------------------------------------------


@on_gpus
@pytest.mark.parametrize("route", ["spread", "one takes all", "half of no expert"])
def test_blocks_that_are_searched_and_listed_are_equal(route):
    """Bit by bit: the same rows meet the same matrices."""
    arrays, experts = inputs(SHARED), jnp.asarray(base.routed(route))
    outputs = [
        np.asarray(run(**arrays, experts=experts, impl="triton", config=config))
        for config in (cut(SHARED, rows=4, searched=most) for most in (SEARCHED, 0))
    ]
    assert outputs[0].tobytes() == outputs[1].tobytes()
    expected = looped(**arrays, experts=np.asarray(experts))
    assert base.relative(outputs[0], expected) < 1e-6


def search(experts, spec, rows):
    """Return expert, pairs and their number, block by block."""

    def kernel(routed, expert, pairs, count):
        block = pl.program_id(0)
        found = blocks._searched(routed, block, spec=spec, rows=rows)
        for ref, value in zip((expert, count), (found[0], found[2]), strict=True):
            ref[block] = value
        pairs[block, :] = found[1]

    size = blocks.gpu.power_of_two(spec.pairs)
    found = routes.launch(
        kernel,
        name="search",
        grid=(spec.pairs,),
        inputs=[(jnp.asarray(experts), (size,))],
        outputs=[
            ((spec.pairs,), jnp.int32),
            ((spec.pairs, rows), jnp.int32),
            ((spec.pairs,), jnp.int32),
        ],
        options=(4, 1),
    )
    return [np.asarray(array) for array in found]


def assert_each_pair_once(experts, spec, rows):
    seen = []
    for expert, pairs, count in zip(*search(experts, spec, rows), strict=True):
        assert 0 <= count <= rows
        seen.extend(pairs[:count])
        assert np.all(experts[pairs[:count]] == expert)
    assert sorted(seen) == list(np.flatnonzero(experts < spec.experts))


@on_gpus
@pytest.mark.parametrize("sizes", [(1, 1, 1, 16), (3, 2, 40, 16), (30, 8, 7, 8)])
def test_a_search_finds_every_pair_of_an_expert_once(sizes):
    spec, cases = base.route_cases(sizes)
    for experts in cases:
        assert_each_pair_once(experts, spec, sizes[-1])


@on_gpus
def test_a_search_that_begins_no_second_block_is_seen(monkeypatch):
    spec, cases = base.route_cases((30, 8, 7, 8))
    monkeypatch.setattr(blocks.jnp, "minimum", lambda a, b: jnp.clip(a, 0, b - 1))
    with pytest.raises(AssertionError):
        assert_each_pair_once(cases[0], spec, 8)


def test_few_pairs_are_searched_and_many_are_listed():
    for tokens, rows, arrays in ((4, 16, 1), (40, 16, 1), (40, 64, 2), (160, 16, 2)):
        spec = specs.make_spec(
            tokens=tokens, per_token=8, experts=256, hidden=128, inner=128
        )
        experts = jnp.zeros((tokens, 8), jnp.int32)
        found = blocks.find(experts, spec=spec, config=cut(spec, rows=rows))
        assert (len(found.inputs), found.shared) == (arrays, 0)


def test_the_limit_of_the_search_is_checked():
    with pytest.raises(ValueError, match="searched is -1; 0 or more"):
        configs.choose(SHARED, "gpu", "unknown", cut(SHARED, searched=-1))
