"""Every rule of acceptance against the target's own distribution, by sampled texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import toys
from treewy_jax import accept, drafters, loop
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import rejection

Sampling = sampling_lib.Sampling
TABLES = toys.tables()
ROWS = 6_000
TREES = {"match": (2, 2), "rejection": (4, 1), "traversal": (4, 1), "block": (1, 1, 1)}
PENALTIES = Sampling(1.0, repetition_penalty=1.7, presence_penalty=0.8)
CUT = Sampling(1.5, top_k=3)  # fewer tokens than a node has children
# test_accept_exact.py sums over all that the rules may draw; here the draws are
# those of the loop.
CASES = [
    ("match", PENALTIES),
    ("block", PENALTIES),
    ("rejection", CUT),
    ("rejection", Sampling(0.5)),
    ("traversal", Sampling(1.5, top_p=0.8, min_p=0.1, presence_penalty=1.0)),
]


def drafter(rule):
    return toys.sampled(TREES[rule])


def write(rule, sampling, tables=TABLES, rows=ROWS, name=None):
    return toys.write(tables, drafter(name or rule), sampling, rule, rows)


@functools.cache
def exact(sampling):
    return toys.joint(TABLES[0], sampling)


@pytest.mark.parametrize(("rule", "sampling"), CASES, ids=str)
def test_texts_have_the_targets_distribution(rule, sampling):
    state = write(rule, sampling)
    assert toys.chance(toys.counts(state), exact(sampling)) > 1e-4
    hits = int(jnp.sum(state.accept_lengths > 1))
    assert hits > 20, "hardly any draft was accepted: vacuous"


def biased(monkeypatch, name, twin, sampling):
    """Return by how much a rule with a fault misses, in units of the bound."""
    monkeypatch.setattr(rejection, name, twin)
    # A rule of its own, so that no program compiled without the fault is found.
    rule = accept.Rule(name, lambda offer: rejection.rejection(offer), True)
    state = write(rule, sampling, name="rejection")
    wanted = exact(sampling)
    return toys.distance(toys.counts(state), wanted) / toys.bound(wanted, ROWS)


def test_drafts_accepted_at_chance_zero_are_seen(monkeypatch):
    twin = lambda uniform, chance: (uniform < chance) | (chance == 0)  # noqa: E731
    assert biased(monkeypatch, "passes", twin, CUT) > 1.5


def test_a_draft_not_normalised_after_a_rejection_is_seen(monkeypatch):
    def twin(q, token):
        return jnp.where(jnp.arange(q.shape[1]) == token[:, None], 0, q)

    assert biased(monkeypatch, "_without", twin, Sampling(1.0)) > 1.5


def test_the_distance_sees_another_temperature():
    wanted = exact(Sampling(0.9))
    counted = toys.counts(write("match", Sampling(1.0)))
    assert toys.distance(counted, wanted) > 1.1 * toys.bound(wanted, ROWS)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
def test_a_draft_like_the_target_is_accepted_whole(rule):
    state = write(rule, Sampling(1.0), (TABLES[0], TABLES[0]))
    depth = len(TREES[rule])
    assert np.all(state.accept_lengths[:, 0] == min(depth + 1, toys.SAID))
    wanted = exact(Sampling(1.0))
    assert toys.distance(toys.counts(state), wanted) < toys.bound(wanted, ROWS)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
def test_a_draft_without_a_common_token_is_not_accepted(rule, monkeypatch):
    even = np.arange(toys.VOCAB) % 2 == 0
    target, draft = TABLES
    apart = np.where(even, target, -1e4), np.where(even, -1e4, draft)
    sampling = Sampling(1.0)
    state = write(rule, sampling, apart)
    assert np.all(np.asarray(state.accept_lengths)[:, : toys.SAID] == 1)
    wanted = toys.joint(apart[0], sampling)
    assert toys.distance(toys.counts(state), wanted) < toys.bound(wanted, ROWS)


def test_the_test_is_strict():
    chances = jnp.asarray([[0.0, 1e-30, 1.0]])
    assert rejection.passes(jnp.zeros((1, 3)), chances).tolist() == [
        [False, True, True]
    ]


@pytest.mark.parametrize("rule", TREES)
def test_without_temperature_it_is_greedy(rule):
    """Token for token, and as far as a greedy walk over the same drafts."""
    table = TABLES[0].copy()
    table[toys.PROMPT] = TABLES[0][1, 1]
    tables, run = (table, TABLES[1]), functools.partial(toys.write, rows=4, said=12)
    plain = run(tables, drafters.NoDrafter(), Sampling(), "greedy")
    greedy = run(tables, drafter(rule), Sampling(), "greedy")
    for temperature in (0.0, 1e-5):
        state = run(tables, drafter(rule), Sampling(temperature), rule)
        assert np.array_equal(state.tokens, plain.tokens)
        if temperature == 0:
            assert np.array_equal(state.accept_lengths, greedy.accept_lengths)


def test_block_and_traversal_are_one_on_a_chain():
    states = [
        toys.write(TABLES, drafter("block"), Sampling(1.0), rule, 500)
        for rule in ("block", "traversal")
    ]
    assert np.array_equal(states[0].tokens, states[1].tokens)
    assert np.array_equal(states[0].accept_lengths, states[1].accept_lengths)


def test_traversal_accepts_no_less_than_rejection():
    """On average, at the first step, over the same drafts."""
    near = TABLES[0], TABLES[0] + TABLES[1] / 4
    lengths = [
        toys.write(near, drafter("block"), Sampling(1.0), rule, ROWS, steps=1)
        for rule in ("traversal", "rejection")
    ]
    means = [float(jnp.mean(state.accept_lengths[:, 0])) for state in lengths]
    assert means[0] > means[1] + 0.01


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_compiled_loop_writes_the_same(rule):
    states = [
        toys.write(TABLES, drafter(rule), PENALTIES, rule, 8, compiled=compiled)
        for compiled in (False, True)
    ]
    for name in ("tokens", "accept_lengths", "seen"):
        assert np.array_equal(getattr(states[0], name), getattr(states[1], name))


@pytest.mark.parametrize("rule", TREES)
def test_a_row_draws_alone_as_in_a_batch_and_in_another_envelope(rule):
    tables = TABLES[0].copy(), TABLES[1]
    tables[0][toys.PROMPT] = 0.0
    keys = jax.random.split(jax.random.key(5), 8)
    sampling = Sampling(1.0, presence_penalty=0.3)
    run = functools.partial(toys.write, tables, sampling=sampling, accept=rule, said=12)
    whole = run(drafter(rule), rows=8, key=keys)
    alone = run(drafter(rule), rows=1, key=keys[3:4])
    wide = run(toys.sampled(TREES[rule], 16), rows=8, key=keys)
    assert np.array_equal(whole.tokens[3], alone.tokens[0])
    assert np.array_equal(whole.tokens, wide.tokens)
    assert np.array_equal(whole.accept_lengths, wide.accept_lengths)
    assert len(np.unique(np.asarray(whole.tokens), axis=0)) == 8


def test_padding_of_any_content_changes_nothing():
    random = np.random.default_rng(0)
    tree = tree_lib.DraftTree.from_widths((2, 2), n_max=10, batch=3)
    tree = tree.with_tokens(jnp.asarray(random.integers(0, 8, (3, 10)), jnp.int32))
    real = (jnp.arange(10) < 7)[None, :, None]
    logits, draft = random.normal(size=(2, 3, 10, 8)).astype(np.float32)
    base, key = jnp.zeros(3, jnp.int32), jax.random.key(1)
    for name in ("rejection", "traversal", "block"):
        results = []
        for fill in (0.0, jnp.nan):
            log_probs = jnp.where(real, jax.nn.log_softmax(draft), fill)
            filled = jnp.where(real, logits, fill)
            offer = accept.Offer(filled, tree, log_probs, key, base, Sampling(1.0))
            results.append(accept.RULES[name].decide(offer))
        for one, other in zip(*results, strict=True):
            assert np.array_equal(one, other)


def test_unfitting_rules_are_refused_with_a_reason():
    chain = toys.sampled((1, 1))
    plain = drafters.MTPDrafter.from_tree(tree_lib.DraftTree.chain(2))
    with pytest.raises(ValueError, match="accept 'best': allowed are match, greedy"):
        accept.by_name("best")
    for name in ("rejection", "block", "traversal"):
        rule = accept.by_name(name)
        with pytest.raises(ValueError, match="hands out no draft distribution"):
            rule.check(plain, Sampling(1.0))
        rule.check(drafters.NoDrafter(), Sampling(1.0))
        rule.check(chain, Sampling())
    with pytest.raises(ValueError, match="7 nodes and depth 2; only chains"):
        accept.by_name("block").check(toys.sampled((2, 2)), Sampling())
    with pytest.raises(ValueError, match=r"temperature is 0\.7; only 0"):
        accept.by_name("greedy").check(chain, Sampling(0.7))
    with pytest.raises(ValueError, match="hands out no log-probabilities"):
        toys.write(TABLES, plain, Sampling(1.0), "rejection", 2)


def plain_step(target, drafter, state, rules, sampling):
    """The step without penalties, sampled drafts or a choice of rules."""
    from treewy_jax import slots

    tree, draft = drafter.propose(state.draft, state.root, state.base)
    hidden, records = target.verify(state.cache, tree)
    accepted = accept.sample_and_match(
        target.logits(hidden), tree, rules.key, state.base, sampling
    )
    accepted, ends, cut = loop._stop(accepted, tree, state, rules)
    new, count = accepted.emitted(tree.tokens), accepted.count
    return loop.LoopState(
        cache=target.commit(state.cache, records, accepted),
        draft=drafter.update(draft, accepted, hidden),
        root=jnp.where(state.done, state.root, accepted.next_token),
        base=state.base + count,
        done=state.done | ends,
        cut=state.cut | cut,
        tokens=slots.append(state.tokens, new, count, state.emitted),
        emitted=state.emitted + count,
        accept_lengths=state.accept_lengths.at[:, state.steps].set(count),
        steps=state.steps + 1,
        tree=tree,
        accepted=accepted,
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 3, 0.9)], ids=str)
def test_the_default_costs_nothing(sampling):
    """With the default rule and no penalty the step is the plain one, op for op."""
    plan = drafters.MTPDrafter.from_tree(tree_lib.DraftTree.from_widths((2, 2)))
    state = toys.write(TABLES, plan, sampling, "match", 2, steps=0)
    target = toys.Target(tuple(map(jnp.asarray, TABLES)))
    bound = plan.bind(target)
    rules = loop.Rules(jnp.full(2, 4), jnp.full(1, -1), jax.random.key(0))

    def program(step, state, sampling=sampling):
        call = lambda state: step(target, bound, state, rules, sampling)  # noqa: E731
        return str(jax.make_jaxpr(call)(state))

    assert state.seen is None
    assert program(loop.step, state) == program(plain_step, state)
    penalised = Sampling(1.0, presence_penalty=1.0)
    other = toys.write(TABLES, plan, penalised, "match", 2, steps=0)
    assert other.seen.shape == (2, toys.VOCAB)
    assert program(loop.step, other, penalised) != program(plain_step, state)
