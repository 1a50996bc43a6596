"""Each drafter against plain Python: which token stands at which node, and why."""

import dataclasses
import functools
import inspect

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.treewy_jax import strategies
from treewy_jax import accept, drafters
from treewy_jax import tree as tree_lib

DraftTree = tree_lib.DraftTree


# --- MTP: a head small enough to expand by hand --------------------------------------

HIDDEN, VOCAB, CAPACITY = 6, 23, 16
RANDOM = np.random.default_rng(0)
EMBED = RANDOM.normal(size=(VOCAB, HIDDEN))
FROM_TOKEN, FROM_HIDDEN, FROM_OTHERS, PLACE = RANDOM.normal(size=(4, HIDDEN, HIDDEN))
TO_LOGITS = RANDOM.normal(size=(HIDDEN, VOCAB))
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


def by_hand(token, hidden, position):
    """x = tanh(A e + B h + C sin(position))."""
    place = PLACE[:, 0] * np.sin(position)
    return np.tanh(EMBED[token] @ FROM_TOKEN + hidden @ FROM_HIDDEN + place)


@dataclasses.dataclass(frozen=True)
class Head:
    """m = x, or tanh(x + D mean x') over all rows x' that a row sees, its own too.

    Keys are x and values are x; what is not seen may be NaN.
    """

    attends: bool

    def rows(self, tokens, hidden, positions):
        mixed = jnp.asarray(EMBED)[tokens] @ FROM_TOKEN + hidden @ FROM_HIDDEN
        return jnp.tanh(mixed + PLACE[:, 0] * jnp.sin(positions)[..., None])

    def mix(self, x, seen, mask):
        if not self.attends:
            return x
        seen = jnp.where(mask[..., None], seen[:, None], 0)
        mean = jnp.sum(seen, axis=2) / jnp.sum(mask, axis=2)[..., None]
        return jnp.tanh(x + mean @ FROM_OTHERS)

    def prefill(self, tokens, hidden, positions):
        x = self.rows(tokens, hidden, positions)
        length = x.shape[1]
        mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(x), length, length))
        return self.mix(x, x, mask), (x[:, :, None], x[:, :, None])

    def extend(self, tokens, hidden, positions, prefix, length, mask, earlier=None):
        x = self.rows(tokens, hidden, positions)
        rows = x[:, :, None]
        if earlier is not None:
            rows = jnp.concatenate([earlier[0], rows], axis=1)
        assert mask.shape == (*x.shape[:2], rows.shape[1])
        filled = jnp.arange(prefix[0].shape[1]) < length[:, None]
        filled = jnp.broadcast_to(filled[:, None], (*x.shape[:2], filled.shape[1]))
        seen = jnp.concatenate([prefix[1], rows], axis=1)[:, :, 0]
        m = self.mix(x, seen, jnp.concatenate([filled, mask], axis=-1))
        return m, (rows, rows)

    def logits(self, hidden):
        return hidden @ TO_LOGITS


@dataclasses.dataclass
class Text:
    """One row in NumPy: the rows x of its pairs so far, and the newest output m."""

    attends: bool
    rows: list
    seed: np.ndarray | None = None

    def output(self, x, others):
        if not self.attends:
            return x
        return np.tanh(x + np.mean([*self.rows, *others, x], axis=0) @ FROM_OTHERS)

    def take(self, tokens, hidden):
        """Run one pair after the other at the next positions."""
        for token, h in zip(tokens, hidden, strict=True):
            x = by_hand(token, h, len(self.rows))
            self.seed = self.output(x, [])
            self.rows.append(x)

    def draft(self, parents, root):
        """Expand the tree node by node, one full pass over the path for each."""
        tokens, outputs, rows = [root], [self.seed], [None]
        for node, parent in enumerate(parents[1:], 1):
            rank = parents[:node].count(parent)
            best = np.argsort(-(outputs[parent] @ TO_LOGITS), kind="stable")
            path = strategies.root_path(parents, parent)
            position = len(self.rows) + len(path) - 1
            x = by_hand(best[rank], outputs[parent], position)
            tokens.append(int(best[rank]))
            rows.append(x)
            outputs.append(self.output(x, [rows[i] for i in path[1:]]))
        return tokens


PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
LENGTHS = [5, 2]
FIRST = [6, 5]
PROMPT_HIDDEN = RANDOM.normal(size=(2, 8, HIDDEN))


def started(drafter, attends):
    """Start two ragged rows; returns the drafter's state and the same in NumPy."""
    tokens, hidden = np.full((2, 8), 7), PROMPT_HIDDEN.copy()
    texts = []
    for b, prompt in enumerate(PROMPTS):
        tokens[b, : len(prompt)] = prompt
        hidden[b, len(prompt) :] = np.nan
        text = Text(attends, [])
        text.take(prompt[1:] + [FIRST[b]], PROMPT_HIDDEN[b, : len(prompt)])
        texts.append(text)
    lengths, first = jnp.asarray(LENGTHS), jnp.asarray(FIRST)
    hidden = jnp.asarray(hidden, jnp.float32)
    state = drafter.start(jnp.asarray(tokens), lengths, hidden, first, CAPACITY)
    return state, texts


def bound(tree, attends, **envelope):
    drafter = drafters.MTPDrafter.from_tree(tree, **envelope)
    return drafters.mtp.BoundMTPDrafter(drafter, Head(attends))


def widened(shape, attends):
    """Return the drafter of a shape inside the common envelope."""
    parents, depth = SHAPES[shape].parent.tolist(), len(WIDE["level_sizes"])
    wide = DraftTree.from_parents(parents, n_max=N_MAX, depth_max=depth)
    return bound(wide, attends, **WIDE)


@functools.cache
def program(method, attends):
    """Compile a method with the plan as data, as the loop does."""

    def run(plan, *args):
        drafter = drafters.mtp.BoundMTPDrafter(plan, Head(attends))
        return getattr(drafter, method)(*args)

    return jax.jit(run)


def poisoned(state):
    """Fill every KV slot from `length` on with NaN."""
    unused = jnp.arange(CAPACITY) >= state.length[:, None]
    key, value = (
        jnp.where(unused[..., None, None], jnp.nan, x) for x in (state.key, state.value)
    )
    return state._replace(key=key, value=value)


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
    state, texts = started(drafter, attends=True)
    drafted, after = propose(drafter, poisoned(state), FIRST)
    for b, text in enumerate(texts):
        assert drafted.tokens[b].tolist() == text.draft(parents, FIRST[b])
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
    state, texts = started(drafter, attends)
    propose(widened("3,3,3", attends), state, FIRST)
    programs = program("propose", attends)._cache_size()
    drafted, _ = propose(drafter, poisoned(state), FIRST)
    assert program("propose", attends)._cache_size() == programs
    assert drafted.size.tolist() == [len(parents)] * 2
    for b, text in enumerate(texts):
        tokens = drafted.tokens[b].tolist()
        assert tokens[: len(parents)] == text.draft(parents, FIRST[b])


@pytest.mark.parametrize("fault", ["position", "siblings", "seed"])
def test_mtp_faults_are_seen(fault):
    """One position off, siblings in the mask, a stale seed: another tree each time."""
    tree = SHAPES["3,3,3"]
    drafter, base = bound(tree, True), jnp.asarray(LENGTHS)
    state, texts = started(drafter, True)
    if fault == "position":
        base = base + 1
    elif fault == "siblings":
        everyone = jnp.ones_like(drafter.plan.ancestors)
        plan = dataclasses.replace(drafter.plan, ancestors=everyone)
        drafter = dataclasses.replace(drafter, plan=plan)
    else:
        state = state._replace(seed=state.seed[::-1])
    drafted, _ = propose(drafter, state, FIRST, base)
    for b, text in enumerate(texts):
        expected = text.draft(tree.parent.tolist(), FIRST[b])
        assert drafted.tokens[b].tolist() != expected


@over_heads
def test_update_reruns_the_accepted_pairs(attends):
    """Row 0 accepts a branch, row 1 takes no step, then both take one."""
    parents, drafter = SHAPES["uneven"].parent.tolist(), widened("uneven", attends)
    state, texts = started(drafter, attends)
    root, update = FIRST, program("update", attends)
    for step, nodes in enumerate([(4, None), (0, 9), (None, 2)]):
        drafted, state = propose(drafter, poisoned(state), root)
        paths = [strategies.root_path(parents, n) for n in nodes]
        room = len(WIDE["level_sizes"]) + 1
        path = [p + [p[-1] if p else 0] * (room - len(p)) for p in paths]
        count = jnp.asarray([len(p) for p in paths])
        path, newest = jnp.asarray(path), jnp.asarray([10 + step, 20 - step])
        taken = accept.Accepted(path[:, -1], path, count, newest)
        hidden = np.random.default_rng(step).normal(size=(2, N_MAX, HIDDEN))
        after = update(drafter.plan, state, taken, jnp.asarray(hidden, jnp.float32))
        for b, (text, p) in enumerate(zip(texts, paths, strict=True)):
            if p:
                tokens = [int(drafted.tokens[b, i]) for i in p[1:]] + [int(newest[b])]
                text.take(tokens, hidden[b, p])
                root = [*root[:b], int(newest[b]), *root[b + 1 :]]
            assert_follows(after, state, b, text, len(p))
        state = after
    drafted, _ = propose(drafter, poisoned(state), root)
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


# --- n-gram --------------------------------------------------------------------------


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
    mtp = drafters.MTPDrafter.from_tree(SHAPES["root"])
    assert isinstance(mtp, drafters.Drafter)
    bound_ones = [
        drafters.mtp.BoundMTPDrafter(mtp, Head(True)),
        drafters.NgramDrafter(),
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
    assert isinstance(Head(True), drafters.DraftHead)
