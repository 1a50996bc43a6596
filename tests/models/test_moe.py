"""The mixture of experts against a loop over tokens in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_5 import moe
from tests.models import golden

# The shared expert is of the size of the others, or narrower or wider.
WIDTHS = (16, 8, 24)
over_widths = pytest.mark.parametrize("width", WIDTHS)


def layer(width):
    sizes = dict(moe_intermediate_size=16, shared_expert_intermediate_size=width)
    config = dataclasses.replace(golden.model("moe").config, **sizes)
    return moe.MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def rows(layer, batch=2, tokens=5):
    size = layer.experts.down_proj.shape[-1]
    return jax.random.normal(jax.random.key(1), (batch, tokens, size))


def looped(layer, x):
    """Return sum_k p_k expert_k(x) + sigmoid(g x) shared(x), token by token."""
    params = nnx.to_pure_dict(nnx.state(layer))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    gate, experts, shared = (params[k] for k in ("gate", "experts", "shared_expert"))
    output = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        row = np.asarray(x[place], np.float64)
        *scores, shared_score = gate["weight"] @ row
        share = np.exp(scores) / np.sum(np.exp(scores))
        best = np.argsort(-share)[: layer.gate.top_k]
        for e in best:
            gates, ups = np.split(row @ experts["gate_up_proj"][e], 2)
            found = gates / (1 + np.exp(-gates)) * ups @ experts["down_proj"][e]
            output[place] += share[e] / share[best].sum() * found
        gates, ups = (row @ shared["gate_up_proj"][:, half] for half in (0, 1))
        found = gates / (1 + np.exp(-gates)) * ups @ shared["down_proj"]["kernel"]
        output[place] += found / (1 + np.exp(-shared_score))
    return output


def error(layer, x, expected):
    found = np.asarray(jax.jit(lambda x: layer(x))(x), np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@over_widths
def test_every_token_meets_its_experts_and_the_shared_one(width):
    subject = layer(width)
    x = rows(subject)
    assert error(subject, x, looped(subject, x)) < 1e-6


@pytest.mark.parametrize("fault", ["gate of the shared expert", "choices"])
@over_widths
def test_broken_twins_fail(fault, width):
    subject = layer(width)
    x = rows(subject)
    expected = looped(subject, x)
    weight = subject.gate.weight
    if fault == "choices":
        weight[...] = jnp.roll(weight[...], 1, axis=0)
    else:
        weight[...] = weight[...].at[-1].set(0)
    assert error(subject, x, expected) > 1e-2


@over_widths
def test_one_call_for_all_experts(width):
    """The shared expert run alone, and then added, is the same function."""
    subject = layer(width)
    x = rows(subject)
    together = jax.jit(lambda x: subject(x))(x)

    @jax.jit
    def apart(x):
        weights, experts = subject.gate(x.reshape(-1, x.shape[-1]))
        routed = subject._run(x.reshape(-1, x.shape[-1]), experts, weights[:, :-1])
        shared = weights[:, -1:].reshape(*x.shape[:2], 1) * subject.shared_expert(x)
        return routed.reshape(x.shape) + shared

    np.testing.assert_allclose(together, apart(x), atol=1e-6)


@over_widths
def test_terms_for_a_kernel_that_adds_them_up(width, monkeypatch):
    """One a choice and the shared expert's."""
    subject = layer(width)
    x = rows(subject)
    assert np.array_equal(subject.parts(x), subject(x))  # no kernel runs here
    monkeypatch.setattr(moe.residual_norm, "adds_up", lambda *sizes: True)
    parts = jax.jit(lambda x: subject.parts(x))(x)
    assert parts.shape == (*x.shape[:2], subject.gate.top_k + 1, x.shape[-1])
    added = jnp.sum(parts, axis=2)
    expected = looped(subject, x)
    assert np.linalg.norm(added - expected) / np.linalg.norm(expected) < 1e-6


def test_the_gradient_reaches_every_matrix():
    subject = layer(16)
    graphdef, params = nnx.split(subject)
    x = rows(subject, 4, 8)
    found = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(x) ** 2)))(params)
    for leaf in jax.tree.leaves(found):
        assert float(jnp.max(jnp.abs(leaf))) > 0
