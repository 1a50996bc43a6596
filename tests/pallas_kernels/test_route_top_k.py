"""Weights and experts of tokens against a sort in float64, by every implementation.

On a CPU the kernel is interpreted, on a GPU it is compiled.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from pallas_kernels.grouped_matmul import router, router_triton

# Tokens, experts and choices: one of all, no powers of two, as many as there are.
SIZES = (
    ((1, 1, 1), False),
    ((5, 40, 10), True),
    ((4, 7, 7), False),
    ((3, 64, 8), True),
)
BOUND = 1e-6
run = jax.jit(router.route_top_k, static_argnames=("k", "shared", "impl"))


def runs_here(impl):
    if impl == "reference":
        return True
    module = router.IMPLEMENTATIONS.module(impl)
    spec = router.make_spec(tokens=1, experts=4, per_token=2)
    return module.supports(spec, jax.default_backend(), interpret=True) is None


IMPLS = [name for name in router.IMPLEMENTATIONS.modules if runs_here(name)]
KERNELS = [name for name in IMPLS if name != "reference"]
over_impls = pytest.mark.parametrize("impl", IMPLS)


def sorted_routes(logits, k, shared):
    """Return weights and experts: all softmaxed, the k best kept and divided."""
    logits = np.asarray(logits, np.float64)
    scores = logits[:, : logits.shape[1] - shared]
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    weights = np.take_along_axis(share, experts, axis=1)
    weights /= weights.sum(1, keepdims=True)
    gates = 1 / (1 + np.exp(-logits[:, scores.shape[1] :]))
    return np.concatenate([weights, gates], axis=1), experts


def drawn(sizes, shared, seed, levels):
    """Return logits, of some levels so that many are equal, or of none."""
    tokens, experts, _ = sizes
    random = np.random.default_rng(seed)
    logits = 3 * random.normal(size=(tokens, experts + shared))
    if levels:
        logits = np.round(logits * levels) / levels + 0.0  # the sign of 0 has an order
    return np.asarray(logits, np.float32)


def errors(logits, k, shared, impl, run=run):
    """Return the largest error of a weight, and the number of wrong experts."""
    expected, order = sorted_routes(logits, k, shared)
    weights, experts = run(jnp.asarray(logits), k=k, shared=shared, impl=impl)
    assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
    assert weights.shape == (len(logits), k + shared)
    return np.max(np.abs(weights - expected)), np.sum(experts != order)


@over_impls
@pytest.mark.parametrize(("sizes", "shared"), SIZES, ids=str)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    seed=strategies.integers(0, 2**32 - 1), levels=strategies.sampled_from([0, 1, 4])
)
def test_the_best_in_the_order_of_the_experts(impl, sizes, shared, seed, levels):
    logits = drawn(sizes, shared, seed, levels)
    error, wrong = errors(logits, sizes[2], shared, impl)
    assert error < BOUND and wrong == 0


@over_impls
def test_zeros_have_the_order_of_their_signs(impl):
    """As `lax.top_k` has them."""
    logits = np.zeros((1, 9), np.float32)
    logits[:, ::2] = -0.0
    _, experts = run(jnp.asarray(logits), k=6, impl=impl)
    np.testing.assert_array_equal(experts, [[1, 3, 5, 7, 0, 2]])


@over_impls
def test_bfloat16(impl):
    logits = jnp.asarray(drawn((6, 40, 8), True, 0, 0), jnp.bfloat16)
    error, wrong = errors(logits, 8, True, impl)
    assert error < BOUND and wrong == 0


def test_float64_stays_float64(double):
    logits = np.random.default_rng(0).normal(size=(5, 12))
    weights, experts = router.route_top_k(jnp.asarray(logits), 3, shared=True)
    expected = sorted_routes(logits, 3, True)
    assert weights.dtype == jnp.float64
    np.testing.assert_allclose(weights, expected[0], atol=1e-15)
    np.testing.assert_array_equal(experts, expected[1])


@over_impls
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
def test_what_is_no_number_stays_in_its_row(impl, value):
    logits = drawn((4, 16, 3), True, 1, 0)
    before = run(jnp.asarray(logits), k=3, shared=True, impl=impl)
    logits[2, 1::2] = value
    after = run(jnp.asarray(logits), k=3, shared=True, impl=impl)
    others = np.arange(4) != 2
    for x, y in zip(before, after, strict=True):
        assert np.asarray(x)[others].tobytes() == np.asarray(y)[others].tobytes()
    weights, experts = (np.asarray(x)[2] for x in after)
    assert len(set(experts)) == 3 and np.all((experts >= 0) & (experts < 16))
    reference = run(jnp.asarray(logits), k=3, shared=True, impl="reference")
    np.testing.assert_array_equal(experts, reference[1][2])
    np.testing.assert_allclose(weights, reference[0][2], atol=BOUND)


@over_impls
def test_a_row_without_a_finite_logit(impl):
    for value in (-np.inf, np.nan, -np.nan):
        logits = jnp.full((2, 12), value, jnp.float32)
        weights, experts = run(logits, k=4, impl=impl)
        np.testing.assert_array_equal(experts, [[0, 1, 2, 3]] * 2)
        assert np.all(np.isnan(weights))


@over_impls
def test_what_follows_the_experts_is_no_expert(impl):
    """The shared expert's gate is never chosen, however large."""
    logits = drawn((5, 40, 8), True, 2, 0)
    logits[:, -1] = 1e4
    error, wrong = errors(logits, 8, True, impl)
    assert error < BOUND and wrong == 0


def test_gradients():
    """That of the softmax of all logits, cut and divided; by every implementation."""
    logits, direction = drawn((5, 12, 3), True, 3, 0), np.linspace(-1, 1, 4)

    def loss(logits, impl):
        weights, _ = router.route_top_k(logits, 3, shared=True, impl=impl)
        return jnp.sum(direction * weights**2)

    def plain(logits):
        share = jax.nn.softmax(logits[:, :-1], axis=-1)
        best, _ = jax.lax.top_k(share, 3)
        best = best / jnp.sum(best, axis=-1, keepdims=True)
        gates = jax.nn.sigmoid(logits[:, -1:])
        return jnp.sum(direction * jnp.concatenate([best, gates], axis=-1) ** 2)

    expected = jax.grad(plain)(jnp.asarray(logits))
    assert float(jnp.max(jnp.abs(expected))) > 0.01
    for impl in IMPLS:
        found = jax.jit(jax.grad(loss), static_argnums=1)(jnp.asarray(logits), impl)
        np.testing.assert_allclose(found, expected, atol=BOUND, err_msg=impl)


# --- logits of rows -----------------------------------------------------------------

# Tokens, experts, choices and channels: one token, parts of the sum, more tokens than
# the kernel takes.
ROWS = ((1, 8, 2, 16), (5, 40, 8, 512), (65, 7, 3, 48))
routed = jax.jit(router.route, static_argnames=("k", "shared", "impl"))


def row_inputs(sizes, dtype="float32"):
    tokens, experts, _, hidden = sizes
    random = np.random.default_rng(5)
    x = random.normal(size=(tokens, hidden)) + random.normal(size=(1, hidden))
    weight = random.normal(size=(experts + 1, hidden)) * hidden**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def row_errors(sizes, dtype, impl, routed=routed):
    """Return the largest error of a weight, and the number of wrong experts."""
    x, weight = row_inputs(sizes, dtype)
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    expected, order = sorted_routes(logits, sizes[2], True)
    weights, experts = routed(x, weight, k=sizes[2], shared=True, impl=impl)
    return np.max(np.abs(weights - expected)), np.sum(experts != order)


@over_impls
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", ROWS, ids=str)
def test_logits_of_rows_are_not_rounded(sizes, dtype, impl):
    error, wrong = row_errors(sizes, dtype, impl)
    assert error < 2e-6 and wrong == 0


@pytest.mark.skipif("triton" not in KERNELS, reason="a kernel of GPUs")
def test_rounded_logits_are_seen(monkeypatch):
    """The broken twin: operands in one part."""
    monkeypatch.setattr(router_triton.dots, "split", lambda x, _: SPLIT(x, 1))
    again = functools.partial(router.route)
    again = jax.jit(again, static_argnames=("k", "shared", "impl"))
    assert row_errors(ROWS[1], "float32", "triton", again)[0] > 1e-4


SPLIT = router_triton.dots.split


def test_gradients_of_rows():
    x, weight = row_inputs((5, 12, 3, 32))

    def loss(x, weight, impl):
        weights, _ = router.route(x, weight, 3, shared=True, impl=impl)
        return jnp.sum(weights**2)

    def plain(x, weight):
        logits = jnp.matmul(x, weight.T, precision="highest")
        return jnp.sum(router.route_top_k(logits, 3, shared=True)[0] ** 2)

    expected = jax.grad(plain, (0, 1))(x, weight)
    for impl in IMPLS:
        found = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, weight, impl)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=BOUND, err_msg=impl)


def test_rows_that_do_not_belong_to_the_matrix():
    x, weight = row_inputs((5, 12, 3, 32))
    for arrays, message in (
        ((x, weight[:, 1:]), r"weight has shape \(13, 31\); \(rows, 32\)"),
        ((x[0], weight), r"x has shape \(32,\)"),
        ((x, weight.astype(jnp.bfloat16)), "weight has dtype bfloat16; that of x"),
    ):
        with pytest.raises(ValueError, match=message):
            router.spec_of_rows(*arrays, 3, True)


ORDER = router_triton._order
TWINS = {
    "bits for order": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    "the last of equals": lambda x: ORDER(x) + jax.lax.iota(jnp.int32, x.shape[0]),
}


@pytest.mark.skipif("triton" not in KERNELS, reason="a kernel of GPUs")
@pytest.mark.parametrize("twin", TWINS)
def test_broken_twins_fail(twin, monkeypatch):
    monkeypatch.setattr(router_triton, "_order", TWINS[twin])
    again = functools.partial(router.route_top_k)  # nothing compiled is taken
    again = jax.jit(again, static_argnames=("k", "shared", "impl"))
    logits = drawn((4, 7, 7), True, 4, 1)
    assert errors(logits, 7, True, "triton", again)[1] > 0


# --- choices and refusals -----------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "k", "message"),
    [
        ((4, 8), "float32", 0, "k is 0; 1 to 7 is allowed"),
        ((4, 8), "float32", 8, "k is 8; 1 to 7 is allowed"),
        ((4, 8), "int32", 2, "logits has dtype int32"),
        ((0, 8), "float32", 2, "tokens is 0; 1 or more"),
        ((4, 1), "float32", 1, "experts is 0; 1 or more"),
    ],
)
def test_wrong_arguments(shape, dtype, k, message):
    with pytest.raises(ValueError, match=message):
        router.spec_of(jnp.zeros(shape, dtype), k, True)
    with pytest.raises(ValueError, match=r"logits has shape \(8,\); rank 2"):
        router.spec_of(jnp.zeros(8), 2, True)


@pytest.mark.parametrize(
    ("platform", "changes", "reason"),
    [
        ("tpu", {}, "needs a GPU; the device is a tpu"),
        ("gpu", dict(experts=2048), "at most 1024 experts, not 2048"),
        ("gpu", dict(hidden=40), "hidden to be a multiple of 16, not 40"),
        ("gpu", dict(per_token=40), "at most 32 per_token, not 40"),
        ("gpu", dict(input_dtype="float16"), "input dtype float16"),
    ],
)
def test_the_kernel_says_why_not(platform, changes, reason):
    spec = router.make_spec(**dict(tokens=4, experts=64, per_token=8) | changes)
    assert reason in router_triton.supports(spec, platform)


def test_a_named_kernel_runs_or_says_why_not():
    logits = jnp.zeros((2, 2048))
    with pytest.raises(NotImplementedError, match="'triton' does not run here"):
        router.route_top_k(logits, 2, impl="triton")
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: auto, triton"):
        router.route_top_k(logits, 2, impl="cuda")
    assert router.route_top_k(logits, 2, impl="auto")[1].shape == (2, 2)
