"""Points of the step benchmark, and the files that their rows are kept in.

A row is the answer to a point for a state of the code. `Store.add` writes the whole
file anew and lets it take its place at once, so that a run that is stopped loses
nothing; what is there is not measured again while the code is the same.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import reporting
from scripts.benching import code

# What decides the compiled step: libraries, block sizes, and the acceptance.
OWN = ("step_inject.py", "step_state.py", "step_program.py")
SOURCES = (
    "models",
    "treewy_jax",
    "pallas_kernels",
    *(f"scripts/benching/{name}" for name in OWN),
)
# And the step on a mesh.
MESH_SOURCE = "scripts/benching/step_mesh.py"


@dataclasses.dataclass(frozen=True)
class Point:
    """What one row is about.

    Attributes:
        model: name, or folder.
        layers: of the target; None: all.
        tree: widths of each level, or none.
        commit: lifecycle; `horizon` is that of deferred, None for others.
        accept: share of steps that accept at least 1, 2, ... drafts.
        router: loads of the experts.
        context: tokens that the state covers at first.
        batch: rows; None where the largest is asked for.
        mesh: devices, as `step_mesh.canonical` writes them; None: one.
    """

    model: str
    layers: int | None
    dtype: str
    state_dtype: str
    tree: str
    commit: str
    horizon: int | None
    accept: tuple[float, ...]
    router: str
    context: int
    batch: int | None
    mesh: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a file holds them: without a mesh of None."""
        found = dataclasses.asdict(self)
        if self.mesh is None:
            del found["mesh"]
        return json.loads(json.dumps(found))

    @property
    def label(self) -> str:
        """One line for tables."""
        horizon = f" {self.horizon}" if self.horizon else ""
        mesh = f", {self.mesh}" if self.mesh else ""
        size = self.batch or "largest"
        return f"{self.commit}{horizon}, tree {self.tree}, B={size}{mesh}"


def code_key() -> str:
    """Return a digest of the code that is timed, of JAX and of the device."""
    return code.digest(*SOURCES)


def _key_of(point: Point) -> str:
    """Return the digest of what a point's figures depend on."""
    return code_key() if point.mesh is None else code.digest(*SOURCES, MESH_SOURCE)


def with_batch(point: Point, batch: int) -> Point:
    """Return the point with so many rows."""
    return dataclasses.replace(point, batch=batch)


def clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of a row that count: of its kernels, or else the wall's."""
    return row["device_ms"] or row["wall_ms"]


class Store:
    """The rows of one JSON file.

    Rows are {"kind", "point", "code", ...}; a point has one row of each kind.
    """

    def __init__(self, path: pathlib.Path | None, about: Mapping[str, Any]):
        """Read what is there.

        Raises ValueError for a file that is no result of this kind.
        """
        self.path, self.about = path, dict(about)
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.rows = _read(path)

    def has(self, kind: str, point: Point, *fields: str) -> bool:
        """Return whether this code has answered the point, with these fields."""
        found = self._find(kind, point)
        return (
            found is not None
            and found["code"] == _key_of(point)
            and ("problem" in found or set(fields) <= found.keys())
        )

    def add(self, kind: str, point: Point, answer: Mapping[str, Any]) -> None:
        """Keep an answer, in the place of an older one, and write the file."""
        key = _key_of(point)
        row = {"kind": kind, "point": point.as_json(), "code": key, **answer}
        old = self._find(kind, point)
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row
        if self.path is not None:
            reporting.write_result(self.path, self.about | {"rows": self.rows})

    def _find(self, kind: str, point: Point) -> dict[str, Any] | None:
        wanted = (kind, point.as_json())
        matching = (r for r in self.rows if (r["kind"], r["point"]) == wanted)
        return next(matching, None)


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        known = all({"kind", "point", "code"} <= row.keys() for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no result of bench_step.py ({error})") from error
    if not known:
        raise ValueError(f"{path}: rows without kind, point or code")
    return rows


def read_steptime(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the entries of a simulator's file, none where there is no file.

    Raises ValueError for a file that is no such table.
    """
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text("utf-8"))["entries"]
        for entry in entries:
            _key(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no table of step times ({error})") from error
    return entries


def merge_steptime(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the timed rows into a file for simulators; see scripts/bench_step.py."""
    entries = {_key(entry): entry for entry in read_steptime(path)}
    for row in rows:
        if row["kind"] == "step" and row.get("wall_ms"):
            entry = _entry(row)
            entries[_key(entry)] = entry
    fields = {"schema": "steptime/1", "entries": list(entries.values())}
    reporting.write_result(path, fields)


KEYS = (
    "model", "layers", "dtype", "state_dtype", "lifecycle", "horizon", "tree", "batch",
    "context", "accept", "router",
)  # fmt: skip


def _key(entry: Mapping[str, Any]) -> tuple:
    return (*(json.dumps(entry[name]) for name in KEYS), entry.get("mesh"))


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    point = {**row["point"], "lifecycle": row["point"]["commit"]}
    copied = ("nodes", "accept_length", "floor_ms", "peak_bytes", "code")
    times = {
        "ms": row["wall_ms"]["mean"],
        "device_ms": row["device_ms"] and row["device_ms"]["mean"],
    }
    mesh = {"mesh": point["mesh"]} if "mesh" in point else {}
    return (
        {name: point[name] for name in KEYS}
        | mesh
        | times
        | {name: row[name] for name in copied}
    )
