"""The expert layer against a loop over tokens and experts, by every implementation.

On a CPU the kernels are interpreted, on a GPU they are compiled.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dots, tuning
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import mosaic_tpu, op, routes, triton
from pallas_kernels.grouped_matmul import spec as specs

TOKENS, PER_TOKEN, EXPERTS, HIDDEN, INNER = 9, 2, 5, 128, 128
run = jax.jit(op.swiglu_experts, static_argnames=("impl", "config"))


def make_spec(**changes):
    sizes = dict(
        tokens=TOKENS, per_token=PER_TOKEN, experts=EXPERTS, hidden=HIDDEN, inner=INNER
    )
    return specs.make_spec(**sizes | dict(input_dtype="float32") | changes)


def runs_here(impl):
    if impl == "reference":
        return True
    module = op.IMPLEMENTATIONS.module(impl)
    platform = jax.default_backend()
    return module.supports(make_spec(), platform, interpret=True) is None


IMPLS = [name for name in op.IMPLEMENTATIONS.modules if runs_here(name)]
KERNELS = [name for name in IMPLS if name != "reference"]
over_impls = pytest.mark.parametrize("impl", IMPLS)


def inputs(spec, seed=0):
    """Return the arrays of a call but the routes, rounded to the dtype of the spec."""
    random = np.random.default_rng(seed)
    count, hidden, inner = spec.experts, spec.hidden, spec.inner
    common = random.normal(size=(1, hidden))  # of all tokens, as in a trained model
    arrays = {
        "x": common + random.normal(size=(spec.tokens, hidden)),
        "gate_up": random.normal(size=(count, hidden, 2 * inner)) * hidden**-0.5,
        "down": random.normal(size=(count, inner, hidden)) * inner**-0.5,
        "weights": random.random((spec.tokens, spec.per_token)),
    }
    return {name: np.asarray(x, spec.input_dtype) for name, x in arrays.items()}


# Which experts each token goes to, by the case they make.
ROUTES = {
    "spread": lambda random: random.permuted(
        np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1
    )[:, :PER_TOKEN],
    "empty experts": lambda random: random.choice([1, 3], (TOKENS, PER_TOKEN)),
    "one takes all": lambda random: np.full((TOKENS, PER_TOKEN), 2),
    "the last takes all": lambda random: np.full((TOKENS, PER_TOKEN), EXPERTS - 1),
    "one token each": lambda random: (
        np.arange(TOKENS * PER_TOKEN).reshape(TOKENS, PER_TOKEN) % EXPERTS
    ),
    "half of no expert": lambda random: random.integers(
        0, 2 * EXPERTS, (TOKENS, PER_TOKEN)
    ),
}
over_routes = pytest.mark.parametrize("route", ROUTES)


def routed(route):
    return ROUTES[route](np.random.default_rng(3)).astype(np.int32)


def looped(x, gate_up, down, weights, experts):
    """Return sum_k weights[t, k] down_e(silu(gate_e x_t) * up_e x_t), t by t."""
    x, gate_up, down, weights = (
        np.asarray(array, np.float64) for array in (x, gate_up, down, weights)
    )
    output, inner = np.zeros((len(x), down.shape[2])), down.shape[1]
    for t, row in enumerate(x):
        for e, weight in zip(experts[t], weights[t], strict=True):
            if e >= len(gate_up):  # no expert
                continue
            gate, up = row @ gate_up[e, :, :inner], row @ gate_up[e, :, inner:]
            output[t] += weight * (gate / (1 + np.exp(-gate)) * up @ down[e])
    return output


def relative(actual, expected):
    actual = np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def call(arrays, experts, impl, run=run):
    arrays = jax.tree.map(jnp.asarray, arrays)
    return run(**arrays, experts=jnp.asarray(experts), impl=impl)


# --- numbers ------------------------------------------------------------------------


@over_impls
@over_routes
def test_every_token_meets_its_experts(route, impl):
    arrays, experts = inputs(make_spec()), routed(route)
    output = call(arrays, experts, impl)
    assert output.dtype == jnp.float32
    assert relative(output, looped(**arrays, experts=experts)) < 1e-6


# One token; fewer pairs than experts; sizes that are no powers of two.
@pytest.mark.parametrize(
    "sizes",
    [
        dict(tokens=1, per_token=1, experts=1),
        dict(tokens=3, per_token=8, experts=40),
        dict(tokens=39, per_token=3, experts=7, hidden=384, inner=256),
    ],
    ids=str,
)
@over_impls
def test_sizes_in_bfloat16(impl, sizes):
    spec = make_spec(**sizes, input_dtype="bfloat16")
    random = np.random.default_rng(1)
    shape = (spec.tokens, spec.per_token)
    experts = random.integers(0, spec.experts, shape).astype(np.int32)
    arrays = inputs(spec)
    output = call(arrays, experts, impl)
    assert output.dtype == jnp.bfloat16
    assert relative(output, looped(**arrays, experts=experts)) < 6e-3


def test_the_reference_takes_any_size():
    spec = make_spec(hidden=6, inner=4)
    arrays, experts = inputs(spec), routed("spread")
    output = call(arrays, experts, None)
    assert relative(output, looped(**arrays, experts=experts)) < 1e-6


def test_float64_is_computed_in_float64(double):
    arrays, experts = inputs(make_spec(input_dtype="float64")), routed("spread")
    output = call(arrays, experts, None)
    assert output.dtype == jnp.float64
    assert relative(output, looped(**arrays, experts=experts)) < 1e-14


@pytest.mark.parametrize("fault", ["halves swapped", "weights", "experts"])
@over_impls
def test_a_wrong_order_is_seen(fault, impl):
    arrays, experts = inputs(make_spec()), routed("spread")
    output = call(arrays, experts, impl)
    if fault == "halves swapped":
        arrays["gate_up"] = np.roll(arrays["gate_up"], INNER, axis=-1)
    elif fault == "weights":
        arrays["weights"] = arrays["weights"][:, ::-1]
    else:
        experts = experts[::-1]
    assert relative(output, looped(**arrays, experts=experts)) > 1e-2


def broken_split(x, parts):
    return (x.astype(jnp.bfloat16),)


def short_list(spec, rows):
    return LIST_LENGTH(spec, rows) - 1


LIST_LENGTH = routes.list_length


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [(dots, "split", broken_split), (routes, "list_length", short_list)],
    ids=["operands rounded", "a block left out"],
)
@pytest.mark.skipif("triton" not in KERNELS, reason="a kernel of GPUs")
def test_a_broken_kernel_is_seen(monkeypatch, module, name, broken):
    monkeypatch.setattr(module, name, broken)
    arrays, experts = inputs(make_spec()), routed("the last takes all")
    config = dataclasses.replace(configs.heuristic(make_spec(), "gpu"), searched=0)
    options = dict(impl="triton", config=config)
    again = jax.jit(lambda **arrays: op.swiglu_experts(**arrays, **options))
    output = again(**arrays, experts=experts)
    assert not relative(output, looped(**arrays, experts=experts)) < 1e-6


@over_impls
@over_routes
def test_the_order_of_tokens_and_choices_does_not_matter(route, impl):
    arrays, experts = inputs(make_spec()), routed(route)
    output = call(arrays, experts, impl)
    order = np.random.default_rng(1).permutation(TOKENS)
    moved = arrays | {name: arrays[name][order] for name in ("x", "weights")}
    moved = call(moved, experts[order], impl)
    assert relative(moved, np.asarray(output)[order]) < 1e-6
    swapped = arrays | {"weights": arrays["weights"][:, ::-1]}
    assert relative(call(swapped, experts[:, ::-1], impl), np.asarray(output)) < 1e-6


@over_impls
def test_an_expert_nobody_chose_plays_no_part(impl):
    arrays, experts = inputs(make_spec()), routed("empty experts")
    before = np.asarray(call(arrays, experts, impl))
    for name in ("gate_up", "down"):
        # The reference multiplies them by zero on a CPU.
        arrays[name][[0, 2, 4]] = 1e4 if impl == "reference" else np.nan
    after = np.asarray(call(arrays, experts, impl))
    assert after.tobytes() == before.tobytes()


@over_impls
def test_a_token_stays_out_of_the_others(impl):
    arrays, experts = inputs(make_spec()), routed("spread")
    before = np.asarray(call(arrays, experts, impl))
    arrays["x"][4] = np.nan
    after = np.asarray(call(arrays, experts, impl))
    others = np.arange(TOKENS) != 4
    assert after[others].tobytes() == before[others].tobytes()
    assert np.all(np.isnan(after[4]))


@over_impls
def test_tokens_of_no_expert_are_zero(impl):
    arrays, experts = inputs(make_spec()), routed("spread")
    expected = looped(**arrays, experts=np.where(experts > 1, experts, EXPERTS))
    output = call(arrays, np.where(experts > 1, experts, EXPERTS), impl)
    assert relative(output, expected) < 1e-6
    assert not np.any(call(arrays, np.full_like(experts, EXPERTS), impl))


def loss(arrays, experts, impl):
    return jnp.sum(op.swiglu_experts(**arrays, experts=experts, impl=impl) ** 2)


gradient = jax.jit(jax.grad(loss), static_argnums=2)


@pytest.mark.parametrize("route", ["spread", "half of no expert"])
@pytest.mark.parametrize("impl", KERNELS)
def test_gradients_are_those_of_the_reference(impl, route):
    arrays, experts = inputs(make_spec()), jnp.asarray(routed(route))
    expected = gradient(arrays, experts, "reference")
    found = gradient(arrays, experts, impl)
    assert not np.any(found["weights"][np.asarray(experts) >= EXPERTS])
    for name, array in expected.items():
        assert relative(found[name], np.asarray(array)) < 1e-5, name


# --- routes of the kernels ----------------------------------------------------------

# T, K, E and rows of a block: one pair, fewer pairs than experts, more, many.
ROUTE_SIZES = [(1, 1, 1, 16), (3, 2, 40, 16), (9, 2, 5, 16), (300, 8, 7, 64)]


def route_cases(sizes):
    """Return the spec, and routes [P]: even, skewed, all with one expert, or none."""
    tokens, per_token, count, _ = sizes
    spec = make_spec(tokens=tokens, per_token=per_token, experts=count)
    random = np.random.default_rng(2)
    even = random.integers(0, count, spec.pairs)
    skewed = np.minimum(even, random.integers(0, count, spec.pairs))
    one, none = (np.full(spec.pairs, e) for e in (count // 2, count))
    routes = (even, skewed, one, none, np.where(even % 2, even, count))
    return spec, [experts.astype(np.int32) for experts in routes]


@pytest.mark.skipif("triton" not in KERNELS, reason="a kernel of GPUs")
@pytest.mark.parametrize("sizes", ROUTE_SIZES, ids=str)
def test_blocks_hold_every_pair_of_an_expert_once(sizes):
    (spec, cases), rows = route_cases(sizes), sizes[-1]
    route = jax.jit(lambda experts: routes.route(experts, spec=spec, rows=rows))
    for experts in cases:
        order, blocks = (np.asarray(array) for array in route(experts))
        known = np.sum(experts < spec.experts)
        by_expert = np.argsort(experts, kind="stable")
        np.testing.assert_array_equal(order[:known], by_expert[:known])
        seen = []
        for expert, start, count in blocks[:, :3]:
            assert 0 <= count <= rows
            slots = np.arange(start, start + count)
            seen.extend(slots)
            assert np.all(experts[order[slots]] == expert)
        assert sorted(seen) == list(range(known))
        used = np.sum(-(-np.bincount(experts)[: spec.experts] // rows))
        assert np.sum(blocks[:, routes.COUNT] > 0) == used


@pytest.mark.parametrize("sizes", ROUTE_SIZES, ids=str)
def test_visits_hold_every_pair_of_an_expert_once(sizes):
    (spec, cases), rows = route_cases(sizes), sizes[-1]
    visit = jax.jit(lambda e: mosaic_tpu.list_visits(e, spec=spec, rows=rows))
    for experts in cases:
        visits = visit(experts)
        ordered, seen = np.sort(experts), []
        for block, expert, start, end in np.asarray(visits).T:
            assert 0 <= start <= rows and end <= rows and 0 <= expert < spec.experts
            slots = np.arange(block * rows + start, block * rows + end)
            seen.extend(slots)
            assert np.all(ordered[slots] == expert)
            assert 0 <= block < -(-spec.pairs // rows)
        assert seen == list(range(np.sum(experts < spec.experts)))
        assert np.all(np.diff(visits.block) >= 0)


# --- choices and refusals -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (TOKENS, 2, 64), "x has shape .* rank 2"),
        ("gate_up", (EXPERTS, HIDDEN, INNER), "gate_up has shape .* 256"),
        ("down", (EXPERTS, INNER, 2 * HIDDEN), "down has shape"),
        ("experts", (TOKENS + 1, PER_TOKEN), "experts has shape"),
        ("weights", (TOKENS, PER_TOKEN + 1), "weights has shape"),
    ],
)
def test_shapes_that_do_not_belong_together(name, shape, message):
    arrays = {**inputs(make_spec()), "experts": routed("spread")}
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    arrays[name] = jnp.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=message):
        specs.spec_of(**arrays)


def test_dtypes_that_do_not_belong_together():
    arrays = {**inputs(make_spec()), "experts": routed("spread")}
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    with pytest.raises(ValueError, match="experts has dtype float32"):
        specs.spec_of(**arrays | {"experts": arrays["weights"]})
    with pytest.raises(ValueError, match="down has dtype bfloat16"):
        specs.spec_of(**arrays | {"down": arrays["down"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="tokens is 0; 1 or more"):
        make_spec(tokens=0)


def test_unknown_names_are_refused():
    arrays, experts = inputs(make_spec()), routed("spread")
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: auto, triton"):
        call(arrays, experts, "cuda")


@pytest.mark.parametrize(
    ("module", "platform", "changes", "reason"),
    [
        (triton, "tpu", {}, "needs a GPU; the device is a tpu"),
        (triton, "gpu", dict(hidden=40), "hidden to be a multiple of 16, not 40"),
        (triton, "gpu", dict(inner=8), "inner to be a multiple of 16, not 8"),
        (triton, "gpu", dict(input_dtype="float16"), "takes float32 and bfloat16"),
        (triton, "gpu", dict(expert_dtype="bfloat16"), "needs one dtype"),
        (mosaic_tpu, "gpu", {}, "needs a TPU; the device is a gpu"),
        (mosaic_tpu, "tpu", dict(inner=64), "inner to be a multiple of 128, not 64"),
        (mosaic_tpu, "tpu", dict(input_dtype="float16"), "takes float32 and bfloat16"),
        (mosaic_tpu, "tpu", dict(expert_dtype="bfloat16"), "needs one dtype"),
    ],
)
def test_kernels_say_why_not(module, platform, changes, reason):
    assert reason in module.supports(make_spec(**changes), platform)


@pytest.mark.parametrize(("module", "platform"), [(triton, "gpu"), (mosaic_tpu, "tpu")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_take_the_published_sizes(module, platform, dtype):
    for tokens in (1, 40, 2048):
        for count, per_token, hidden, inner in (
            (256, 8, 2048, 512),
            (512, 10, 4096, 1024),
        ):
            spec = specs.make_spec(
                tokens=tokens, per_token=per_token, experts=count, hidden=hidden,
                inner=inner, input_dtype=dtype,
            )  # fmt: skip
            assert module.supports(spec, platform) is None
            config = configs.choose(spec, platform, "unknown")
            assert configs.choose(spec, platform, "unknown", config) == config


def test_a_named_kernel_runs_or_says_why_not():
    arrays, experts = inputs(make_spec(hidden=40)), routed("spread")
    with pytest.raises(NotImplementedError, match="does not run here: needs"):
        call(arrays, experts, "triton")
    explained = op.IMPLEMENTATIONS.explain(make_spec(input_dtype="float64"))
    assert explained.startswith("grouped_matmul runs impl=reference (triton ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=0), "rows is 0"),
        (dict(up_columns=96), "up_columns is 96; a divisor of 128"),
        (dict(down_depth=0), "down_depth is 0; a divisor of 128"),
    ],
)
def test_a_configuration_has_to_divide_the_sizes(change, message):
    spec = make_spec()
    config = dataclasses.replace(configs.heuristic(spec, "gpu"), **change)
    with pytest.raises(ValueError, match=message):
        configs.choose(spec, "gpu", "unknown", config)


@pytest.mark.parametrize("impl", KERNELS)
def test_an_explicit_configuration_is_used(impl):
    spec = make_spec(inner=256)
    config = configs.Config(16, 128, 32, 64, 64, weights_first=True)
    arrays, experts = inputs(spec), routed("spread")
    function = jax.jit(op.swiglu_experts, static_argnames=("impl", "config"))
    output = function(**arrays, experts=experts, impl=impl, config=config)
    assert relative(output, looped(**arrays, experts=experts)) < 1e-6


def test_tuned_tables_are_valid():
    files = list(configs.TUNED.glob("*.json"))
    assert files
    spec = specs.make_spec(tokens=40, per_token=8, experts=256, hidden=2048, inner=512)
    for file in files:
        for entry in json.loads(file.read_text()):
            assert entry["match"].keys() <= dataclasses.asdict(spec).keys()
            config = configs.Config(**entry["config"])
            assert configs.choose(spec, "gpu", "unknown", config) == config
    found = tuning.lookup(configs.TUNED, "NVIDIA H200", spec)
    assert configs.Config(**found) == configs.choose(spec, "gpu", "NVIDIA H200")


def test_the_floor_counts_the_experts_touched():
    spec = specs.make_spec(tokens=40, per_token=8, experts=256, hidden=2048, inner=512)
    assert spec.bytes_for(182.0) / 4.3e6 == pytest.approx(266, rel=0.01)
    random = np.random.default_rng(0)
    touched = [
        len(np.unique(np.argsort(random.random((40, 256)), axis=1)[:, :8]))
        for _ in range(20)
    ]
    assert spec.touched == pytest.approx(np.mean(touched), rel=0.02)
    assert spec.flops == 40 * 8 * 3 * 2 * 2048 * 512
    one = dataclasses.replace(spec, tokens=1)
    assert one.touched == pytest.approx(8)
