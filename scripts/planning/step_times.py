"""Step times of one setting from a file of bench_step.py, by batch."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from scripts.benching import step_store
from scripts.decoding import topology
from treewy_jax import planning

# What a file may mix, and what therefore may have to be chosen.
SETTINGS = {
    "model": "model",
    "layers": "layers",
    "dtype": "dtype",
    "state_dtype": "state-dtype",
    "lifecycle": "commit",
    "horizon": "horizon",
    "context": "context",
    "router": "router",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Step times of the batches that were measured, in between by straight lines.

    `deepest` is the depth of the deepest tree that was timed at every batch: what a
    level of drafting costs beyond it, is a guess.
    """

    batches: tuple[int, ...]
    fits: tuple[planning.StepTimes, ...]
    deepest: int

    def at(self, batch: int, nodes: int, depth: int) -> float:
        """Return the milliseconds of a step."""
        return float(
            np.interp(batch, self.batches, [fit(nodes, depth) for fit in self.fits])
        )

    def check(self, batch: int) -> None:
        """Raise ValueError for a batch outside of what was measured."""
        if not self.batches[0] <= batch <= self.batches[-1]:
            raise ValueError(
                f"batch is {batch}; the step times are of {self.batches[0]} to "
                f"{self.batches[-1]} rows"
            )

    def covers(self, nodes: int, depth: int) -> bool:
        """Return whether trees as large, as small and as deep were timed everywhere."""
        return depth <= self.deepest and all(fit.covers(nodes) for fit in self.fits)


def read(path: pathlib.Path, wanted: Mapping[str, Any]) -> tuple[Table, dict[str, Any]]:
    """Return the times of the entries that have the wanted settings, and these.

    `wanted` maps names of `SETTINGS` to values; None takes what the file has, which
    then has to be one value. "mesh" is another one: the entries of one device are
    taken without it.

    Raises:
        ValueError: no file of step times, no such entry, or a setting left open.
    """
    if not path.exists():
        raise ValueError(f"step-time {path}: no such file")
    entries, mesh = step_store.read_steptime(path), wanted.get("mesh")
    entries = _on(path, mesh, entries)
    for name, value in wanted.items():
        if value is not None and name in SETTINGS:
            known = sorted({str(entry[name]) for entry in entries})
            entries = [entry for entry in entries if entry[name] == value]
            if not entries:
                raise ValueError(
                    f"step-time {path}: no entry has {SETTINGS[name]} {value}; there "
                    f"are {', '.join(known) or 'none'}"
                )
    if not entries:
        raise ValueError(f"step-time {path}: it has no entry")
    settings = {name: _only(path, name, entries) for name in SETTINGS}
    return _table(path, entries), settings | ({"mesh": mesh} if mesh else {})


def _on(path, mesh, entries) -> list[dict[str, Any]]:
    """Return the entries of one device, or of a mesh."""
    found = [entry for entry in entries if entry.get("mesh") == mesh]
    if entries and not found:
        known = sorted({entry.get("mesh") or "one device" for entry in entries})
        raise ValueError(
            f"step-time {path}: no entry has mesh {mesh or 'none'}; there are "
            f"{', '.join(known)}"
        )
    return found


def _only(path, name, entries) -> Any:
    values = list(dict.fromkeys(entry[name] for entry in entries))
    if len(values) > 1:
        listed = ", ".join(map(str, values))
        raise ValueError(
            f"step-time {path}: several values of {SETTINGS[name]} ({listed}); choose "
            f"one with --{SETTINGS[name]}"
        )
    return values[0]


def _table(path, entries) -> Table:
    points: dict[int, list[tuple[int, int, float]]] = {}
    for entry in entries:
        parents = topology.parents(entry["tree"], n_max=2**16)
        point = (len(parents), planning.depth_of(parents), float(entry["ms"]))
        points.setdefault(int(entry["batch"]), []).append(point)
    try:
        fits = {batch: planning.StepTimes.fit(of) for batch, of in points.items()}
    except ValueError as error:
        raise ValueError(f"step-time {path}: {error}") from None
    batches = sorted(fits)
    deepest = min(max(depth for _, depth, _ in points[batch]) for batch in batches)
    return Table(tuple(batches), tuple(fits[batch] for batch in batches), deepest)
