"""Reading result files, and writing Markdown."""

import json
from typing import Any

from scripts import reporting


def read(name: str) -> dict[str, Any]:
    """Return the fields of a result file, named by device and script."""
    return json.loads((reporting.RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
