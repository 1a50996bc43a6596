"""Drafts by a script, by nothing, and what all drafters have in common."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import draft_heads, strategies
from treewy_jax import accept, drafters
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree


# --- scripted and nothing ------------------------------------------------------------

FORK = strategies.SHAPES["fork"]
SCRIPT = [[7, 3, 3, 9, 1, 0, 2, 8, 8, 5, 4, 6], [1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 2]]


walk = jax.jit(accept.walk)
tell = jax.jit(drafters.ScriptedDrafter.propose)


def scripted(goals):
    tree = DraftTree.from_parents(FORK, n_max=14, batch=2)
    return drafters.ScriptedDrafter(
        script=jnp.asarray(SCRIPT), tree=tree, goals=jnp.asarray(goals), vocab_size=10
    )


def agree(tree, told):
    """Accept as a target does that would write the script."""
    script, depth = np.asarray(SCRIPT), np.asarray(tree.depth())
    place = np.minimum(np.asarray(told)[:, None] + depth + 1, script.shape[1] - 1)
    chosen = np.take_along_axis(script, place, axis=1)
    return walk(jnp.asarray(chosen, jnp.int32), tree)


def start_scripted(drafter):
    root = jnp.asarray([row[0] for row in SCRIPT])
    return root, drafter.start(None, jnp.zeros(2, jnp.int32), None, root, 0)


@pytest.mark.parametrize("goal", range(len(FORK)))
def test_a_script_is_accepted_down_to_its_goal(goal):
    drafter = scripted([[goal], [len(FORK) - 1 - goal]])
    root, state = start_scripted(drafter)
    tree, state = tell(drafter, state, root, root)
    accepted = agree(tree, state.told)
    assert accepted.node.tolist() == [goal, len(FORK) - 1 - goal]
    assert np.all((tree.tokens >= 0) & (tree.tokens < 10))


def test_goals_take_turns_and_the_text_moves_on():
    """A row without a step keeps its place in the script and among the goals."""
    drafter = scripted([[2, 0, 6], [0, 11, 1]])
    root, state = start_scripted(drafter)
    told, steps = [0, 0], [0, 0]
    for turn in range(6):
        tree, state = tell(drafter, state, root, root)
        accepted = agree(tree, state.told)
        goals = [int(drafter.goals[b, steps[b] % 3]) for b in range(2)]
        script_goes_on = [told[b] + 4 < len(SCRIPT[b]) for b in range(2)]
        for b in range(2):
            if script_goes_on[b]:
                assert int(accepted.node[b]) == goals[b]
        if turn == 1:
            emitted = accepted.emitted(tree.tokens)
            accepted = accepted.shorten(jnp.asarray([0, 1]), emitted)
        state = drafter.update(state, accepted, None)
        count = accepted.count.tolist()
        told = [t + c for t, c in zip(told, count, strict=True)]
        steps = [s + (c > 0) for s, c in zip(steps, count, strict=True)]
        root = jnp.asarray(
            [row[min(t, 11)] for row, t in zip(SCRIPT, told, strict=True)]
        )
        assert state.told.tolist() == told and state.step.tolist() == steps


def test_beyond_its_end_a_script_repeats_its_last_token():
    drafter = scripted([[2], [2]])
    root, state = start_scripted(drafter)
    state = state._replace(told=jnp.asarray([11, 40]))
    tree, _ = tell(drafter, state, root, root)
    assert tree.tokens[:, 1].tolist() == tree.tokens[:, 2].tolist() == [6, 2]


def test_nothing_is_the_root_alone():
    drafter = drafters.NoDrafter()
    root = jnp.asarray([4, 5])
    state = drafter.start(None, None, None, root, 0)
    tree, state = drafter.propose(state, root, root)
    assert tree.tokens.tolist() == [[4], [5]]
    assert (tree.size.tolist(), tree.depth_max) == ([1, 1], 0)
    assert drafter.update(state, accept.nothing(tree), None) == state


# --- the protocols -------------------------------------------------------------------


def test_every_drafter_is_one():
    mtp = drafters.MTPDrafter.from_tree(DraftTree.from_widths(()))
    root = DraftTree.from_widths(())
    external = drafters.ExternalDrafter((), root, build=lambda _: None, rank_max=1)
    for plan in (mtp, external, drafters.DynamicDrafter()):
        assert isinstance(plan, drafters.Drafter)
    bound_ones = [
        drafters.mtp.BoundMTPDrafter(mtp, draft_heads.Head(True)),
        drafters.dynamic.BoundDynamicDrafter(
            drafters.DynamicDrafter(), draft_heads.Head(True)
        ),
        drafters.external.BoundExternalDrafter(external, None),
        drafters.NgramDrafter(),
        drafters.SuffixDrafter(),
        drafters.NoDrafter(),
        scripted([[0], [0]]),
    ]
    for drafter in bound_ones:
        assert isinstance(drafter, drafters.BoundDrafter)
        assert drafter.bind(None) is drafter
        for name in ("start", "propose", "update"):
            wanted = inspect.signature(getattr(drafters.BoundDrafter, name))
            given = inspect.signature(getattr(type(drafter), name))
            assert list(given.parameters) == list(wanted.parameters)
    assert isinstance(draft_heads.Head(True), drafters.DraftHead)
