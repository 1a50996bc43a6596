"""Rows that a result file has already: a run that ended early goes on from there."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.benching import code

ORIGIN = "kernels"


def origin(*ops: str) -> dict[str, str]:
    """Return what tells rows apart that were measured with other kernels of `ops`."""
    return {ORIGIN: code.digest(*code.kernels(*ops))}


class Kept(NamedTuple):
    """Rows of a file.

    Attributes:
      others: rows of what is not asked for now; they stay, of whatever kernels.
      groups: for each group all its rows, or none where one is missing.
    """

    others: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]


def keep(
    path: pathlib.Path | None,
    groups: Sequence[Sequence[Mapping[str, Any]]],
) -> Kept:
    """Return the rows of the file that stay.

    What is asked for is described by some fields of its row, those of `origin` among
    them; its row has to be "ok". What was timed in turn stays together.

    Raises ValueError without a path, and for a file that holds no such rows.
    """
    if path is None:
        raise ValueError("resume is True; with --json FILE alone it is allowed")
    if not path.exists():
        return Kept([], [[] for _ in groups])
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        good = [row for row in rows if row["state"] == "ok"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"json {path}: no such result ({error!r})") from error
    # As a file holds it: tuples are lists there.
    asked = [[json.loads(json.dumps(dict(each))) for each in group] for group in groups]
    named = [
        {name: value for name, value in each.items() if name != ORIGIN}
        for group in asked
        for each in group
    ]
    others = [row for row in good if not any(_fits(row, each) for each in named)]
    return Kept(others, [_group(good, group) for group in asked])


def _group(rows, group):
    found = [row for each in group for row in rows if _fits(row, each)]
    return found if len(found) == len(group) else []


def _fits(row: dict[str, Any], fields: Mapping[str, Any]) -> bool:
    return fields.items() <= row.items()
