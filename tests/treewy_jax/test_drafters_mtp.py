"""The MTP drafter against a walk by hand: which token stands at which node, and why."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import draft_heads, strategies
from treewy_jax import accept, drafters
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree

SHAPES = {
    "3,3,3": DraftTree.from_widths((3, 3, 3)),
    "4,2,1": DraftTree.from_widths((4, 2, 1)),
    "1,1,1": DraftTree.from_widths((1, 1, 1)),
    "uneven": DraftTree.from_parents([-1, 0, 1, 1, 3, 0, 0, 6, 7, 8, 7]),
    "one level": DraftTree.from_widths((5,)),
    "root": DraftTree.from_widths(()),
}
over_shapes = pytest.mark.parametrize("shape", SHAPES)
# An envelope that fits every shape.
N_MAX, WIDE = 40, dict(level_sizes=(1, 4, 9, 9, 2, 1), rank_max=8)


def bound(tree, attends, **envelope):
    drafter = drafters.MTPDrafter.from_tree(tree, **envelope)
    return drafters.mtp.BoundMTPDrafter(drafter, draft_heads.Head(attends))


def widened(shape, attends):
    """Return the drafter of a shape inside the common envelope."""
    parents, depth = SHAPES[shape].parent.tolist(), len(WIDE["level_sizes"])
    wide = DraftTree.from_parents(parents, n_max=N_MAX, depth_max=depth)
    return bound(wide, attends, **WIDE)


@functools.cache
def program(method, attends):
    """Compile a method with the plan as data, as the loop does."""

    def run(plan, *args):
        drafter = drafters.mtp.BoundMTPDrafter(plan, draft_heads.Head(attends))
        return getattr(drafter, method)(*args)

    return jax.jit(run)


def propose(drafter, state, root, base=None):
    base = state.length if base is None else base
    run = program("propose", drafter.head.attends)
    return run(drafter.plan, state, jnp.asarray(root), base)


over_heads = pytest.mark.parametrize("attends", [False, True], ids=["local", "attends"])


@pytest.mark.parametrize("shape", ["3,3,3", "uneven", "root"])
def test_mtp_drafts_what_a_walk_by_hand_drafts(shape):
    tree = SHAPES[shape]
    parents = tree.parent.tolist()
    drafter = bound(tree, attends=True)
    state, texts = draft_heads.started(drafter, attends=True)
    drafted, after = propose(drafter, draft_heads.poisoned(state), draft_heads.FIRST)
    for b, text in enumerate(texts):
        assert drafted.tokens[b].tolist() == text.draft(parents, draft_heads.FIRST[b])
    assert drafted.parent.tolist() == parents
    assert drafted.size.tolist() == [len(parents)] * 2
    assert drafted.depth_max == tree.depth_max
    assert np.array_equal(after.tokens, drafted.tokens)


@over_heads
@over_shapes
def test_a_wider_envelope_drafts_the_same_tree(shape, attends):
    """More nodes, levels and ranks than the tree needs only pad; no new program."""
    parents = SHAPES[shape].parent.tolist()
    drafter = widened(shape, attends)
    sizes = tuple(len(level) for level in drafter.plan.levels)
    assert (sizes, drafter.plan.rank_max) == tuple(WIDE.values())
    state, texts = draft_heads.started(drafter, attends)
    propose(widened("3,3,3", attends), state, draft_heads.FIRST)
    programs = program("propose", attends)._cache_size()
    drafted, _ = propose(drafter, draft_heads.poisoned(state), draft_heads.FIRST)
    assert program("propose", attends)._cache_size() == programs
    assert drafted.size.tolist() == [len(parents)] * 2
    for b, text in enumerate(texts):
        tokens = drafted.tokens[b].tolist()
        assert tokens[: len(parents)] == text.draft(parents, draft_heads.FIRST[b])


@pytest.mark.parametrize("fault", ["position", "siblings", "seed"])
def test_mtp_faults_are_seen(fault):
    """One position off, siblings in the mask, a stale seed: another tree each time."""
    tree = SHAPES["3,3,3"]
    drafter, base = bound(tree, True), jnp.asarray(draft_heads.LENGTHS)
    state, texts = draft_heads.started(drafter, True)
    if fault == "position":
        base = base + 1
    elif fault == "siblings":
        everyone = jnp.ones_like(drafter.plan.ancestors)
        plan = dataclasses.replace(drafter.plan, ancestors=everyone)
        drafter = dataclasses.replace(drafter, plan=plan)
    else:
        state = state._replace(seed=state.seed[::-1])
    drafted, _ = propose(drafter, state, draft_heads.FIRST, base)
    for b, text in enumerate(texts):
        expected = text.draft(tree.parent.tolist(), draft_heads.FIRST[b])
        assert drafted.tokens[b].tolist() != expected


@over_heads
def test_update_reruns_the_accepted_pairs(attends):
    """Row 0 accepts a branch, row 1 takes no step, then both take one."""
    parents, drafter = SHAPES["uneven"].parent.tolist(), widened("uneven", attends)
    state, texts = draft_heads.started(drafter, attends)
    root, update = draft_heads.FIRST, program("update", attends)
    for step, nodes in enumerate([(4, None), (0, 9), (None, 2)]):
        drafted, state = propose(drafter, draft_heads.poisoned(state), root)
        paths = [strategies.root_path(parents, n) for n in nodes]
        room = len(WIDE["level_sizes"]) + 1
        path = [p + [p[-1] if p else 0] * (room - len(p)) for p in paths]
        count = jnp.asarray([len(p) for p in paths])
        path, newest = jnp.asarray(path), jnp.asarray([10 + step, 20 - step])
        taken = accept.Accepted(path[:, -1], path, count, newest)
        hidden = np.random.default_rng(step).normal(size=(2, N_MAX, draft_heads.HIDDEN))
        after = update(drafter.plan, state, taken, jnp.asarray(hidden, jnp.float32))
        for b, (text, p) in enumerate(zip(texts, paths, strict=True)):
            if p:
                tokens = [int(drafted.tokens[b, i]) for i in p[1:]] + [int(newest[b])]
                text.take(tokens, hidden[b, p])
                root = [*root[:b], int(newest[b]), *root[b + 1 :]]
            assert_follows(after, state, b, text, len(p))
        state = after
    drafted, _ = propose(drafter, draft_heads.poisoned(state), root)
    for b, text in enumerate(texts):
        tokens = drafted.tokens[b, : len(parents)].tolist()
        assert tokens == text.draft(parents, root[b])


def assert_follows(after, before, row, text, count):
    """`count` slots and the seed are new, and every other bit is as it was."""
    length = len(text.rows)
    assert int(after.length[row]) == length
    for new, old in ((after.key, before.key), (after.value, before.value)):
        np.testing.assert_allclose(new[row, :length, 0], text.rows, rtol=0, atol=1e-5)
        kept = np.asarray(old[row]).copy()
        kept[length - count : length] = new[row, length - count : length]
        assert np.asarray(new[row]).tobytes() == kept.tobytes()
    np.testing.assert_allclose(after.seed[row], text.seed, rtol=0, atol=1e-5)
    if count == 0:
        assert np.array_equal(after.seed[row], before.seed[row])


@pytest.mark.parametrize(
    "envelope",
    [
        dict(level_sizes=(1, 3, 8)),
        dict(level_sizes=(1, 3)),
        dict(level_sizes=(1, 3, 9, 1)),
        dict(rank_max=2),
    ],
    ids=str,
)
def test_an_envelope_that_is_too_small_is_named(envelope):
    with pytest.raises(ValueError, match=r"needs at least \(1, 3, 9\) and 3"):
        drafters.MTPDrafter.from_tree(SHAPES["3,3,3"], **envelope)
