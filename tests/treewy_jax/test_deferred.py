"""Histories over many steps: when they fold, what stays as it is, what a fault does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import accept, commit, deferred
from treewy_jax import history as history_lib
from treewy_jax import tree as tree_lib

N = 9
ROWS = 4
OWNERS = {
    "fused": dict(name="fused", depth=N - 1),
    "deferred 9": dict(name="deferred", horizon=N),
    "deferred 16": dict(name="deferred", horizon=16),
    "deferred 32": dict(name="deferred", horizon=32),
}
over_owners = pytest.mark.parametrize("name", OWNERS)


@functools.cache
def owner_of(name, **options):
    owner = commit.by_name(**OWNERS[name], **options)
    return owner, jax.jit(owner.verify), jax.jit(owner.commit)


class Text:
    """Rows that take random steps; their float64 states go along, node by node."""

    def __init__(self, name, seed=0, **options):
        self.owner, self.verify, self.commit = owner_of(name, **options)
        self.rng = np.random.default_rng(seed)
        self.expected = [
            strategies.make_case([-1], seed + b).state for b in range(ROWS)
        ]
        start = jnp.asarray(np.stack(self.expected), jnp.float32)
        self.state = self.owner.init(start, strategies.KEY_HEADS)
        self.steps = 0

    def step(self, change=lambda records: records):
        """Verify random trees and accept random nodes, in a fifth of the rows none."""
        trees = [self._parents() for _ in range(ROWS)]
        seeds = 100 * self.steps + np.arange(ROWS)
        cases = [
            strategies.make_case(p, int(seed))
            for p, seed in zip(trees, seeds, strict=True)
        ]
        *rows, _, tree = strategies.batch(cases, N, fill=np.nan)
        before = self.state
        output, records = self.verify(self.state, commit.Inputs(*rows), tree)
        paths = []
        for b, case in enumerate(cases):
            case.state = self.expected[b]
            outputs, states = strategies.oracle(case)
            error = strategies.relative(output[b, : len(outputs)], outputs)
            node = int(self.rng.integers(-1, len(outputs)))
            node = None if self.rng.random() < 0.2 else max(0, node)
            paths.append(strategies.root_path(case.parents, node))
            if node is not None:
                self.expected[b] = states[node]
            self.worst = max(error, self.worst if b else 0.0)
        self.accepted = taken(paths)
        self.state = self.commit(self.state, change(records), self.accepted)
        self.steps += 1
        return before, records

    def _parents(self):
        parents = [-1]
        for node in range(1, int(self.rng.integers(1, N + 1))):
            parents.append(int(self.rng.integers(max(0, node - 2), node)))
        return preorder(parents)

    def error(self):
        found = self.owner.materialize(self.state)
        pairs = zip(found, self.expected, strict=True)
        return max(strategies.relative(x, e) for x, e in pairs)


def preorder(parents):
    """Renumber the nodes of a tree in preorder."""
    children = {node: [] for node in range(len(parents))}
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    found = []

    def visit(node, parent):
        found.append(parent)
        here = len(found) - 1
        for child in children[node]:
            visit(child, here)

    visit(0, -1)
    return found


def taken(paths):
    padded = [(p + [p[-1] if p else 0] * N)[:N] for p in paths]
    path = jnp.asarray(padded, jnp.int32)
    count = jnp.asarray([len(p) for p in paths], jnp.int32)
    return accept.Accepted(path[:, -1], path, count, jnp.zeros_like(count))


@over_owners
def test_forty_random_steps(name):
    """Outputs and states stay on the oracle; S keeps its bits until a row folds."""
    text = Text(name)
    folded = kept = 0
    for _ in range(40):
        before, records = text.step()
        folds = before.count > text.owner.fold_above(N - 1)
        after = text.state
        assert text.worst < 4e-6
        for b in range(ROWS):
            if folds[b]:
                folded += 1
            else:
                assert np.array_equal(after.state[b], before.state[b])
                kept += 1
        assert int(after.count.max()) <= text.owner.horizon
        assert records.fold_above == text.owner.fold_above(N - 1)
        left = jnp.where(folds, 0, before.count)
        assert np.array_equal(after.count, left + text.accepted.count)
    assert text.error() < 4e-6
    # Each lifecycle has its own pace; none folds always, none never.
    assert folded >= 5 and kept >= 5


def test_longer_horizons_write_less():
    writes = {}
    for name in OWNERS:
        text = Text(name, seed=5)
        writes[name] = 0
        for _ in range(20):
            before, _ = text.step()
            folds = before.count > text.owner.fold_above(N - 1)
            writes[name] += int(jnp.sum(folds))
    order = list(writes.values())
    assert order == sorted(order, reverse=True) and order[0] > 2 * order[-1]


@over_owners
def test_a_thousand_rejected_trees_are_plain_decoding(name):
    owner, _, _ = owner_of(name)
    steps, parents = 1000, [-1, 0, 1, 0]
    roots = strategies.make_case([-1] * steps, 3, gates="slow")
    drafts = strategies.make_case(parents, 4)
    tree = tree_lib.DraftTree.from_parents(parents)
    rejected = taken([[0]])

    @jax.jit
    def decode(state, rows):
        def step(state, root):
            rows = [
                jnp.asarray(d, jnp.float32).at[0].set(r)[None]
                for d, r in zip(drafts.rows(), root, strict=True)
            ]
            output, records = owner.verify(state, commit.Inputs(*rows), tree)
            return owner.commit(state, records, rejected), output[:, 0]

        return jax.lax.scan(step, state, rows)

    start = owner.init(
        jnp.asarray(roots.state, jnp.float32)[None], strategies.KEY_HEADS
    )
    after, outputs = decode(start, [jnp.asarray(x, jnp.float32) for x in roots.rows()])
    chain = strategies.Case(*roots.rows(), roots.state, list(range(-1, steps - 1)))
    expected, states = strategies.oracle(chain)
    assert strategies.relative(outputs[:, 0], expected) < 1e-5
    assert strategies.relative(owner.materialize(after)[0], states[-1]) < 1e-5


@over_owners
def test_rows_move_and_slots_are_used_again(name):
    """Permuted between commit and next step, freed and given to another text."""
    text = Text(name, seed=11)
    for _ in range(4):
        text.step()
    order = np.asarray([2, 0, 3, 1])
    text.state = jax.tree.map(lambda x: x[order], text.state)
    text.expected = [text.expected[i] for i in order]
    text.step()
    assert text.worst < 4e-6 and text.error() < 4e-6
    fresh = strategies.make_case([-1], 77).state
    new = text.owner.init(jnp.asarray(fresh, jnp.float32)[None], strategies.KEY_HEADS)
    # What the freed slot held before, NaN included, has to be gone.
    text.state = jax.tree.map(
        lambda x: x.at[1].set(jnp.nan) if x.ndim > 1 else x, text.state
    )
    text.state = jax.tree.map(lambda x, y: x.at[1].set(y[0]), text.state, new)
    text.expected[1] = fresh
    for _ in range(4):
        text.step()
    assert text.worst < 4e-6 and text.error() < 4e-6


FAULTS = {
    "a row's neighbour": lambda r: dict(k=jnp.roll(r.k, 1, axis=0)),
    "a stale state": lambda r: dict(state=jnp.zeros_like(r.state)),
    "records without decay": lambda r: dict(log_decay=0 * r.log_decay),
    "a history dropped though it did not fold": lambda r: dict(fold_above=0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_commit_is_seen(fault):
    text = Text("deferred 32", seed=2)
    for step in range(6):
        change = FAULTS[fault] if step == 4 else lambda records: {}
        text.step(lambda r, change=change: dataclasses.replace(r, **change(r)))
    assert text.error() > 1e-3


def test_a_history_that_is_kept_though_it_folded_is_seen():
    text = Text("fused", seed=2)
    for _ in range(6):
        text.step(lambda records: dataclasses.replace(records, fold_above=N))
    assert text.error() > 1e-3


@over_owners
def test_layers_are_committed_at_once(name):
    """Each with its own state, records and counts; the twin has two of them swapped."""
    texts = [Text(name, seed=seed) for seed in (1, 2, 3)]
    for number, text in enumerate(texts):
        for _ in range(number + 1):
            before, records = text.step()
        text.left = before, records
    states, records = zip(*(text.left for text in texts), strict=True)
    accepted = texts[0].accepted
    owner = texts[0].owner
    together = jax.jit(owner.commit_layers)(states, records, accepted)
    pairs = zip(states, records, strict=True)
    alone = [texts[0].commit(*pair, accepted) for pair in pairs]
    assert isinstance(together, tuple) and same_bits(together, alone)
    swapped = owner.commit_layers(
        states, (records[1], records[0], records[2]), accepted
    )
    assert not same_bits(swapped, alone)
    other = dataclasses.replace(records[1], fold_above=N)
    with pytest.raises(ValueError, match="records have fold_above .*one value"):
        owner.commit_layers(states, (records[0], other, records[2]), accepted)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        owner.commit_layers(states[:2], records, accepted)


def same_bits(some, others):
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def test_an_index_instead_of_the_path_is_seen():
    """The twin of compaction: the first nodes of the tree in place of the path's."""
    text = Text("deferred 32", seed=2)
    advance = text.commit

    def wrong(state, records, accepted):
        path = jnp.broadcast_to(jnp.arange(N), accepted.path.shape)
        return advance(state, records, accepted._replace(path=path))

    text.commit = wrong
    for _ in range(6):
        text.step()
    assert text.error() > 1e-3


@pytest.mark.parametrize("records", ["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_storage(records, state):
    """Both are options; what is stored has that dtype, and the rest is float32."""
    text = Text("deferred 16", seed=8, state_dtype=state, record_dtype=records)
    for _ in range(6):
        text.step()
    assert text.state.state.dtype == state
    assert text.state.k.dtype == text.state.pseudo_values.dtype == records
    assert text.state.log_decay.dtype == jnp.float32
    bound = 4e-6 if records == state == "float32" else 2e-2
    assert text.error() < bound


def test_keys_of_narrower_rows_stay_as_they_are():
    """Stored in float32 they would fold into the same bits."""
    owner, rng = deferred.Deferred(horizon=8), np.random.default_rng(3)
    tree = tree_lib.DraftTree.chain(3, batch=1)
    k = jnp.asarray(rng.normal(size=(1, 4, 1, 4)), jnp.bfloat16)
    v = jnp.asarray(rng.normal(size=(1, 4, 2, 4)), jnp.bfloat16)
    gates = jnp.full((1, 4, 2), -0.1), jnp.full((1, 4, 2), 0.5)
    inputs = commit.Inputs(k, k / 2, v, *gates)
    found = []
    for key_dtype in (jnp.bfloat16, None):
        state = owner.init(jnp.ones((1, 2, 4, 4)), 1, key_dtype)
        _, records = owner.verify(state, inputs, tree)
        state = owner.commit(state, records, taken([[0, 1, 2]]))
        assert state.k.dtype == (key_dtype or jnp.float32)
        assert jnp.array_equal(state.k[0, :3], inputs.k[0, :3])
        found.append(owner.materialize(state))
    assert jnp.array_equal(*found)


def test_a_tree_deeper_than_there_is_room_for():
    deep = tree_lib.DraftTree.chain(4)
    with pytest.raises(ValueError, match="horizon is 4; .* up to 5 nodes"):
        deferred.Deferred(horizon=4).check(deep.depth_max, deep.n_max)
    with pytest.raises(ValueError, match="depth is 3; this tree needs 4"):
        deferred.Fused(depth=3).check(deep.depth_max, deep.n_max)
    deferred.Deferred(horizon=5).check(deep.depth_max, deep.n_max)
    with pytest.raises(ValueError, match="key_heads is None"):
        deferred.Deferred().init(jnp.zeros((1, 2, 4, 4)))


def test_an_empty_history_is_a_state_of_its_own():
    state = jnp.ones((2, 2, 4, 4))
    history = history_lib.empty(state, 1, 8, "bfloat16")
    assert history.horizon == 8 and history.count.tolist() == [0, 0]
    assert np.array_equal(history_lib.fold(history), state)
