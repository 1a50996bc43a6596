"""Do the planner's tokens a second come true? Predicted and measured, tree by tree.

    python scripts/bench_plan.py --json plan.json
    python scripts/bench_plan.py --from acceptance.json --trees 2,2,1 --plan 8 16

The planner (scripts/plan_tree.py) says tokens a second = rows * accept length / time of
a step. The accept length follows from rates by rank and depth (`--from`, a result of
bench_acceptance.py), the time from a fit over the trees of `--fit`: straight lines
between their node counts, and the same cost for every level of drafting. The trees that
are checked, `--trees` and by rates the best of `--plan` nodes, are others. Rates are
counted at the roots of reference trees (scripts/accepting/rates.py): chains, and trees
planned for 16 and 40 nodes. What such a tree accepts is known from the start, and only
its time is predicted; of the trees checked by default, that is so of 1,1,1.

Measured is the decoding of the prompts, greedy, by the loop that `generate` runs, from
its call to its result; categories take turns in the order of prompts. Every tree is one
compiled program, warm; rounds go over all trees in turn, the median counts. The prompt
pass is timed apart ("with prompts" counts it). "error" is predicted / measured - 1, of
tokens a second, of tokens a step and of milliseconds a step.

What ends a text costs steps their tokens: rates are of whole steps, measured tokens are
of all, also of steps cut short by end of text or budget (a text has about 37 tokens
with the shipped model, so that is 2 or 3 %). With several rows a batch, rows that are
done wait for the last one: predictions are scaled by the share of busy rows.

"halves": where the rates of halves of the prompts are known, each half's rates also
predict the other half. That adds what 40 prompts tell of 40 others. On a CPU the times
say nothing of a GPU.

Exit status: 0; 1 where a tree's tokens a second are off by more than `--within`; 2 for
wrong input, with one line on stderr.
"""

import dataclasses
import json as json_lib
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

import models
from scripts import bench_acceptance, command, reporting
from scripts.accepting import prompts, rates
from scripts.benching import code
from scripts.decoding import topology
from scripts.planning import checks, checks_report, runs
from treewy_jax import planning
from treewy_jax import tree as tree_lib

NAME = "bench_plan.py"
SOURCES = ("models", "treewy_jax", "pallas_kernels", "scripts/planning/runs.py")
FIT = ("none", "1", "3,3", "1,1,1,1,1,1,1,1", "3,3,3")


@dataclasses.dataclass(frozen=True)
class Options:
    """Holds the planner against measured tokens a second."""

    results: Annotated[pathlib.Path, tyro.conf.arg(name="from")] = (
        reporting.RESULTS / "nvidia-h200" / "acceptance.json"
    )
    """Result of bench_acceptance.py."""
    model: str = "tiny"
    """The model that ships, or a folder."""
    dtype: str = "float32"
    """Of weights and activations."""
    fit: tuple[str, ...] = FIT
    """Trees whose step times the prediction is made from."""
    trees: tuple[str, ...] = ("1,1,1", "2,2,2", "2,1,1,1,1")
    """Trees to check, which may not be among those."""
    plan: tuple[int, ...] = (24,)
    """Sizes of planned trees to check, too."""
    batch: int = 1
    """Rows decoded together."""
    commit: str = "reconstruct"
    """Lifecycle."""
    max_new_tokens: int = 128
    """Budget of each prompt."""
    prompts: pathlib.Path = prompts.PROMPTS
    """JSON lines with turns, prompt or question, or a folder of such files."""
    limit: int | None = None
    """Take so many prompts of each source and category."""
    fit_prompts: int = 24
    """Prompts that are decoded for step times."""
    rounds: int = 3
    """Times that everything is decoded by the clock."""
    within: float = 0.1
    """Allowed error of tokens a second."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    resume: bool = False
    """Keep trees that the file has, measured by this code."""
    plot: pathlib.Path | None = None
    """Draw predicted over measured into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, NAME, arguments)
        check(chosen)
        known = [rates.read(chosen.results, "mtp", 0.0)]
        known += rates.read_halves(chosen.results, "mtp", 0.0)
        trees = select(chosen, known[0])
        old = kept(chosen, trees) if chosen.resume else []
        entries = prompts.rotated(prompts.read(chosen.prompts, chosen.limit))
        work = prepare(chosen, entries, trees)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse(NAME, error)
    for rows in run(chosen, work, trees, prompts.halves(entries), old):
        found = summary(chosen, known, rows)
        if chosen.json is not None:
            reporting.write_result(chosen.json, found)
    checks_report.show(found, command.console())
    if chosen.plot is not None:
        from scripts.planning import plots

        plots.checked(found).savefig(chosen.plot)
    off = [abs(tree["errors"]["tokens_per_second"]) for tree in found["trees"]]
    return int(max(off) > chosen.within)


def check(chosen: Options) -> None:
    """Raise ValueError for options that cannot be measured, before anything runs."""
    command.check_files(chosen.json, chosen.plot)
    command.check_plot(chosen.plot)
    for name in ("batch", "max_new_tokens", "fit_prompts", "rounds"):
        if getattr(chosen, name) < 1:
            raise ValueError(f"{name} is {getattr(chosen, name)}; 1 or more is allowed")
    if not chosen.within > 0:
        raise ValueError(f"within is {chosen.within}; a number above 0 is allowed")
    if chosen.resume and chosen.json is None:
        raise ValueError("resume is True; with --json FILE alone it is allowed")
    if not chosen.fit:
        raise ValueError("fit is empty; one or more trees are allowed")
    if not chosen.trees and not chosen.plan:
        raise ValueError("trees and plan are empty; one tree or more is allowed")
    if any(nodes < 2 for nodes in chosen.plan):
        raise ValueError(f"plan is {chosen.plan}; sizes of 2 or more are allowed")


def select(
    chosen: Options, by_depth: planning.ByDepth
) -> dict[tuple[str, str], tree_lib.DraftTree]:
    """Return the trees by role, "fit" or "checked", and name.

    Raises ValueError for a wrong tree, one in both roles, or one without rates.
    """
    found = {("fit", name): topology.read(name) for name in chosen.fit}
    found |= {("checked", name): topology.read(name) for name in chosen.trees}
    for nodes in chosen.plan:
        parents = planning.optimal(by_depth[max(by_depth)], nodes)
        made = tree_lib.DraftTree.from_parents(parents)
        found["checked", f"planned, {nodes} nodes"] = made
    fitted = {
        tuple(topology.parents_of(t)) for (role, _), t in found.items() if role == "fit"
    }
    for (role, name), tree in found.items():
        parents = topology.parents_of(tree)
        if role == "checked":
            planning.accept_length(parents, by_depth)
            if tuple(parents) in fitted:
                raise ValueError(
                    f"tree {name}: its step time is fitted; other trees than those of "
                    "--fit are allowed"
                )
    return found


def prepare(chosen: Options, entries, trees) -> runs.Work:
    """Load the model; ValueError where prompts or trees do not go with it."""
    show_bar = sys.stderr.isatty()
    model = models.load(chosen.model, dtype=chosen.dtype, progress=show_bar)
    ids = [bench_acceptance.encode(model, entry["turns"][0]) for entry in entries]
    names = ("batch", "commit", "max_new_tokens")
    work = runs.Work.of(model, ids, **{n: getattr(chosen, n) for n in names})
    for tree in trees.values():
        work.lifecycle(work.drafter(tree))
    return work


def run(chosen, work, trees, halves, rows) -> Iterator[list[dict[str, Any]]]:
    """Compile and time what has no row yet; yields all rows after every round."""
    have = {(row["role"], row["tree"]) for row in rows}
    missing = [key for key in trees if key not in have]
    if not missing:
        yield rows
        return
    command.note(f"compiling {len(missing)} trees")
    made = list(runs.programs(work, [trees[key] for key in missing]))
    command.note("compiled; warming up")
    groups = [
        runs.batches(
            halves, chosen.batch, chosen.fit_prompts if role == "fit" else None
        )
        for role, _ in missing
    ]
    for number, found in enumerate(runs.measure(work, made, groups, chosen.rounds), 1):
        command.note(f"round {number} of {chosen.rounds}")
        pairs = zip(missing, found, strict=True)
        yield rows + [{"role": role, "tree": name} | row for (role, name), row in pairs]


def setting(chosen: Options) -> dict[str, Any]:
    """Return what rows depend on, as a file holds it."""
    fields = dataclasses.asdict(chosen)
    for name in ("json", "resume", "plot", "within", "trees", "fit", "plan"):
        del fields[name]
    fields |= {"results": chosen.results.name, "prompts": chosen.prompts.name}
    return fields | {"code": code.digest(*SOURCES)}


def kept(chosen: Options, trees) -> list[dict[str, Any]]:
    """Return the rows of the file that this code measured, of the trees asked for.

    Raises ValueError for a file that is no such result.
    """
    if not chosen.json.exists():
        return []
    shapes = {key: topology.parents_of(tree) for key, tree in trees.items()}
    try:
        found = json_lib.loads(chosen.json.read_text("utf-8"))
        if found["setting"] != setting(chosen):
            return []
        return [
            row
            for row in found["rows"]
            if shapes.get((row["role"], row["tree"])) == row["parents"]
            and len(row["halves"][0]["run_s"]) == chosen.rounds
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"json {chosen.json}: no such result ({error!r})") from None


def summary(chosen: Options, known, rows) -> dict[str, Any]:
    """Return the result: settings, fit, checked trees, and the rows behind them."""
    by_role = {
        role: [row for row in rows if row["role"] == role]
        for role in ("fit", "checked")
    }
    fit = checks.step_times(by_role["fit"])
    plain = next((r for r in by_role["fit"] if r["nodes"] == 1), None)
    return {
        "method": __doc__,
        "setting": setting(chosen),
        "level_milliseconds": fit.level,
        "fit": [
            {name: row[name] for name in ("tree", "nodes", "depth")}
            | {"measured": checks.measured(row)}
            for row in by_role["fit"]
        ],
        "trees": [described(row, known, fit, plain) for row in by_role["checked"]],
        "rows": rows,
    }


def described(row, known, fit, plain) -> dict[str, Any]:
    """Return a checked tree: on all prompts, and each half by rates of the other."""
    everything, *halves = known
    found = {name: row[name] for name in ("tree", "nodes", "depth", "parents")}
    found |= checks.check(row, everything, fit)
    found["halves"] = [
        checks.check(row, by_depth, fit, half=1 - half)
        for half, by_depth in enumerate(halves)
    ]
    if plain is not None:
        found["differ_from_plain"] = checks.different(row, plain)
    return found


if __name__ == "__main__":
    sys.exit(main())
