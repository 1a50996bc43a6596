"""How fast is each kernel, beside its implementations in XLA and its floors?

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --ops tree_verify commit --json kernels.json
    python scripts/bench_kernels.py --ops decode --impl triton --cases B=256 --quick

Workloads are those of scripts/workloads that are tagged "bench". Each implementation
passes the correctness gate first: fresh random inputs, NaN in the memory that outputs
may get, first and last row against float64, all rows bit-equal in 20 more calls. Then
all of a case take turns: every round times each of them. A program runs the op several
times in a row, each run depending on the one before, its input sets taking turns so
that L2 holds none of them.

"device us" is the summed time of the kernels of one run (CUPTI); "in jit" is the
host's clock over such programs divided by the runs, launches included. Floors: least
bytes at the rate of a large copy, least flops at that of a large bfloat16 product, both
measured in the same run unless they are given. "x baseline" is how many times faster
than the implementation "reference", plain XLA. On a CPU kernels are interpreted, at
the sizes tagged "small", and times are the host's: they say nothing of a GPU. --resume
keeps the rows of what took turns, if they are of the same kernels, JAX and device, and
those of cases that are not asked for.

Exit status: 0; 1 where an implementation is wrong or fails (it is not timed then); 2
for wrong input, with one line on stderr.
"""

import dataclasses
import gc
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich.progress

from scripts import command, reporting
from scripts.benching import contenders, rates, resume, tables
from scripts.workloads import all as workloads
from scripts.workloads import base

ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Options:
    """Times every kernel beside its floors."""

    ops: tuple[str, ...] = tuple(workloads.MODULES)
    """Ops to time; by default all that have workloads."""
    impl: tuple[str, ...] = ()
    """Implementations to time; by default all that run on this device."""
    cases: tuple[str, ...] = ()
    """Only cases whose label has one of these in it."""
    quick: bool = False
    """Two rounds in place of five."""
    copy_tb_s: float | None = None
    """Rate of a large copy, TB/s, read and written; by default measured."""
    product_tflop_s: float | None = None
    """Rate of a large bfloat16 product, TFLOP/s; by default measured."""
    resume: bool = False
    """Keep what --json has of the same kernels."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    plot: pathlib.Path | None = None
    """Draw times and floors into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_kernels.py", arguments)
        entrants = select(chosen)
        kept, entrants = found_rows(chosen, entrants)
    except (ValueError, OSError) as error:
        return command.refuse("bench_kernels.py", error)
    limits = rates.get(
        chosen.copy_tb_s and 1e12 * chosen.copy_tb_s,
        chosen.product_tflop_s and 1e12 * chosen.product_tflop_s,
    )

    def save() -> None:
        if chosen.json is not None:  # a run that is ended early leaves what it has
            write(chosen, kept, entrants, limits)

    with command.progress() as progress:
        time_all(entrants, 2 if chosen.quick else ROUNDS, progress, save)
    console = command.console()
    console.print(tables.table(entrants, limits))
    console.print(summary(limits), soft_wrap=True)
    if chosen.plot is not None:
        from scripts.benching import plot

        plot.draw(entrants, limits).savefig(chosen.plot)
    return int(any(entrant.problem for entrant in entrants))


def select(chosen: Options) -> list[contenders.Contender]:
    """Return what is to be timed.

    Raises ValueError for unknown names, empty selections and files that cannot be.
    """
    command.check_files(chosen.json, chosen.plot)
    command.check_plot(chosen.plot)
    for name in ("copy_tb_s", "product_tflop_s"):
        command.check_rate(name, getattr(chosen, name))
    cases = cases_here(chosen.ops, "bench", chosen.cases)
    known = dict.fromkeys(n for case in cases for n in case.implementations.modules)
    for name in chosen.impl:
        if name not in known:
            raise ValueError(f"impl names {name!r}; allowed: {', '.join(known)}")
    found = []
    for case in cases:
        names = [n for n in chosen.impl or known if n in case.implementations.modules]
        found += contenders.of_case(case, names) if names else []
    return found


def found_rows(
    chosen: Options, entrants: Sequence[contenders.Contender]
) -> tuple[list[dict[str, Any]], list[contenders.Contender]]:
    """Return rows of the file that stay, and who is still to be timed."""
    if not chosen.resume:
        return [], list(entrants)
    groups = grouped(entrants)
    wanted = [
        [
            dict(op=e.case.op, case=e.case.label, impl=e.impl)
            | resume.origin(e.case.op)
            for e in group
        ]
        for group in groups
    ]
    kept = resume.keep(chosen.json, wanted)
    open_groups = [g for g, rows in zip(groups, kept.groups, strict=True) if not rows]
    return sum(kept.groups, kept.others), sum(open_groups, [])


def grouped(
    entrants: Sequence[contenders.Contender],
) -> list[list[contenders.Contender]]:
    """Return what takes turns; cases without a group are a group each."""
    groups: dict[object, list[contenders.Contender]] = {}
    for entrant in entrants:
        groups.setdefault(entrant.case.group or entrant.case, []).append(entrant)
    return list(groups.values())


def cases_here(
    ops: Sequence[str], tag: str, labels: Sequence[str] = ()
) -> list[base.Case]:
    """Return the cases of a tag, on a CPU the small ones, with one of `labels`.

    Raises ValueError where there are none.
    """
    if not ops:
        raise ValueError("ops is empty; one or more are allowed")
    tag = tag if jax.default_backend() == "gpu" else "small"
    cases = workloads.cases(ops, [tag])
    if not cases:
        raise ValueError(f"{', '.join(ops)}: no case is tagged {tag!r}")
    found = [c for c in cases if not labels or any(x in c.label for x in labels)]
    if not found:
        allowed = ", ".join(repr(case.label) for case in cases)
        raise ValueError(f"cases is {', '.join(labels)}; labels are {allowed}")
    return found


def time_all(
    entrants: Sequence[contenders.Contender],
    rounds: int,
    progress: rich.progress.Progress,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Compile everything, then check and time group by group; memory is freed between.

    `after` is called after each.
    """
    groups = grouped(entrants)
    compiling = progress.add_task("compiling", total=None)
    contenders.build(entrants, lambda: progress.advance(compiling))
    command.note(f"compiled {len(entrants)} contenders")
    timing = progress.add_task("checking and timing", total=len(groups))
    for group in groups:
        contenders.run(group, rounds)
        for entrant in group:
            entrant.inputs = entrant.program = entrant.single = None
        gc.collect()
        after()
        progress.advance(timing)
        command.note(f"{group[0].case.op} {group[0].case.label}")


def summary(limits: rates.Rates) -> str:
    """Return what the floors are made from, and whose clock the times are."""
    clock = (
        "device us: CUPTI; in jit: the host's clock"
        if jax.default_backend() == "gpu"
        else "no GPU: kernels are interpreted, and the only clock is the host's"
    )
    return (
        f"{reporting.device()}; {clock}. Copy {limits.bytes_per_s / 1e12:.3g} TB/s, "
        f"product {limits.flops_per_s / 1e12:.3g} TFLOP/s ({limits.origin})."
    )


def write(
    chosen: Options,
    kept: Sequence[Mapping[str, Any]],
    entrants: Sequence[contenders.Contender],
    limits: rates.Rates,
) -> None:
    """Write method, rates, rows that are kept and every contender as JSON."""
    fields = {
        "method": __doc__,
        "clock": "cupti" if jax.default_backend() == "gpu" else "host",
        "rounds": 2 if chosen.quick else ROUNDS,
        "rates": dataclasses.asdict(limits),
        "rows": [
            *kept,
            *(
                tables.record(entrant, limits) | resume.origin(entrant.case.op)
                for entrant in entrants
            ),
        ],
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
