"""Rows that bench_acceptance.py is asked for, and those that its file has already."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.benching import code
from treewy_jax import sampling as sampling_lib

SOURCES = ("models", "treewy_jax", "pallas_kernels", "scripts/accepting")
# What a row does not depend on, or says itself.
APART = ("trees", "drafters", "temperatures", "rows", "out", "plot", "resume", "plan")
FIELDS = ("cells", "rates", "ranks", "planned", "texts")


class Wanted(NamedTuple):
    """A tree, the drafter that fills it or has its size, and a temperature."""

    tree: str
    drafter: str = "mtp"
    temperature: float = 0.0


def rows(chosen: Any) -> list[Wanted]:
    """Return the rows by temperature: those named, else all that lists make.

    Raises ValueError for what names no row.
    """
    if chosen.rows:
        found = [parse(text) for text in chosen.rows]
    else:
        found = [
            Wanted(tree, drafter, temperature)
            for temperature in chosen.temperatures
            for tree in chosen.trees
            for drafter in chosen.drafters
        ]
    return sorted(dict.fromkeys(found), key=lambda one: one.temperature)


def parse(text: str) -> Wanted:
    """Read "3,3,3", "3,3,3@dynamic" or "3,3,3@mtp@0.5".

    >>> parse("3,2,1@dynamic")
    Wanted(tree='3,2,1', drafter='dynamic', temperature=0.0)
    """
    tree, *more = text.split("@")
    try:
        temperature = float(more[1]) if len(more) > 1 else 0.0
        sampling_lib.Sampling(temperature=temperature)
    except ValueError as error:
        raise ValueError(f"rows: {text!r}: temperature: {error}") from None
    if len(more) > 2 or not tree or "" in more:
        raise ValueError(
            f"rows: {text!r}; TREE, TREE@DRAFTER or TREE@DRAFTER@TEMPERATURE is allowed"
        )
    return Wanted(tree, more[0] if more else "mtp", temperature)


def setting(chosen: Any) -> dict[str, Any]:
    """Return what rows depend on beside themselves, as a file holds it."""
    fields = dataclasses.asdict(chosen) | {"prompts": chosen.prompts.name}
    for name in APART:
        del fields[name]
    return fields | {"code": code.digest(*SOURCES)}


def kept(path: pathlib.Path, chosen: Any) -> dict[str, list]:
    """Return the fields of a file with the same setting, else empty ones.

    Raises ValueError for a file that is no such result.
    """
    found: dict[str, list] = {name: [] for name in FIELDS}
    if not (chosen.resume and path.exists()):
        return found
    try:
        content = json.loads(path.read_text("utf-8"))
        if content.get("setting") != setting(chosen):
            return found
        found = {name: list(content[name]) for name in FIELDS}
        for cell in found["cells"]:
            of_cell(cell)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"out {path}: no such result ({error!r})") from None
    return found


def of_cell(cell: Mapping[str, Any]) -> Wanted:
    """Return what a cell of a result is about."""
    return Wanted(cell["tree"], cell["drafter"], cell["temperature"])


def missing(wanted: Sequence[Wanted], found: Mapping[str, list]) -> list[Wanted]:
    """Return the rows that no cell is about."""
    have = {of_cell(cell) for cell in found["cells"]}
    return [one for one in wanted if one not in have]
