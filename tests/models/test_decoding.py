"""The loop never changes a token: every tree, lifecycle and stop against plain text."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import golden
from treewy_jax import commit, drafters, generate, loop
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

N_MAX, DEPTH_MAX, ROOM, CAPACITY = 40, 5, 48, 176
TREES = {
    "none": (),
    "1,1,1": (1, 1, 1),
    "1,1,1,1,1": (1,) * 5,
    "2,2,2": (2, 2, 2),
    "4,2,1": (4, 2, 1),
    "3,3,3": (3, 3, 3),
}
LIFECYCLES = tuple(commit.LIFECYCLES)


def envelope(widths):
    """Return the tree inside the one static envelope that all tests share."""
    parents = np.asarray(tree_lib.DraftTree.from_widths(widths).parent).tolist()
    return tree_lib.DraftTree.from_parents(parents, n_max=N_MAX, depth_max=DEPTH_MAX)


def owner(lifecycle):
    return commit.by_name(lifecycle, depth=DEPTH_MAX, nodes=N_MAX)


def decode(variant, rows, drafter, budget=ROOM, eos=(), lifecycle="reconstruct"):
    """Run the loop to its end; every call of a batch size has the same shapes."""
    model = golden.model(variant)
    build = model.builder(owner(lifecycle))
    tokens = jnp.concatenate([golden.padded(ids)[0] for ids in rows])
    lengths = jnp.asarray([len(ids) for ids in rows], jnp.int32)
    # One id at least, so that the shape stays: -1 is no token.
    eos = jnp.asarray([*eos, -1][:1], jnp.int32)
    budget = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), len(rows))
    rules = loop.Rules(budget, eos, jax.random.key(0))
    options = dict(sampling=sampling_lib.Sampling())
    state = loop.start(
        build,
        model.params,
        drafter,
        tokens,
        lengths,
        rules,
        capacity=CAPACITY,
        max_new_tokens=ROOM,
        **options,
    )
    return loop.run(
        build, model.params, drafter, state, rules, jnp.int32(ROOM), **options
    )


def scripted(variant, widths, goals, batch=4):
    """Draft the golden text, to be accepted down to `goals` (by row, then by step)."""
    _, text = golden.prompt(variant)
    return drafters.ScriptedDrafter(
        script=jnp.asarray([text] * batch, jnp.int32),
        tree=envelope(widths).with_tokens(jnp.zeros((batch, N_MAX), jnp.int32)),
        goals=jnp.asarray(goals, jnp.int32),
        vocab_size=256,
    )


def every_node(widths, batch=4, steps=16):
    """Spread all nodes over rows and steps, so that each is a goal at least once."""
    size = int(envelope(widths).size[0])
    return [
        [(row + batch * step) % size for step in range(steps)] for row in range(batch)
    ]


@functools.cache
def prefill(variant):
    """Return the compiled prefill of a golden model, the same for every prompt."""
    model = golden.model(variant)
    target = model.builder(commit.by_name("reconstruct"))(model.params)
    return jax.jit(target.prefill, static_argnums=2)


@functools.cache
def plain_states(variant, ids):
    """Return the cache after `ids`, by one prefill."""
    return prefill(variant)(*golden.padded(list(ids)), CAPACITY)[1]


def assert_covers(state, row, variant, ids, lifecycle="reconstruct"):
    """The row's state is that of plain decoding after `ids`."""
    expected = plain_states(variant, tuple(ids))
    assert int(state.cache.length[row]) == len(ids)
    cache = state.cache
    plain = tuple(map(owner(lifecycle).materialize, cache.recurrent))
    filled = slice(0, len(ids))
    for parts, places in (
        ([(plain, expected.recurrent), (cache.window, expected.window)], ...),
        ([(cache.key, expected.key), (cache.value, expected.value)], filled),
    ):
        for got, want in [pair for x, y in parts for pair in zip(x, y, strict=True)]:
            np.testing.assert_allclose(
                got[row][places], want[0][places], rtol=0, atol=golden.HIDDEN
            )


def emitted(state, row):
    return state.tokens[row, : int(state.emitted[row])].tolist()


@pytest.mark.parametrize("variant", golden.VARIANTS)
@pytest.mark.parametrize("lifecycle", LIFECYCLES)
@pytest.mark.parametrize("name", TREES)
def test_every_accept_length_and_child(variant, lifecycle, name):
    """The golden text comes out whatever is accepted, through whichever child."""
    widths = TREES[name]
    prompt, text = golden.prompt(variant)
    goals = every_node(widths)
    drafter = scripted(variant, widths, goals)
    state = decode(variant, [prompt] * 4, drafter, lifecycle=lifecycle)
    depth = np.asarray(envelope(widths).depth())[0]
    for row in range(4):
        assert emitted(state, row) == text
        taken = state.accept_lengths[row, : int(state.steps)]
        taken = [length for length in taken.tolist() if length]
        whole = taken[:-1] if state.cut[row] else taken
        wanted = itertools.cycle(depth[goals[row]] + 1)
        assert whole == list(itertools.islice(wanted, len(whole)))
    assert_covers(state, 0, variant, prompt + text[:-1], lifecycle)


@pytest.mark.parametrize("tree", ["1,1,1", "3,3,3"])
def test_mtp_drafts_change_nothing(tree):
    prompt, text = golden.prompt("dense")
    model = golden.model("dense")
    written = generate.generate(model, prompt, tree=tree, max_new_tokens=ROOM)
    assert written.token_ids == [text]
    assert len(text) == 1 + sum(written.accept_lengths[0])
    assert max(written.accept_lengths[0]) > 1, "the head never hit: a vacuous test"


@pytest.mark.parametrize("variant", golden.VARIANTS)
@pytest.mark.parametrize("lifecycle", LIFECYCLES)
def test_end_of_text_at_every_offset_of_the_window(variant, lifecycle):
    """Whichever place of the window holds the end-of-text token, all stops there."""
    prompt, text = golden.prompt(variant)
    first = [i for i, token in enumerate(text) if token not in text[:i]][:12]
    drafter = scripted(variant, (1, 1, 1), [[3] * 16] * 4)
    offsets = set()
    for place in first:
        eos = [text[place]]
        state = decode(variant, [prompt] * 4, drafter, eos=eos, lifecycle=lifecycle)
        assert emitted(state, 0) == text[: place + 1]
        assert bool(state.done[0])
        assert_covers(state, 0, variant, prompt + text[:place], lifecycle)
        offsets.add((place - 1) % 4)
    assert offsets == {0, 1, 2, 3}


@pytest.mark.parametrize("variant", golden.VARIANTS)
@pytest.mark.parametrize("lifecycle", LIFECYCLES)
def test_budgets_from_one_to_more_than_a_window(variant, lifecycle):
    prompt, text = golden.prompt(variant)
    drafter = scripted(variant, (2, 2, 2), [[3] * 16] * 4)
    for low in (1, 5):
        budgets = list(range(low, low + 4))
        rows = [prompt] * 4
        state = decode(variant, rows, drafter, budget=budgets, lifecycle=lifecycle)
        for row, budget in enumerate(budgets):
            assert emitted(state, row) == text[:budget]
            assert_covers(state, row, variant, prompt + text[: budget - 1], lifecycle)


@pytest.mark.parametrize("variant", golden.VARIANTS)
@pytest.mark.parametrize("lifecycle", LIFECYCLES)
def test_ragged_batch(variant, lifecycle):
    """Rows of different lengths and acceptance are as each of them alone."""
    prompt, text = golden.prompt(variant)
    rows = [prompt, prompt[:33], prompt[:5], prompt]
    nothing = scripted(variant, (), [[0] * 16] * 4)
    alone = decode(variant, rows, nothing, lifecycle=lifecycle)
    assert emitted(alone, 0) == text
    # The script fits rows 0 and 3 only: the others accept what happens to agree.
    drafter = scripted(variant, (3, 3, 3), every_node((3, 3, 3)))
    state = decode(variant, rows, drafter, budget=[48, 40, 44, 9], lifecycle=lifecycle)
    for row, budget in enumerate((48, 40, 44, 9)):
        expected = emitted(alone, row)[:budget]
        assert emitted(state, row) == expected
        assert_covers(state, row, variant, rows[row] + expected[:-1], lifecycle)


def test_one_step_function_and_no_recompilation(monkeypatch):
    """Topologies, prompts of a bucket, budgets and endings share one traced step."""
    prompt, _ = golden.prompt("dense")
    loop.run.clear_cache()
    traced = chex.assert_max_traces(loop.step, n=1)
    monkeypatch.setattr(loop, "step", traced)
    for widths in TREES.values():
        drafter = scripted("dense", widths, every_node(widths))
        for rows in ([prompt] * 4, [prompt[:-3]] * 4):
            decode("dense", rows, drafter, budget=6, eos=[7])
    assert loop.run._cache_size() == 1
    other = scripted("dense", (1, 1), [[2] * 16] * 3, batch=3)
    with pytest.raises(AssertionError, match="traced"):
        decode("dense", [prompt] * 3, other)
    loop.run.clear_cache()


def test_streaming_in_blocks_tells_the_same_text():
    prompt, text = golden.prompt("dense")
    heard = []
    written = generate.generate(
        golden.model("dense"),
        [prompt, prompt[:20]],
        tree="1,1,1",
        max_new_tokens=20,
        on_tokens=lambda row, tokens: heard.append((row, tokens)),
    )
    for row, tokens in enumerate(written.token_ids):
        assert sum((new for r, new in heard if r == row), []) == tokens
    assert written.token_ids[0] == text[:20]
    assert len(heard) > 4


def test_ngram_drafts_change_nothing_and_hit():
    """A text that repeats is drafted from itself."""
    prompt, text = golden.prompt("dense")
    again = prompt + text[:10] + prompt
    written = generate.generate(
        golden.model("dense"),
        [again[-100:], prompt],
        tree="none",
        drafter=drafters.NgramDrafter(branches=2, depth=4),
        max_new_tokens=24,
    )
    plain = generate.generate(
        golden.model("dense"), [again[-100:], prompt], tree="none", max_new_tokens=24
    )
    assert written.token_ids == plain.token_ids
    assert written.token_ids[1] == text[:24]


def test_sampled_text_does_not_depend_on_the_tree_or_the_batch():
    prompt, _ = golden.prompt("dense")
    model, sampling = golden.model("dense"), sampling_lib.Sampling(1.0, 50, 0.95)
    options = dict(max_new_tokens=20, sampling=sampling, seed=3)
    plain = generate.generate(model, [prompt, prompt], tree="none", **options)
    drafted = generate.generate(model, [prompt, prompt], tree="1,1,1", **options)
    assert plain.token_ids == drafted.token_ids
    assert plain.token_ids[0] != plain.token_ids[1], "rows draw for themselves"
    assert drafted.token_ids[0] != golden.prompt("dense")[1][:20]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
        (dict(prompts=[1, 256]), "id 256: allowed are 0 to 255"),
        (dict(prompts=[-1]), "id -1"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=500), "at most 512"),
        (dict(tree="3,,3"), "3,,3"),
        (dict(tree="8,8"), "64"),
        (dict(commit="never"), "commit='never': allowed are reconstruct, store-all"),
        (dict(commit=commit.by_name("deferred", horizon=3)), "horizon is 3"),
        (
            dict(commit=commit.by_name("store-all", nodes=3)),
            "nodes is 3; this tree needs 4",
        ),
        (dict(impl="magic"), "impl is 'magic'"),
        (dict(state_dtype="int8"), "state_dtype='int8'"),
    ],
)
def test_wrong_arguments_are_named_before_any_compute(change, words, monkeypatch):
    monkeypatch.setattr(loop, "start", None)
    request = dict(prompts=[1, 2, 3] * 5, tree="1,1,1", max_new_tokens=4)
    with pytest.raises(ValueError, match=words):
        generate.generate(golden.model("dense"), **(request | change))
