"""What does each lifecycle cost a step, in passes over the recurrent state?

    python scripts/bench_commit.py --json commit.json --plot commit.png
    python scripts/bench_commit.py --nodes 4 --batch 128 --quick
    python scripts/bench_commit.py --json commit.json --resume --max-seconds 500

A step is that of the recurrent part of Qwen3.5 35B-A3B: all layers verify a tree of n
nodes (4: a chain of three drafts; 15: 2,2,2; 40: 3,3,3), one after the other, then all
commit the path that each row accepts. A program takes 20 such steps in a row, its
states donated, through the public interface of the lifecycles only. Rows are bfloat16,
the same in all layers; records of fused and deferred are float32. A child is accepted
with the probability p for which 1 + p + p^2 + p^3 is the mean (3.2, 3.4, 3.6 tokens a
step unless --accept says otherwise), each row and step for itself, by a fixed seed;
which child is even odds. Before, rows skip every other step at random, so that their
histories are of different lengths and some fold in each step. Where not all 30 layers
fit memory beside the other lifecycles, all of a group have fewer ("layers").

First every lifecycle is held against float64: after 40 steps, the states of two rows in
the first and the last layer against the rule run token by token over what they
accepted, and the outputs of all nodes of the last layer's last step. Then those of a
group take turns, round by round.

"us" are microseconds a layer and step: all kernels of the program (CUPTI) but those
that only chain layers; "wall" is the host's clock. "moves" is what a copy moves in that
time, in states of the batch: time x copy rate / (batch x S). "ideal" is the same of the
least bytes of the ops' specs, with the records read and the rows that fold; store-all
keeps the accepted state by an index, as engines do, so that its commit moves none. "XLA
MB" are bytes a step of copies that XLA adds, as large as half a layer's states or more,
read from the compiled program. On a CPU sizes are tiny and times say nothing of a GPU.

--resume keeps the rows that the file has of a group, if all of them are right and of
the same kernels, JAX and device, and measures the others. Groups that are not asked for
stay as they are.

Exit status: 0; 1 where a lifecycle is wrong or fails (it is not timed then); 2 for
wrong input, with one line on stderr.
"""

import dataclasses
import gc
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from scripts import command, reporting
from scripts.benching import (
    lifecycle_report,
    lifecycle_runs,
    lifecycles,
    rates,
    resume,
)

ROUNDS = 5
LABELS = (*lifecycles.PLAIN, "deferred-8", "deferred-16", "deferred-32")
NODES = tuple(lifecycles.WIDTHS)
BATCHES = (1, 8, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a step of every lifecycle, in passes over the recurrent state."""

    lifecycles: tuple[str, ...] = LABELS
    """store-all, reconstruct, fused, deferred-HORIZON."""
    nodes: tuple[int, ...] = NODES
    """Nodes verified: 4, 15, 40."""
    batch: tuple[int, ...] = BATCHES
    """Rows."""
    state_dtype: tuple[str, ...] = ("float32",)
    """Storage of the recurrent state: float32, bfloat16."""
    accept: float | None = None
    """Mean tokens a step; by default 3.2, 3.4, 3.6 of 4, 15, 40 nodes."""
    impl: str | None = None
    """Implementation of all ops that have it; by default the best that runs."""
    quick: bool = False
    """Two rounds in place of five."""
    resume: bool = False
    """Keep what --json has of the same kernels."""
    max_seconds: float | None = None
    """Begin no group after so long."""
    copy_tb_s: float | None = None
    """Rate of a large copy, TB/s, read and written; by default measured."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    plot: pathlib.Path | None = None
    """Draw moves against batch into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_commit.py", arguments)
        groups = select(chosen)
        kept = resume.Kept([], [[] for _ in groups])
        if chosen.resume:
            wanted = [[described(cell) for cell in group] for group in groups]
            kept = resume.keep(chosen.json, wanted)
    except (ValueError, OSError) as error:
        return command.refuse("bench_commit.py", error)
    limit = math.inf if chosen.max_seconds is None else chosen.max_seconds
    begun = time.monotonic()
    groups = [
        group for group, rows in zip(groups, kept.groups, strict=True) if not rows
    ]
    rate = rates.copy(chosen.copy_tb_s)
    cells: list[lifecycles.Cell] = []
    with command.progress() as progress:
        for group in progress.track(groups, description="checking and timing"):
            if time.monotonic() - begun > limit:
                command.note("out of time: --resume goes on from here")
                break
            cells += group
            lifecycle_runs.run(group, 2 if chosen.quick else ROUNDS)
            gc.collect()
            if chosen.json is not None:  # a run that is ended early leaves what it has
                write(chosen, sum(kept.groups, kept.others), cells, rate)
            first = group[0].group
            command.note(f"n={first.nodes} B={first.batch} S={first.state_dtype}")
    console = command.console()
    console.print(lifecycle_report.table(cells, rate))
    console.print(summary(rate, chosen.copy_tb_s is not None), soft_wrap=True)
    if chosen.plot is not None:
        lifecycle_report.draw(cells, rate).savefig(chosen.plot)
    return int(any(cell.problem for cell in cells))


def select(chosen: Options) -> list[list[lifecycles.Cell]]:
    """Return what is to be timed, group by group.

    Raises ValueError for unknown names, sizes out of range and files that cannot be.
    """
    command.check_files(chosen.json, chosen.plot)
    command.check_plot(chosen.plot)
    command.check_rate("copy_tb_s", chosen.copy_tb_s)
    for name in ("lifecycles", "nodes", "batch", "state_dtype"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    sizes = itertools.product(chosen.state_dtype, chosen.nodes, chosen.batch)
    return [_group(chosen, *size) for size in sizes]


def _group(
    chosen: Options, state_dtype: str, nodes: int, batch: int
) -> list[lifecycles.Cell]:
    """Return the cells of one size; ValueError where there can be none."""
    if nodes not in lifecycles.WIDTHS:
        allowed = ", ".join(map(str, lifecycles.WIDTHS))
        raise ValueError(f"nodes is {nodes}; allowed: {allowed}")
    if batch < 1:
        raise ValueError(f"batch is {batch}; 1 or more is allowed")
    if state_dtype not in lifecycle_runs.BOUNDS:
        allowed = ", ".join(lifecycle_runs.BOUNDS)
        raise ValueError(f"state_dtype is {state_dtype!r}; allowed: {allowed}")
    most = len(lifecycles.WIDTHS[nodes]) + 1
    accept = lifecycles.ACCEPT[nodes] if chosen.accept is None else chosen.accept
    if not 1 <= accept <= most:
        raise ValueError(f"accept is {accept}; 1 to {most} tokens a step are allowed")
    gpu = jax.default_backend() == "gpu"
    sizes = lifecycles.Sizes() if gpu else lifecycles.SMALL
    group = lifecycles.Group(nodes, batch, state_dtype, accept, sizes)
    return [
        lifecycles.cell(group, label, impl=chosen.impl)
        for label in dict.fromkeys(chosen.lifecycles)
    ]


def described(cell: lifecycles.Cell) -> dict[str, Any]:
    """Return the fields of a row that tell which one it is."""
    sizes = lifecycle_report.record(cell, 1.0)
    names = ("lifecycle", "options", "nodes", "batch", "state_dtype", "accept")
    return {name: sizes[name] for name in names} | resume.origin(*lifecycles.OPS)


def summary(rate: float, given: bool) -> str:
    """Return whose clock the times are, and what moves are made from."""
    clock = (
        "us: CUPTI, a layer and step; wall: the host's clock"
        if jax.default_backend() == "gpu"
        else "no GPU: sizes are tiny, and the only clock is the host's"
    )
    return f"{reporting.device()}; {clock}. {rates.describe_copy(rate, given)}"


def write(
    chosen: Options,
    kept: Sequence[Mapping[str, Any]],
    cells: Sequence[lifecycles.Cell],
    rate: float,
) -> None:
    """Write method, rows that are kept and every cell as JSON."""
    rounds = 2 if chosen.quick else ROUNDS
    new = resume.origin(*lifecycles.OPS) | {"copy_bytes_per_s": rate, "rounds": rounds}
    fields = {
        "method": __doc__,
        "clock": "cupti" if jax.default_backend() == "gpu" else "host",
        "rows": [
            *kept,
            *(lifecycle_report.record(cell, rate) | new for cell in cells),
        ],
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
