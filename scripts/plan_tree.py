"""Which draft tree? From measured acceptance, and from step times where they are given.

    python scripts/plan_tree.py --from scripts/results/nvidia-h200/acceptance.json
    python scripts/plan_tree.py --from acceptance.json --nodes 8,16,40 \
        --step-time steptime.json --batch 1,8,32 --out plan.json
    python scripts/decode.py --tree plan.json          # or plan.json:16

`--from` is a result of bench_acceptance.py. A node count includes the root; for each,
the tree that accepts most is found by dynamic programming (treewy_jax/planning). With
step times of bench_step.py, each batch also gets its fastest tree, and the batches in
which a tree beats the best chain are named. Times of trees that were not timed lie on
straight lines between those that were, at the same cost a level of drafting. How far
such predictions are from measured tokens a second, scripts/bench_plan.py measures.

`--out` holds the tree recommended: the fastest for the first batch, or, without step
times, the largest. Exit status: 0, or 2 for wrong input, with one line on stderr.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from scripts import command, reporting
from scripts.accepting import rates
from scripts.decoding import topology
from scripts.planning import report, step_times
from treewy_jax import planning

NAME = "plan_tree.py"
# The plan has a tree of every size: time and memory grow with the square.
MOST_NODES = 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """Plans draft trees from measured acceptance and step times."""

    results: Annotated[pathlib.Path, tyro.conf.arg(name="from")]
    """Result of bench_acceptance.py."""
    nodes: str = "8,16,40"
    """Largest numbers of nodes, the root included."""
    depth: int | None = None
    """Most levels of drafts; by default as many as were measured."""
    drafter: str = "mtp"
    """Whose rates."""
    temperature: float = 0.0
    """At which they were measured."""
    step_time: pathlib.Path | None = None
    """Step times of bench_step.py; without them trees are chosen by acceptance."""
    batch: str | None = None
    """Rows, such as 1,8,32; by default the batches of the step times."""
    model: str | None = None
    """Of the step times, where the file has several; the same holds for the next."""
    layers: int | None = None
    """Layers of that model."""
    commit: str | None = None
    """Lifecycle."""
    horizon: int | None = None
    """Of deferred."""
    context: int | None = None
    """Tokens that the state covers."""
    dtype: str | None = None
    """Of the weights."""
    state_dtype: str | None = None
    """Storage of the recurrent states."""
    router: str | None = None
    """Loads of the experts."""
    mesh: str | None = None
    """Devices, such as tensor=2, as the file writes them; by default one."""
    json: bool = False
    """Print the plan as JSON in place of text."""
    out: pathlib.Path | None = None
    """Write the trees to this file, which decode.py takes as --tree."""
    plot: pathlib.Path | None = None
    """Draw acceptance, and what it is worth, into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, NAME, arguments)
        command.check_files(chosen.out, chosen.plot)
        command.check_plot(chosen.plot)
        plan = make(chosen)
    except (ValueError, OSError) as error:
        return command.refuse(NAME, error)
    if chosen.json:
        sys.stdout.write(report.as_json(plan))
    else:
        report.show(plan, command.console())
    if chosen.out is not None:
        reporting.write_result(chosen.out, plan)
    if chosen.plot is not None:
        from scripts.planning import plots

        plots.plan(plan).savefig(chosen.plot)
    return 0


def make(chosen: Options) -> dict[str, Any]:
    """Return the plan as `--out` holds it.

    Raises ValueError for wrong input, one line.
    """
    measured = rates.read(chosen.results, chosen.drafter, chosen.temperature)
    sizes = numbers("nodes", chosen.nodes)
    if max(sizes) > MOST_NODES:
        raise ValueError(f"nodes is {max(sizes)}; at most {MOST_NODES} are allowed")
    depth = max(measured) if chosen.depth is None else chosen.depth
    if depth not in measured:
        raise ValueError(
            f"depth is {depth}; allowed are {', '.join(map(str, measured))}"
        )
    measured = {level: one for level, one in measured.items() if level <= depth}
    best = planning.frontier(measured[depth], max(sizes))
    trees = {str(n): described(best[n - 1], measured) for n in sizes}
    plan: dict[str, Any] = {
        "schema": topology.SCHEMA,
        "method": __doc__,
        "from": chosen.results.name,
        "drafter": chosen.drafter,
        "temperature": chosen.temperature,
        "depth_limit": depth,
        **trees[str(max(sizes))],
        "trees": trees,
        "acceptance": [planning.accept_length(parents, measured) for parents in best],
        "chains": [planning.accept_length(chain, measured) for chain in chains(depth)],
    }
    if chosen.step_time is None:
        if chosen.batch is not None:
            raise ValueError("batch: only allowed with --step-time")
        return plan
    return plan | timed(chosen, plan, measured, max(sizes))


def described(parents: Sequence[int], measured: planning.ByDepth) -> dict[str, Any]:
    """Return a tree with its depth, expected acceptance and each node's chance."""
    depth = planning.depth_of(parents)
    reach = [1.0]
    if depth:
        reach = planning.reach(parents, measured[depth].at(len(parents)))
    return {
        "parents": list(parents),
        "nodes": len(parents),
        "depth": depth,
        "accept_length": planning.accept_length(parents, measured),
        "reach": reach,
    }


def chains(depth: int) -> list[list[int]]:
    """Return the parents of chains of 0, 1, ... drafts."""
    return [list(range(-1, drafts)) for drafts in range(depth + 1)]


def timed(chosen, plan, measured, most) -> dict[str, Any]:
    """Return what step times add: for each batch the fastest tree and chain."""
    wanted = {name: getattr(chosen, name, None) for name in step_times.SETTINGS}
    commit = chosen.commit and chosen.commit.replace("_", "-")
    wanted |= {"lifecycle": commit, "mesh": chosen.mesh}
    table, settings = step_times.read(chosen.step_time, wanted)
    batches = table.batches
    if chosen.batch is not None:
        batches = numbers("batch", chosen.batch)
    tried = planning.candidates(measured, most)
    rows = []
    for batch in batches:
        table.check(batch)
        rows.append(row(batch, table, plan, measured, tried))
    fastest = rows[0]["fastest"]
    return {
        **described(fastest["parents"], measured),
        "chosen_for_batch": rows[0]["batch"],
        "step_time": chosen.step_time.name,
        "settings": settings,
        "extrapolated": not table.covers(most, plan["depth_limit"]),
        "batches": rows,
        "crossover": {
            nodes: [r["batch"] for r in rows if r["trees"][nodes]["ratio"] > 1]
            for nodes in plan["trees"]
        },
    }


def row(batch, table, plan, measured, tried) -> dict[str, Any]:
    """Return what a batch of so many rows does: best chain, each tree, fastest tree."""

    def step_ms(nodes, levels):
        return table.at(batch, nodes, levels)

    def choice(parents):
        return planning.choice(parents, measured, step_ms, batch)

    lines = [choice(parents) for parents in chains(plan["depth_limit"])]
    chain = max(lines, key=lambda one: one.tokens_per_second)
    found = {
        "batch": batch,
        "chain": chain._asdict(),
        "fastest": planning.fastest(tried, measured, step_ms, batch)._asdict(),
        "trees": {
            nodes: choice(tree["parents"])._asdict()
            for nodes, tree in plan["trees"].items()
        },
    }
    for one in (found["fastest"], *found["trees"].values()):
        one["ratio"] = one["tokens_per_second"] / chain.tokens_per_second
    return found


def numbers(name: str, text: str) -> list[int]:
    """Read "8,16,40"; ValueError for anything but positive integers."""
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        if not (piece.isascii() and piece.isdigit() and 0 < int(piece) < 2**20):
            raise ValueError(
                f"{name} is {text!r}: {piece!r} is no positive integer; allowed are "
                "some, separated by commas"
            )
    return sorted({int(piece) for piece in pieces})


if __name__ == "__main__":
    sys.exit(main())
