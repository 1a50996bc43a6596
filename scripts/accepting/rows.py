"""Accept lengths of decoded prompts, and their means with bootstrap intervals."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GRAM = 6
RESAMPLES = 2000


class Row(NamedTuple):
    """One prompt decoded with one tree; `lengths` are of steps not cut short."""

    token_ids: list[int]
    lengths: list[int]

    @property
    def unlooped(self) -> list[int]:
        """The steps that end before the text repeats a 6-gram of its own."""
        ends = 1 + np.cumsum(self.lengths)
        kept = ends <= first_repeat(self.token_ids)
        return [a for a, keep in zip(self.lengths, kept, strict=True) if keep]


def first_repeat(tokens: Sequence[int], gram: int = GRAM) -> int:
    """Return how many tokens come before the first 6-gram that occurred before ends."""
    seen = set()
    for end in range(gram, len(tokens) + 1):
        piece = tuple(tokens[end - gram : end])
        if piece in seen:
            return end - 1
        seen.add(piece)
    return len(tokens)


def measure(entries: Sequence[dict], rows: Sequence[Row]) -> dict[str, Any]:
    """Return acceptance over all rows, by source and by category."""
    groups = {"all": list(rows)}
    for name in ("source", "category"):
        for value in sorted({entry[name] for entry in entries}):
            pairs = zip(entries, rows, strict=True)
            groups[value] = [row for entry, row in pairs if entry[name] == value]
    return {name: summary(group) for name, group in groups.items()}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return mean accept lengths with 95 % bootstrap intervals over prompts."""
    fields: dict[str, Any] = {
        "prompts": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
    }
    for name in ("lengths", "unlooped"):
        steps = [getattr(row, name) for row in rows]
        mean, interval = bootstrap(steps)
        fields[name] = {
            "mean": mean,
            "interval": interval,
            "steps": sum(map(len, steps)),
        }
    return fields


def bootstrap(steps: Sequence[list[int]]) -> tuple[float | None, list[float] | None]:
    """Return the mean over all steps, and its interval when prompts are redrawn."""
    sums, counts = _totals(steps)
    if not counts.sum():
        return None, None
    means = _redrawn(sums, counts)
    return round(float(sums.sum() / counts.sum()), 4), _interval(means)


def difference(
    ours: Sequence[list[int]], theirs: Sequence[list[int]]
) -> tuple[float, list[float]]:
    """Return by how much the first mean is above the second, prompts redrawn in pairs.

    The interval holds 95 % of the redrawn differences.
    """
    pairs = [_totals(ours), _totals(theirs)]
    means = [sums.sum() / counts.sum() for sums, counts in pairs]
    first, second = (_redrawn(sums, counts) for sums, counts in pairs)
    return round(float(means[0] - means[1]), 4), _interval(first - second)


def by_depth(rows: Sequence[Row], depth: int) -> list[float]:
    """Return the shares of steps that accept at least 1, 2, ... drafts."""
    lengths = np.array([length for row in rows for length in row.lengths])
    if not lengths.size:
        return []
    return [round(float(np.mean(lengths > d)), 4) for d in range(1, depth + 1)]


def _totals(steps):
    return tuple(np.array([f(s) for s in steps], float) for f in (sum, len))


def _redrawn(sums, counts):
    """Return the means of redrawn prompts: the same draws for the same prompts."""
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    return sums[drawn].sum(1) / np.maximum(counts[drawn].sum(1), 1)


def _interval(values) -> list[float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return [round(float(low), 3), round(float(high), 3)]
