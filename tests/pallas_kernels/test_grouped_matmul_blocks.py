"""Blocks of the expert layer on a GPU, and the expert that all tokens go to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import blocks, op, reference, routes, triton
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import spec as specs
from tests.pallas_kernels import test_grouped_matmul as base

SHARED = base.make_spec(shared=base.INNER)
# A device of several has a part of the shared expert, and whole ones of the others.
NARROWER, WIDER = (base.make_spec(shared=width) for width in (32, 192))
over_widths = pytest.mark.parametrize(
    "spec", [SHARED, NARROWER, WIDER], ids=["equal", "narrower", "wider"]
)
SEARCHED = 512
run = jax.jit(op.swiglu_experts, static_argnames=("impl", "config"))
on_gpus = pytest.mark.skipif("triton" not in base.KERNELS, reason="a kernel of GPUs")


def inputs(spec, seed=0):
    """Return the arrays of a call but the routes, the shared expert among them."""
    arrays = base.inputs(spec, seed)
    if not spec.shared:
        return arrays
    one = dataclasses.replace(spec, experts=1, inner=spec.shared)
    other = base.inputs(one, seed + 1)
    random = np.random.default_rng(seed)
    weights = np.asarray(random.random((spec.tokens, spec.slots)), spec.input_dtype)
    shared = (other["gate_up"][0], other["down"][0])
    return arrays | {"weights": weights, "shared": shared}


def looped(x, gate_up, down, weights, experts, shared):
    """The shared expert is one of another stack, which every token names."""
    stack = (matrix[None] for matrix in shared)
    every = np.zeros((len(x), 1), np.int32)
    alone = base.looped(x, *stack, weights[:, -1:], every)
    return base.looped(x, gate_up, down, weights[:, :-1], experts) + alone


def cut(spec, **changes):
    return dataclasses.replace(configs.heuristic(spec, "gpu"), **changes)


# --- the shared expert --------------------------------------------------------------


@base.over_impls
@pytest.mark.parametrize("route", ["spread", "half of no expert", "one takes all"])
@over_widths
def test_every_token_meets_the_shared_expert(spec, route, impl):
    arrays, experts = inputs(spec), base.routed(route)
    output = base.call(arrays, experts, impl)
    assert base.relative(output, looped(**arrays, experts=experts)) < 1e-6


@base.over_impls
@pytest.mark.parametrize("width", [32, 128])
def test_it_is_seen_in_bfloat16_and_in_more_than_a_block(width, impl):
    spec = base.make_spec(
        tokens=39, per_token=3, experts=7, input_dtype="bfloat16", shared=width
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
@over_widths
def test_a_wrong_shared_expert_is_seen(spec, fault, impl):
    arrays, experts = inputs(spec), base.routed("spread")
    output = base.call(arrays, experts, impl)
    if fault == "weight":
        arrays["weights"] = np.roll(arrays["weights"], 1, axis=1)
    else:
        arrays["shared"] = tuple(np.roll(each, 1) for each in arrays["shared"])
    assert base.relative(output, looped(**arrays, experts=experts)) > 1e-2


@pytest.mark.parametrize("impl", base.KERNELS)
@over_widths
def test_its_gradients_are_those_of_the_reference(spec, impl):
    arrays, experts = inputs(spec), jnp.asarray(base.routed("half of no expert"))
    expected = base.gradient(arrays, experts, "reference")
    found = base.gradient(arrays, experts, impl)
    leaves = jax.tree.leaves_with_path(expected)
    assert len(leaves) == 6
    for (path, array), ours in zip(leaves, jax.tree.leaves(found), strict=True):
        assert base.relative(ours, np.asarray(array)) < 1e-5, path


@on_gpus
@pytest.mark.parametrize(
    ("spec", "with_one_more"), [(NARROWER, 0), (SHARED, 1)], ids=["narrower", "equal"]
)
def test_of_many_tokens_a_narrower_one_is_apart(spec, with_one_more, monkeypatch):
    """It has no block of its own, and the result is the same."""
    arrays, experts = inputs(spec), base.routed("half of no expert")
    seen, find = [], blocks.find

    def noted(routed, *, spec, config):
        found = find(routed, spec=spec, config=config)
        seen.append(found.shared)
        return found

    monkeypatch.setattr(blocks, "find", noted)
    for most in (base.TOKENS, base.TOKENS - 1):
        monkeypatch.setattr(triton, "MOST_TOGETHER", most)
        # A function of its own: nothing that was traced before is taken.
        again = jax.jit(
            lambda **call: op.swiglu_experts(**call), static_argnames="impl"
        )
        output = base.call(arrays, experts, "triton", again)
        assert base.relative(output, looped(**arrays, experts=experts)) < 1e-6
    assert seen == [1, with_one_more]


# --- terms of the sum ---------------------------------------------------------------

parts_of = jax.jit(op.swiglu_parts, static_argnames=("impl", "config"))


@base.over_impls
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@over_widths
def test_terms_add_up(spec, dtype, impl):
    """A term a choice, in their order, and the shared expert's behind them."""
    spec = dataclasses.replace(spec, input_dtype=dtype, expert_dtype=dtype)
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
        ((gate_up, down[1:]), r"shared gate_up has shape .* \(128, 254\)"),
        ((gate_up, down[:, 1:]), r"shared down has shape .* \(128, 128\)"),
        ((gate_up, down.astype(jnp.bfloat16)), "shared down has dtype bfloat16"),
        (None, r"weights has shape \(9, 3\); \(9, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            specs.spec_of(**arrays | {"shared": shared})


@over_widths
def test_the_floor_counts_it(spec):
    without = dataclasses.replace(spec, shared=0)
    matrices = 3 * base.HIDDEN * spec.shared * 4
    routes_of_it = 4 * base.TOKENS
    assert spec.bytes_moved - without.bytes_moved == matrices + routes_of_it
    added = 6 * base.TOKENS * base.HIDDEN * spec.shared
    assert spec.flops - without.flops == added


def test_tiles_divide_a_narrow_shared_expert():
    """Also where the tuned ones would not."""
    sizes = dict(tokens=1024, per_token=8, experts=256, hidden=2048, inner=512)
    for width, columns in ((512, 128), (64, 64)):
        spec = specs.make_spec(**sizes, shared=width)
        for device in ("NVIDIA H200", "unknown"):
            config = configs.choose(spec, "gpu", device)
            assert config.up_columns == columns
            assert width % config.down_depth == 0
    with pytest.raises(ValueError, match="up_columns is 128; a divisor of 64"):
        configs.choose(spec, "gpu", device, dataclasses.replace(config, up_columns=128))
    with pytest.raises(ValueError, match="shared is -1; 0 or more"):
        specs.make_spec(**sizes, shared=-1)
    reason = triton.supports(specs.make_spec(**sizes, shared=8), "gpu")
    assert reason == "needs shared to be a multiple of 16, not 8"


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


UNEVEN = base.make_spec(tokens=61, per_token=2, experts=5, shared=32)


def uneven_blocks(least):
    """Return experts whose last blocks have 1, 2, 3, 5 and 8 of 8 rows, and the cut."""
    random = np.random.default_rng(4)
    experts = np.repeat(np.arange(5), (9, 18, 27, 37, 24))
    nobody = np.full(UNEVEN.pairs - len(experts), UNEVEN.experts)
    experts = random.permutation(np.concatenate([experts, nobody])).reshape(61, 2)
    cuts = dict(rows=8, searched=0, least_rows=least)
    return experts.astype(np.int32), cut(UNEVEN, **cuts)


@on_gpus
@pytest.mark.parametrize("least", [1, 2, 4, 8])
def test_a_block_of_few_rows_takes_a_smaller_tile(least):
    experts, config = uneven_blocks(least)
    assert config.tiles == (8, 4, 2, 1)[: 4 - int(np.log2(least))]
    arrays = inputs(UNEVEN)
    found = run(**arrays, experts=jnp.asarray(experts), impl="triton", config=config)
    assert base.relative(found, looped(**arrays, experts=experts)) < 1e-6


@on_gpus
def test_a_tile_that_is_too_small_is_seen(monkeypatch):
    experts, config = uneven_blocks(4)
    monkeypatch.setattr(configs.Config, "tiles", (4,))
    # Of this seed nothing right can be left where a GPU does not write.
    arrays, options = inputs(UNEVEN, seed=7), dict(impl="triton", config=config)
    again = jax.jit(lambda **arrays: op.swiglu_experts(**arrays, **options))
    found = again(**arrays, experts=jnp.asarray(experts))
    assert not base.relative(found, looped(**arrays, experts=experts)) < 1e-2


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
    with pytest.raises(ValueError, match="least_rows is 32; 1 to 16 is allowed"):
        configs.choose(SHARED, "gpu", "unknown", cut(SHARED, rows=16, least_rows=32))
