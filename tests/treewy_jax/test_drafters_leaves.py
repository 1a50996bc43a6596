"""A chain with runner-ups beside it, by builder, by name, and as the head fills it."""

import jax
import jax.numpy as jnp
import pytest

from tests.treewy_jax import draft_heads, strategies
from treewy_jax import drafters
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree
ALL = [-1, 0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "leaves, parents",
    [(None, ALL), (0, ALL[:4]), (1, [*ALL[:4], 0]), (2, [-1, 0, 1, 2, 1, 0])],
)
def test_leaves_hang_beside_the_first_drafts(leaves, parents):
    tree = DraftTree.chain_with_leaves(3, leaves=leaves, n_max=9, batch=2)
    assert tree.parents().tolist() == [parents + [-1] * (9 - len(parents))] * 2
    assert tree.size.tolist() == [len(parents)] * 2 and tree.depth_max == 3


def test_wrong_numbers_are_named():
    for leaves in (-1, 4, 1.5, True):
        with pytest.raises(ValueError, match=f"leaves is {leaves}; .* from 0 to 3"):
            DraftTree.chain_with_leaves(3, leaves=leaves)
    with pytest.raises(ValueError, match="drafts is -1"):
        DraftTree.chain_with_leaves(-1)


@pytest.mark.parametrize(
    "name, parents",
    [
        ("chain3", ALL[:4]),
        ("chain3+leaf", [*ALL[:4], 0]),
        (" chain3+leaves ", ALL),
        ("2,1", [-1, 0, 1, 0, 3]),
        ("none", [-1]),
    ],
)
def test_names(name, parents):
    assert tree_lib.parse(name).parent.tolist() == parents


@pytest.mark.parametrize(
    "name, message",
    [
        ("chain", "tree 'chain': of chains, names such as chain4,"),
        ("chain0", "tree 'chain0': of chains, names such as"),
        ("chain3+leafs", "tree 'chain3.leafs': of chains, names such as"),
        ("chain8+leaf", "tree 'chain8.leaf': at least 10 nodes .* n_max = 9"),
        ("3,x", "tree '3,x': level 2 is 'x'"),
    ],
)
def test_wrong_names_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        tree_lib.parse(name, n_max=9)


def test_rank_is_the_place_among_siblings():
    tree = DraftTree.stack(
        [DraftTree.from_parents(ALL), DraftTree.from_parents([-1, 0, 0, 0])]
    )
    assert tree.rank().tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 0, 0, 0]]


def token_paths(tokens, parents):
    """Return the text below the root that each node stands for."""
    nodes = range(len(parents))
    paths = [strategies.root_path(parents, node)[1:] for node in nodes]
    return {tuple(tokens[node] for node in path) for path in paths}


@pytest.mark.parametrize("twin", [False, True])
def test_the_head_fills_in_its_best_and_its_runner_ups(twin):
    """A twin whose leaves come before the chain goes on below the runner-up."""
    parents = [-1, 0, 0, 2, 2, 4, 4] if twin else ALL
    plan = drafters.MTPDrafter.from_tree(DraftTree.from_parents(parents))
    drafter = drafters.mtp.BoundMTPDrafter(plan, draft_heads.Head(True))
    state, texts = draft_heads.started(drafter, True)
    root = jnp.asarray(draft_heads.FIRST)
    drafted, _ = jax.jit(drafter.propose)(state, root, state.length)
    for row, text in enumerate(texts):
        wanted = text.draft(ALL, draft_heads.FIRST[row])
        found = token_paths(drafted.tokens[row].tolist(), parents)
        assert (found == token_paths(wanted, ALL)) != twin
    # No more passes than a chain: one node a level is run.
    assert [len(level) for level in plan.levels] == [1, 1, 1]
