"""Min-p, penalties along the path of a node, and what the other draws depend on."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.treewy_jax import strategies, toys
from treewy_jax import drafters
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

Sampling = sampling_lib.Sampling
VOCAB = 16
FORK = strategies.SHAPES["fork"]


def test_min_p_is_relative_to_the_best():
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.19, 0.1, 0.01]))
    for min_p, kept in ((0.0, 5), (0.2, 4), (0.3, 3), (0.7, 2), (1.0, 1)):
        left = sampling_lib.distribution(logits, Sampling(1.0, min_p=min_p))
        assert np.flatnonzero(left > -np.inf).tolist() == list(range(kept))
    # The temperature comes first: 0.1 / 0.4 is 0.5 at temperature 2.
    left = sampling_lib.distribution(logits, Sampling(2.0, min_p=0.45))
    assert np.count_nonzero(left > -np.inf) == 4


def test_penalties_by_hand():
    logits = jnp.asarray([[[2.0, -2.0, 0.0, 4.0]]], jnp.bfloat16)
    seen = jnp.asarray([[[True, True, True, False]]])
    settings = Sampling(repetition_penalty=2.0, presence_penalty=0.5)
    lowered = sampling_lib.penalise(logits, seen, settings)
    assert lowered.dtype == jnp.float32
    assert lowered[0, 0].tolist() == [0.5, -4.5, -0.5, 4.0]
    assert settings.penalised and not Sampling(0.7, 3, 0.9, 0.1).penalised


def test_a_node_sees_the_text_its_ancestors_and_itself():
    random = np.random.default_rng(0)
    tree = tree_lib.DraftTree.from_parents(FORK, n_max=14, batch=2)
    tokens = random.integers(0, VOCAB, (2, 14))
    tree = tree.with_tokens(jnp.asarray(tokens, jnp.int32))
    text = random.random((2, VOCAB)) < 0.2
    seen = sampling_lib.seen_on_paths(jnp.asarray(text), tree.tokens, tree.ancestors())
    for row in range(2):
        for node in range(len(FORK)):
            path = strategies.root_path(FORK, node)
            wanted = set(np.flatnonzero(text[row])) | set(tokens[row, path])
            assert set(np.flatnonzero(seen[row, node])) == wanted


def test_a_penalised_text_is_that_of_plain_decoding():
    """Along every path, so that no draft changes what a later node sees."""
    table = toys.tables()[0].copy()
    table[toys.PROMPT] = table[1, 1]
    plan = drafters.MTPDrafter.from_tree(tree_lib.DraftTree.from_widths((2, 1)))
    for sampling in (
        Sampling(presence_penalty=2.0),
        Sampling(1.0, presence_penalty=1.0, repetition_penalty=1.5),
    ):
        plain, drafted = (
            toys.write((table, table), drafter, sampling, "match", 3, said=14)
            for drafter in (drafters.NoDrafter(), plan)
        )
        assert np.array_equal(plain.tokens, drafted.tokens)
        assert np.array_equal(plain.seen, drafted.seen)
        assert np.max(drafted.accept_lengths) > 1
        for row, said in enumerate(np.asarray(plain.tokens)):
            known = {*toys.PROMPT, *said.tolist()}
            assert set(np.flatnonzero(plain.seen[row])) == known


def test_a_key_a_row_draws_as_that_row_alone():
    random = np.random.default_rng(1)
    logits = jnp.asarray(random.normal(size=(3, 4, VOCAB)), jnp.float32)
    position = jnp.asarray(random.integers(0, 99, (3, 4)))
    one = jax.random.key(3)
    rows = jnp.stack([jax.random.fold_in(one, row) for row in range(3)])
    draw = lambda *args: sampling_lib.draw(*args, Sampling(1.0))  # noqa: E731
    shared = draw(logits, one, position)
    assert np.array_equal(shared, draw(logits, rows, position))
    alone = draw(logits[1:2], rows[1:2], position[1:2])
    assert np.array_equal(shared[1:2], alone)


def test_streams_nodes_positions_and_rows_have_numbers_of_their_own():
    nodes = jnp.arange(5)
    numbers = []
    for base in (0, 1):
        at = jnp.full(3, base)
        draws = sampling_lib.Draws.at(jax.random.key(0), at, Sampling(1.0))
        for stream in (sampling_lib.DRAFT, sampling_lib.TEST, sampling_lib.NEXT):
            uniform = draws.uniform(stream, nodes)
            assert np.array_equal(uniform[:, :3], draws.uniform(stream, nodes[:3]))
            numbers.append(np.asarray(uniform))
    assert len(np.unique(numbers)) == 2 * 3 * 3 * 5


def test_drawn_children_are_distinct_and_follow_the_draft():
    """Siblings differ, their order is that of drawing, and q is what was drawn from."""
    rows, sampling = 4000, Sampling(1.0)
    plan, tables = toys.sampled((3,)), toys.tables()
    state = toys.write(tables, plan, sampling, "match", rows, steps=0)
    bound = plan.bind(toys.Target(tuple(map(jnp.asarray, tables))))
    draws = sampling_lib.Draws.at(jax.random.key(0), state.base, sampling)
    tree, log_probs, _ = bound.propose_sampled(
        state.draft, state.root, state.base, draws
    )
    exact = toys.following(tables[1][toys.PROMPT[1], toys.FIRST], set(), sampling)
    np.testing.assert_allclose(np.exp(log_probs[:, 0]), [exact] * rows, atol=1e-6)
    drawn = np.asarray(tree.tokens)[:, 1:]
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    second = sum(
        exact[x] * np.where(np.arange(8) == x, 0, exact) / (1 - exact[x])
        for x in range(8)
    )
    for rank, wanted in enumerate((exact, second)):
        counted = np.bincount(drawn[:, rank], minlength=8)
        assert toys.distance(counted, wanted) < toys.bound(wanted, rows)


def test_without_temperature_the_best_are_drawn():
    plan, tables = toys.sampled((3, 2)), toys.tables()
    state = toys.write(tables, plan, Sampling(), "match", 4, steps=0)
    bound = plan.bind(toys.Target(tuple(map(jnp.asarray, tables))))
    draws = sampling_lib.Draws.at(jax.random.key(0), state.base, Sampling())
    given = state.draft, state.root, state.base
    best, drawn = bound.propose(*given)[0], bound.propose_sampled(*given, draws)[0]
    assert np.array_equal(best.tokens, drawn.tokens)
    assert isinstance(bound, drafters.SampledDrafter)
