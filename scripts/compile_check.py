"""Compiles every kernel for GPUs and TPUs that need not be there, within bounds.

    python scripts/compile_check.py
    python scripts/compile_check.py --targets H200 v5e:2x2 --json result.json
    python scripts/compile_check.py --model qwen3.5-397b-a17b --target B200x8

What is compiled are the cases of scripts/workloads that are tagged "compile": Pallas
Triton for a GPU, Pallas TPU for a TPU. Exit status: 0; 1 where a kernel does not
compile, exceeds the device's shared memory or spills more than
scripts/compiling/kernels.py allows; 2 for a wrong argument or a missing compiler, with
one line on stderr. `make compile-check` installs the compilers, `make
compile-check-next` those of the next JAX. Numbers and speed are not checked.

With --model it is the decode step `treewy_jax.loop.step` of a published size, with its
state donated, spread over the devices of --target. Printed are the bytes of a device by
part, store-all's beside those of the lifecycles asked for, of each --tree; and whether
a weight, state or KV is copied whole or put together from all devices. Of the first
--layers only, the peak of all of them is that of the program and what the other layers
keep, by formula. Exit status 1 then says that a lifecycle asked for does not compile,
needs more memory than the device has, copies one of those, holds more temporaries than
scripts/compiling/model_check.py allows, or grows with the tree by more than it does.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

from scripts import command, reporting
from scripts.compiling import kernels, model_options, report, targets
from scripts.workloads import all as workloads
from scripts.workloads import base

ALL_KERNELS = tuple(workloads.MODULES)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles every kernel for GPUs and TPUs that need not be there."""

    targets: tuple[str, ...] = targets.DEFAULT
    """H200, B200, or TPU topologies such as v5e:2x2."""
    kernels: tuple[str, ...] = ALL_KERNELS
    """Ops to compile; by default all that have workloads."""
    workers: int = 2
    """Targets that are compiled for at the same time, or lifecycles of a model."""
    json: pathlib.Path | None = None
    """Write the figures to this file."""
    model: str | None = None
    """Compile the decode step of this published size instead."""
    step: Annotated[model_options.Options, tyro.conf.arg(name="")] = (
        model_options.Options()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "compile_check.py", arguments)
        if chosen.model is not None:
            return check_model(chosen)
        asked = check_options(chosen)
    except (ValueError, OSError) as error:
        return command.refuse("compile_check.py", error)
    console = command.console()
    with console.status("compiling"):
        rows = check_all(asked, chosen.kernels, chosen.workers)
    console.print(report.table(rows), report.summary(rows))
    if chosen.json is not None:
        write(chosen.json, rows)
    return int(any(row.problems for row in rows))


def check_model(chosen: Options) -> int:
    """Compile the decode step of a model; returns the exit status.

    Raises ValueError for wrong options.
    """
    from scripts.compiling import model_check  # imports models; kernels need none

    for name, usual in (("targets", targets.DEFAULT), ("kernels", ALL_KERNELS)):
        if getattr(chosen, name) != usual:
            raise ValueError(f"{name}: not allowed with --model")
    check_run(chosen)
    cases = model_check.cases(chosen.model, chosen.step)
    results = model_check.compile_all(cases, chosen.workers, in_fresh_process)
    console = command.console()
    console.print(*model_check.tables(results))
    for line in model_check.lines(results):
        console.print(line, markup=False)
    if chosen.json is not None:
        model_check.write(chosen.json, cases, results)
    return int(model_check.failed(results, chosen.step.commit))


def check_run(chosen: Options) -> None:
    """Raise ValueError for too few workers, and a file that cannot be written."""
    if chosen.workers < 1:
        raise ValueError(f"workers is {chosen.workers}; 1 or more are allowed")
    if chosen.json is not None and chosen.json.is_dir():
        raise ValueError(f"json is {chosen.json}, a folder; a file is allowed")


def check_options(chosen: Options) -> list[targets.Target]:
    """Return the targets of the options.

    Raises ValueError for an unknown target or kernel, and for a missing compiler.
    """
    for field in dataclasses.fields(chosen.step):
        value = getattr(chosen.step, field.name)
        if value != field.default:
            option = field.name.replace("_", "-")
            raise ValueError(f"--{option} is {value}; allowed with --model only")
    asked = [targets.parse(name) for name in chosen.targets]
    for given, name in ((asked, "targets"), (chosen.kernels, "kernels")):
        if not given:
            raise ValueError(f"{name} is empty; one or more are allowed")
    for name in chosen.kernels:
        if name not in workloads.MODULES:
            allowed = ", ".join(workloads.MODULES)
            raise ValueError(f"kernels names {name!r}; allowed: {allowed}")
    check_run(chosen)
    absent = dict.fromkeys(name for t in asked for name in targets.missing(t))
    if absent:
        raise ValueError(
            f"{', '.join(absent)} not installed; run make compile-check, or "
            "pip install --group compile"
        )
    return asked


def check_all(
    asked: Sequence[targets.Target], names: Sequence[str], workers: int
) -> list[report.Row]:
    """Check kernels for every target, some of them side by side, in the order asked."""
    for target in asked:  # before JAX starts in the new processes
        targets.prepare(target)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda target: check_apart(target.name, names), asked)
        return [row for rows in found for row in rows]


def check_apart(target_name: str, names: Sequence[str]) -> list[report.Row]:
    """Check kernels for a target in a process of its own; if it dies, that is a row."""
    begin = time.perf_counter()
    try:
        return in_fresh_process(check, target_name, tuple(names))
    except concurrent.futures.process.BrokenProcessPool:
        seconds = time.perf_counter() - begin
        reason = ("the compiler ended its process",)
        nothing = report.Resources()
        all_of_them = ", ".join(names)
        return [report.Row(target_name, all_of_them, "all", seconds, nothing, reason)]


def in_fresh_process(function: Callable, *arguments: Any) -> Any:
    """Call a function in a new process: a compiler may keep its first architecture.

    Raises BrokenProcessPool where the process ends before the function returns.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def check(target_name: str, names: Sequence[str]) -> list[report.Row]:
    """Compile every case of some ops for a target and compare with the bounds."""
    target = targets.parse(target_name)
    warnings.filterwarnings("ignore", ".*[Tt]riton.*", DeprecationWarning)
    cases = workloads.cases(names, ["compile", f"compile-{target.platform}"])
    usual = kernels.IMPLEMENTATION[target.platform]
    return [
        check_case(target, case, impl)
        for case in cases
        for impl in (usual, *kernels.ALSO.get((target_name, case.op), ()))
    ]


def check_case(target: targets.Target, case: base.Case, impl: str) -> report.Row:
    """Compile one case; whatever goes wrong becomes a problem of its row."""
    begin = time.perf_counter()
    used = report.Resources()
    usual = impl == kernels.IMPLEMENTATION[target.platform]
    label = case.label if usual else f"{case.label} {impl}"
    try:
        used = compile_case(target, case, impl)
        bound = kernels.bound(case.op, case.kind)
        found = report.problems(target, used, bound) if usual else ()
    except Exception as error:  # each compiler has its own
        lines = str(error).strip().splitlines() or [""]
        found = (f"{type(error).__name__}: {lines[0][:300]}",)
    seconds = time.perf_counter() - begin
    return report.Row(target.name, case.op, label, seconds, used, found)


def compile_case(
    target: targets.Target, case: base.Case, impl: str
) -> report.Resources:
    """Compile one case and return what its kernels use of the device, if it is known.

    Of the leaves in `kernels.ALSO` it is not.
    """
    names = case.kernels or (case.op,)
    with tempfile.TemporaryDirectory() as folder:
        compiled = targets.compile_for(
            target,
            case.call(impl, None),
            *case.shapes(),
            donate=case.donate,
            compiler_options=targets.dump_options(target, folder),
        )
        if impl != kernels.IMPLEMENTATION[target.platform]:
            return report.Resources()
        if target.platform == "tpu":
            return report.tpu_resources(compiled, names)
        return report.gpu_resources(pathlib.Path(folder), names)


def write(path: pathlib.Path, rows: Sequence[report.Row]) -> None:
    """Write rows, bounds and the compilers' versions as JSON."""
    packages = [name for names in targets.PACKAGES.values() for name in names]
    reporting.write_result(
        path,
        {
            "compilers": {name: targets.version(name) for name in packages},
            "max_spill": [
                {"kernel": kernel, "kind": kind} | dataclasses.asdict(bound)
                for (kernel, kind), bound in kernels.MAX_SPILL.items()
            ],
            "rows": [dataclasses.asdict(row) for row in rows],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
