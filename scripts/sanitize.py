"""Runs every kernel once at odd sizes, for a memory checker to watch.

    compute-sanitizer --tool memcheck python3 scripts/sanitize.py
    compute-sanitizer --tool racecheck python3 scripts/sanitize.py --ops tree_verify

Every array gets an allocation of exactly its size from the driver: JAX' own pool would
hide what reads or writes beyond an array. Outputs are held against float64 as well, so
a run without the checker means something too. compute-sanitizer comes with the CUDA
toolkit; it reports "0 errors" at the end and with --error-exitcode 1 fails otherwise.

Workloads are those of scripts/workloads that are tagged "small". Exit status: 0; 1
where an implementation is wrong or fails; 2 for wrong input, with one line on stderr.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # before JAX is there; it would allocate a pool
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

from scripts import command
from scripts.benching import chains, contenders, tables
from scripts.workloads import all as workloads


@dataclasses.dataclass(frozen=True)
class Options:
    """Runs every kernel once at odd sizes."""

    ops: tuple[str, ...] = tuple(workloads.MODULES)
    """Ops to run; by default all that have workloads."""
    impl: tuple[str, ...] = ()
    """Implementations to run; by default all kernels that run on this device."""
    reference: bool = False
    """Run the implementations in XLA too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "sanitize.py", arguments)
        entrants = select(chosen)
    except ValueError as error:
        return command.refuse("sanitize.py", error)
    for entrant in entrants:
        entrant.attempt(lambda e=entrant: run(e))
        case = f"{entrant.case.op} {entrant.case.label} {entrant.impl}"
        print(f"{case}: {tables.state(entrant)}", flush=True)
    done = sum(bool(entrant.errors) for entrant in entrants)
    print(f"{done} calls run of {len(entrants)}")
    return int(any(entrant.problem for entrant in entrants) or not done)


def select(chosen: Options) -> list[contenders.Contender]:
    """Return what is to be run.

    Raises ValueError for unknown ops, and for one without a small case.
    """
    if not chosen.ops:
        raise ValueError("ops is empty; one or more are allowed")
    found = []
    for op in chosen.ops:
        cases = workloads.cases([op], ["small"])
        if not cases:
            raise ValueError(f"{op}: no case is tagged 'small'")
        for case in cases:
            names = [
                name
                for name in case.implementations.modules
                if name in (chosen.impl or case.implementations.modules)
                and (chosen.reference or name != tables.BASELINE)
            ]
            found += contenders.of_case(case, names) if names else []
    if not found:
        raise ValueError(f"impl is {chosen.impl}; no op here has such a kernel")
    return found


def run(entrant: contenders.Contender) -> None:
    """Run one call, with nothing around it, and hold it against float64."""
    chain = contenders.plan(entrant.case, entrant.impl)
    arguments = entrant.case, entrant.impl, entrant.config
    entrant.single = chains.lower_once(*arguments).compile()
    contenders.check(entrant, contenders.Data(entrant.case, chain), repeats=0)


if __name__ == "__main__":
    sys.exit(main())
