"""The largest batch whose step runs, searched from what the formula says.

A try compiles the step and takes two. It fails where XLA's count of bytes is above the
limit, or where an allocation fails; its arrays are let go before the next one. So
everything happens in one process and a model is made once. What `treewy_jax.memory`
predicts is (limit - weights) / (bytes of a row and its logits), which leaves out other
activations and workspace. The batches next to the first one tried compile beside it.
On a mesh all bytes are those of one device, and the same number of rows is added to
each part of the batch.
"""

import concurrent.futures
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts import command
from scripts.benching import step_floor, step_mesh, step_run, step_store
from treewy_jax import memory

STEPS = 2
RESOLUTION = 16  # the answer is exact to one in so many


class Tried(NamedTuple):
    """One try: whether it ran, bytes by XLA's count, and why it did not."""

    batch: int
    fits: bool
    peak_bytes: int | None
    reason: str | None


def largest(fits: Callable[[int], bool], first: int, most: int = 2**20) -> int:
    """Return the largest batch that fits, to one in RESOLUTION; 0 where none does.

    Strides from `first` double until it is between two batches that were tried.
    """
    low, high, stride = 0, most + 1, resolution(first)
    batch = min(first, most)
    while low < batch < high:
        if fits(batch):
            low, batch = batch, batch + stride
        else:
            high, batch = batch, max(1, batch - stride)
        if low and high <= most:
            break
        stride *= 2
    while high <= most and high - low > resolution(low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def resolution(batch: int) -> int:
    """Return the step to which a batch is told."""
    return max(1, batch // RESOLUTION)


def predicted(point: step_store.Point, held: step_run.Held, limit: int) -> int:
    """Return the batch by formula."""
    left = limit - step_mesh.nbytes(held.params)
    here = max(0, left // sum(_row_bytes(point, held).values()))
    return here * step_mesh.rows(held.mesh)


def _row_bytes(point, held) -> dict[str, int]:
    one = step_store.with_batch(point, step_mesh.rows(held.mesh))
    subject = step_run.subject_of(one, held.config, held.graphdef, held.params)
    tokens = step_mesh.vocabulary(held.config, held.mesh)
    logits = memory.logits_bytes(tokens, subject.drafter.n_max)
    return step_floor.per_row(subject, point.dtype, held.mesh) | {"logits": logits}


def search(
    point: step_store.Point, held: step_run.Held, limit: int, first: int | None
) -> dict[str, Any]:
    """Find the largest batch of a point; returns the fields of a row.

    The first try is `first`, by default the prediction.
    """
    tried: list[Tried] = []
    formula, parts = predicted(point, held, limit), step_mesh.rows(held.mesh)
    first = max(1, (first or formula) // parts)
    near = sorted({first, first + resolution(first), max(1, first - resolution(first))})
    points = [step_store.with_batch(point, parts * each) for each in near]
    ahead = dict(zip(near, step_run.side_by_side(points, held, limit), strict=True))

    def fits(each: int) -> bool:
        batch = parts * each
        one = step_store.with_batch(point, batch)
        made = ahead.pop(each, None) or step_run.side_by_side([one], held, limit)[0]
        tried.append(attempt(batch, made, held))
        found = tried[-1]
        command.note(f"B={batch}: {'runs' if found.fits else found.reason}")
        return found.fits

    return {
        "largest": parts * largest(fits, first),
        "predicted": formula,
        "limit_bytes": limit,
        "weight_bytes": step_mesh.nbytes(held.params),
        "row_bytes": _row_bytes(point, held),
        "tried": [one._asdict() for one in tried],
    }


def attempt(batch: int, made: concurrent.futures.Future, held: step_run.Held) -> Tried:
    """Take two of the steps that were compiled."""
    peak = None
    try:
        built = made.result()
        peak = built.peak_bytes
        step_run.running(built, held, STEPS)
    except step_run.OutOfMemory as error:
        return Tried(batch, False, peak, str(error))
    finally:
        gc.collect()
    return Tried(batch, True, peak, None)
