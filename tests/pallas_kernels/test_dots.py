"""Products of split operands: as exact as their parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dots


def operands(seed=0, size=64):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(size, size)), jnp.float32) for _ in range(2))


@pytest.mark.parametrize(("parts", "bound"), [(1, 2**-8), (2, 2**-16), (3, 2**-24)])
def test_parts_add_up(parts, bound):
    x, _ = operands()
    found = dots.split(x, parts)
    assert len(found) == parts and all(p.dtype == jnp.bfloat16 for p in found)
    total = sum(np.asarray(p, np.float64) for p in found)
    assert np.max(np.abs(total - np.asarray(x)) / np.abs(x)) <= bound


def test_bfloat16_is_one_part_and_loses_nothing():
    x = jnp.ones((4, 4), jnp.bfloat16)
    assert dots.split(x, 3) == (x,)


@pytest.mark.parametrize(
    ("parts", "least", "most"), [(1, 1e-3, 4e-3), (2, 1e-6, 8e-6), (3, 0, 3e-7)]
)
def test_the_error_is_that_of_the_parts(parts, least, most):
    a, b = operands()
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    got = dots.dot(dots.split(a, parts), dots.split(b, parts), 1, 1)
    error = np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact)
    assert got.dtype == jnp.float32
    assert least <= error < most


def test_an_exact_operand_needs_no_second_part():
    a, b = operands()
    a = a.astype(jnp.bfloat16)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    got = dots.dot(dots.split(a, 2), dots.split(b, 2), 1, 0)
    assert np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact) < 3e-6
