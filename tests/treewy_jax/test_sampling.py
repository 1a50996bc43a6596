"""Draws against the softmax they should follow, and what a draw may depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treewy_jax import sampling as sampling_lib

Sampling = sampling_lib.Sampling
VOCAB, SHAPE = 12, (4, 5000)
TOTAL = 4 * 5000
LOGITS = np.random.default_rng(0).normal(scale=1.5, size=VOCAB)
SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.5, top_k=4),
    Sampling(1.0, top_p=0.8),
    Sampling(0.8, top_k=5, top_p=0.9),
    Sampling(2.0, top_k=VOCAB + 1),
]


def probabilities(logits, sampling):
    """Return softmax, cut to the k best, then to the smallest set reaching top_p."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    order = np.argsort(-scaled)
    kept = order[: sampling.top_k or len(order)]
    weights = np.exp(scaled[kept] - scaled.max())
    weights /= weights.sum()
    enough = int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1
    exact = np.zeros(len(order))
    exact[kept[:enough]] = weights[:enough] / weights[:enough].sum()
    return exact


def draw(logits, seed, position, sampling):
    """Draw for [4, 5000] nodes; op by op, one compiled generator serves all calls."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (*SHAPE, VOCAB))
    position = jnp.broadcast_to(jnp.asarray(position), SHAPE)
    key = jax.random.key(seed)
    return np.asarray(sampling_lib.draw(logits, key, position, sampling))


@functools.cache
def tokens(sampling):
    """Draw 20,000 tokens from LOGITS, one a position and row."""
    return draw(LOGITS, 0, np.arange(SHAPE[1]), sampling)


def frequencies(drawn):
    return np.bincount(drawn.reshape(-1), minlength=VOCAB) / drawn.size


def bound(exact):
    """Return the distance that exact draws exceed at three sigma only."""
    counts = np.random.default_rng(1).multinomial(TOTAL, exact, size=400)
    distances = np.abs(counts / (TOTAL) - exact).sum(axis=1) / 2
    return distances.mean() + 3 * distances.std()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution(sampling):
    exact, drawn = probabilities(LOGITS, sampling), frequencies(tokens(sampling))
    assert np.abs(drawn - exact).sum() / 2 < bound(exact)
    assert not np.any(drawn[exact == 0])


def test_a_slightly_different_distribution_is_seen():
    drawn = frequencies(tokens(Sampling(1.0)))
    for other in (Sampling(0.9), Sampling(1.1), Sampling(1.0, top_k=8)):
        exact = probabilities(LOGITS, other)
        assert np.abs(drawn - exact).sum() / 2 > 2 * bound(exact)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_itself(sampling):
    logits = np.random.default_rng(2).normal(size=(3, 5, VOCAB))
    given = jnp.asarray(logits, jnp.bfloat16)
    kept = sampling_lib.distribution(given, sampling)
    assert kept.dtype == jnp.float32
    logits = np.asarray(given, np.float64).reshape(-1, VOCAB)
    for actual, row in zip(kept.reshape(-1, VOCAB), logits, strict=True):
        exact = probabilities(row, sampling)
        np.testing.assert_allclose(jax.nn.softmax(actual), exact, rtol=0, atol=1e-6)


def test_without_temperature_the_best_token_wins():
    logits = np.random.default_rng(3).normal(size=(*SHAPE, VOCAB)).astype(np.float32)
    logits[1, 2] = 0.0
    logits[1, 2, [4, 7]] = 1.0
    for seed in (0, 1):
        drawn = draw(logits, seed, 0, Sampling())
        assert drawn.dtype == np.int32
        assert np.array_equal(drawn, np.argmax(logits, axis=-1))
    assert drawn[1, 2] == 4, "the first of equal tokens"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_p=1e-30),
        Sampling(5.0, top_k=3, top_p=1e-6),
        Sampling(1e-4),
        Sampling(1e-37),
        Sampling(1e-42),
    ],
    ids=str,
)
def test_the_best_token_always_stays(sampling):
    assert set(tokens(sampling).reshape(-1).tolist()) == {int(np.argmax(LOGITS))}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = jnp.log(jnp.asarray([0.125, 0.5, 0.125, 0.25]))
    for top_p, kept in ((0.45, [1]), (0.55, [1, 3]), (0.7, [1, 3]), (1.0, range(4))):
        left = sampling_lib.distribution(logits, Sampling(1.0, top_p=top_p))
        assert np.flatnonzero(left > -np.inf).tolist() == list(kept)


def test_ties_with_the_last_token_kept_stay():
    logits = jnp.asarray([1.0, 3.0, 2.0, 2.0, 2.0])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6)):
        left = sampling_lib.distribution(logits, sampling)
        assert np.flatnonzero(left > -np.inf).tolist() == [1, 2, 3, 4]


def test_a_forbidden_token_is_never_drawn():
    logits = np.where(np.arange(VOCAB) % 2 == 0, -np.inf, 0.0)
    for sampling in (Sampling(1.0), Sampling(0.5, top_k=8, top_p=0.99)):
        drawn = draw(logits, 0, np.arange(SHAPE[1]), sampling)
        assert set(drawn.reshape(-1).tolist()) == set(range(1, VOCAB, 2))


def test_a_draw_depends_on_row_position_key_and_its_own_logits():
    random, sampling = np.random.default_rng(4), Sampling(1.0)
    logits = random.normal(size=(*SHAPE, VOCAB)).astype(np.float32)
    position = random.integers(0, 10**5, SHAPE)
    drawn = draw(logits, 5, position, sampling)
    order = random.permutation(SHAPE[1])
    moved = draw(logits[:, order], 5, position[:, order], sampling)
    assert np.array_equal(moved, drawn[:, order])
    others = logits.copy()
    others[2:], others[:, 100:] = 0.0, 1.0
    elsewhere = np.where(others[..., 0] == logits[..., 0], position, 7)
    changed = draw(others, 5, elsewhere, sampling)
    assert np.array_equal(changed[:2, :100], drawn[:2, :100])
    for other in (
        draw(logits, 6, position, sampling),
        draw(logits, 5, position + 1, sampling),
        draw(logits[::-1], 5, position[::-1], sampling)[::-1],
    ):
        assert 0.05 < np.mean(other == drawn) < 0.4


def test_siblings_share_their_noise():
    """Nodes of one position that have the same logits say the same."""
    drawn = draw(LOGITS, 0, np.arange(SHAPE[1]) // 2, Sampling(1.0))
    assert np.array_equal(drawn[:, ::2], drawn[:, 1::2])
    assert len(set(drawn[0, ::2].tolist())) > 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(temperature=-1.0), r"temperature=-1\.0: must be 0 or more"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(top_k=-1), r"top_k=-1: must be 0 \(all\) or more"),
        (dict(top_p=0.0), r"top_p=0\.0: must lie in \(0, 1\]"),
        (dict(top_p=1.5), r"top_p=1\.5"),
        (dict(top_p=float("nan")), "top_p=nan"),
        (dict(min_p=1.5), r"min_p=1\.5: must lie in \[0, 1\]"),
        (dict(repetition_penalty=0.0), r"repetition_penalty=0\.0: must be above 0"),
        (dict(presence_penalty=float("inf")), "presence_penalty=inf: must be finite"),
    ],
)
def test_wrong_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)
