"""Attention over a prefix and a tree, against a dense softmax."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import attention

N_MAX, SLOTS, DIM = 12, 9, 8
LENGTHS = (5, SLOTS)
FORK = strategies.SHAPES["fork"]
# Query and key-value heads.
HEADS = [(4, 2), (6, 2), (3, 1), (2, 2)]


def ancestors(parents):
    """Ancestor-or-self in the envelope; padding sees nothing and is not seen."""
    mask = np.zeros((N_MAX, N_MAX), bool)
    for node, parent in enumerate(parents):
        mask[node] = mask[parent] if parent >= 0 else False
        mask[node, node] = True
    return mask


def inputs(seed=0, heads=(4, 2), lengths=LENGTHS, dtype=np.float32):
    """Return q, prefix keys and values, node keys and values, and the lengths."""
    random = np.random.default_rng(seed)
    shapes = [(N_MAX, heads[0])] + 2 * [(SLOTS, heads[1])] + 2 * [(N_MAX, heads[1])]
    arrays = [random.normal(size=(len(lengths), *s, DIM)).astype(dtype) for s in shapes]
    return *arrays, np.asarray(lengths, np.int32)


def dense(q, old_k, old_v, k, v, length, mask):
    """Softmax of q.k / sqrt(D) over the visible slots only, query by query."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    output = np.zeros(q.shape)
    for t, seen in enumerate(mask):
        for h in range(heads):
            j = h // group
            keys = np.concatenate([old_k[:length, j], k[seen, j]]).astype(np.float64)
            values = np.concatenate([old_v[:length, j], v[seen, j]])
            scores = keys @ q[t, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            output[t, h] = weights @ values / weights.sum()
    return output


@jax.jit
def over_tree(q, old_k, old_v, k, v, length, mask):
    return attention.over_tree(q, (old_k, old_v), (k, v), length, mask)


def masks(*rows):
    return np.stack([ancestors(parents) for parents in rows])


@hypothesis.given(strategies.preorder_parents(N_MAX))
def test_a_node_attends_to_the_prefix_and_its_path(parents):
    arrays, mask = inputs(), masks(parents, FORK)
    output = over_tree(*arrays, mask)
    for b, size in enumerate((len(parents), len(FORK))):
        row = [x[b] for x in arrays]
        row[0] = row[0][:size]
        expected = dense(*row, mask[b, :size])
        assert strategies.relative(output[b, :size], expected) < 1e-6


def test_a_sibling_in_the_mask_is_seen():
    """The check above has teeth: one wrong entry is far outside its bound."""
    arrays, mask = inputs(), masks(FORK, FORK)
    wrong = mask.copy()
    wrong[:, 4, 3] = True
    right, twin = over_tree(*arrays, mask), over_tree(*arrays, wrong)
    assert np.array_equal(right[:, :4], twin[:, :4])
    assert strategies.relative(twin[:, 4], np.asarray(right[:, 4])) > 1e-3


@pytest.mark.parametrize("heads", HEADS)
def test_query_heads_share_key_heads_in_order(heads):
    """Values that name their head come back from it: j // (heads // kv)."""
    arrays = list(inputs(heads=heads))
    for i in (2, 4):
        arrays[i] = np.ones_like(arrays[i]) * np.arange(heads[1])[:, None]
    output = over_tree(*arrays, masks(FORK, FORK))
    named = np.arange(heads[0]) // (heads[0] // heads[1])
    expected = np.broadcast_to(named[:, None], output.shape)
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_ratio(heads):
    arrays, mask = inputs(heads=heads), masks(FORK, FORK)
    output = over_tree(*arrays, mask)
    for b in range(2):
        expected = dense(*(x[b] for x in arrays), mask[b])
        assert strategies.relative(output[b], expected) < 1e-6


@pytest.mark.parametrize("size", [1, 4, 9])
def test_unused_slots_and_padding_change_no_bit(size):
    q, old_k, old_v, k, v, length = inputs()
    mask = masks(FORK[:size], FORK[:size])
    clean = over_tree(q, old_k, old_v, k, v, length, mask)[:, :size]
    old_k[0, LENGTHS[0] :] = old_v[0, LENGTHS[0] :] = np.nan
    q[:, size:] = k[:, size:] = v[:, size:] = np.nan
    dirty = over_tree(q, old_k, old_v, k, v, length, mask)[:, :size]
    assert np.all(np.isfinite(dirty))
    assert np.asarray(clean).tobytes() == np.asarray(dirty).tobytes()


def test_a_node_changes_no_bit_outside_its_subtree():
    arrays, mask = inputs(), masks(FORK, FORK)
    before = np.asarray(over_tree(*arrays, mask))
    for node in range(len(FORK)):
        changed = [x.copy() for x in arrays]
        for i in (0, 3, 4):
            changed[i][:, node] = 1e4
        after = np.asarray(over_tree(*changed, mask))
        moved = np.any(before != after, axis=(0, 2, 3))
        assert moved.tolist() == mask[0, : len(FORK), node].tolist()


def test_the_root_alone_over_nothing_returns_its_value():
    q, old_k, old_v, k, v, _ = inputs()
    poison = np.full_like(old_k, np.nan)
    mask, nothing = masks([-1], [-1]), np.zeros(2, np.int32)
    output = over_tree(q, poison, poison, k, v, nothing, mask)
    assert np.array_equal(output[:, 0], np.repeat(v[:, 0], 2, axis=1))


def test_some_of_the_nodes_may_ask():
    """Drafting asks level by level: m queries over n nodes."""
    q, *others = inputs()
    mask, level = masks(FORK, FORK), [1, 6, 9]
    output = over_tree(q[:, level], *others, mask[:, level])
    for b in range(2):
        expected = dense(q[b, level], *(x[b] for x in others), mask[b, level])
        assert strategies.relative(output[b], expected) < 1e-6


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_is_a_chain(heads):
    q, _, _, k, v, _ = inputs(heads=heads)
    output = jax.jit(attention.causal)(q, k, v)
    chain, empty = ancestors(range(-1, N_MAX - 1)), np.zeros((0, heads[1], DIM))
    for b in range(2):
        expected = dense(q[b], empty, empty, k[b], v[b], 0, chain)
        assert strategies.relative(output[b], expected) < 1e-6


def test_large_scores_do_not_overflow():
    q, old_k, old_v, k, v, length = inputs()
    arrays, mask = (1e3 * q, 1e3 * old_k, old_v, 1e3 * k, v, length), masks(FORK, FORK)
    output = over_tree(*arrays, mask)
    expected = dense(*(x[0] for x in arrays), mask[0])
    assert strategies.relative(output[0], expected) < 1e-6


def test_bfloat16_comes_back_as_bfloat16():
    *arrays, length = inputs()
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    output, mask = over_tree(*arrays, length, masks(FORK, FORK)), ancestors(FORK)
    assert output.dtype == jnp.bfloat16
    for b in range(2):
        row = [np.asarray(x[b], np.float64) for x in arrays]
        assert strategies.relative(output[b], dense(*row, length[b], mask)) < 5e-3


def test_float64_is_computed_in_float64(double):
    arrays, mask = inputs(dtype=np.float64), masks(FORK, FORK)
    output = over_tree(*arrays, mask)
    assert output.dtype == jnp.float64
    expected = dense(*(x[0] for x in arrays), mask[0])
    assert strategies.relative(output[0], expected) < 1e-14
