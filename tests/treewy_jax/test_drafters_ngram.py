"""The n-gram drafter against a search of the text in plain Python."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from treewy_jax import accept, drafters
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree
THREE = drafters.NgramDrafter(branches=3, depth=2, match=3)


def ngram(drafter, texts, pad=0):
    """Draft for up to three texts whose last token is the root."""
    prompts = [text[:-1] for text in texts] + [[0]] * (3 - len(texts))
    tokens = [prompt + [pad] * (22 - len(prompt)) for prompt in prompts]
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    root = [text[-1] for text in texts] + [1] * (3 - len(texts))
    tokens, root = jnp.asarray(tokens, jnp.int32), jnp.asarray(root, jnp.int32)
    state = drafter.start(tokens, lengths, None, root, 24)
    return compiled(drafter)(state, root, lengths)


@functools.cache
def compiled(drafter):
    return jax.jit(drafter.propose)


def branches(drafter, tree, row):
    """Return the chains below the root of one row."""
    drafts = tree.tokens[row, 1 : int(tree.size[row])]
    return drafts.reshape(-1, drafter.depth).tolist()


def test_the_longest_match_wins_then_the_latest():
    longest = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 3, 70, 71, 1, 2, 3]
    latest = [1, 2, 3, 50, 51, 1, 2, 3, 60, 61, 3, 70, 71, 1, 2, 3]
    tree, _ = ngram(THREE, [longest, latest])
    assert branches(THREE, tree, 0) == [[50, 51], [60, 61], [70, 71]]
    assert branches(THREE, tree, 1) == [[60, 61], [50, 51], [70, 71]]


def test_branches_begin_with_distinct_tokens():
    text = [1, 2, 50, 51, 1, 2, 50, 52, 2, 60, 61, 1, 2]
    tree, _ = ngram(THREE, [text])
    assert branches(THREE, tree, 0) == [[50, 52], [60, 61]]
    assert int(tree.size[0]) == 5


def test_matches_beyond_the_limit_do_not_count():
    """With match=1 the latest place wins, however long an older one agrees."""
    text = [7, 1, 2, 50, 51, 2, 60, 61, 7, 1, 2]
    for match, first in ((1, 60), (2, 50)):
        drafter = drafters.NgramDrafter(branches=1, depth=1, match=match)
        assert branches(drafter, ngram(drafter, [text])[0], 0) == [[first]]


def test_without_a_match_the_root_stands_alone():
    for pad in (0, 4):
        tree, _ = ngram(THREE, [[1, 2, 3, 4], [5, 4]], pad=pad)
        assert tree.size.tolist() == [1, 1, 1]
        assert tree.tokens[:, 0].tolist() == [4, 4, 1]
        assert not np.any(tree.depth())


def test_the_branches_are_a_tree_in_preorder():
    tree, _ = ngram(THREE, [[1, 2, 1]])
    expected = DraftTree.from_parents([-1, 0, 1, 0, 3, 0, 5])
    assert tree.parent.tolist() == expected.parent.tolist()
    assert tree.depth_max == expected.depth_max


def searched(text, drafter):
    """Return the branches' first tokens, and where they stand, by trying all places."""
    newest = len(text) - 1
    places = []
    for at in range(newest):
        length = 0
        while (
            length < min(drafter.match, at + 1)
            and text[at - length] == text[newest - length]
        ):
            length += 1
        if length:
            places.append((length, at))
    found = []
    for _, at in sorted(places, reverse=True):
        if text[at + 1] not in [text[place] for place in found]:
            found.append(at + 1)
    return found[: drafter.branches]


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=2, max_size=20),
    st.lists(st.integers(0, 2), min_size=2, max_size=20),
)
def test_ragged_rows_search_their_own_text(one, other):
    """The prompt's padding looks like text here, and must not be found."""
    texts = [one, other, [0, 1, 2, 0] * 5]
    tree, _ = ngram(THREE, texts, pad=1)
    for row, text in enumerate(texts):
        places = searched(text, THREE)
        assert int(tree.size[row]) == 1 + len(places) * THREE.depth
        for chain, place in zip(branches(THREE, tree, row), places, strict=True):
            known = text[place : place + THREE.depth]
            assert chain[: len(known)] == known


def test_the_text_grows_by_what_was_emitted():
    texts = [[1, 2, 3, 4, 1, 2], [8, 9, 8], [0, 1]]
    tree, state = ngram(THREE, texts)
    assert branches(THREE, tree, 0) == [[3, 4]]
    path = jnp.asarray([[0, 1, 2], [0, 0, 0], [0, 0, 0]])
    count, newest = jnp.asarray([3, 0, 1]), jnp.asarray([5, 6, 0])
    taken = accept.Accepted(path[:, -1], path, count, newest)
    after = THREE.update(state, taken, None)
    grown = [texts[0] + [3, 4, 5], texts[1], [0, 1, 0]]
    for row, text in enumerate(grown):
        assert after.text[row, : len(text)].tolist() == text
    assert after.length.tolist() == [8, 2, 2]
    assert np.array_equal(after.text[1], state.text[1])
    # The same as if the whole text had been the prompt.
    whole, _ = ngram(THREE, grown)
    later, _ = compiled(THREE)(after, jnp.asarray([5, 8, 0]), after.length)
    for row in range(3):
        assert branches(THREE, whole, row) == branches(THREE, later, row)


@pytest.mark.parametrize("field", ["branches", "depth", "match"])
def test_wrong_numbers_are_named(field):
    with pytest.raises(ValueError, match=f"{field}=0: must be 1 or more"):
        drafters.NgramDrafter(**{field: 0})
