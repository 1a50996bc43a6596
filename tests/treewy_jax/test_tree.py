"""DraftTree: builders, their errors, and every traced method against plain Python."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from tests.treewy_jax import strategies
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree
N_MAX = 16


def walk(parents, node):
    """Return the nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def padded(parents):
    return DraftTree.from_parents(parents, n_max=N_MAX, depth_max=N_MAX - 1)


path_of = jax.jit(DraftTree.path)


def test_widths_give_the_papers_node_counts():
    for widths, n in (((1, 1, 1), 4), ((2, 2, 2), 15), ((3, 3, 3), 40), ((), 1)):
        tree = DraftTree.from_widths(widths)
        assert tree.n_max == n == int(tree.size[0])
        deepest = max(len(walk(tree.parent.tolist(), i)) for i in range(n))
        assert tree.depth_max == len(widths) == deepest - 1


def test_widths_are_laid_out_in_preorder():
    tree = DraftTree.from_widths((2, 2), n_max=8, batch=3)
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0, 4, 4, -1]
    assert tree.tokens.shape == (3, 8)
    assert tree.size.tolist() == [7, 7, 7]


def test_a_chain_is_a_tree_of_width_one():
    chain, narrow = DraftTree.chain(5), DraftTree.from_widths((1,) * 5)
    assert chain.parent.tolist() == narrow.parent.tolist()
    assert DraftTree.chain(0).n_max == 1


@hypothesis.given(strategies.preorder_parents(N_MAX))
def test_methods_agree_with_walking_up(parents):
    tree, size = padded(parents), len(parents)
    ancestors, strict, depth, valid, near = jax.device_get(_traced(tree))
    assert valid[0].tolist() == [i < size for i in range(N_MAX)]
    for node in range(N_MAX):
        expected = walk(parents, node) if node < size else []
        assert np.flatnonzero(ancestors[0, node]).tolist() == expected
        assert depth[0, node] == max(len(expected) - 1, 0)
        for distance in range(4):
            above = expected[::-1][distance : distance + 1] or [-1]
            assert near[distance][0, node] == above[0]
    assert not np.any(np.diagonal(strict, axis1=1, axis2=2))
    assert np.array_equal(strict | np.diag(valid[0]), ancestors)


@jax.jit
def _traced(tree):
    near = [tree.ancestor_at(distance) for distance in range(4)]
    strict = tree.ancestors(include_self=False)
    return tree.ancestors(), strict, tree.depth(), tree.valid(), near


@hypothesis.given(strategies.preorder_parents(N_MAX))
def test_paths_start_at_the_root_and_repeat_the_node(parents):
    nodes = [-1, *range(len(parents)), *[N_MAX] * (N_MAX + 1 - len(parents))]
    tree = padded(parents).with_tokens(jnp.zeros((N_MAX + 2, N_MAX), jnp.int32))
    path, count = jax.device_get(path_of(tree, jnp.asarray(nodes, jnp.int32)))
    for row, node in enumerate(nodes):
        expected = walk(parents, node) if 0 <= node < len(parents) else []
        fill = node if expected else 0
        assert count[row] == len(expected)
        assert path[row].tolist() == expected + [fill] * (N_MAX - len(expected))


def test_rows_may_hold_different_trees():
    star, chain = DraftTree.from_parents([-1, 0, 0]), DraftTree.chain(3)
    both = DraftTree.stack([star, chain], n_max=6)
    assert both.depth().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0]]
    assert both.depth_max == 3
    path, count = both.path(jnp.asarray([2, 2]))
    assert path.tolist() == [[0, 2, 2, 2], [0, 1, 2, 2]]
    assert count.tolist() == [2, 3]


def test_another_topology_in_the_envelope_compiles_nothing():
    traces = []

    @jax.jit
    def depth(tree):
        traces.append(1)
        return tree.depth()

    for parents in strategies.SHAPES.values():
        depth(padded(parents))
    assert len(traces) == 1


def test_a_tree_is_a_pytree_and_takes_tokens():
    tree = DraftTree.from_widths((2,), n_max=4)
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    filled = jax.jit(DraftTree.with_tokens)(tree, tokens)
    assert filled.tokens.tolist() == tokens.tolist()
    assert filled.size.tolist() == [3, 3]
    assert filled.depth_max == 1
    assert jax.tree.map(jnp.shape, tree).tokens == (1, 4)
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 3\)"):
        tree.with_tokens(tokens[:, :3])
    with pytest.raises(ValueError, match="tokens has 1 rows; the tree has 2"):
        filled.with_tokens(tokens[:1])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "non-empty"),
        ([0, 1.5], "list of ints"),
        ([0, 0], "root comes first"),
        ([-1, 0, -1], "only node 0 is a root"),
        ([-1, 1], "in preorder"),
        ([-1, 2, 0], "in preorder"),
        ([-1, 0, 0, 1], "in preorder"),
        ([-1, -2], "in preorder"),
    ],
)
def test_what_is_no_preorder_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(parents)


def test_what_exceeds_the_envelope_is_refused():
    with pytest.raises(ValueError, match="n_max = 32"):
        DraftTree.from_widths((3, 3, 3), n_max=32)
    with pytest.raises(ValueError, match="depth_max is 1"):
        DraftTree.from_parents([-1, 0, 1], depth_max=1)
    for widths in ((0,), (-1,), (2.0,), (True,), ("2",)):
        with pytest.raises(ValueError, match=r"widths\[0\]"):
            DraftTree.from_widths(widths)
    with pytest.raises(ValueError, match="batch is 0"):
        DraftTree.from_widths((1,), batch=0)
    with pytest.raises(ValueError, match="drafts is -1"):
        DraftTree.chain(-1)


def test_parse_widths():
    assert tree_lib.parse_widths("3,3,3") == (3, 3, 3)
    assert tree_lib.parse_widths(" 1, 2") == (1, 2)
    assert tree_lib.parse_widths("none") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,,3", "level 2 is ''"),
        ("0", "level 1 is '0'"),
        ("3,x", "level 2 is 'x'"),
        ("", "level 1 is ''"),
        ("-1", "level 1 is '-1'"),
        ("1_0", "level 1 is '1_0'"),
        (",".join("1" * 200), "n_max = 64"),
        (",".join("9" * 200), "n_max = 64"),
        ("4,4,4", "n_max = 64"),
        ("9" * 5000, "level 1"),
    ],
)
def test_parse_widths_refuses_in_one_line(text, message):
    with pytest.raises(ValueError, match="^tree ") as error:
        tree_lib.parse_widths(text, n_max=64)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_render_draws_the_real_nodes_and_marks_the_path():
    tree = DraftTree.from_widths((2, 1), n_max=8)
    drawn = tree.render(labels=list("rabcd") + ["pad"] * 3, highlight=[0, 3, 4])
    console = rich.console.Console(width=40, record=True, force_terminal=True)
    with console.capture() as captured:
        console.print(drawn)
    lines = captured.get().splitlines()
    assert len(lines) == 5
    assert ["\x1b[1;32m" in line for line in lines] == [True, False, False, True, True]
    assert "pad" not in captured.get()
    with pytest.raises(ValueError, match="labels has 1 entries"):
        tree.render(labels=["r"])
