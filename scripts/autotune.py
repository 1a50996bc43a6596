"""Which block sizes are best on this device? Writes pallas_kernels/<op>/tuned/.

    python scripts/autotune.py --ops tree_verify
    python scripts/autotune.py --ops commit decode --cases B=256 --dry-run

Tries every configuration of the cases tagged "tune", and what is chosen today. Each
passes the gate of bench_kernels.py first, then all of a case take turns; the median
of the device's time (CUPTI) decides. Cases that one entry of the table would match
(equal fields `match`) are decided together: the configuration wins that runs in all of
them and whose times, each relative to the best of its case, have the least geometric
mean. A configuration that does not compile, or is wrong, is a row of the report.

The table gets the winners; entries for other calls stay as they are. Times go to the
result file. On a CPU there is nothing to tune: only --dry-run is allowed there.

Exit status: 0; 1 where no configuration of some case runs; 2 for wrong input, with one
line on stderr.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich import markup
from rich import table as rich_table

from pallas_kernels import tuning
from scripts import bench_kernels, command, reporting
from scripts.benching import contenders, tables, timing
from scripts.workloads import all as workloads
from scripts.workloads import base

ROUNDS = 5
KERNELS = pathlib.Path(__file__).parent.parent / "pallas_kernels"

Key = tuple[str, tuple[tuple[str, Any], ...]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Finds the best block sizes on this device."""

    ops: tuple[str, ...] = tuple(workloads.MODULES)
    """Ops to tune; by default all that have workloads."""
    impl: str = "triton"
    """Implementation to tune."""
    cases: tuple[str, ...] = ()
    """Only cases whose label has one of these in it."""
    rounds: int = ROUNDS
    """Turns that each configuration gets."""
    dry_run: bool = False
    """Report only; write no table."""
    json: pathlib.Path | None = None
    """Where the times go; by default in scripts/results, unless on a dry run."""


@dataclasses.dataclass(frozen=True)
class Winner:
    """The configuration of one entry of a table; None: nothing runs in all cases.

    Attributes:
      us: median microseconds of it in each case.
      before: those of what was chosen before.
    """

    config: Any
    us: dict[str, float]
    before: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "autotune.py", arguments)
        entrants = select(chosen)
    except (ValueError, OSError) as error:
        return command.refuse("autotune.py", error)

    def save() -> None:
        if not chosen.dry_run:  # a run that is ended early leaves what it has
            write_tables(decided(entrants))

    with command.progress() as progress:
        bench_kernels.time_all(entrants, chosen.rounds, progress, save)
    winners = decided(entrants)
    console = command.console()
    console.print(report(entrants))
    console.print(*map(sentence, winners.items()), sep="\n", soft_wrap=True)
    if not chosen.dry_run:
        write_tables(winners)
    if chosen.json is not None or not chosen.dry_run:
        write_times(chosen, entrants, winners)
    return int(any(winner.config is None for winner in winners.values()))


def select(chosen: Options) -> list[contenders.Contender]:
    """Return every configuration to try, and the present choice as None, case by case.

    Raises ValueError for unknown names, and where there is nothing to tune.
    """
    command.check_files(chosen.json)
    if chosen.rounds < 1:
        raise ValueError(f"rounds is {chosen.rounds}; 1 or more are allowed")
    if jax.default_backend() != "gpu" and not chosen.dry_run:
        raise ValueError(
            f"a {jax.default_backend()} has nothing to tune; --dry-run is allowed"
        )
    cases = bench_kernels.cases_here(chosen.ops, "tune", chosen.cases)
    found = []
    for case in cases:
        if chosen.impl not in case.implementations.modules:
            allowed = ", ".join(case.implementations.modules)
            raise ValueError(f"impl is {chosen.impl!r}; {case.op} has {allowed}")
        if not (case.match and case.configs):
            raise ValueError(f"{case.op} {case.label}: no configs, or none to match")
        (first,) = contenders.of_case(case, [chosen.impl])
        for config in dict.fromkeys((None, *case.configs)):
            entrant = contenders.Contender(case, chosen.impl, config)
            entrant.absent = first.absent
            found.append(entrant)
    return found


def match_of(case: base.Case) -> dict[str, Any]:
    """Return what an entry for a case matches on."""
    return {field: getattr(case.spec, field) for field in case.match}


def by_match(
    entrants: Sequence[contenders.Contender],
) -> dict[Key, list[contenders.Contender]]:
    """Group contenders by the entry that would hold their configuration."""
    groups: dict[Key, list[contenders.Contender]] = {}
    for entrant in entrants:
        key = entrant.case.op, tuple(match_of(entrant.case).items())
        groups.setdefault(key, []).append(entrant)
    return groups


def decided(entrants: Sequence[contenders.Contender]) -> dict[Key, Winner]:
    """Return the winner of each entry whose cases have all been reached."""
    return {
        key: decide(group)
        for key, group in by_match(entrants).items()
        if all(tables.median_us(one) or not one.runs for one in group)
    }


def decide(entrants: Sequence[contenders.Contender]) -> Winner:
    """Choose among contenders that share an entry, see the top of this file."""
    times: dict[Any, dict[str, float]] = {}
    for entrant in entrants:
        us = tables.median_us(entrant) if entrant.runs else None
        if us is not None:
            times.setdefault(entrant.config, {})[entrant.case.label] = us
    before = times.pop(None, {})
    labels = {entrant.case.label for entrant in entrants}
    best = {
        x: min(us.get(x, math.inf) for us in times.values()) for x in labels if times
    }

    def loss(us: dict[str, float]) -> float:
        return sum(math.log(us[label] / best[label]) for label in labels)

    whole = {config: us for config, us in times.items() if us.keys() == labels}
    if not whole:
        return Winner(None, {}, before)
    config = min(whole, key=lambda config: loss(whole[config]))
    return Winner(config, whole[config], before)


def write_tables(winners: dict[Key, Winner]) -> None:
    """Put winners into the tables of this device; an equal match is replaced."""
    device_kind = jax.devices()[0].device_kind
    for (op, match), winner in winners.items():
        if winner.config is None:
            continue
        file = KERNELS / op / "tuned" / f"{tuning.slug(device_kind)}.json"
        entries = json.loads(file.read_text("utf-8")) if file.exists() else []
        file.parent.mkdir(exist_ok=True)
        text = merged(entries, dict(match), winner.config)
        reporting.replace(file, functools.partial(pathlib.Path.write_text, data=text))


def merged(entries: list[dict], match: dict[str, Any], config: Any) -> str:
    """Return a table, an entry a line, with one entry put in or replaced."""
    entry = {"match": match, "config": dataclasses.asdict(config)}
    places = [i for i, other in enumerate(entries) if other["match"] == match]
    if places:
        entries = [entry if i == places[0] else x for i, x in enumerate(entries)]
    else:  # the first that agrees is taken, and this one may be narrower than others
        entries = [entry, *entries]
    lines = ",\n ".join(json.dumps(entry) for entry in entries)
    return f"[\n {lines}\n]\n"


def report(entrants: Sequence[contenders.Contender]) -> rich_table.Table:
    """Return every configuration of every case, the fastest first."""
    drawn = rich_table.Table("op", "case", "configuration")
    for name in ("error", "us", "median"):
        drawn.add_column(name, justify="right")
    drawn.add_column("state")
    for case in dict.fromkeys(entrant.case for entrant in entrants):
        mine = [entrant for entrant in entrants if entrant.case == case]
        for entrant in sorted(mine, key=lambda e: tables.median_us(e) or math.inf):
            samples = entrant.device_us or entrant.in_jit_us
            found = timing.times(samples) if samples else None
            shown = (
                "as chosen today" if entrant.config is None else tables.name(entrant)
            )
            drawn.add_row(
                case.op,
                markup.escape(case.label),
                markup.escape(shown),
                f"{max(entrant.errors):.1e}" if entrant.errors else "-",
                tables.number(found and found.least),
                tables.number(found and found.median),
                markup.escape(tables.state(entrant)),
            )
        drawn.add_section()
    return drawn


def sentence(item: tuple[Key, Winner]) -> str:
    """Return one line on what won an entry."""
    (op, match), winner = item
    calls = ", ".join(f"{field}={value}" for field, value in match)
    if winner.config is None:
        return markup.escape(f"{op} ({calls}): no configuration runs")
    parts = (
        f"{label} {us:.1f} us (before {winner.before.get(label, math.nan):.1f})"
        for label, us in winner.us.items()
    )
    return markup.escape(f"{op} ({calls}): {winner.config}: {'; '.join(parts)}")


def write_times(
    chosen: Options,
    entrants: Sequence[contenders.Contender],
    winners: dict[Key, Winner],
) -> None:
    """Write what was measured, beside the tables, as JSON."""
    path = chosen.json or reporting.result_path(f"autotune_{'_'.join(chosen.ops)}")
    rows = [
        {
            "op": entrant.case.op,
            "case": entrant.case.label,
            "impl": entrant.impl,
            "config": tables.plain(entrant.config),
            "state": tables.state(entrant),
            "us": tables.median_us(entrant),
        }
        for entrant in entrants
    ]
    entries = [
        {"op": op, "match": dict(match)}
        | {
            "config": tables.plain(winner.config),
            "us": winner.us,
            "before": winner.before,
        }
        for (op, match), winner in winners.items()
    ]
    fields = {"method": __doc__, "rounds": chosen.rounds, "entries": entries}
    reporting.write_result(path, fields | {"rows": rows})


if __name__ == "__main__":
    sys.exit(main())
