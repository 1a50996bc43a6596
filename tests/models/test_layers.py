"""The pieces that every layer shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_5 import layers
from pallas_kernels import device


@pytest.fixture
def linear():
    return layers.linear(24, 40, dtype=jnp.float32, rngs=nnx.Rngs(0))


def rows_of_products(function, x):
    """Return how many rows the matrix products of a function have."""
    found = jax.make_jaxpr(function)(x).eqns
    products = [each for each in found if each.primitive.name == "dot_general"]
    return [each.invars[0].aval.shape for each in products]


@pytest.mark.parametrize("batch", [(1,), (1, 1), (3,), (1, 2)])
def test_one_row_is_multiplied_as_two_on_a_gpu(linear, batch, monkeypatch):
    x = jax.random.normal(jax.random.key(1), (*batch, 24))
    expected, pull = jax.vjp(linear, x)
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    found, pull_here = jax.vjp(linear, x)
    assert found.shape == (*batch, 40)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    given = jnp.ones_like(found)
    np.testing.assert_allclose(
        pull_here(given)[0], pull(given)[0], rtol=1e-5, atol=1e-6
    )
    alone = np.prod(batch) == 1
    (shape,) = rows_of_products(linear, x)
    assert shape == ((2, *batch[1:], 24) if alone else x.shape)


def test_elsewhere_a_row_stays_alone(linear):
    (shape,) = rows_of_products(linear, jnp.ones((1, 1, 24)))
    assert shape == (1, 1, 24)
