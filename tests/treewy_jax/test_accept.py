"""The walk down the tree, against a walk in plain Python."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.treewy_jax import strategies
from treewy_jax import accept
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

# Three tokens, so that drafts often agree and siblings are often the same.
N_MAX, DEPTH_MAX, VOCAB = 12, 11, 3
FORK = strategies.SHAPES["fork"]


def envelope(rows, tokens):
    trees = [
        tree_lib.DraftTree.from_parents(p, n_max=N_MAX, depth_max=DEPTH_MAX)
        for p in rows
    ]
    return tree_lib.DraftTree.stack(trees).with_tokens(jnp.asarray(tokens, jnp.int32))


def python_walk(parents, tokens, chosen):
    """Return the accepted nodes: go to the first child that says what was chosen."""
    path = [0]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1]]
        fitting = [i for i in children if tokens[i] == chosen[path[-1]]]
        if not fitting:
            return path
        path.append(fitting[0])


def assert_accepted(accepted, row, path, next_token):
    """The row holds this path, padded with its last node."""
    padded = path + [path[-1]] * (DEPTH_MAX + 1 - len(path))
    assert accepted.path[row].tolist() == padded
    assert int(accepted.node[row]) == path[-1]
    assert int(accepted.count[row]) == len(path)
    assert int(accepted.next_token[row]) == next_token


def random_rows(parents, seed):
    """Return trees, tokens (padding has some too) and choices of four rows."""
    random = np.random.default_rng(seed)
    rows = [parents, FORK, parents, strategies.random_parents(random, N_MAX)]
    return rows, *random.integers(0, VOCAB, (2, 4, N_MAX))


walk = jax.jit(accept.walk)
greedy = jax.jit(accept.greedy)


@functools.cache
def walk_down(node):
    """Accept FORK down to `node`: every token is its own index, which is unique."""
    path = [node]
    while FORK[path[0]] >= 0:
        path.insert(0, FORK[path[0]])
    chosen = np.full((1, N_MAX), 100)
    chosen[0, path[:-1]] = path[1:]
    tree = envelope([FORK], [range(N_MAX)])
    return path, tree, walk(jnp.asarray(chosen, jnp.int32), tree)


@hypothesis.given(strategies.preorder_parents(N_MAX), st.integers(0, 2**16))
def test_the_walk(parents, seed):
    rows, tokens, chosen = random_rows(parents, seed)
    accepted = walk(jnp.asarray(chosen, jnp.int32), envelope(rows, tokens))
    for b, row in enumerate(rows):
        path = python_walk(row, tokens[b], chosen[b])
        assert_accepted(accepted, b, path, chosen[b, path[-1]])


@hypothesis.given(strategies.preorder_parents(N_MAX), st.integers(0, 2**16))
def test_greedy_follows_the_argmax_and_ignores_padding(parents, seed):
    rows, tokens, _ = random_rows(parents, seed)
    logits = np.random.default_rng(seed).normal(size=(4, N_MAX, VOCAB))
    for b, row in enumerate(rows):
        logits[b, len(row) :] = np.nan
    accepted = greedy(jnp.asarray(logits, jnp.float32), envelope(rows, tokens))
    for b, row in enumerate(rows):
        best = [max(range(VOCAB), key=list(node).__getitem__) for node in logits[b]]
        path = python_walk(row, tokens[b], best)
        assert_accepted(accepted, b, path, best[path[-1]])


@pytest.mark.parametrize("node", range(len(FORK)))
def test_every_node_can_be_the_last(node):
    path, _, accepted = walk_down(node)
    assert_accepted(accepted, 0, path, 100)


def test_the_first_of_equal_siblings_wins():
    """Node 2 hangs below the first of the twins, so node 4 below the second is lost."""
    parents, tokens = [-1, 0, 1, 0, 3], np.zeros((1, N_MAX), int)
    tokens[0, :5] = [9, 1, 2, 1, 3]
    for wanted, path in ((2, [0, 1, 2]), (3, [0, 1])):
        chosen = np.full((1, N_MAX), wanted)
        chosen[0, 0] = 1
        accepted = walk(jnp.asarray(chosen, jnp.int32), envelope([parents], tokens))
        assert_accepted(accepted, 0, path, wanted)


def test_the_token_of_the_root_plays_no_part():
    chosen = jnp.ones((1, N_MAX), jnp.int32)
    for root in (0, 1):
        tokens = np.full((1, N_MAX), 2)
        tokens[0, 0] = root
        accepted = walk(chosen, envelope([FORK], tokens))
        assert_accepted(accepted, 0, [0], 1)


@pytest.mark.parametrize("node", range(len(FORK)))
def test_emitted_and_every_way_to_shorten(node):
    """The text of the first c nodes is the first c tokens of the whole text."""
    path, tree, accepted = walk_down(node)
    emitted = accepted.emitted(tree.tokens)
    text = path[1:] + [100]
    assert emitted[0].tolist() == text + [100] * (DEPTH_MAX + 1 - len(text))
    for count in range(1, len(path) + 1):
        cut = accepted.shorten(jnp.asarray([count]), emitted)
        assert_accepted(cut, 0, path[:count], text[count - 1])
        assert cut.emitted(tree.tokens)[0, :count].tolist() == text[:count]
    none = accepted.shorten(jnp.asarray([0]), emitted)
    assert none.count.tolist() == none.node.tolist() == [0]
    assert none.path.tolist() == [[0] * (DEPTH_MAX + 1)]


def test_rows_are_shortened_on_their_own():
    chosen = jnp.asarray([[1] * N_MAX] * 3, jnp.int32)
    chain = list(range(-1, N_MAX - 1))
    tree = envelope([chain] * 3, [[1] * N_MAX] * 3)
    accepted = walk(chosen, tree)
    assert accepted.count.tolist() == [N_MAX] * 3
    counts = jnp.asarray([4, 0, 1], jnp.int32)
    cut = accepted.shorten(counts, accepted.emitted(tree.tokens))
    assert cut.count.tolist() == [4, 0, 1]
    assert cut.node.tolist() == [3, 0, 0]
    assert cut.path[0].tolist() == [0, 1, 2] + [3] * (N_MAX - 3)


def test_nothing_is_no_step():
    tree = envelope([FORK] * 2, np.zeros((2, N_MAX)))
    none = accept.nothing(tree)
    assert none.path.shape == (2, DEPTH_MAX + 1)
    assert all(leaf.dtype == jnp.int32 and not np.any(leaf) for leaf in none)
    walked = walk(jnp.zeros((2, N_MAX), jnp.int32), tree)
    for one, other in zip(none, walked, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@functools.cache
def match(sampling):
    return jax.jit(functools.partial(accept.sample_and_match, sampling=sampling))


def test_matching_without_temperature_is_greedy():
    rows, tokens, _ = random_rows(FORK, 1)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, N_MAX, VOCAB)))
    tree, base = envelope(rows, tokens), jnp.asarray([3, 0, 9, 70])
    matched = match(sampling_lib.Sampling())(logits, tree, jax.random.key(0), base)
    for one, other in zip(matched, greedy(logits, tree), strict=True):
        assert np.array_equal(one, other)


def test_matching_walks_the_samples_at_each_depth():
    sampling, key = sampling_lib.Sampling(temperature=1.0), jax.random.key(4)
    base, lengths = jnp.asarray([3, 0, 9, 70]), []
    for seed in range(8):
        rows, tokens, _ = random_rows(FORK, seed)
        logits = jnp.asarray(np.random.default_rng(seed).normal(size=(4, N_MAX, VOCAB)))
        tree = envelope(rows, tokens)
        position = base[:, None] + tree.depth()
        chosen = np.asarray(sampling_lib.draw(logits, key, position, sampling))
        accepted = match(sampling)(logits, tree, key, base)
        for b, row in enumerate(rows):
            path = python_walk(row, tokens[b], chosen[b])
            assert_accepted(accepted, b, path, chosen[b, path[-1]])
            lengths.append(len(path))
    assert max(lengths) > 2, "the drafts never hit: a vacuous test"


def test_the_sampled_text_does_not_depend_on_the_tree():
    """The same logits at each position tell the same text, however it is drafted."""
    sampling, key = sampling_lib.Sampling(temperature=1.0), jax.random.key(2)
    by_position = np.random.default_rng(3).normal(size=(64, VOCAB))

    def write(parents, seed, total=24):
        random, text, steps = np.random.default_rng(seed), [], 0
        while len(text) < total:
            tree = envelope([parents], random.integers(0, VOCAB, (1, N_MAX)))
            position = len(text) + np.asarray(tree.depth())
            logits = jnp.asarray(by_position[position])
            accepted = match(sampling)(logits, tree, key, jnp.asarray([len(text)]))
            new = accepted.emitted(tree.tokens)[0, : int(accepted.count[0])]
            text, steps = text + new.tolist(), steps + 1
        return text[:total], steps

    plain, most = write([-1], 0)
    assert most == 24
    for seed, parents in enumerate((FORK, [-1, 0, 0, 0], list(range(-1, 7)))):
        text, steps = write(parents, seed)
        assert text == plain and steps < most
