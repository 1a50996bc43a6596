"""Acceptance rates in a result file: written by bench_acceptance.py, read by planners.

An entry of "rates" says, of one drafter, temperature and depth of trees, how often a
parent was reached and each of its children accepted, by level, context and rank
(treewy_jax.planning):

    {"drafter": "mtp", "temperature": 0.0, "depth": D, "reference": parents,
     "reached": [D][C], "accepted": [D][C][R]}

Counted are the roots at which a tree of this depth begins its whole steps: those of
`reference`, the best tree of 16 nodes by these very rates (found by repetition).
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.accepting import probe
from treewy_jax import planning
from treewy_jax.planning import trees

WIDTH = 8
CONTEXTS = 3
REFERENCE = 16
ROUNDS = 5


def entries(
    drafter: str, temperature: float, ranks: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return the entries of measured ranks (scripts/accepting/probe.py), by depth."""
    about = {"drafter": drafter, "temperature": temperature}
    return [
        about | _entry([one[:, :depth] for one in ranks], depth)
        for depth in range(1, ranks[0].shape[1] + 1)
    ]


def _entry(ranks, depth) -> dict[str, Any]:
    """Count at the roots of the best tree's steps; what is best depends on the counts.

    The first tree is the best one by the rates at all positions.
    """
    reached, accepted = _counts(ranks)
    parents: list[int] = []
    for _ in range(ROUNDS):
        best = planning.optimal(_rates(reached, accepted), REFERENCE, depth)
        if best == parents:
            break
        parents = best
        reached, accepted = _counts(probe.at_roots(ranks, parents))
    return {
        "depth": depth,
        "reference": parents,
        "reached": reached.tolist(),
        "accepted": accepted.tolist(),
    }


def _counts(ranks) -> tuple[np.ndarray, np.ndarray]:
    counts = [trees.count(one, width=WIDTH, contexts=CONTEXTS) for one in ranks]
    reached, accepted = zip(*counts, strict=True)
    return np.sum(reached, axis=0), np.sum(accepted, axis=0)


def _rates(reached, accepted) -> planning.Rates:
    return planning.Rates(accepted / np.maximum(reached, 1)[..., None])


def read(path: pathlib.Path, drafter: str, temperature: float) -> planning.ByDepth:
    """Return the rates of a drafter at a temperature, by the depth of trees.

    Raises ValueError, one line, for a file that has none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))["rates"]
        known = [(one["drafter"], one["temperature"]) for one in found]
    except OSError as error:
        raise ValueError(f"from {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"from {path}: no rates of bench_acceptance.py ({error!r})"
        ) from None
    wanted = (drafter, temperature)
    if wanted not in known:
        listed = ", ".join(f"{name} at {t:g}" for name, t in dict.fromkeys(known))
        raise ValueError(
            f"from {path}: no rates of {drafter} at temperature {temperature:g}; the "
            f"file has {listed or 'none'}"
        )
    pairs = zip(known, found, strict=True)
    return from_entries(path, [one for key, one in pairs if key == wanted])


def from_entries(path: pathlib.Path, found: Sequence[dict]) -> planning.ByDepth:
    """Return accepted / reached of entries of one drafter and temperature.

    Raises ValueError where the two are no counts of the depth that they name.
    """
    made = {}
    try:
        for one in found:
            reached = np.array(one["reached"], float)
            accepted = np.array(one["accepted"], float)
            shapes = f"{reached.shape} and {accepted.shape}, depth {one['depth']}"
            if reached.ndim != 2 or accepted.shape[:-1] != reached.shape:
                raise ValueError(f"shapes {shapes}")
            if len(reached) != one["depth"]:
                raise ValueError(f"shapes {shapes}")
            made[int(one["depth"])] = _rates(reached, accepted)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"from {path}: rates are no counts ({error})") from None
    return dict(sorted(made.items()))


def by_depth_and_rank(found: dict[str, Any]) -> np.ndarray:
    """Return accepted / reached over all contexts, [D, R]."""
    reached = np.sum(found["reached"], axis=1)
    accepted = np.sum(found["accepted"], axis=1)
    return accepted / np.maximum(reached, 1)[:, None]
