"""Contenders as rows: of a table to read, and of a JSON file."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich import markup
from rich import table as rich_table

from scripts.benching import contenders, rates, timing

BASELINE = "reference"


def state(entrant: contenders.Contender) -> str:
    """Return "ok", why it does not run here, what went wrong, or "not reached"."""
    if entrant.absent is not None:
        return f"does not run here: {entrant.absent}"
    # A run that is ended early has not come to everyone.
    return entrant.problem or ("ok" if entrant.errors else "not reached")


def median_us(entrant: contenders.Contender) -> float | None:
    """Return the device's median, else the host's; None where nothing was timed."""
    samples = entrant.device_us or entrant.in_jit_us
    return timing.times(samples).median if samples else None


def record(entrant: contenders.Contender, limits: rates.Rates) -> dict[str, Any]:
    """Return all that is known of a contender."""
    case, chain = entrant.case, entrant.chain
    floors = limits.floors_us(case.spec)
    found: dict[str, Any] = {
        "op": case.op,
        "case": case.label,
        "impl": entrant.impl,
        "config": plain(entrant.config),
        "state": state(entrant),
        "errors": [finite(error) for error in entrant.errors],
        "bounds": list(case.bounds),
        "spec": plain(case.spec),
        "bytes_moved": case.spec.bytes_moved,
        "flops": case.spec.flops,
        "floors": floors,
    }
    if chain is not None:
        found["chain"] = {
            "runs": chain.total,
            "input_sets": chain.sets,
            "chained_by": chain.chained_by,
        }
    for name in ("device_us", "in_jit_us"):
        samples = getattr(entrant, name)
        found[name] = timing.times(samples)._asdict() if samples else None
    us = median_us(entrant)
    found["times_floor"] = us / max(floors.values()) if us else None
    found["kernels_us"] = entrant.kernels
    return found


def plain(x: Any) -> Any:
    """Return a dataclass, or None, as JSON can hold it."""
    return dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x


def table(
    entrants: Sequence[contenders.Contender], limits: rates.Rates
) -> rich_table.Table:
    """Return errors, times, floors and the ratio to the baseline, case by case."""
    drawn = rich_table.Table()
    for name in ("op", "case", "implementation"):
        drawn.add_column(name, no_wrap=True)
    names = ("error", "device us", "median", "in jit", "bytes", "flops", "x floor")
    for name in (*names, "x baseline"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("state")
    for case in dict.fromkeys(entrant.case for entrant in entrants):
        mine = [entrant for entrant in entrants if entrant.case == case]
        for entrant in mine:
            drawn.add_row(*_cells(entrant, _baseline(mine), limits))
        drawn.add_section()
    return drawn


def _baseline(mine: Iterable[contenders.Contender]) -> float | None:
    times = (median_us(e) for e in mine if e.impl == BASELINE)
    return next(times, None)


def _cells(
    entrant: contenders.Contender, baseline: float | None, limits: rates.Rates
) -> list[str]:
    floors = limits.floors_us(entrant.case.spec)
    device = entrant.device_us and timing.times(entrant.device_us)
    in_jit = entrant.in_jit_us and timing.times(entrant.in_jit_us)
    us = median_us(entrant)
    faster = baseline / us if baseline and us else None
    return [
        entrant.case.op,
        markup.escape(entrant.case.label),
        markup.escape(name(entrant)),
        f"{max(entrant.errors):.1e}" if entrant.errors else "-",
        number(device and device.least),
        number(device and device.median),
        number(in_jit and in_jit.median),
        number(floors["bytes_us"]),
        number(floors["flops_us"]),
        f"{us / max(floors.values()):.2f}" if us else "-",
        f"{faster:.2f}" if faster else "-",
        markup.escape(state(entrant)),
    ]


def name(entrant: contenders.Contender) -> str:
    """Return implementation and configuration in a few words."""
    if entrant.config is None:
        return entrant.impl
    fields = dataclasses.asdict(entrant.config).items()
    return " ".join([entrant.impl, *(f"{key}={value}" for key, value in fields)])


def number(us: Any) -> str:
    """Return microseconds with three digits or so; a dash for what was not timed."""
    if not us:
        return "-"
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def finite(error: float) -> float | str:
    """Return an error as JSON can hold it."""
    return error if abs(error) < float("inf") else str(error)
