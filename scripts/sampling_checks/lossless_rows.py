"""Rows of bench_lossless.py as its file holds them, written and read back."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from scripts.sampling_checks import cases, exact, measure


def record(found: measure.Found) -> dict[str, Any]:
    """Return all that is known of a case."""
    sigmas = found.yardstick.sigmas(found.distance)
    return found.case._asdict() | {
        "samples": found.samples,
        "accepted": found.accepted,
        "tvd": found.distance,
        "exact_mean": found.yardstick.mean,
        "exact_sigma": found.yardstick.sigma,
        "sigmas": sigmas if math.isfinite(sigmas) else None,
        "passed": found.passed,
        "seconds": found.seconds,
    }


def kept(
    path: pathlib.Path, about: Mapping[str, Any]
) -> dict[cases.Case, measure.Found]:
    """Return the rows of a file by case, where they are about the same, else none.

    Raises ValueError for a file that is no such result.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["about"] != about:
            return {}
        found = [_read(row) for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"json {path}: no such result ({error!r})") from None
    return {one.case: one for one in found}


def _read(row: Mapping[str, Any]) -> measure.Found:
    case = cases.Case(**{name: row[name] for name in cases.Case._fields})
    return measure.Found(
        case=case,
        samples=row["samples"],
        distance=row["tvd"],
        yardstick=exact.Yardstick(row["exact_mean"], row["exact_sigma"]),
        accepted=row["accepted"],
        seconds=row["seconds"],
    )
