"""All lifecycles against the recurrence along every accepted path."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.treewy_jax import strategies
from treewy_jax import accept, commit, deferred
from treewy_jax import tree as tree_lib

N_MAX = 16
over_lifecycles = pytest.mark.parametrize("name", commit.LIFECYCLES)
over_shapes = pytest.mark.parametrize("shape", strategies.SHAPES)


def by_name(name, **options):
    """Return a lifecycle that takes any tree of N_MAX nodes."""
    sizes = dict(depth=N_MAX - 1, nodes=N_MAX, horizon=N_MAX + 8)
    return commit.by_name(name, **(sizes | options))


@functools.cache
def lifecycle(name, state_dtype="float32"):
    """Return the lifecycle with its two traced methods compiled."""
    owner = by_name(name, state_dtype=state_dtype)
    return owner, jax.jit(owner.verify), jax.jit(owner.commit)


@functools.cache
def materialized(owner):
    return jax.jit(owner.materialize)


def begin(owner, state):
    return owner.init(state, strategies.KEY_HEADS)


def poison(records):
    """Put NaN into what records say of nodes, not into a committed state there."""
    if isinstance(records, commit.Slots):
        return strategies.spoil_slots(records, jnp.nan)
    if isinstance(records, deferred.Written):
        nodes = ("k", "pseudo_values", "log_decay")
        filled = {name: poison(getattr(records, name)) for name in nodes}
        return dataclasses.replace(records, **filled)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), records)


def accepted(parents, nodes):
    """Accept nodes[b] in row b; None stands for no step."""
    paths = [
        strategies.root_path(row, node)
        for row, node in zip(parents, nodes, strict=True)
    ]
    padded = [(p + [p[-1] if p else 0] * N_MAX)[:N_MAX] for p in paths]
    path = jnp.asarray(padded, jnp.int32)
    count = jnp.asarray([len(p) for p in paths], jnp.int32)
    return accept.Accepted(path[:, -1], path, count, jnp.zeros_like(count))


def batch(cases):
    """Return state, inputs and tree of `cases` in the common envelope."""
    *rows, state, tree = strategies.batch(cases, N_MAX)
    return state, commit.Inputs(*rows), tree


def many(parents, **options):
    """One case a row, each with its own numbers; row b is there to accept node b."""
    return [strategies.make_case(parents, seed, **options) for seed in range(N_MAX)]


def permuted(tree, order):
    return jax.tree.map(lambda leaf: leaf[order], tree)


def assert_equal_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@over_lifecycles
@over_shapes
def test_every_node_of_every_shape(name, shape):
    """All nodes at once, one a row; rows that are left over take no step."""
    parents = strategies.SHAPES[shape]
    cases = many(parents)
    owner, verify, advance = lifecycle(name)
    state, inputs, tree = batch(cases)
    output, records = verify(begin(owner, state), inputs, tree)
    nodes = list(range(len(parents))) + [None] * (N_MAX - len(parents))
    taken = accepted([parents] * N_MAX, nodes)
    committed = advance(begin(owner, state), records, taken)
    after = owner.materialize(committed)
    for b, node in enumerate(nodes):
        outputs, states = strategies.oracle(cases[b])
        assert strategies.relative(output[b, : len(parents)], outputs) < 1e-6
        if node is None:
            assert_equal_bits(after[b], state[b])
        else:
            assert strategies.relative(after[b], states[node]) < 1e-6
    # Only what belongs to a row decides about it, wherever the row stands.
    order = np.random.default_rng(0).permutation(N_MAX)
    moved = advance(*permuted((begin(owner, state), records, taken), order))
    assert_equal_bits(moved, permuted(committed, order))


@over_lifecycles
def test_the_wrong_node_or_row_is_seen(name):
    """Each twin is far away: depth for index, a neighbour's path, a shorter path."""
    parents = strategies.SHAPES["comb"]
    cases = many(parents)
    owner, verify, advance = lifecycle(name)
    state, inputs, tree = batch(cases)
    _, records = verify(begin(owner, state), inputs, tree)
    node = len(parents) - 1
    _, states = strategies.oracle(cases[0])
    depth = len(strategies.root_path(parents, node)) - 1
    state = begin(owner, state)
    for wrong in (depth, parents[node], node - 1):
        after = advance(state, records, accepted([parents] * N_MAX, [wrong] * N_MAX))
        after = owner.materialize(after)
        assert strategies.relative(after[0], states[node]) > 1e-2
    taken = accepted([parents] * N_MAX, [node] * N_MAX)
    swapped = advance(state, permuted(records, slice(None, None, -1)), taken)
    assert strategies.relative(owner.materialize(swapped)[0], states[node]) > 1e-2


@over_lifecycles
def test_no_step_keeps_every_bit_whatever_the_records_hold(name):
    cases = many(strategies.SHAPES["fork"])
    owner, verify, advance = lifecycle(name)
    state, inputs, tree = batch(cases)
    _, records = verify(begin(owner, state), inputs, tree)
    if isinstance(records, deferred.Written):
        first = records.state.at[0, 0, 0, 0].set(-0.0)
        records = dataclasses.replace(records, state=first)
    if isinstance(records, commit.Slots):
        first = records.states.at[0, records.index[0], 0, 0, 0].set(-0.0)
        records = dataclasses.replace(records, states=first)
    state = state.at[0, 0, 0, 0].set(-0.0)
    after = advance(begin(owner, state), poison(records), accept.nothing(tree))
    assert_equal_bits(owner.materialize(after), state)


@over_lifecycles
@hypothesis.settings(max_examples=12)
@hypothesis.given(st.data())
def test_a_text_of_random_steps(name, data):
    """Three rows take their own trees and nodes, or none, and stay on the oracle."""
    owner, verify, advance = lifecycle(name)
    plain = materialized(owner)
    start = [strategies.make_case([-1], seed).state for seed in range(3)]
    state = begin(owner, jnp.asarray(np.stack(start), jnp.float32))
    for step in range(3):
        trees = [data.draw(strategies.preorder_parents(N_MAX)) for _ in range(3)]
        nodes = [
            data.draw(st.none() | st.integers(0, len(parents) - 1)) for parents in trees
        ]
        cases = [strategies.make_case(p, 3 * step + b) for b, p in enumerate(trees)]
        _, inputs, tree = batch(cases)
        _, records = verify(state, inputs, tree)
        state = advance(state, records, accepted(trees, nodes))
        for b, node in enumerate(nodes):
            if node is not None:
                cases[b].state = start[b]
                start[b] = strategies.oracle(cases[b])[1][node]
        held = plain(state)
        for b, expected in enumerate(start):
            assert strategies.relative(held[b], expected) < 2e-6


@over_lifecycles
def test_a_chain_then_the_root_then_a_tree(name):
    """A long accept leaves nothing behind that a step without drafts could read.

    The three rows begin at another place of this round, so modes mix in a batch.
    """
    owner, verify, advance = lifecycle(name)
    plain = materialized(owner)
    chain, fork = strategies.SHAPES["chain"], strategies.SHAPES["fork"]
    turns = [(chain, 3), ([-1], 0), (fork, 8)]
    expected = [strategies.make_case([-1], row).state for row in range(3)]
    state = begin(owner, jnp.asarray(np.stack(expected), jnp.float32))
    for step in range(4):
        trees, nodes = zip(*(turns[(step + row) % 3] for row in range(3)), strict=True)
        cases = [strategies.make_case(p, 3 * step + b) for b, p in enumerate(trees)]
        _, inputs, tree = batch(cases)
        output, records = verify(state, inputs, tree)
        state = advance(state, records, accepted(trees, nodes))
        held = plain(state)
        for b, case in enumerate(cases):
            case.state = expected[b]
            outputs, states = strategies.oracle(case)
            expected[b] = states[nodes[b]]
            assert strategies.relative(output[b, : len(outputs)], outputs) < 2e-6
            assert strategies.relative(held[b], expected[b]) < 2e-6


@over_lifecycles
def test_two_hundred_rejected_drafts_leave_no_trace(name):
    """Root after root is the plain recurrence; what the drafts held changes no bit."""
    parents, steps = [-1, 0, 0, 2], 200
    roots = strategies.make_case([-1] * steps, 5)
    owner = by_name(name)
    tree = tree_lib.DraftTree.from_parents(parents)
    taken = accept.greedy(jnp.zeros((1, 4, 3)), tree.with_tokens(jnp.ones((1, 4))))
    assert taken.count.tolist() == [1]

    @jax.jit
    def decode(state, rows):
        def step(state, inputs):
            _, records = owner.verify(state, commit.Inputs(*inputs), tree)
            return owner.commit(state, records, taken), None

        return jax.lax.scan(step, begin(owner, state), rows)[0]

    def steps_with_drafts(seed):
        """Put drafts of any size behind every root: [steps, 1, n, ...]."""
        drafts = [strategies.make_case(parents, seed + i) for i in range(steps)]
        rows = [np.stack(x) for x in zip(*(d.rows() for d in drafts), strict=True)]
        for row, root in zip(rows, roots.rows(), strict=True):
            row[:, 0] = root
        return [jnp.asarray(row, jnp.float32)[:, None] for row in rows]

    start = jnp.asarray(roots.state, jnp.float32)[None]
    after = decode(start, steps_with_drafts(10))
    other = decode(start, steps_with_drafts(1000))
    if name == "store-all":  # whose other slots hold the drafts' states
        assert_equal_bits(after.index, other.index)
        assert_equal_bits(owner.materialize(after), owner.materialize(other))
    else:
        assert_equal_bits(after, other)
    chain = strategies.Case(*roots.rows(), roots.state, list(range(-1, steps - 1)))
    expected = strategies.oracle(chain)[1][-1]
    assert strategies.relative(owner.materialize(after)[0], expected) < 5e-6


@over_lifecycles
def test_bfloat16_states_are_rounded_once(name):
    """Within a step all is float32: the new state is the exact one, rounded."""
    parents = strategies.SHAPES["chain"]
    cases = many(parents)
    owner, verify, advance = lifecycle(name, "bfloat16")
    plain, inputs, tree = batch(cases)
    state = begin(owner, plain)
    before = owner.materialize(state)
    assert before.dtype == jnp.bfloat16
    saved = owner.nbytes(begin(by_name(name), plain)) - owner.nbytes(state)
    states = N_MAX + 1 if name == "store-all" else 1
    assert saved == states * plain.nbytes // 2
    _, records = verify(state, inputs, tree)
    after = advance(state, records, accepted([parents] * N_MAX, range(N_MAX)))
    after = owner.materialize(after)
    assert after.dtype == jnp.bfloat16
    for b, case in enumerate(cases):
        case.state = np.asarray(before[b], np.float64)
        expected = strategies.oracle(case)[1][b]
        np.testing.assert_allclose(
            np.asarray(after[b], np.float64), expected, rtol=2**-8, atol=2e-6
        )


def test_store_all_keeps_a_state_a_node_and_reconstruct_a_vector():
    state, inputs, tree = batch(many(strategies.SHAPES["star"]))
    size = {}
    for name in commit.LIFECYCLES:
        for dtype in ("float32", "bfloat16"):
            owner = by_name(name, state_dtype=dtype)
            _, records = jax.eval_shape(owner.verify, begin(owner, state), inputs, tree)
            leaves = jax.tree.leaves(records)
            size[name, dtype] = sum(x.size * x.dtype.itemsize for x in leaves)
    ring = (N_MAX + 1) * state.nbytes
    assert size["store-all", "float32"] == ring + 4 * N_MAX
    assert size["store-all", "bfloat16"] == ring // 2 + 4 * N_MAX
    per_node = strategies.KEY_HEADS * strategies.DIM
    per_node += strategies.VALUE_HEADS * (strategies.DIM + 1)
    vectors = N_MAX * N_MAX * 4 * per_node
    assert size["reconstruct", "float32"] == vectors
    for name in ("fused", "deferred"):  # and the state as it leaves the verification
        assert size[name, "float32"] == vectors + state.nbytes


def walk(owner, steps, trees, spoil=lambda state: state):
    """Take random steps, one in four rows none; yield states and the oracle's.

    `spoil` changes the state before each verification.
    """
    rng = np.random.default_rng(3)
    verify, advance, plain = map(
        jax.jit, (owner.verify, owner.commit, owner.materialize)
    )
    expected = [strategies.make_case([-1], row).state for row in range(4)]
    state = begin(owner, jnp.asarray(np.stack(expected), jnp.float32))
    for step in range(steps):
        parents = [strategies.random_parents(rng, trees(rng)) for _ in expected]
        nodes = [None if rng.random() < 0.25 else rng.integers(len(p)) for p in parents]
        cases = [strategies.make_case(p, 4 * step + b) for b, p in enumerate(parents)]
        _, inputs, tree = batch(cases)
        _, records = verify(spoil(state), inputs, tree)
        before, state = state, advance(state, records, accepted(parents, nodes))
        for b, node in enumerate(nodes):
            if node is None:
                assert_equal_bits(plain(state)[b], plain(before)[b])
            else:
                cases[b].state = expected[b]
                expected[b] = strategies.oracle(cases[b])[1][node]
        yield state, plain(state), expected


class IndexOff(commit.StoreAll):
    """Broken: the committed state is taken to be a slot further."""

    def commit(self, state, records, accepted):
        found = super().commit(state, records, accepted)
        slots = found.states.shape[1]
        return dataclasses.replace(found, index=(found.index + 1) % slots)


@pytest.mark.parametrize("spare", [0, 3])
def test_fifty_steps_around_the_ring(spare):
    """From every slot, whatever the others hold; only an index moves in commit."""
    owner = commit.StoreAll(nodes=N_MAX + spare)
    visited = set()

    def spoil(state):
        return strategies.spoil_slots(state, jnp.nan)

    small_and_large = lambda rng: int(rng.integers(1, N_MAX + 1))  # noqa: E731
    for state, found, expected in walk(owner, 50, small_and_large, spoil):
        visited |= set(state.index.tolist())
        for b in range(4):
            assert strategies.relative(found[b], expected[b]) < 2e-6
    assert visited == set(range(N_MAX + spare + 1))
    twin = IndexOff(nodes=N_MAX + spare)
    with pytest.raises(AssertionError):
        for _, found, expected in walk(twin, 3, small_and_large):
            assert strategies.relative(found[0], expected[0]) < 1e-2


def test_commit_of_a_ring_moves_no_state():
    """Its compiled program touches the index alone, and hands the slots on."""
    cases = many(strategies.SHAPES["fork"])
    owner, verify, _ = lifecycle("store-all")
    state, inputs, tree = batch(cases)
    _, records = verify(begin(owner, state), inputs, tree)
    taken = accepted([strategies.SHAPES["fork"]] * N_MAX, [3] * N_MAX)
    after = owner.commit(begin(owner, state), records, taken)
    assert after.states is records.states
    assert np.array_equal(after.index, (records.index + 1 + 3) % (N_MAX + 1))


def test_a_tree_with_more_nodes_than_slots_is_refused():
    owner = commit.StoreAll(nodes=6)
    owner.check(5, 6)
    with pytest.raises(ValueError, match="nodes is 6; this tree needs 7 or more"):
        owner.check(6, 7)
    state, inputs, tree = batch(many(strategies.SHAPES["fork"]))
    with pytest.raises(ValueError, match=f"needs {N_MAX} or more"):
        owner.verify(begin(owner, state), inputs, tree)


@over_lifecycles
def test_the_interface(name):
    owner = by_name(name)
    assert isinstance(owner, commit.Lifecycle)
    assert owner == by_name(name.replace("-", "_"))
    assert hash(owner) == hash(by_name(name)), "jit takes it as a constant"
    state = jnp.asarray(strategies.make_case([-1]).state, jnp.float32)[None]
    assert_equal_bits(owner.materialize(begin(owner, state)), state)
    more = by_name(name).nbytes(begin(owner, state)) - state.nbytes
    assert (more > 0) == (name != "reconstruct")
    if name == "store-all":
        assert more == N_MAX * state.nbytes + 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(name="never"), "commit='never': allowed are reconstruct, store-all"),
        (dict(name=""), "commit=''"),
        (dict(name="store-all", state_dtype="int8"), "state_dtype='int8': allowed are"),
        (dict(name="reconstruct", impl="magic"), "impl is 'magic'"),
        (dict(name="fused", depth=-1), "depth is -1; 0 or more"),
        (dict(name="store-all", nodes=0), "nodes is 0; 1 or more"),
        (dict(name="deferred", horizon=0), "horizon is 0; 1 or more"),
        (dict(name="deferred", record_dtype="int8"), "record_dtype='int8': allowed"),
        (dict(name="deferred", horizn=8), "horizn is no option; allowed are state_dt"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        commit.by_name(**options)
