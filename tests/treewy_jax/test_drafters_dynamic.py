"""The dynamic drafter against slow searches in NumPy, and its one program."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.sampling_checks import toys as parts
from tests.treewy_jax import draft_heads, toys
from treewy_jax import accept, drafters, loop
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.drafters import candidates

Dynamic = drafters.DynamicDrafter


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits)))


def from_paths(paths):
    """Return tokens and parents of the tree of these paths, siblings in their order."""
    tokens, parents = [], []

    def walk(path, parent):
        node = len(parents)
        parents.append(parent)
        tokens.append(path[-1] if path else None)
        for below in paths:
            if len(below) == len(path) + 1 and below[: len(path)] == path:
                walk(below, node)

    walk((), -1)
    return tokens[1:], parents


# --- which tree -----------------------------------------------------------------------


def best_paths(table, last, nodes, depth):
    """Return the best paths of all there are, the most probable first."""
    found = []
    for length in range(1, depth + 1):
        for path in itertools.product(range(toys.VOCAB), repeat=length):
            text, value = [*last, *path], 0.0
            for i in range(length):
                value += log_softmax(table[text[i], text[i + 1]])[path[i]]
            found.append((-value, path))
    return [path for _, path in sorted(found)[: nodes - 1]]


TABLE = np.random.default_rng(5).normal(scale=2.0, size=(toys.VOCAB,) * 3)


def propose(plan, table, texts):
    """Draft below the last token of each text of two."""

    @jax.jit
    def run(table, before, root):
        drafter = drafters.dynamic.BoundDynamicDrafter(plan, parts.Head(table))
        batch = len(texts)
        state = drafters.mtp.MTPState(
            key=jnp.zeros((batch, 1, 1, 1)),
            value=jnp.zeros((batch, 1, 1, 1)),
            length=jnp.zeros(batch, jnp.int32),
            seed=parts.pair(before, root),
            tokens=jnp.zeros((batch, plan.nodes), jnp.int32),
        )
        return drafter.propose(state, root, jnp.zeros(batch, jnp.int32))[0]

    return run(jnp.asarray(table, jnp.float32), *jnp.asarray(texts).T)


TEXTS = [(0, 1), (3, 3), (7, 2)]


@pytest.mark.parametrize("nodes, depth", [(2, 1), (12, 2), (30, 3)])
def test_with_room_for_all_it_is_the_best_tree_there_is(nodes, depth):
    plan = Dynamic(nodes=nodes, depth=depth, width=64, children=toys.VOCAB)
    tree = propose(plan, TABLE, TEXTS)
    for row, text in enumerate(TEXTS):
        tokens, parents = from_paths(best_paths(TABLE, text, nodes, depth))
        assert tree.tokens[row].tolist() == [text[1], *tokens]
        assert tree.parent[row].tolist() == parents
    assert tree.size.tolist() == [nodes] * 3 and tree.depth_max == depth


def test_a_value_without_its_path_is_seen(monkeypatch):
    """A twin that ranks nodes by their own probability draws another tree."""
    children = drafters.dynamic.BoundDynamicDrafter._children

    def alone(self, level):
        value = jnp.zeros_like(level.value)
        return children(self, dataclasses.replace(level, value=value))

    plan = Dynamic(nodes=12, depth=2, width=64, children=toys.VOCAB)
    right = propose(plan, TABLE, TEXTS)
    monkeypatch.setattr(drafters.dynamic.BoundDynamicDrafter, "_children", alone)
    wrong = propose(plan, TABLE, TEXTS)
    for row in range(len(TEXTS)):
        assert wrong.parent[row].tolist() != right.parent[row].tolist()


def test_equal_values_leave_the_tree_connected():
    """All tokens are as probable: parents come first, then lower tokens."""
    plan = Dynamic(nodes=7, depth=3, width=2, children=2)
    tree = propose(plan, np.zeros((toys.VOCAB,) * 3), TEXTS)
    expected = tree_lib.DraftTree.from_widths((2, 2)).parent.tolist()
    assert tree.parent.tolist() == [expected] * 3
    assert tree.tokens[0, 1:].tolist() == [0, 0, 1, 1, 0, 1]


def test_what_is_no_candidate_is_padding():
    tree = jax.jit(candidates.best_tree, static_argnames=("n_max", "depth_max"))(
        jnp.asarray([9, 9]),
        jnp.asarray([[1, 2, 3, 4, 5]] * 2),
        jnp.asarray([[-1, -1, 0, 1, 0]] * 2),
        jnp.asarray([[-1, -jnp.inf, -2, -jnp.inf, -1.5], [-2, -1, -3, -4, -5]]),
        n_max=5,
        depth_max=2,
    )
    assert tree.size.tolist() == [4, 5]
    assert tree.tokens[0, :4].tolist() == [9, 1, 3, 5]
    assert tree.parents()[0].tolist() == [-1, 0, 1, 1, -1]
    assert tree.tokens[1].tolist() == [9, 1, 3, 2, 4]
    assert tree.parents()[1].tolist() == [-1, 0, 1, 0, 3]


# --- how the head is run --------------------------------------------------------------


def grown(text, root, plan):
    """Grow the tree of one row, with a full pass over its path for every node."""
    level, every = [((), 0.0, text.seed, [])], []
    for _ in range(plan.depth):
        found = []
        for path, value, output, rows in level:
            log_probs = log_softmax(output @ draft_heads.TO_LOGITS)
            for token in np.argsort(-log_probs, kind="stable")[: plan.children]:
                below = (*path, int(token))
                found.append((below, value + log_probs[token], output, rows))
        every += found
        best = sorted(found, key=lambda one: -one[1])[: plan.width]
        level = [
            (p, v, *run_node(text, p, output, rows)) for p, v, output, rows in best
        ]
    best = sorted(every, key=lambda one: -one[1])[: plan.nodes - 1]
    tokens, parents = from_paths([path for path, *_ in best])
    return [root, *tokens], parents


def run_node(text, path, output, rows):
    """Run a node; returns its output and the rows of its path."""
    position = len(text.rows) + len(path) - 1
    x = draft_heads.by_hand(path[-1], output, position)
    return text.output(x, rows), [*rows, x]


def bound(plan, attends):
    head = draft_heads.Head(attends)
    return drafters.dynamic.BoundDynamicDrafter(plan, head)


PLANS = [
    Dynamic(nodes=16, depth=3, width=3, children=4),
    Dynamic(nodes=9, depth=4, width=1, children=5),
    Dynamic(nodes=6, depth=1, width=2, children=5),
]


def expand(plan, fault=None):
    """Return the tree and what is right; a fault is planted if one is named."""
    drafter = bound(plan, attends=True)
    state, texts = draft_heads.started(drafter, attends=True)
    base = state.length + (fault == "position")
    if fault == "seed":
        state = state._replace(seed=state.seed[::-1])
    state, root = draft_heads.poisoned(state), jnp.asarray(draft_heads.FIRST)
    tree, after = jax.jit(drafter.propose)(state, root, base)
    assert np.array_equal(after.tokens, tree.tokens)
    rows = zip(texts, draft_heads.FIRST, strict=True)
    return tree, [grown(text, root, plan) for text, root in rows]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_it_grows_what_a_walk_by_hand_grows(plan):
    tree, expected = expand(plan)
    for row, (tokens, parents) in enumerate(expected):
        assert tree.tokens[row].tolist() == tokens
        assert tree.parent[row].tolist() == parents


@pytest.mark.parametrize("fault", ["position", "siblings", "seed"])
def test_faults_are_seen(fault, monkeypatch):
    """One position off, siblings in the mask, a stale seed: another tree each time."""
    if fault == "siblings":
        run_level = drafters.mtp_head.BoundHead.run_level

        def everyone(self, state, tokens, above, depth, base, mask, kv):
            mask = jnp.ones_like(mask)
            return run_level(self, state, tokens, above, depth, base, mask, kv)

        monkeypatch.setattr(drafters.mtp_head.BoundHead, "run_level", everyone)
    tree, expected = expand(PLANS[0], fault)
    for row, (tokens, parents) in enumerate(expected):
        found = tree.tokens[row].tolist(), tree.parent[row].tolist()
        assert found != (tokens, parents)


def test_update_is_that_of_the_head():
    """After a branch is accepted the next tree is that of the longer text."""
    plan = PLANS[0]
    drafter = bound(plan, attends=True)
    state, texts = draft_heads.started(drafter, attends=True)
    run = jax.jit(drafter.propose)
    tree, state = run(state, jnp.asarray(draft_heads.FIRST), state.length)
    node = jnp.argmax(tree.depth(), axis=1)
    path, count = tree.path(node)
    taken = accept.Accepted(node, path, count, jnp.asarray([8, 11]))
    hidden = np.random.default_rng(3).normal(size=(2, plan.nodes, draft_heads.HIDDEN))
    state = jax.jit(drafter.update)(state, taken, jnp.asarray(hidden, jnp.float32))
    for row, text in enumerate(texts):
        emitted = taken.emitted(tree.tokens)[row, : int(count[row])].tolist()
        text.take(emitted, hidden[row, path[row, : int(count[row])]])
    tree, _ = run(state, taken.next_token, state.length)
    for row, (text, newest) in enumerate(zip(texts, [8, 11], strict=True)):
        tokens, parents = grown(text, newest, plan)
        assert tree.tokens[row].tolist() == tokens
        assert tree.parent[row].tolist() == parents


# --- in the loop ----------------------------------------------------------------------

PLAN = Dynamic(nodes=8, depth=3, width=3, children=3)
GREEDY = sampling_lib.Sampling()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(temperature):
    """One program runs all steps, whose trees differ, and those of the rows, too."""
    sampling, tables = sampling_lib.Sampling(temperature), toys.tables(far=-1)
    seen, programs = set(), loop.run._cache_size()
    for state in draft_heads.written(PLAN, sampling, tables):
        parents = np.where(state.done[:, None], 0, state.tree.parent)
        seen |= {tuple(row) for row in parents.tolist()}
    assert loop.run._cache_size() == programs + 1
    assert len(seen) >= (8 if temperature else 4)  # greedy texts repeat themselves
    plain, steps = draft_heads.text_of(drafters.NoDrafter(), sampling, tables)
    assert state.tokens.tolist() == plain
    assert int(state.steps) < steps


# --- arguments and the tree's order ---------------------------------------------------


def test_wrong_numbers_are_named():
    for field, least in (("nodes", 2), ("depth", 1), ("width", 1), ("children", 1)):
        with pytest.raises(ValueError, match=f"{field}=0: must be {least} or more"):
            Dynamic(**{field: 0})
    with pytest.raises(ValueError, match="nodes=9: depth=2, width=1 and .* at most 7"):
        Dynamic(nodes=9, depth=2, width=1, children=3)
    plan = Dynamic(nodes=4, depth=1, width=1, children=9)
    with pytest.raises(ValueError, match="children=9: allowed are at most the 8"):
        propose(plan, np.zeros((toys.VOCAB,) * 3), TEXTS)


def test_any_size_has_a_drafter():
    for nodes in range(2, 65):
        for depth in (1, 2, 3, 8, 70):
            plan = Dynamic.of_size(nodes, depth)
            assert (plan.nodes, plan.depth) == (nodes, min(depth, nodes - 1))
            assert plan.children < nodes


def test_no_distribution_is_handed_out():
    with pytest.raises(ValueError, match="DynamicDrafter hands out no draft distrib"):
        accept.by_name("rejection").check(Dynamic(), GREEDY)


def test_nodes_of_any_order_come_in_preorder():
    parent = [[-1, 0, 0, 1, 2, 1, 4, 0], [-1, 0, 1, 2, -1, -1, -1, -1]]
    tree = tree_lib.DraftTree(
        tokens=jnp.arange(16).reshape(2, 8),
        parent=jnp.asarray(parent),
        size=jnp.asarray([8, 4]),
        depth_max=3,
    )
    sorted_tree = candidates.in_preorder(tree)
    assert sorted_tree.tokens.tolist() == [
        [0, 1, 3, 5, 2, 4, 6, 7],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]
    assert sorted_tree.parents()[0].tolist() == [-1, 0, 1, 1, 0, 4, 5, 0]
    assert sorted_tree.parents()[1].tolist() == [-1, 0, 1, 2, -1, -1, -1, -1]
