"""The decode step of a model, compiled for each lifecycle, and what a device holds."""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich import markup
from rich import table as rich_table

from scripts import reporting
from scripts.benching import command
from scripts.compiling import hosts, model_options, model_step, targets

GIB = 2**30
WATCHED = {"weights", "states", "history", "kv", "mtp_kv"}  # not to be copied whole


def cases(model: str, chosen: model_options.Options) -> list[model_step.Case]:
    """Return what to compile, the baseline last; the compilers are made ready.

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
    if not chosen.commit:
        raise ValueError("commit is empty; one or more are allowed")
    names = [name.replace("_", "-") for name in chosen.commit]
    if not chosen.alone:
        names.append(model_step.BASELINE)
    options = dataclasses.asdict(chosen)
    del options["alone"], options["commit"]
    targets.prepare(host.target)  # before JAX first computes
    found = [
        model_step.Case(model=model, commit=name, **options)
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
        command.note(f"{case.model} {case.commit} for {case.target}")
        try:
            result = apart(model_step.compile_case, case)
        except concurrent.futures.process.BrokenProcessPool:
            reason = "the compiler ended its process"
            result = model_step.Result(commit=case.commit, problem=reason)
        command.note(f"{case.commit}: {result.problem or 'compiled'}")
        return result

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, found))


def problems(result: model_step.Result) -> list[str]:
    """Return what is wrong: no program, more than the device has, arrays copied."""
    found = [] if result.problem is None else [result.problem]
    if result.limit is not None and (result.peak or 0) > result.limit:
        found.append(f"peak: {result.peak} bytes; the device has {result.limit}")
    if copies := _watched(result):
        kinds = sorted({kind for copy in copies for kind in copy.kinds})
        found.append(f"copied whole: {', '.join(kinds)}")
    return found


def _watched(result):
    return [copy for copy in result.copies if WATCHED & set(copy.kinds)]


def failed(results: Sequence[model_step.Result], commit: Sequence[str]) -> bool:
    """Tell whether a lifecycle that was asked for has problems."""
    asked = {name.replace("_", "-") for name in commit}
    return any(problems(result) for result in results if result.commit in asked)


def table(results: Sequence[model_step.Result]) -> rich_table.Table:
    """Return the parts of a device's memory as rows, a column a lifecycle."""
    found = rich_table.Table()
    found.add_column("GiB a device", no_wrap=True)
    for result in results:
        found.add_column(result.commit, justify="right")
    for name in next((r.parts for r in results if r.parts), ()):
        found.add_row(name, *(_gib(result.parts.get(name)) for result in results))
    for name in ("temporaries", "records", "peak", "limit"):
        shown = "(records in them)" if name == "records" else name
        found.add_row(shown, *(_gib(getattr(result, name)) for result in results))
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
    found = []
    for result in results:
        found += [
            f"{result.commit}: {'/'.join(copy.kinds)} {copy.shape} of "
            f"{copy.nbytes / 2**20:.1f} MiB is copied whole, {copy.times} times "
            f"({copy.source})"
            for copy in result.copies
        ]
        if result.peak is not None and not _watched(result):
            found.append(f"{result.commit}: no weight, state or KV is copied whole")
        for word in ("kernels", "collectives") if result.peak is not None else ():
            counts = getattr(result, word)
            text = ", ".join(f"{n} {name}" for name, n in counts.items())
            found.append(f"{result.commit}: {word}: {text or 'none'}")
    return found


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
