"""Compiles every kernel for GPUs and TPUs that need not be there, within bounds.

    python scripts/compile_check.py
    python scripts/compile_check.py --targets H200 v5e:2x2 --json result.json

Exit status: 0; 1 where a kernel does not compile, exceeds the device's shared memory or
spills more than scripts/compiling/kernels.py allows; 2 for a wrong argument or a
missing compiler, with one line on stderr. `make compile-check` installs the compilers.
Numbers and speed are not checked.
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
from typing import Any

import tyro
from rich import console as rich_console

from scripts import reporting
from scripts.compiling import kernels, report, targets

# Of the table where no terminal sets the width: nothing is cut short in a log.
LOG_WIDTH = 160


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles every kernel for GPUs and TPUs that need not be there."""

    targets: tuple[str, ...] = targets.DEFAULT
    """H200, B200, or TPU topologies such as v5e:2x2."""
    kernels: tuple[str, ...] = tuple(kernels.KERNELS)
    """Kernels to compile; by default all."""
    json: pathlib.Path | None = None
    """Write the figures to this file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    chosen = tyro.cli(Options, args=arguments, prog="compile_check.py")
    try:
        asked = check_options(chosen)
    except (ValueError, OSError) as error:
        print(f"compile_check.py: error: {error}", file=sys.stderr)
        return 2
    console = rich_console.Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    rows: list[report.Row] = []
    for target in asked:
        with console.status(f"compiling for {target.name}"):
            rows += check_apart(target.name, chosen.kernels)
    console.print(report.table(rows), report.summary(rows))
    if chosen.json is not None:
        write(chosen.json, rows)
    return int(any(row.problems for row in rows))


def check_options(chosen: Options) -> list[targets.Target]:
    """Return the targets of the options.

    Raises ValueError for an unknown target or kernel, and for a missing compiler.
    """
    asked = [targets.parse(name) for name in chosen.targets]
    for given, name in ((asked, "targets"), (chosen.kernels, "kernels")):
        if not given:
            raise ValueError(f"{name} is empty; one or more are allowed")
    for name in chosen.kernels:
        if name not in kernels.KERNELS:
            allowed = ", ".join(kernels.KERNELS)
            raise ValueError(f"kernels names {name!r}; allowed: {allowed}")
    if chosen.json is not None and chosen.json.is_dir():
        raise ValueError(f"json is {chosen.json}, a folder; a file is allowed")
    absent = dict.fromkeys(name for t in asked for name in targets.missing(t))
    if absent:
        raise ValueError(
            f"{', '.join(absent)} not installed; run make compile-check, or "
            "pip install --group compile"
        )
    return asked


def check_apart(target_name: str, kernel_names: Sequence[str]) -> list[report.Row]:
    """Check kernels for a target in a process of its own; if it dies, that is a row."""
    targets.prepare(targets.parse(target_name))  # before JAX starts in the new process
    begin = time.perf_counter()
    try:
        return in_fresh_process(check, target_name, tuple(kernel_names))
    except concurrent.futures.process.BrokenProcessPool:
        seconds = time.perf_counter() - begin
        reason = ("the compiler ended its process",)
        kernel = ", ".join(kernel_names)
        nothing = report.Resources()
        return [report.Row(target_name, kernel, "all", seconds, nothing, reason)]


def in_fresh_process(function: Callable, *arguments: Any) -> Any:
    """Call a function in a new process: a compiler may keep its first architecture.

    Raises BrokenProcessPool where the process ends before the function returns.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def check(target_name: str, kernel_names: Sequence[str]) -> list[report.Row]:
    """Compile every variant of the kernels for a target and compare with the bounds."""
    target = targets.parse(target_name)
    warnings.filterwarnings("ignore", ".*[Tt]riton.*", DeprecationWarning)
    return [
        check_variant(target, name, variant)
        for name in kernel_names
        for variant in kernels.KERNELS[name]()
    ]


def check_variant(
    target: targets.Target, kernel: str, variant: kernels.Variant
) -> report.Row:
    """Compile one variant; whatever goes wrong becomes a problem of its row."""
    begin = time.perf_counter()
    used = report.Resources()
    try:
        used = compile_variant(target, kernel, variant)
        bound = kernels.MAX_SPILL[kernel, variant.kind]
        found = report.problems(target, used, bound)
    except Exception as error:  # each compiler has its own
        lines = str(error).strip().splitlines() or [""]
        found = (f"{type(error).__name__}: {lines[0][:300]}",)
    seconds = time.perf_counter() - begin
    return report.Row(target.name, kernel, variant.label, seconds, used, found)


def compile_variant(
    target: targets.Target, kernel: str, variant: kernels.Variant
) -> report.Resources:
    """Compile one variant and return what its kernel uses of the device."""
    function, shapes = variant.case(target.platform)
    with tempfile.TemporaryDirectory() as folder:
        options = targets.dump_options(target, folder)
        compiled = targets.compile_for(
            target, function, *shapes, compiler_options=options
        )
        if target.platform == "tpu":
            return report.tpu_resources(compiled, kernel)
        return report.gpu_resources(pathlib.Path(folder), kernel)


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
