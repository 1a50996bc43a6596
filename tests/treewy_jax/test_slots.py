"""Rows by number: what `append` and `take` touch, and what they leave alone."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.treewy_jax import strategies
from treewy_jax import slots

N_MAX, SLOTS, DIM = 12, 9, 8


def rows_of_nodes():
    rows = np.random.default_rng(0).normal(size=(2, N_MAX, 2, DIM))
    return rows.astype(np.float32)


append = jax.jit(slots.append)


@jax.jit
def commit(cache, rows, path, count, length):
    return slots.append(cache, slots.take(rows, path), count, length)


def written(cache, rows, count, length):
    """Put the first `count` rows behind `length`, one by one, while there is room."""
    cache = cache.copy()
    for b in range(len(cache)):
        for i in range(count[b]):
            if length[b] + i < cache.shape[1]:
                cache[b, length[b] + i] = rows[b, i]
    return cache


def poisoned_cache(length):
    """Return random rows up to `length` and NaN behind them."""
    cache = np.random.default_rng(7).normal(size=(2, SLOTS, 2, DIM))
    for row, used in zip(cache, length, strict=True):
        row[used:] = np.nan
    return cache.astype(np.float32)


@hypothesis.given(st.data())
def test_append_writes_count_slots_and_no_other(data):
    length = [data.draw(st.integers(0, SLOTS)) for _ in range(2)]
    count = [data.draw(st.integers(0, 4)) for _ in range(2)]
    cache, rows = poisoned_cache(length), rows_of_nodes()[:, :4].copy()
    for b in range(2):
        rows[b, count[b] :] = np.nan
    after = append(cache, rows, np.asarray(count), np.asarray(length))
    expected = written(cache, rows, count, length)
    assert np.asarray(after).tobytes() == expected.tobytes()


@hypothesis.given(strategies.preorder_parents(N_MAX), st.data())
def test_commit_writes_the_path(parents, data):
    nodes = [data.draw(st.integers(0, len(parents) - 1)) for _ in range(2)]
    length = [data.draw(st.integers(0, SLOTS)) for _ in range(2)]
    paths = [np.asarray(strategies.root_path(parents, n)) for n in nodes]
    count = [len(path) for path in paths]
    path = [np.resize(np.append(p, N_MAX * [p[-1]]), N_MAX) for p in paths]
    cache, rows = poisoned_cache(length), rows_of_nodes()
    after = commit(cache, rows, np.asarray(path), np.asarray(count), np.asarray(length))
    chosen = [rows[b][p] for b, p in enumerate(path)]
    expected = written(cache, np.stack(chosen), count, length)
    assert np.asarray(after).tobytes() == expected.tobytes()


def test_no_step_changes_no_bit():
    cache = poisoned_cache([3, SLOTS])
    poison, none = np.full_like(rows_of_nodes(), np.nan), np.zeros(2, np.int32)
    path = np.zeros((2, 4), np.int32)
    after = commit(cache, poison, path, none, np.asarray([3, SLOTS]))
    assert np.asarray(after).tobytes() == cache.tobytes()


def test_the_cache_keeps_its_dtype():
    cache = jnp.zeros((2, SLOTS, 2, DIM), jnp.bfloat16)
    rows = rows_of_nodes()
    after = append(cache, rows, np.asarray([2, 0]), np.asarray([1, 1]))
    assert after.dtype == jnp.bfloat16
    assert np.array_equal(after[0, 1:3], jnp.asarray(rows[0, :2], jnp.bfloat16))
