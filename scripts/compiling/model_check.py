"""The decode step of a model, compiled for each lifecycle, and what a device holds."""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich import markup
from rich import table as rich_table

from scripts import command, reporting
from scripts.compiling import hosts, model_options, model_step, targets

GIB = 2**30
WATCHED = {"weights", "states", "history", "kv", "mtp_kv"}  # not to be copied whole
# Temporaries beside the records. Slices of layers that a scan copies are more: of the
# largest model on eight devices, those of one super-block are 6.6 GiB.
MOST_TEMPORARY = 4 * GIB
# By which the peak may grow from the smallest tree to the largest; not of the baseline.
MOST_GROWTH = 0.03


def cases(model: str, chosen: model_options.Options) -> list[model_step.Case]:
    """Return what to compile, by tree, the baseline last; compilers are made ready.

    Raises ValueError for a case that cannot be, and for a missing compiler.
    """
    if chosen.target is None:
        raise ValueError("target is missing; H200, B200x8 and others are allowed")
    host = hosts.parse(chosen.target)
    absent = targets.missing(host.target)
    if absent:
        raise ValueError(
            f"{', '.join(absent)} not installed; run make compile-check, or "
            "pip install --group compile"
        )
    for name in ("commit", "tree"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    names = [name.replace("_", "-") for name in chosen.commit]
    if not chosen.alone:
        names.append(model_step.BASELINE)
    options = dataclasses.asdict(chosen)
    for name in ("alone", "commit", "tree"):
        del options[name]
    targets.prepare(host.target)  # before JAX first computes
    found = [
        model_step.Case(model=model, commit=name, tree=tree, **options)
        for tree in dict.fromkeys(chosen.tree)
        for name in dict.fromkeys(names)
    ]
    for case in found:
        model_step.check(case)
    model_step.make_mesh(found[0])
    return found


def compile_all(
    found: Sequence[model_step.Case], workers: int, apart: Callable
) -> list[model_step.Result]:
    """Compile every case in a process of its own, which `apart` starts."""

    def one(case: model_step.Case) -> model_step.Result:
        command.note(f"{case.model} {case.commit} {case.tree} for {case.target}")
        try:
            result = apart(model_step.compile_case, case)
        except concurrent.futures.process.BrokenProcessPool:
            reason = "the compiler ended its process"
            result = model_step.Result(commit=case.commit, problem=reason)
        command.note(f"{case.commit} {case.tree}: {result.problem or 'compiled'}")
        return result

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, found))


def problems(result: model_step.Result) -> list[str]:
    """Return what is wrong: no program, more than the device has, arrays copied."""
    found = [] if result.problem is None else [result.problem]
    peak = _peak(result) or 0
    if result.limit is not None and peak > result.limit:
        found.append(f"peak: {peak} bytes; the device has {result.limit}")
    if _beside(result) > MOST_TEMPORARY:
        found.append(
            f"temporaries: {_beside(result)} bytes beside the records; {MOST_TEMPORARY}"
            " allowed, layers may be copied"
        )
    if copies := _watched(result):
        kinds = sorted({kind for copy in copies for kind in copy.kinds})
        found.append(f"copied whole: {', '.join(kinds)}")
    return found


def _watched(result):
    return [copy for copy in result.copies if WATCHED & set(copy.kinds)]


def _peak(result: model_step.Result) -> int | None:
    """Return the peak with all layers, where it is known."""
    return result.peak if result.whole_peak is None else result.whole_peak


def _beside(result: model_step.Result) -> int:
    return (result.temporaries or 0) - (result.records or 0)


def growth(results: Sequence[model_step.Result]) -> dict[str, float]:
    """Return by what share each lifecycle's peak grows from its smallest, by trees."""
    peaks: dict[str, list[int]] = {}
    for result in results:
        if (peak := _peak(result)) is not None:
            peaks.setdefault(result.commit, []).append(peak)
    return {
        name: (max(found) - min(found)) / min(found) for name, found in peaks.items()
    }


def failed(results: Sequence[model_step.Result], commit: Sequence[str]) -> bool:
    """Tell whether a lifecycle that was asked for has problems, or grows too much."""
    asked = {name.replace("_", "-") for name in commit}
    wrong = any(problems(result) for result in results if result.commit in asked)
    ours = asked - {model_step.BASELINE}
    grown = growth(results)
    return wrong or any(grown.get(name, 0) > MOST_GROWTH for name in ours)


def peak_table(results: Sequence[model_step.Result]) -> rich_table.Table:
    """Return the peaks of all layers, a row a lifecycle, a column a tree."""
    trees = dict.fromkeys(result.nodes for result in results)
    found = rich_table.Table()
    found.add_column("peak, GiB a device", no_wrap=True)
    for nodes in trees:
        found.add_column(f"n = {nodes}", justify="right")
    for name in dict.fromkeys(result.commit for result in results):
        by_tree = {r.nodes: _peak(r) for r in results if r.commit == name}
        found.add_row(name, *(_gib(by_tree.get(nodes)) for nodes in trees))
    return found


def tables(results: Sequence[model_step.Result]) -> list[rich_table.Table]:
    """Return a table for each tree, and one of their peaks where there are several."""
    by_tree: dict[int | None, list[model_step.Result]] = {}
    for result in results:
        by_tree.setdefault(result.nodes, []).append(result)
    found = [table(of_tree) for of_tree in by_tree.values()]
    return found + ([peak_table(results)] if len(found) > 1 else [])


def table(results: Sequence[model_step.Result]) -> rich_table.Table:
    """Return the parts of a device's memory as rows, a column a lifecycle."""
    found = rich_table.Table(title=f"n = {results[0].nodes}", title_justify="left")
    found.add_column("GiB a device", no_wrap=True)
    for result in results:
        found.add_column(result.commit, justify="right")
    for name in next((r.parts for r in results if r.parts), ()):
        found.add_row(name, *(_gib(result.parts.get(name)) for result in results))
    shown = {"records": "(records in them)", "whole_peak": "peak, all layers"}
    for name in ("temporaries", "records", "peak", "whole_peak", "limit"):
        sizes = (_gib(getattr(result, name)) for result in results)
        found.add_row(shown.get(name, name), *sizes)
    for name in ("trace_s", "compile_s"):
        seconds = (getattr(result, name) for result in results)
        shown = name.replace("_s", " s")
        found.add_row(shown, *("-" if x is None else f"{x:.1f}" for x in seconds))
    found.add_row(
        "result",
        *(markup.escape("; ".join(problems(result))) or "ok" for result in results),
    )
    return found


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.3f}"


def lines(results: Sequence[model_step.Result]) -> list[str]:
    """Return what is copied whole, and what a step runs, of each lifecycle."""
    found = [line for result in results for line in _lines(result)]
    if len({result.nodes for result in results}) > 1:
        found += [
            f"{name}: the peak grows by {share:.1%} from the smallest tree"
            for name, share in growth(results).items()
        ]
    return found


def _lines(result: model_step.Result) -> list[str]:
    found = [
        f"{'/'.join(copy.kinds)} {copy.shape} of {copy.nbytes / 2**20:.1f} MiB is "
        f"copied whole, {copy.times} times ({copy.source})"
        for copy in result.copies
    ]
    if result.peak is not None and not _watched(result):
        found.append(
            "no weight, state or KV of a layer is copied whole; "
            f"{_gib(_beside(result))} GiB of temporaries beside the records, at most "
            f"{_gib(MOST_TEMPORARY)}"
        )
    for word in ("kernels", "collectives") if result.peak is not None else ():
        counts = getattr(result, word)
        text = ", ".join(f"{n} {name}" for name, n in counts.items())
        found.append(f"{word}: {text or 'none'}")
    return [f"{result.commit}, n = {result.nodes}: {line}" for line in found]


def write(
    path: pathlib.Path,
    found: Sequence[model_step.Case],
    results: Sequence[model_step.Result],
) -> None:
    """Write cases, figures and the compilers' versions as JSON."""
    packages = [name for names in targets.PACKAGES.values() for name in names]
    rows: list[dict[str, Any]] = []
    for case, result in zip(found, results, strict=True):
        copies = [copy._asdict() for copy in result.copies]
        figures = dataclasses.asdict(result) | {"copies": copies}
        rows.append(dataclasses.asdict(case) | figures | {"problems": problems(result)})
    reporting.write_result(
        path,
        {"compilers": {name: targets.version(name) for name in packages}, "rows": rows},
    )
