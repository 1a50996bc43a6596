"""What XLA adds around the work: instructions of a compiled program that only move.

Copies made by the device's copy engine are in no list of kernels, so they are read
from the optimised program.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
MOVES = {
    "broadcast", "concatenate", "copy", "dynamic-slice", "dynamic-update-slice",
    "pad", "reshape", "slice", "transpose",
}  # fmt: skip
# In a fusion, what may stand beside moves of floats without computing any.
SILENT = {"bitcast", "constant", "get-tuple-element", "parameter", "select", "tuple"}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")


class Move(NamedTuple):
    """An instruction that moves floats: `nbytes` are written, `times` in a run."""

    name: str
    shape: str
    nbytes: int
    times: int
    source: str


class Line(NamedTuple):
    """One instruction."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    root: bool


def moves(program: str, least: int = 2**20) -> list[Move]:
    """Return the moves of at least `least` bytes in optimised HLO, the largest first.

    Broadcasts of constants count too: they write. Of an update in place, the update
    counts.
    """
    computations, entry = _read(program)
    found = list(_walk(computations, entry, 1)) if entry else []
    found = [move for move in found if move.nbytes >= least]
    return sorted(found, key=lambda move: -move.nbytes * move.times)


def sources(program: str) -> dict[str, str]:
    """Return where each instruction, kernels included, comes from in the source."""
    pattern = r'^\s+(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"'
    return dict(re.findall(pattern, program, re.MULTILINE))


def _read(program: str) -> tuple[dict[str, list[Line]], str | None]:
    computations: dict[str, list[Line]] = {}
    entry, lines = None, []
    for text in program.splitlines():
        if head := COMPUTATION.match(text):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif part := INSTRUCTION.match(text):
            operands = tuple(re.findall(r"%([\w.\-]+)", part[5]))
            lines.append(Line(part[2], part[3], part[4], operands, text, bool(part[1])))
    return computations, entry


def _walk(computations, name: str, times: int) -> Iterator[Move]:
    """Follow loops and calls; fusions are looked into, not followed."""
    for line in computations[name]:
        called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line.text)
        if line.opcode == "while":
            body = re.search(r"body=%?([\w.\-]+)", line.text)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
            trips = int(trips[1]) if trips else 1
            yield from _walk(computations, body[1], times * trips)
        elif line.opcode == "call" and called:
            yield from _walk(computations, called[1], times)
        elif line.opcode in ("fusion", "fusion-start", "async-start") and called:
            inner = computations[called[1]]
            if _only_moves(inner):
                yield _move(line, inner, times)
        elif line.opcode.removesuffix("-start") in MOVES and line.opcode != "reshape":
            yield _move(line, [line], times)


def _only_moves(lines: list[Line]) -> bool:
    """Tell whether no float is computed; numbers of rows may be."""
    floats = {line.opcode for line in lines if nbytes(line.shape)}
    return bool(floats & MOVES) and floats <= MOVES | SILENT


def _move(line: Line, inner: list[Line], times: int) -> Move:
    shapes = {part.name: part.shape for part in inner}
    updates = [
        shapes[part.operands[1]]
        for part in inner
        if part.opcode == "dynamic-update-slice" and part.operands[1] in shapes
    ]
    roots = [part.shape for part in inner if part.root] or [line.shape]
    written = updates or roots
    source = re.search(r'op_name="([^"]*)"', line.text)
    shape = ", ".join(f"{kind}[{sizes}]" for kind, sizes in ARRAY.findall(written[0]))
    size = sum(map(nbytes, written))
    return Move(line.name, shape, size, times, source[1] if source else "")


def nbytes(shape: str) -> int:
    """Return the bytes of the floats in a shape; single numbers count as none."""
    total = 0
    for kind, sizes in ARRAY.findall(shape):
        if kind in SIZES and sizes:
            count = 1
            for size in sizes.split(","):
                count *= int(size)
            total += count * SIZES[kind]
    return total
