"""The hybrid cache: every part moves along the accepted path, or not at all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import accept, cache, commit, deferred
from treewy_jax import tree as tree_lib

BLOCKS, LAYERS, BATCH, SLOTS, CHANNELS, WINDOW = 2, 3, 4, 10, 5, 3
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
        for layer in range(BLOCKS * LAYERS)
    ]
    arrays = [strategies.batch(rows, NODES)[:-1] for rows in cases]
    stack = [jnp.stack(x) for x in zip(*arrays, strict=True)]
    stack = [x.reshape(BLOCKS, LAYERS, *x.shape[1:]) for x in stack]
    return cases, commit.Inputs(*stack[:-1]), stack[-1], tree


def make(name):
    """Return the lifecycle, a cache with NaN in unused slots, records, and cases."""
    depth = tree_lib.DraftTree.from_parents(PARENTS).depth_max
    owner = commit.by_name(name, depth=depth, nodes=NODES)
    cases, inputs, state, tree = layer_inputs()
    begin = functools.partial(owner.init, key_heads=strategies.KEY_HEADS)
    state = jax.vmap(jax.vmap(begin))(state)
    verify = lambda state, inputs: owner.verify(state, inputs, tree)[1]  # noqa: E731
    recurrent = jax.jit(jax.vmap(jax.vmap(verify)))(state, inputs)
    unused = jnp.arange(SLOTS) >= jnp.asarray(LENGTHS)[:, None]
    slots = (BLOCKS, BATCH, SLOTS, 2, 4)
    kv = [
        jnp.where(unused[..., None, None], jnp.nan, random(*slots, seed=s))
        for s in (1, 2)
    ]
    rows = [random(BLOCKS, BATCH, NODES, 2, 4, seed=s) for s in (3, 4)]
    window = random(BLOCKS, LAYERS, BATCH, WINDOW, CHANNELS, seed=5)
    conv_rows = random(BLOCKS, LAYERS, BATCH, NODES, CHANNELS, seed=6)
    length = jnp.asarray(LENGTHS, jnp.int32)
    before = cache.HybridCache(state, window, *kv, length)
    return owner, before, cache.Records(recurrent, conv_rows, *rows), cases


def advance(owner, before, records, accepted):
    return jax.jit(cache.commit, static_argnums=3)(before, records, accepted, owner)


def of_row(whole, row):
    """Return one row's part of a cache, as bytes; of a ring, the committed state."""
    recurrent = whole.recurrent
    if isinstance(recurrent, commit.Slots):
        recurrent = states(commit.StoreAll(), whole)
    parts = [(recurrent, 2), (whole.window, 2), (whole.key, 1)]
    parts += [(whole.value, 1), (whole.length, 0)]
    return [
        [np.take(np.asarray(x), row, axis).tobytes() for x in jax.tree.leaves(part)]
        for part, axis in parts
    ]


def states(owner, whole):
    """Return the plain states of all layers and rows."""
    return np.asarray(jax.vmap(jax.vmap(owner.materialize))(whole.recurrent))


def spoiled(records, value, row=slice(None)):
    """Put a value into what rows' records say of nodes, not into a state there.

    Of a ring, into all slots but the committed one.
    """

    def spoil(x):
        return x.at[:, :, row].set(value)

    if isinstance(records, commit.Slots):
        other = strategies.spoil_slots(records, value)
        states = records.states.at[:, :, row].set(other.states[:, :, row])
        return dataclasses.replace(records, states=states)
    if isinstance(records, deferred.Written):
        return deferred.Written(*records[:2], *jax.tree.map(spoil, records[2:]))
    return jax.tree.map(spoil, records)


def poisoned(records, value):
    return cache.Records(
        recurrent=spoiled(records.recurrent, value),
        rows=jnp.full_like(records.rows, value),
        key=jnp.full_like(records.key, value),
        value=jnp.full_like(records.value, value),
    )


@over_lifecycles
def test_every_part_follows_its_own_path(name):
    owner, before, records, cases = make(name)
    after = advance(owner, before, records, taken())
    held = states(owner, after)
    before, records, after = jax.tree.map(np.asarray, (before, records, after))
    for b, path in enumerate(PATHS):
        assert int(after.length[b]) == LENGTHS[b] + len(path)
        for layer in range(BLOCKS * LAYERS):
            place = (*divmod(layer, LAYERS), b)
            rows = np.concatenate([before.window[place], records.rows[place][path]])
            assert np.array_equal(after.window[place], rows[len(rows) - WINDOW :])
            expected = cases[layer][b].state
            if path:
                expected = strategies.oracle(cases[layer][b])[1][path[-1]]
            assert strategies.relative(held[place], expected) < 1e-6
        for part in ("key", "value"):
            expected = getattr(before, part)[:, b].copy()
            room = SLOTS - LENGTHS[b]
            new = getattr(records, part)[:, b][:, path[:room]]
            expected[:, LENGTHS[b] : LENGTHS[b] + len(path)] = new
            assert np.array_equal(getattr(after, part)[:, b], expected, equal_nan=True)


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
        rows=records.rows.at[:, :, 2].set(jnp.nan),
        key=records.key.at[:, 2].set(jnp.nan),
        value=records.value.at[:, 2].set(jnp.nan),
    )
    dirty = advance(owner, before, records, taken())
    for row in (0, 1, 3):
        assert of_row(dirty, row) == of_row(clean, row)
    assert np.all(np.isnan(states(owner, dirty)[:, :, 2]))


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
    assert not np.any(states(owner, freed)[:, :, 1])
    if name == "store-all":  # no other row's slot, and no NaN that might be left there
        assert np.array_equal(
            moved.recurrent.index, after.recurrent.index[..., [3, 0, 0]]
        )
        assert not np.any(freed.recurrent.states[:, :, [1, 3]])
        assert not np.any(freed.recurrent.index[:, :, [1, 3]])
    for part in of_row(freed, 3):
        assert not any(any(leaf) for leaf in part)


def test_bytes_are_those_of_the_arrays():
    _, before, records, _ = make("store-all")
    mtp_kv = (jnp.zeros((BATCH, SLOTS, 2, 4), jnp.bfloat16),) * 2
    held = cache.state_bytes(before, records, mtp_kv)
    state = BLOCKS * LAYERS * BATCH * strategies.VALUE_HEADS * strategies.DIM**2 * 4
    rows = BLOCKS * LAYERS * BATCH * NODES * CHANNELS * 4
    ring = (NODES + 1) * state + BLOCKS * LAYERS * BATCH * 4
    assert held == {
        "recurrent": ring,
        "conv": BLOCKS * LAYERS * BATCH * WINDOW * CHANNELS * 4,
        "kv": 2 * BLOCKS * BATCH * SLOTS * 2 * 4 * 4,
        "mtp_kv": 2 * BATCH * SLOTS * 2 * 4 * 2,
        "records": ring + rows + 2 * BLOCKS * BATCH * NODES * 2 * 4 * 4,
    }
    shapes = jax.eval_shape(lambda: before)
    assert cache.nbytes(shapes) == sum(x.nbytes for x in jax.tree.leaves(before))
