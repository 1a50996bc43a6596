"""The suffix drafter against a trie in plain Python."""

import collections
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.treewy_jax import draft_heads, toys
from treewy_jax import accept, drafters
from treewy_jax import sampling as sampling_lib

Suffix = drafters.SuffixDrafter
PLAN = Suffix(nodes=8, depth=3, match=3, occurrences=6)
ROOM = 22


def searched(text, plan):
    """Return tokens and parents of the tree, by trying all places."""
    newest, places = len(text) - 1, []
    for at in range(newest):
        length = 0
        while (
            length < min(plan.match, at + 1)
            and text[at - length] == text[newest - length]
        ):
            length += 1
        if length:
            places.append((length, at))
    best = sorted(places, reverse=True)[: plan.occurrences]
    count, longest, order = collections.Counter(), {}, {}
    for number, (length, at) in enumerate(best):
        for end in range(at + 2, min(at + 1 + plan.depth, len(text)) + 1):
            path = tuple(text[at + 1 : end])
            count[path] += 1
            longest.setdefault(path, length)
            order.setdefault(path, number)

    def key(path):
        return -longest[path], -count[path], len(path), order[path]

    chosen = sorted(count, key=key)[: plan.nodes - 1]
    tokens, parents = [text[-1]], [-1]

    def walk(path, node):
        below = [p for p in chosen if len(p) == len(path) + 1 and p[:-1] == path]
        for child in sorted(below, key=order.get):
            tokens.append(child[-1])
            parents.append(node)
            walk(child, len(parents) - 1)

    walk((), 0)
    return tokens, parents


def start(plan, texts, pad=0):
    """Return the state of texts whose last token is the root, and the roots."""
    prompts = [text[:-1] for text in texts]
    tokens = [prompt + [pad] * (ROOM - len(prompt)) for prompt in prompts]
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    root = jnp.asarray([text[-1] for text in texts], jnp.int32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return plan.start(tokens, lengths, None, root, ROOM + 2), root


@functools.cache
def compiled(plan):
    return jax.jit(plan.propose)


def rows(tree):
    """Return tokens and parents of every row, without padding."""
    found = []
    for row, size in enumerate(tree.size.tolist()):
        tokens = tree.tokens[row, :size].tolist()
        found.append((tokens, tree.parents()[row, :size].tolist()))
    return found


def drafted(plan, texts, pad=0):
    state, root = start(plan, texts, pad)
    return rows(compiled(plan)(state, root, state.length)[0])


def test_continuations_are_merged_and_counted():
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2]
    found = drafted(Suffix(nodes=5, depth=3, match=2, occurrences=8), [text])
    # 5 followed three times, and then 6 twice, where a 1 came once within reach.
    assert found == [([2, 5, 6, 1, 7], [-1, 0, 1, 2, 1])]


def test_a_longer_match_comes_before_more_occurrences():
    text = [9, 1, 2, 5, 3, 2, 6, 4, 2, 6, 9, 1, 2]
    longest = Suffix(nodes=3, depth=1, match=3, occurrences=8)
    assert drafted(longest, [text]) == [([2, 5, 6], [-1, 0, 0])]
    often = Suffix(nodes=3, depth=1, match=1, occurrences=8)
    assert drafted(often, [text]) == [([2, 6, 5], [-1, 0, 0])]


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=2, max_size=20),
    st.lists(st.integers(0, 4), min_size=2, max_size=20),
)
def test_ragged_rows_search_their_own_text(one, other):
    """The prompt's padding looks like text here, and must not be found."""
    texts = [one, other, [0, 1, 2, 0] * 5]
    found = drafted(PLAN, texts, pad=1)
    assert found == [searched(text, PLAN) for text in texts]


def test_without_a_match_the_root_stands_alone():
    texts = [[1, 2, 3, 4], [5, 4]]
    assert drafted(PLAN, texts, pad=4) == [([4], [-1])] * 2


def test_more_occurrences_than_tokens_are_allowed():
    plan = Suffix(nodes=8, depth=3, match=3, occurrences=64)
    text = [0, 1, 2, 0, 1, 0, 0, 1]
    assert drafted(plan, [text]) == [searched(text, plan)]


@pytest.mark.parametrize("twin", [False, True])
def test_the_text_grows_by_what_was_emitted(twin):
    """A twin that forgets what was emitted finds other trees."""
    texts = [[1, 2, 3, 4, 1, 2], [8, 9, 8], [0, 1, 0]]
    state, root = start(PLAN, texts)
    tree, state = compiled(PLAN)(state, root, state.length)
    assert rows(tree)[0] == ([2, 3, 4, 1], [-1, 0, 1, 2])
    path = jnp.asarray([[0, 1, 2, 2], [0, 0, 0, 0], [0, 1, 1, 1]])
    count, newest = jnp.asarray([3, 0, 2]), jnp.asarray([1, 6, 1])
    taken = accept.Accepted(path[:, -1], path, count, newest)
    after = state if twin else PLAN.update(state, taken, None)
    whole = [texts[0] + [3, 4, 1], texts[1], texts[2] + [1, 1]]
    root = jnp.asarray([1, 8, 1])
    found = rows(compiled(PLAN)(after, root, after.length)[0])
    assert (found == [searched(text, PLAN) for text in whole]) != twin
    assert found[1] == searched(texts[1], PLAN)


def test_another_topology_is_the_same_program():
    before = compiled(PLAN)._cache_size()
    seen = set()
    for seed in range(8):
        text = np.random.default_rng(seed).integers(0, 3, 20).tolist()
        seen |= {tuple(parents) for _, parents in drafted(PLAN, [text] * 3)}
    assert len(seen) >= 4
    assert compiled(PLAN)._cache_size() <= before + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(temperature):
    sampling, tables = sampling_lib.Sampling(temperature), toys.tables()
    text, steps = draft_heads.text_of(PLAN, sampling, tables)
    plain = draft_heads.text_of(drafters.NoDrafter(), sampling, tables)
    assert text == plain[0] and steps <= plain[1]
    assert temperature or steps < plain[1]  # greedy, the toy's text soon repeats


def test_wrong_numbers_are_named():
    for field in ("depth", "match", "occurrences"):
        with pytest.raises(ValueError, match=f"{field}=0: must be 1 or more"):
            Suffix(**{field: 0})
    with pytest.raises(ValueError, match="nodes=1: must be 2 or more"):
        Suffix(nodes=1)
    with pytest.raises(ValueError, match="nodes=9: depth=2 .* have at most 7"):
        Suffix(nodes=9, depth=2, occurrences=3)
