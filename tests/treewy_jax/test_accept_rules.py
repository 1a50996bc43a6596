"""Every rule of acceptance against the target's own distribution, by sampled texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.sampling_checks import row_trees, twins
from scripts.sampling_checks import toys as parts
from tests.treewy_jax import toys
from treewy_jax import accept, drafters, loop
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import rejection

Sampling = sampling_lib.Sampling
TABLES = toys.tables()
ROWS, SEED = 8_000, 1
WIDTHS = {"match": (2, 2), "rejection": (4, 1), "traversal": (3, 1), "block": (1, 1, 1)}
# A program a rule, so that settings are spread over the rules: test_accept_exact.py
# sums over all that the rules may draw, scripts/bench_lossless.py takes all settings.
# Here the draws are those of the loop.
SETTINGS = {
    "match": Sampling(1.0, repetition_penalty=1.7, presence_penalty=0.8),
    "rejection": Sampling(1.5, top_k=3),  # fewer tokens than a node has children
    "traversal": Sampling(1.5, top_p=0.8, min_p=0.1, presence_penalty=1.0),
    "block": Sampling(0.5, repetition_penalty=1.3),
}
SIGMAS = 3.0  # of as many exact draws


def drafter(rule, n_max=None):
    return toys.sampled(WIDTHS[rule], n_max)


def write(rule, tables=TABLES):
    return toys.write(tables, drafter(rule), SETTINGS[rule], rule, ROWS, key=SEED)


@pytest.fixture(scope="module")
def texts():
    """What each rule writes, with an adversarial draft."""
    return {rule: write(rule) for rule in WIDTHS}


@pytest.mark.parametrize("rule", WIDTHS)
def test_texts_have_the_targets_distribution(rule, texts):
    counted = toys.counts(texts[rule])
    wanted = toys.joint(TABLES[0], SETTINGS[rule])
    assert toys.off(counted, wanted) < SIGMAS
    hits = int(jnp.sum(texts[rule].accept_lengths > 1))
    assert hits > 50, "hardly any draft was accepted: vacuous"


def test_so_they_have_with_a_tree_of_its_own_in_every_row():
    parts = ((0, 1, 2, 4), (0, 1, 4, 5, 6), (0, 1))
    plan = row_trees.RowTrees.of(toys.sampled((2, 2)), parts)
    state = toys.write(TABLES, plan, Sampling(1.0), "rejection", ROWS)
    assert state.tree.parent.ndim == 2
    wanted = toys.joint(TABLES[0], Sampling(1.0))
    assert toys.off(toys.counts(state), wanted) < SIGMAS
    assert int(jnp.sum(state.accept_lengths > 1)) > 50


def test_the_bound_sees_another_temperature(texts):
    other = Sampling(0.8, repetition_penalty=1.7, presence_penalty=0.8)
    wanted = toys.joint(TABLES[0], other)
    assert toys.off(toys.counts(texts["match"]), wanted) > 2 * SIGMAS


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [(twins.AT_ZERO, SETTINGS["rejection"]), (twins.NOT_NORMALISED, Sampling(1.0))],
)
def test_a_fault_is_seen(fault, sampling):
    """The other rules' twins are in test_bench_lossless.py."""
    rule = twins.TWINS["rejection", fault]
    state = toys.write(TABLES, drafter("rejection"), sampling, rule, ROWS)
    wanted = toys.joint(TABLES[0], sampling)
    distance = toys.distance(toys.counts(state), wanted)
    assert distance > 1.5 * toys.bound(wanted, ROWS)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
def test_a_draft_like_the_target_is_accepted_whole(rule):
    state = write(rule, (TABLES[0], TABLES[0]))
    depth = len(WIDTHS[rule])
    assert np.all(state.accept_lengths[:, 0] == min(depth + 1, toys.SAID))
    wanted = toys.joint(TABLES[0], SETTINGS[rule])
    assert toys.off(toys.counts(state), wanted) < SIGMAS


@pytest.mark.parametrize("rule", WIDTHS)
def test_a_draft_without_a_common_token_is_not_accepted(rule):
    even = np.arange(toys.VOCAB) % 2 == 0
    target, draft = TABLES
    apart = np.where(even, target, -1e4), np.where(even, -1e4, draft)
    state = write(rule, tuple(table.astype(np.float32) for table in apart))
    assert np.all(np.asarray(state.accept_lengths)[:, : toys.SAID] == 1)
    wanted = toys.joint(apart[0], SETTINGS[rule])
    assert toys.off(toys.counts(state), wanted) < SIGMAS


def test_the_test_is_strict():
    chances = jnp.asarray([[0.0, 1e-30, 1.0]])
    assert rejection.passes(jnp.zeros((1, 3)), chances).tolist() == [
        [False, True, True]
    ]


def greedily(tables, widths, said):
    """Return the greedy text after PROMPT, and the accept lengths of best drafts."""
    target, draft = tables
    text, lengths = [*toys.PROMPT], []
    while len(text) < len(toys.PROMPT) + said + 1:
        text.append(int(np.argmax(target[text[-2], text[-1]])))
    at = len(toys.PROMPT)
    while at < len(text) - 1:
        count = 0
        while count < len(widths):
            token = text[at + count]
            best = np.argsort(-draft[text[at + count - 1], token])[: widths[count]]
            said_next = np.argmax(target[text[at + count - 1], token])
            if at + count + 1 >= len(text) or said_next not in best:
                break
            count += 1
        lengths.append(min(count + 1, len(text) - 1 - at))
        at += count + 1
    return text[len(toys.PROMPT) :], lengths


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [*((rule, 1e-5) for rule in WIDTHS), ("rejection", 0.0), ("block", 0.0)],
)
def test_without_temperature_it_is_greedy(rule, temperature):
    """Token for token, and as far as a greedy walk over the best drafts."""
    said, widths = 12, WIDTHS[rule]
    near = toys.tables(seed=1, far=-1.5)
    near[0][toys.PROMPT] = near[0][4, 5]
    text, lengths = greedily(near, widths, said)
    state = toys.write(
        near, toys.sampled(widths), Sampling(temperature), rule, 2, said=said
    )
    assert state.tokens.tolist() == [text] * 2
    assert state.accept_lengths[0].tolist()[: len(lengths)] == lengths
    assert 1 in lengths and max(lengths) > 1


def test_block_and_traversal_are_one_on_a_chain(texts):
    plan, settings = drafter("block"), SETTINGS["block"]
    state = toys.write(TABLES, plan, settings, "traversal", ROWS, key=SEED)
    assert np.array_equal(texts["block"].tokens, state.tokens)
    assert np.array_equal(texts["block"].accept_lengths, state.accept_lengths)


@pytest.mark.parametrize("rule", ["match", "traversal", "block"])
def test_a_row_draws_alone_as_in_a_batch_and_in_another_envelope(rule, texts):
    keys = sampling_lib.row_keys(jax.random.key(SEED), ROWS)
    wide, settings = drafter(rule, 11), SETTINGS[rule]
    for row in range(8):
        key = keys[row : row + 1]
        alone = toys.write(TABLES, wide, settings, rule, 1, key=key)
        assert np.array_equal(texts[rule].tokens[row], alone.tokens[0])
        lengths = texts[rule].accept_lengths[row], alone.accept_lengths[0]
        assert np.array_equal(*lengths)
    assert len(np.unique(np.asarray(texts[rule].tokens[:8]), axis=0)) > 4


def test_a_row_draws_in_a_batch_of_8_as_alone():
    """Longer texts, in which rows fall out of step."""
    tables = TABLES[0].copy(), TABLES[1]
    tables[0][toys.PROMPT] = 0.0
    keys = jax.random.split(jax.random.key(5), 8)
    settings = Sampling(1.0, presence_penalty=0.3)
    run = lambda n_max, keys: toys.write(  # noqa: E731
        tables,
        drafter("rejection", n_max),
        settings,
        "rejection",
        len(keys),
        key=keys,
        said=12,
    )
    whole = run(None, keys)
    for row in (3, 6):
        alone = run(11, keys[row : row + 1])
        assert np.array_equal(whole.tokens[row], alone.tokens[0])
    assert len(np.unique(np.asarray(whole.tokens), axis=0)) == 8
    assert len(np.unique(np.asarray(whole.base))) == 1
    assert len(np.unique(np.count_nonzero(whole.accept_lengths, axis=1))) > 1


def decide(name):
    """Return the rule's own decision, compiled in a hurry."""

    @functools.partial(jax.jit, compiler_options=toys.HURRY)
    def call(logits, tree, log_probs, key, base):
        offer = accept.Offer(logits, tree, log_probs, key, base, Sampling(1.0))
        return accept.RULES[name].decide(offer)

    return call


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_padding_of_any_content_changes_nothing(name):
    random, call = np.random.default_rng(0), decide(name)
    tree = tree_lib.DraftTree.from_widths((2, 2), n_max=10, batch=3)
    tree = tree.with_tokens(jnp.asarray(random.integers(0, 8, (3, 10)), jnp.int32))
    real = (jnp.arange(10) < 7)[None, :, None]
    logits, draft = random.normal(size=(2, 3, 10, 8)).astype(np.float32)
    base, key = jnp.zeros(3, jnp.int32), jax.random.key(1)
    results = []
    for fill in (0.0, jnp.nan):
        log_probs = jnp.where(real, jax.nn.log_softmax(draft), fill)
        results.append(call(jnp.where(real, logits, fill), tree, log_probs, key, base))
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


def begun(plan, sampling):
    """Return the shapes of the state of two rows."""
    keys = jax.random.split(jax.random.key(0))
    options = dict(sampling=sampling, accept="match")
    begin = functools.partial(parts.write, steps=0, **options)
    return jax.eval_shape(begin, TABLES, plan, keys)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 3, 0.9)], ids=str)
def test_the_default_costs_nothing(sampling):
    """With the default rule and no penalty the step is the plain one, op for op."""
    plan = drafters.MTPDrafter.from_tree(tree_lib.DraftTree.from_widths((2, 2)))
    state = begun(plan, sampling)
    target = toys.Target(tuple(map(jnp.asarray, TABLES)))
    bound = plan.bind(target)
    rules = loop.Rules(jnp.full(2, 4), jnp.full(1, -1), jax.random.key(0))

    def program(step, state, sampling=sampling):
        call = lambda state: step(target, bound, state, rules, sampling)  # noqa: E731
        return str(jax.make_jaxpr(call)(state))

    assert state.seen is None
    assert program(loop.step, state) == program(plain_step, state)
    penalised = Sampling(1.0, presence_penalty=1.0)
    other = begun(plan, penalised)
    assert other.seen.shape == (2, toys.VOCAB)
    assert program(loop.step, other, penalised) != program(plain_step, state)
