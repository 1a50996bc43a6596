"""Rows that a result file has already: a run that ended early goes on from there."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benching import code


def origin(*ops: str) -> dict[str, str]:
    """Return what tells rows apart that were measured with other kernels of `ops`."""
    return {"kernels": code.digest(*code.kernels(*ops))}


def keep(
    path: pathlib.Path | None,
    groups: Sequence[Sequence[Mapping[str, Any]]],
) -> list[list[dict[str, Any]]]:
    """Return the rows of the file for each group, none where one is missing.

    A row is described by some of its fields, those of `origin` among them, and has to
    be "ok". What was timed in turn stays together.

    Raises ValueError without a path, and for a file that holds no such rows.
    """
    if path is None:
        raise ValueError("resume is True; with --json FILE alone it is allowed")
    if not path.exists():
        return [[] for _ in groups]
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        good = [row for row in rows if row["state"] == "ok"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"json {path}: no such result ({error!r})") from error
    return [_group(good, group) for group in groups]


def _group(rows, group):
    found = []
    for wanted in group:
        # As a file holds it: tuples are lists there.
        fields = json.loads(json.dumps(dict(wanted))).items()
        found += [row for row in rows if fields <= row.items()][:1]
    return found if len(found) == len(group) else []
