"""The convolution along sequences and trees, against a loop over root paths.

Inputs are small integers, so that every sum is exact and equality has no tolerance.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.treewy_jax import strategies
from treewy_jax import conv
from treewy_jax import tree as tree_lib

N_MAX, CHANNELS = 12, 5
FORK = strategies.SHAPES["fork"]
# One tap, the published four, and a window longer than most paths.
WIDTHS = (1, 2, 4, 8)
over_widths = pytest.mark.parametrize("width", WIDTHS)


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


causal = jax.jit(conv.causal)
window_at = jax.jit(conv.window_at)


def convolve(rows, window, weight):
    """Return y_t = sum_w weight[:, w] x_{t-(W-1)+w} over [window; rows], t by t."""
    padded = np.concatenate([window, rows])
    output = np.zeros_like(rows)
    for t in range(len(rows)):
        for w in range(weight.shape[1]):
            output[t] += weight[:, w] * padded[t + w]
    return output


def envelope(*rows):
    trees = [
        tree_lib.DraftTree.from_parents(p, n_max=N_MAX, depth_max=N_MAX - 1)
        for p in rows
    ]
    return tree_lib.DraftTree.stack(trees)


def inputs(width, batch=2):
    """Return node rows, old windows and taps."""
    return (
        integers(1, batch, N_MAX, CHANNELS),
        integers(2, batch, width - 1, CHANNELS),
        integers(3, CHANNELS, width),
    )


@functools.cache
def tree_conv(width):
    def run(rows, window, weight, tree):
        return conv.tree(rows, window, weight, conv.tree_windows(tree, width))

    return jax.jit(run)


def along_paths(parents, rows, window, weight):
    """Return what each node sees when its root path is a sequence of its own."""
    paths = [strategies.root_path(parents, node) for node in range(len(parents))]
    return np.stack([convolve(rows[p], window, weight)[-1] for p in paths])


commit = jax.jit(conv.commit)


def committed(rows, window, parents, nodes):
    """Commit the path to nodes[b] in every row b; None stands for no step."""
    paths = [strategies.root_path(parents, node) for node in nodes]
    path = [(p + [p[-1] if p else 0] * N_MAX)[:N_MAX] for p in paths]
    count = jnp.asarray([len(p) for p in paths], jnp.int32)
    return paths, commit(window, rows, jnp.asarray(path, jnp.int32), count)


@over_widths
def test_a_sequence_is_a_sum_over_its_last_rows(width):
    rows, window, weight = inputs(width)
    output = np.asarray(causal(rows, window, weight))
    for b in range(2):
        assert np.array_equal(output[b], convolve(rows[b], window[b], weight))


@over_widths
def test_a_sequence_may_be_cut_anywhere(width):
    rows, window, weight = inputs(width)
    whole = np.asarray(causal(rows, window, weight))
    for cut in (1, 2, 5, N_MAX - 1):
        head, tail = rows[:, :cut], rows[:, cut:]
        between = window_at(head, window, jnp.full(2, cut))
        assert np.array_equal(causal(tail, between, weight), whole[:, cut:])


@over_widths
def test_the_window_after_ragged_lengths(width):
    batch = N_MAX + 1
    rows, window, _ = inputs(width, batch)
    after = np.asarray(window_at(rows, window, jnp.arange(batch)))
    for length in range(batch):
        padded = np.concatenate([window[length], rows[length, :length]])
        assert np.array_equal(after[length], padded[len(padded) - (width - 1) :])


def test_the_first_window_is_empty():
    rows = jnp.ones((2, 3, CHANNELS), jnp.bfloat16)
    window = conv.empty_window(rows, 4)
    assert window.shape == (2, 3, CHANNELS) and window.dtype == jnp.bfloat16
    assert not np.any(window)


@hypothesis.given(strategies.preorder_parents(N_MAX), st.sampled_from(WIDTHS))
def test_every_node_sees_its_own_path(parents, width):
    rows, window, weight = inputs(width)
    output = tree_conv(width)(rows, window, weight, envelope(parents, FORK))
    for b, row in enumerate((parents, FORK)):
        expected = along_paths(row, rows[b], window[b], weight)
        assert np.array_equal(output[b, : len(row)], expected)


@pytest.mark.parametrize("fault", ["window one off", "preorder for ancestors"])
def test_a_wrong_window_is_seen(fault):
    """Both faults are right at some nodes: the check has to look at all of them."""
    rows, window, weight = inputs(4)
    windows = conv.tree_windows(envelope(FORK, FORK), 4)
    wrong = {
        "window one off": jnp.where(windows < 3, jnp.maximum(windows - 1, 0), windows),
        "preorder for ancestors": jnp.broadcast_to(
            jnp.arange(N_MAX)[:, None] + jnp.arange(4), windows.shape
        ),
    }[fault]
    output = np.asarray(jax.jit(conv.tree)(rows, window, weight, wrong))
    expected = along_paths(FORK, rows[0], window[0], weight)
    right = np.all(output[0] == expected, axis=-1)
    assert np.any(right) and not np.all(right)


@hypothesis.given(strategies.preorder_parents(N_MAX), st.sampled_from(WIDTHS))
def test_commit_keeps_the_last_rows_of_the_path(parents, width):
    """Row b accepts node b; short paths borrow from the old window."""
    rows, window, _ = inputs(width, N_MAX)
    nodes = list(range(len(parents))) + [None] * (N_MAX - len(parents))
    paths, after = committed(rows, window, parents, nodes)
    for b, path in enumerate(paths):
        padded = np.concatenate([window[b], rows[b][path]])
        assert np.array_equal(after[b], padded[len(padded) - (width - 1) :])


def test_commit_then_convolve_is_one_sequence():
    """A step after each accept length continues as if no tree had been there."""
    rows, window, weight = inputs(4, N_MAX)
    paths, after = committed(rows, window, FORK, range(N_MAX))
    following = integers(4, N_MAX, 3, CHANNELS)
    output = causal(following, after, weight)
    for b, path in enumerate(paths):
        text = np.concatenate([rows[b][path], following[b]])
        assert np.array_equal(output[b], convolve(text, window[b], weight)[-3:])


def test_no_step_keeps_every_bit():
    _, window, _ = inputs(4)
    window[0, 0, 0], window[1, 2, 1] = -0.0, np.nan
    poison = np.full((2, N_MAX, CHANNELS), np.nan, np.float32)
    _, after = committed(poison, window, FORK, [None, None])
    assert np.asarray(after).tobytes() == window.tobytes()


@pytest.mark.parametrize("size", [1, 4, 7])
def test_padding_changes_no_bit(size):
    rows, window, weight = inputs(4)
    tree = envelope(FORK[:size], FORK[:size])
    poisoned = rows.copy()
    poisoned[:, size:] = np.nan
    clean = tree_conv(4)(rows, window, weight, tree)[:, :size]
    dirty = tree_conv(4)(poisoned, window, weight, tree)[:, :size]
    assert np.asarray(clean).tobytes() == np.asarray(dirty).tobytes()
    _, after = committed(poisoned, window, FORK, [size - 1] * 2)
    assert np.all(np.isfinite(after))


def test_a_node_touches_its_descendants_alone():
    rows, window, weight = inputs(4)
    tree = envelope(FORK, FORK)
    before = np.asarray(tree_conv(4)(rows, window, weight, tree))
    for node in range(len(FORK)):
        changed = rows.copy()
        changed[:, node] = 1e30
        after = np.asarray(tree_conv(4)(changed, window, weight, tree))
        moved = np.any(before != after, axis=(0, 2))
        paths = [strategies.root_path(FORK, other) for other in range(len(FORK))]
        assert moved.tolist() == [node in path[-4:] for path in paths]


def test_bfloat16_rows_are_summed_in_float32():
    random = np.random.default_rng(5)
    rows, window, weight = (
        jnp.asarray(random.normal(size=x.shape), jnp.bfloat16) for x in inputs(4)
    )
    output = tree_conv(4)(rows, window, weight, envelope(FORK, FORK))
    assert output.dtype == jnp.float32
    rows, window, weight = (np.asarray(x, np.float64) for x in (rows, window, weight))
    for b in range(2):
        expected = along_paths(FORK, rows[b], window[b], weight)
        assert strategies.relative(output[b], expected) < 1e-6


def test_float64_stays_float64(double):
    random = np.random.default_rng(6)
    rows, window, weight = (random.normal(size=x.shape) for x in inputs(4))
    output = tree_conv(4)(rows, window, weight, envelope(FORK, FORK))
    expected = along_paths(FORK, rows[1], window[1], weight)
    assert strategies.relative(output[1], expected) < 1e-15
