"""The largest batch whose step runs: doubled until memory ends, then bisected.

A try compiles the step and takes two. It fails where XLA's count of bytes is above the
limit, or where an allocation fails; its arrays are let go before the next one. So
everything happens in one process and a model is made once. What `treewy_jax.memory`
predicts stands beside: (limit - weights) / (bytes of a row), which leaves out logits,
activations and workspace.
"""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.benching import command, step_floor, step_run, step_store
from treewy_jax import pytree

STEPS = 2
RESOLUTION = 16  # the answer is exact to one in so many


class Tried(NamedTuple):
    """One try: whether it ran, bytes by XLA's count, and why it did not."""

    batch: int
    fits: bool
    peak_bytes: int | None
    reason: str | None


def largest(fits: Callable[[int], bool], first: int, most: int = 2**20) -> int:
    """Return the largest batch that fits, to one in RESOLUTION; 0 where none does."""
    low, high = 0, first
    while high <= most and fits(high):
        low, high = high, 2 * high
    if low == 0:
        high = first
        while high > 1 and not fits(high // 2):
            high //= 2
        low = high // 2
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def predicted(point: step_store.Point, held: step_run.Held, limit: int) -> int:
    """Return the batch by formula."""
    left = limit - pytree.nbytes(held.params)
    return max(0, left // sum(_row_bytes(point, held).values()))


def _row_bytes(point, held) -> dict[str, int]:
    one = step_store.with_batch(point, 1)
    subject = step_run.subject_of(one, held.config, held.graphdef, held.params)
    return step_floor.per_row(subject, point.dtype)


def search(
    point: step_store.Point, held: step_run.Held, limit: int, first: int | None
) -> dict[str, Any]:
    """Find the largest batch of a point; returns the fields of a row.

    The first try is `first`, by default a power of two below half the prediction.
    """
    tried: list[Tried] = []

    def fits(batch: int) -> bool:
        found = attempt(step_store.with_batch(point, batch), held, limit)
        tried.append(found)
        command.note(f"B={batch}: {'runs' if found.fits else found.reason}")
        return found.fits

    formula = predicted(point, held, limit)
    start = first or 1 << max(0, (formula // 2).bit_length() - 1)
    return {
        "largest": largest(fits, start),
        "predicted": formula,
        "limit_bytes": limit,
        "weight_bytes": pytree.nbytes(held.params),
        "row_bytes": _row_bytes(point, held),
        "tried": [one._asdict() for one in tried],
    }


def attempt(point: step_store.Point, held: step_run.Held, limit: int) -> Tried:
    """Compile and take two steps."""
    peak = None
    try:
        built = step_run.compiled(point, held, limit)
        peak = built.peak_bytes
        step_run.running(built, held, STEPS)
    except step_run.OutOfMemory as error:
        return Tried(point.batch, False, peak, str(error))
    finally:
        gc.collect()
    return Tried(point.batch, True, peak, None)
