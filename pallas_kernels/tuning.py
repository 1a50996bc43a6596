"""Block sizes that were measured to be best: tables of `tuned/<device kind>.json`.

A file holds a list of entries {"match": {field of Spec: value, ...}, "config": {field
of Config: value, ...}}. A list as value means any of its elements, {"most": x} at most
x. The first entry whose fields all agree is taken.
"""

import functools
import json
import pathlib
import re
from typing import Any


def lookup(folder: pathlib.Path, device_kind: str, spec: Any) -> dict | None:
    """Return the "config" of the first entry that matches `spec`, or None."""
    for entry in _table(folder / f"{slug(device_kind)}.json"):
        if all(_agrees(getattr(spec, k), want) for k, want in entry["match"].items()):
            return entry["config"]
    return None


def slug(device_kind: str) -> str:
    """Return the file name of a device: "NVIDIA H200" is nvidia_h200."""
    return re.sub("[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def _agrees(value: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return value <= want["most"]
    return value in want if isinstance(want, list) else value == want


@functools.cache
def _table(file: pathlib.Path) -> list[dict]:
    return json.loads(file.read_text()) if file.exists() else []
