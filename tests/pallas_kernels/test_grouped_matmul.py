"""The expert layer against a loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import reference

TOKENS, PER_TOKEN, EXPERTS, HIDDEN, INNER = 9, 2, 5, 6, 4
run = jax.jit(reference.swiglu_experts)


def inputs(seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    shapes = {
        "x": (TOKENS, HIDDEN),
        "gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "down": (EXPERTS, INNER, HIDDEN),
        "weights": (TOKENS, PER_TOKEN),
    }
    return {name: random.normal(size=s).astype(dtype) for name, s in shapes.items()}


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
}
over_routes = pytest.mark.parametrize("route", ROUTES)


def routed(route):
    return ROUTES[route](np.random.default_rng(3)).astype(np.int32)


def looped(x, gate_up, down, weights, experts):
    """Return sum_k weights[t, k] down_e(silu(gate_e x_t) * up_e x_t), t by t."""
    output = np.zeros((len(x), down.shape[2]))
    for t, row in enumerate(x):
        for e, weight in zip(experts[t], weights[t], strict=True):
            gate, up = row @ gate_up[e, :, :INNER], row @ gate_up[e, :, INNER:]
            output[t] += weight * (gate / (1 + np.exp(-gate)) * up @ down[e])
    return output


def relative(actual, expected):
    actual = np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def call(arrays, experts):
    return run(**jax.tree.map(jnp.asarray, arrays), experts=jnp.asarray(experts))


@over_routes
def test_every_token_meets_its_experts(route):
    arrays, experts = inputs(), routed(route)
    output = call(arrays, experts)
    assert output.dtype == jnp.float32
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    assert relative(output, looped(**exact, experts=experts)) < 1e-6


@pytest.mark.parametrize("fault", ["halves swapped", "weights", "experts"])
def test_a_wrong_order_is_seen(fault):
    arrays, experts = inputs(), routed("spread")
    output = call(arrays, experts)
    if fault == "halves swapped":
        arrays["gate_up"] = np.roll(arrays["gate_up"], INNER, axis=-1)
    elif fault == "weights":
        arrays["weights"] = arrays["weights"][:, ::-1]
    else:
        experts = experts[::-1]
    assert relative(output, looped(**arrays, experts=experts)) > 1e-2


@over_routes
def test_the_order_of_tokens_and_choices_does_not_matter(route):
    arrays, experts = inputs(), routed(route)
    output = call(arrays, experts)
    order = np.random.default_rng(1).permutation(TOKENS)
    moved = arrays | {name: arrays[name][order] for name in ("x", "weights")}
    assert relative(call(moved, experts[order]), np.asarray(output)[order]) < 1e-6
    swapped = arrays | {"weights": arrays["weights"][:, ::-1]}
    assert relative(call(swapped, experts[:, ::-1]), np.asarray(output)) < 1e-6


def test_an_expert_nobody_chose_plays_no_part():
    arrays, experts = inputs(), routed("empty experts")
    before = np.asarray(call(arrays, experts))
    for name in ("gate_up", "down"):
        arrays[name][[0, 2, 4]] = 1e4
    assert np.asarray(call(arrays, experts)).tobytes() == before.tobytes()


def test_a_token_stays_out_of_the_others():
    arrays, experts = inputs(), routed("spread")
    before = np.asarray(call(arrays, experts))
    arrays["x"][4] = np.nan
    after = np.asarray(call(arrays, experts))
    others = np.arange(TOKENS) != 4
    assert after[others].tobytes() == before[others].tobytes()
    assert np.all(np.isnan(after[4]))


def test_bfloat16_comes_back_as_bfloat16():
    arrays, experts = jax.tree.map(jnp.bfloat16, inputs()), routed("spread")
    output = call(arrays, experts)
    assert output.dtype == jnp.bfloat16
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    assert relative(output, looped(**exact, experts=experts)) < 2e-2


def test_float64_is_computed_in_float64(double):
    arrays, experts = inputs(dtype=np.float64), routed("spread")
    output = call(arrays, experts)
    assert output.dtype == jnp.float64
    assert relative(output, looped(**arrays, experts=experts)) < 1e-14
