"""The hybrid cache: every part moves along the accepted path, or not at all."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import accept, cache, commit, deferred, pytree
from treewy_jax import tree as tree_lib

LAYERS, ATTENDING, BATCH, SLOTS, CHANNELS, WINDOW = 3, 2, 4, 10, 5, 3
PARENTS = strategies.SHAPES["fork"]
NODES = len(PARENTS)
# Accept nothing, the root, a branch of four nodes, and one that overtakes the window.
ACCEPTED = [None, 0, 8, 5]
LENGTHS = [6, 0, 3, SLOTS - 2]
over_lifecycles = pytest.mark.parametrize("name", commit.LIFECYCLES)


PATHS = [strategies.root_path(PARENTS, n) for n in ACCEPTED]


def taken():
    room = max(map(len, PATHS))
    path = [p + [p[-1] if p else 0] * (room - len(p)) for p in PATHS]
    count = jnp.asarray([len(p) for p in PATHS], jnp.int32)
    path = jnp.asarray(path, jnp.int32)
    return accept.Accepted(path[:, -1], path, count, jnp.zeros_like(count))


def random(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def layer_inputs():
    """Return the cases of each layer and row, and what `verify` takes for them."""
    tree = tree_lib.DraftTree.from_parents(PARENTS, batch=BATCH)
    cases = [
        [strategies.make_case(PARENTS, seed=100 * layer + b) for b in range(BATCH)]
        for layer in range(LAYERS)
    ]
    arrays = [strategies.batch(rows, NODES)[:-1] for rows in cases]
    return cases, [(commit.Inputs(*x[:-1]), x[-1]) for x in arrays], tree


def make(name):
    """Return the lifecycle, a cache with NaN in unused slots, records, and cases."""
    depth = tree_lib.DraftTree.from_parents(PARENTS).depth_max
    owner = commit.by_name(name, depth=depth, nodes=NODES)
    cases, layers, tree = layer_inputs()
    states = tuple(owner.init(state, strategies.KEY_HEADS) for _, state in layers)
    verify = jax.jit(lambda state, inputs: owner.verify(state, inputs, tree)[1])
    recurrent = tuple(
        verify(state, inputs) for state, (inputs, _) in zip(states, layers, strict=True)
    )
    unused = jnp.arange(SLOTS) >= jnp.asarray(LENGTHS)[:, None]
    key, value = (
        tuple(
            jnp.where(unused[..., None, None], jnp.nan, x)
            for x in several(ATTENDING, BATCH, SLOTS, 2, 4, seed=seed)
        )
        for seed in (1, 2)
    )
    rows = [several(ATTENDING, BATCH, NODES, 2, 4, seed=seed) for seed in (3, 4)]
    window = several(LAYERS, BATCH, WINDOW, CHANNELS, seed=5)
    conv_rows = several(LAYERS, BATCH, NODES, CHANNELS, seed=6)
    length = jnp.asarray(LENGTHS, jnp.int32)
    before = cache.HybridCache(states, window, key, value, length)
    return owner, before, cache.Records(recurrent, conv_rows, *rows), cases


def several(layers, *shape, seed):
    """Return an array for each of some layers."""
    return tuple(random(layers, *shape, seed=seed))


def advance(owner, before, records, accepted):
    return jax.jit(cache.commit, static_argnums=3)(before, records, accepted, owner)


def of_row(whole, row):
    """Return one row's part of a cache, as bytes; of a ring, the committed state."""
    recurrent = whole.recurrent
    if isinstance(recurrent[0], commit.Slots):
        recurrent = states(commit.StoreAll(), whole)
    parts = (recurrent, whole.window, whole.key, whole.value, whole.length)
    return [
        [np.asarray(x)[row].tobytes() for x in jax.tree.leaves(part)] for part in parts
    ]


def states(owner, whole):
    """Return the plain states of all layers and rows."""
    return [np.asarray(owner.materialize(state)) for state in whole.recurrent]


def spoiled(layers, value, row=slice(None)):
    """Put a value into what rows' records say of nodes, not into a state there."""
    return tuple(_spoiled(records, value, row) for records in layers)


def _spoiled(records, value, row):
    """As `spoiled`, of one layer. Of a ring, all slots but the committed one."""

    def spoil(x):
        return x.at[row].set(value)

    if isinstance(records, commit.Slots):
        other = strategies.spoil_slots(records, value)
        states = records.states.at[row].set(other.states[row])
        return dataclasses.replace(records, states=states)
    if isinstance(records, deferred.Written):
        nodes = ("k", "pseudo_values", "log_decay")
        changed = {name: spoil(getattr(records, name)) for name in nodes}
        return dataclasses.replace(records, **changed)
    return jax.tree.map(spoil, records)


def poisoned(records, value):
    def fill(part):
        return jax.tree.map(lambda x: jnp.full_like(x, value), part)

    return cache.Records(
        recurrent=spoiled(records.recurrent, value),
        rows=fill(records.rows),
        key=fill(records.key),
        value=fill(records.value),
    )


@over_lifecycles
def test_every_part_follows_its_own_path(name):
    owner, before, records, cases = make(name)
    after = advance(owner, before, records, taken())
    held = states(owner, after)
    before, records, after = jax.tree.map(np.asarray, (before, records, after))
    for b, path in enumerate(PATHS):
        assert int(after.length[b]) == LENGTHS[b] + len(path)
        for layer in range(LAYERS):
            rows = np.concatenate(
                [before.window[layer][b], records.rows[layer][b][path]]
            )
            assert np.array_equal(after.window[layer][b], rows[len(rows) - WINDOW :])
            expected = cases[layer][b].state
            if path:
                expected = strategies.oracle(cases[layer][b])[1][path[-1]]
            assert strategies.relative(held[layer][b], expected) < 1e-6
        for part, layer in itertools.product(("key", "value"), range(ATTENDING)):
            old, new, found = (
                getattr(x, part)[layer] for x in (before, records, after)
            )
            expected = old[b].copy()
            room = SLOTS - LENGTHS[b]
            expected[LENGTHS[b] : LENGTHS[b] + len(path)] = new[b][path[:room]]
            assert np.array_equal(found[b], expected, equal_nan=True)


@over_lifecycles
def test_a_row_without_a_step_keeps_every_bit(name):
    """Whatever its records hold; with no step at all nothing changes anywhere."""
    owner, before, records, _ = make(name)
    poison = poisoned(records, jnp.inf)
    after = advance(owner, before, poison, taken())
    assert of_row(after, 0) == of_row(before, 0)
    for moved in (1, 2, 3):
        changed = zip(of_row(after, moved), of_row(before, moved), strict=True)
        assert all(one != other for one, other in changed)
    tree = tree_lib.DraftTree.from_parents(PARENTS, batch=BATCH)
    after = advance(owner, before, poison, accept.nothing(tree))
    for row in range(BATCH):
        assert of_row(after, row) == of_row(before, row)


@over_lifecycles
def test_rows_do_not_meet(name):
    """A poisoned row spoils itself alone."""
    owner, before, records, _ = make(name)
    clean = advance(owner, before, records, taken())
    records = cache.Records(
        recurrent=spoiled(records.recurrent, jnp.nan, 2),
        rows=tuple(x.at[2].set(jnp.nan) for x in records.rows),
        key=tuple(x.at[2].set(jnp.nan) for x in records.key),
        value=tuple(x.at[2].set(jnp.nan) for x in records.value),
    )
    dirty = advance(owner, before, records, taken())
    for row in (0, 1, 3):
        assert of_row(dirty, row) == of_row(clean, row)
    assert all(np.all(np.isnan(state[2])) for state in states(owner, dirty))


@over_lifecycles
def test_rows_move_and_are_freed_with_all_they_have(name):
    owner, before, records, _ = make(name)
    after = advance(owner, before, records, taken())
    moved = cache.take_rows(after, jnp.asarray([3, 0, 0]))
    assert of_row(moved, 0) == of_row(after, 3)
    assert of_row(moved, 1) == of_row(moved, 2) == of_row(after, 0)
    freed = cache.clear_rows(after, jnp.asarray([False, True, False, True]))
    for row in (0, 2):
        assert of_row(freed, row) == of_row(after, row)
    assert not any(np.any(state[1]) for state in states(owner, freed))
    if name == "store-all":  # no other row's slot, and no NaN that might be left there
        for one, other, free in zip(
            moved.recurrent, after.recurrent, freed.recurrent, strict=True
        ):
            rows = jnp.asarray([3, 0, 0])
            assert np.array_equal(one.index, other.index[rows])
            emptied = jnp.asarray([1, 3])
            assert not np.any(free.states[emptied])
            assert not np.any(free.index[emptied])
    for part in of_row(freed, 3):
        assert not any(any(leaf) for leaf in part)


@over_lifecycles
def test_bytes_are_those_of_the_arrays(name):
    owner, before, records, _ = make(name)
    mtp_kv = (jnp.zeros((BATCH, SLOTS, 2, 4), jnp.bfloat16),) * 2
    held = cache.state_bytes(before, records, mtp_kv, owner)
    heads, dim = strategies.VALUE_HEADS, strategies.DIM
    state = LAYERS * BATCH * heads * dim**2 * 4
    record = strategies.KEY_HEADS * dim + heads * dim + heads
    room = getattr(owner, "horizon", 0)
    count = LAYERS * BATCH * 4
    rows = LAYERS * CHANNELS + 2 * ATTENDING * 2 * 4
    if name == "store-all":
        recurrent = (NODES + 1) * state + count
    else:
        rows += LAYERS * record
        recurrent = state + LAYERS * BATCH * room * record * 4 + count * bool(room)
    assert held == {
        "recurrent": recurrent,
        "conv": LAYERS * BATCH * WINDOW * CHANNELS * 4,
        "kv": 2 * ATTENDING * BATCH * SLOTS * 2 * 4 * 4,
        "mtp_kv": 2 * BATCH * SLOTS * 2 * 4 * 2,
        "records": BATCH * NODES * rows * 4,
    }
    shapes = jax.eval_shape(lambda: before)
    assert pytree.nbytes(shapes) == sum(x.nbytes for x in jax.tree.leaves(before))
