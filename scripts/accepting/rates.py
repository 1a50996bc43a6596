"""Acceptance rates in a result file: written by bench_acceptance.py, read by planners.

An entry of "rates" says, of one drafter, temperature and depth of trees, how often a
parent was reached and each of its children accepted, by level, context and rank
(treewy_jax.planning):

    {"drafter": "mtp", "temperature": 0.0, "depth": D, "reference": parents,
     "reached": [D][C], "accepted": [D][C][R]}

Counted are the roots at which a tree of this depth begins its whole steps: those of
`reference`, the best tree of 16 nodes by these very rates (found by repetition).

An entry of "ranks" has what the rates are made from, a prompt a line:

    {"drafter": "mtp", "temperature": 0.0, "depth": D,
     "prompts": [{"half": 0 or 1, "ranks": "0100..."}]}

D characters for each root, the ranks of the tokens that follow: a digit, 8 for 8 and
more, - behind the end. From it come rates at the roots of smaller and of larger trees,
and those of halves of the prompts (scripts/accepting/prompts.py).
"""

import dataclasses
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
LARGE = 40  # nodes, and depth + 1 is the least of a depth: other references
END = "-"


def entries(
    drafter: str, temperature: float, ranks: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return the entries of measured ranks (scripts/accepting/probe.py), by depth."""
    about = {"drafter": drafter, "temperature": temperature}
    return [
        about | _entry([one[:, :depth] for one in ranks], depth, REFERENCE)
        for depth in range(1, ranks[0].shape[1] + 1)
    ]


def as_text(
    drafter: str, temperature: float, ranks: Sequence[np.ndarray], halves: Sequence[int]
) -> dict[str, Any]:
    """Return measured ranks as an entry of "ranks"; see above."""
    lines = [
        "".join(END if rank < 0 else str(min(rank, WIDTH)) for rank in one.flat)
        for one in ranks
    ]
    return {
        "drafter": drafter,
        "temperature": temperature,
        "depth": ranks[0].shape[1],
        "prompts": [
            {"half": half, "ranks": line}
            for half, line in zip(halves, lines, strict=True)
        ],
    }


def from_ranks(ranks: Sequence[np.ndarray]) -> planning.ByDepth:
    """Return rates of all depths, each at the roots of trees of several sizes."""
    return {
        depth: _sized([one[:, :depth] for one in ranks], depth)
        for depth in range(1, ranks[0].shape[1] + 1)
    }


def _sized(ranks, depth) -> planning.Rates:
    found = {
        size: _rates(*(np.array(entry[name]) for name in ("reached", "accepted")))
        for size in sorted({depth + 1, REFERENCE, LARGE})
        for entry in [_entry(ranks, depth, size)]
    }
    return dataclasses.replace(found[REFERENCE], sized=tuple(found.items()))


def _entry(ranks, depth, size) -> dict[str, Any]:
    """Count at the roots of the best tree's steps; what is best depends on the counts.

    The first tree is the best one by the rates at all positions.
    """
    reached, accepted = _counts(ranks)
    parents: list[int] = []
    for _ in range(ROUNDS):
        best = planning.optimal(_rates(reached, accepted), size, depth)
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
    content = _content(path)
    try:
        found = content["rates"]
        known = [(one["drafter"], one["temperature"]) for one in found]
    except (KeyError, TypeError) as error:
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
    ranks, _ = _kept(path, content, wanted)
    if ranks:
        return from_ranks(ranks)
    pairs = zip(known, found, strict=True)
    return from_entries(path, [one for key, one in pairs if key == wanted])


def read_halves(
    path: pathlib.Path, drafter: str, temperature: float
) -> list[planning.ByDepth]:
    """Return the rates of both halves of the prompts; none where no ranks are kept.

    Raises ValueError, one line, for a file with wrong ones.
    """
    ranks, halves = _kept(path, _content(path), (drafter, temperature))
    parts = [
        [one for one, of in zip(ranks, halves, strict=True) if of == half]
        for half in (0, 1)
    ]
    return [from_ranks(part) for part in parts] if all(parts) else []


def _content(path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"from {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(
            f"from {path}: no rates of bench_acceptance.py ({error!r})"
        ) from None


def as_ranks(
    entries: Sequence[dict[str, Any]], drafter: str, temperature: float
) -> tuple[list[np.ndarray], list[int]]:
    """Return ranks and half of each prompt from entries of "ranks"; none without one.

    Raises ValueError, KeyError or TypeError for wrong ones.
    """
    for entry in entries:
        if (entry["drafter"], entry["temperature"]) == (drafter, temperature):
            lines = [one["ranks"] for one in entry["prompts"]]
            shape = (-1, int(entry["depth"]))
            found = [np.array([-1 if c == END else int(c) for c in x]) for x in lines]
            halves = [one["half"] for one in entry["prompts"]]
            return [one.astype(int).reshape(shape) for one in found], halves
    return [], []


def _kept(path, content, wanted) -> tuple[list[np.ndarray], list[int]]:
    try:
        return as_ranks(content.get("ranks", ()), *wanted)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"from {path}: wrong ranks ({error!r})") from None


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
