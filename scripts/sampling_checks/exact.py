"""What the toy target says, exactly, and how far counted texts are from it."""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from scripts.sampling_checks import toys
from treewy_jax import sampling as sampling_lib

EXACT_DRAWS = 200


def following(
    logits: np.ndarray, seen: set[int], sampling: sampling_lib.Sampling
) -> np.ndarray:
    """Return the target's probabilities after the tokens `seen`, in float64."""
    logits = logits.astype(np.float64)
    if seen:
        at, factor = list(seen), sampling.repetition_penalty
        low = np.where(logits[at] > 0, logits[at] / factor, logits[at] * factor)
        logits[at] = low - sampling.presence_penalty
    if sampling.greedy:
        return (np.arange(logits.size) == np.argmax(logits)).astype(np.float64)
    scaled = (logits - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or logits.size]
    weights = np.exp(scaled[order])
    enough = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    order = order[(enough < sampling.top_p) & (weights >= sampling.min_p)]
    exact = np.zeros(logits.size)
    exact[order] = np.exp(scaled[order])
    return exact / exact.sum()


def joint(table: np.ndarray, sampling: sampling_lib.Sampling) -> np.ndarray:
    """Return the probability of every text of three tokens after PROMPT, FIRST: [512].

    A text's index has its tokens as digits of base 8.
    """
    exact = np.zeros((toys.VOCAB,) * toys.SAID)
    for text in itertools.product(range(toys.VOCAB), repeat=toys.SAID):
        tokens, chance = [*toys.PROMPT, toys.FIRST], 1.0
        for token in text:
            if chance == 0:
                break
            logits = table[tokens[-2], tokens[-1]]
            chance *= following(logits, set(tokens), sampling)[token]
            tokens.append(token)
        exact[text] = chance
    return exact.reshape(-1)


def distance(counted: np.ndarray, exact: np.ndarray) -> float:
    """Return the total variation distance of frequencies from `exact`."""
    return float(np.abs(counted / counted.sum() - exact).sum() / 2)


class Yardstick(NamedTuple):
    """The distance of as many draws from the exact distribution: mean and deviation."""

    mean: float
    sigma: float

    def sigmas(self, distance: float) -> float:
        """Return how many deviations a distance lies above the mean."""
        above = distance - self.mean
        if self.sigma == 0:  # the text is certain
            return float("inf") if above > 0 else 0.0
        return above / self.sigma

    def bound(self, sigmas: float) -> float:
        """Return the distance that is so many deviations above the mean."""
        return self.mean + sigmas * self.sigma


def yardstick(exact: np.ndarray, total: int) -> Yardstick:
    """Measure exact samplers of `total` draws, by 200 of them, with a fixed seed."""
    return _yardstick(exact.tobytes(), total)


@functools.cache
def _yardstick(exact, total):
    exact = np.frombuffer(exact)
    drawn = np.random.default_rng(1).multinomial(total, exact, size=EXACT_DRAWS)
    distances = [distance(one, exact) for one in drawn]
    return Yardstick(float(np.mean(distances)), float(np.std(distances)))
