"""Benchmark prompts: JSON lines of one file, or of all files in a folder.

A line has its text in `turns` (Spec-Bench, MT-bench: the first turn is used), `prompt`
(HumanEval) or `question` (GSM8K); what has no category or source gets the file's name.
"""

import gzip
import json
import pathlib
from collections.abc import Sequence
from typing import Any

PROMPTS = pathlib.Path(__file__).parents[1] / "data" / "prompts80.jsonl"
ENDINGS = (".jsonl", ".jsonl.gz")


def read(path: pathlib.Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return entries with turns, category and source, in the order of the files.

    `limit` keeps so many of each source and category.

    Raises:
        ValueError: no such file or folder, no prompts in it, or a line without text.
    """
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.name.endswith(ENDINGS))
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; 1 or more is allowed")
    entries = [entry for one in files for entry in _read_file(one)]
    if not entries:
        raise ValueError(f"prompts {path}: no prompts; JSON lines are allowed")
    counts: dict[tuple, int] = {}
    kept = []
    for entry in entries:
        group = (entry["source"], entry["category"])
        counts[group] = counts.get(group, 0) + 1
        if limit is None or counts[group] <= limit:
            kept.append(entry)
    return kept


def rotated(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with sources and categories in turn, one of each a round."""
    order = sorted(enumerate(_places(entries)), key=lambda pair: (pair[1], pair[0]))
    return [entries[number] for number, _ in order]


def halves(entries: Sequence[dict[str, Any]]) -> list[int]:
    """Return 0 or 1 of each entry: those of a source and category take turns."""
    return [place % 2 for place in _places(entries)]


def _places(entries) -> list[int]:
    """Return how many of the same source and category come before each entry."""
    counts: dict[tuple, int] = {}
    found = []
    for entry in entries:
        group = (entry["source"], entry["category"])
        found.append(counts.get(group, 0))
        counts[group] = found[-1] + 1
    return found


def _read_file(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"prompts {path}: {error}") from None
    numbered = enumerate(lines, 1)
    return [_entry(path, number, line) for number, line in numbered if line.strip()]


def _entry(path: pathlib.Path, number: int, line: str) -> dict[str, Any]:
    name = path.name.split(".")[0]
    try:
        found = json.loads(line)
        turns = found.get("turns") or [found.get("prompt") or found["question"]]
        first = turns[0]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        first = None
    if not isinstance(first, str) or not first.strip():
        raise ValueError(
            f"prompts {path}: line {number} has no text; JSON with turns, prompt or "
            "question is allowed"
        )
    return {"category": name, "source": name} | found | {"turns": turns}
