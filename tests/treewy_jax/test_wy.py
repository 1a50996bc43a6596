"""The algebra: each equation on its own, and its hazards."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import wy


def chain_mask(n):
    return jnp.tril(jnp.ones((1, n, n), bool))


def gates(values):
    return jnp.asarray(values, jnp.float32)[None, :, None]


def test_the_high_part_holds_sixteenths_and_the_low_part_little():
    log_decay = gates(-(10.0 ** np.linspace(-4, 2.5, 12)))
    high, low = wy.split_path_decay(log_decay, chain_mask(12))
    assert np.array_equal(high * 16, np.round(high * 16))
    assert np.all(np.abs(low) <= np.arange(1, 13) / 32)
    total = np.cumsum(np.asarray(log_decay, np.float64)[0, :, 0])
    assert strategies.relative((high + low)[0, 0], total) < 1e-7


def test_a_cliff_loses_no_digits():
    log_decay = np.asarray([-0.1, -300.0, -0.1, -0.05])
    mask = chain_mask(4)
    high, low = wy.split_path_decay(gates(log_decay), mask)
    decay = np.asarray(wy.path_decay(high, low, mask))[0, 0]
    assert abs(decay[2, 1] / np.exp(-0.1) - 1) < 2e-7
    assert abs(decay[3, 1] / np.exp(-0.15) - 1) < 2e-7
    assert decay[1, 0] == 0
    # The difference of one float32 sum, which this replaces, is far off.
    total = np.cumsum(log_decay.astype(np.float32), dtype=np.float32)
    assert abs(np.exp(total[2] - total[1]) / np.exp(-0.1) - 1) > 1e-6


@pytest.mark.parametrize("strongest", [-1e3, -1e30, -np.inf])
def test_a_total_decay_forgets_everything_above_and_nothing_below(strongest):
    mask = chain_mask(3)
    high, low = wy.split_path_decay(gates([-0.1, strongest, -0.1]), mask)
    decay = np.asarray(wy.path_decay(high, low, mask))[0, 0]
    expected = [[1, 0, 0], [0, 1, 0], [0, np.exp(-0.1), 1]]
    assert np.allclose(decay, expected, rtol=1e-6, atol=0)


def test_unrelated_nodes_do_not_overflow():
    mask = jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    high, low = wy.split_path_decay(gates([-1.0, -900.0, -1.0]), mask)
    decay = wy.path_decay(high, low, mask)
    assert np.all(np.isfinite(decay))
    assert decay[0, 0, 2, 1] == decay[0, 0, 1, 2] == 0


def test_zero_decay_is_exactly_one():
    mask = chain_mask(5)
    high, low = wy.split_path_decay(gates(np.zeros(5)), mask)
    assert np.array_equal(wy.path_decay(high, low, mask)[0], mask)


def test_gram_and_state_reads_serve_each_key_head():
    case = strategies.make_case(strategies.SHAPES["fork"], seed=1)
    k = jnp.asarray(case.k, jnp.float32)[None]
    state = jnp.asarray(case.state, jnp.float32)[None]
    products = wy.gram(k, k)
    assert products.shape[1] == strategies.KEY_HEADS
    expected = np.einsum("thd,ihd->hti", case.k, case.k)
    assert strategies.relative(products[0], expected) < 1e-6
    heads = np.arange(strategies.VALUE_HEADS) // 3
    expected = np.einsum("hvd,thd->htv", case.state, case.k[:, heads])
    assert strategies.relative(wy.read_state(state, k)[0], expected) < 1e-6


@hypothesis.given(strategies.preorder_parents(12))
def test_more_sweeps_than_the_depth_change_no_bit(parents):
    case = strategies.make_case(parents, gates="slow", correlation=0.99)
    *_, tree = arguments = strategies.batch([case], 12)
    solve = jax.jit(wy.verify_reference)
    depth = jnp.max(tree.depth())
    exact = solve(*arguments[:-1], tree.ancestors(), depth)
    more = solve(*arguments[:-1], tree.ancestors(), jnp.int32(11))
    assert all(np.array_equal(a, b) for a, b in zip(exact, more, strict=True))
    if depth > 0:
        fewer = solve(*arguments[:-1], tree.ancestors(), depth - 1)
        assert strategies.relative(fewer[1], np.asarray(more[1])) > 1e-3


def test_five_nodes_by_hand():
    """Without decay and with beta = 1 a repeated key overwrites, so u has zeros."""
    mask = jnp.asarray(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1] * 5],
        bool,
    )[None]
    mask = mask.at[0, 4].set(jnp.asarray([1, 0, 0, 0, 1], bool))
    key = jnp.zeros((1, 5, 1, 2)).at[..., 0].set(1.0)
    v = jnp.asarray([1.0, 1.0, 3.0, 3.0, 1.0]).reshape(1, 5, 1, 1)
    zero, one = jnp.zeros((1, 5, 1)), jnp.ones((1, 5, 1))
    state = jnp.zeros((1, 1, 1, 2))
    output, u = wy.verify_reference(key, key, v, zero, one, state, mask, 2)
    assert u[0, :, 0, 0].tolist() == [1, 0, 2, 0, 0]
    assert output[0, :, 0, 0].tolist() == [1, 1, 3, 3, 1]
