"""What a compiled kernel uses of the device, and whether that is within its bounds."""

import dataclasses
import pathlib
import re
import subprocess
from collections.abc import Iterable, Sequence

import jax
from rich import markup
from rich import table as rich_table

from scripts.compiling import kernels, targets

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
LAUNCH = re.compile(r"(\w+) grid: .*shared_memory: (\d+) bytes")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one kernel uses, in bytes and registers a thread; None: not of this device.

    Attributes:
      architecture: what the code is for, such as sm_90a.
      shared_memory: bytes of a block, static and dynamic.
      registers: of a thread.
      spill_bytes: what a thread stores to local memory for want of registers.
      code_bytes: size of a TPU's program.
    """

    architecture: str | None = None
    shared_memory: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One compilation: what was compiled for what, and what is wrong with it."""

    target: str
    kernel: str
    variant: str
    seconds: float
    resources: Resources
    problems: tuple[str, ...] = ()


def parse_ptxas(text: str) -> dict[str, Resources]:
    """Read what ptxas -v prints, kernel by kernel; shared memory is the static part.

    Raises ValueError where an entry function comes without its figures.
    """
    found = {}
    pieces = ENTRY.split(text)[1:]
    for name, architecture, body in zip(
        pieces[::3], pieces[1::3], pieces[2::3], strict=True
    ):
        spills = re.search(r"(\d+) bytes spill stores", body)
        registers = re.search(r"Used (\d+) registers", body)
        if spills is None or registers is None:
            raise ValueError(f"ptxas says nothing of registers or spills of {name}")
        static = re.search(r"(\d+) bytes smem", body)
        found[name] = Resources(
            architecture=architecture,
            shared_memory=int(static[1]) if static else 0,
            registers=int(registers[1]),
            spill_bytes=int(spills[1]),
        )
    return found


def parse_launches(text: str) -> dict[str, int]:
    """Read the dynamic shared memory of each kernel from XLA's list of launches."""
    return {name: int(size) for name, size in LAUNCH.findall(text)}


def gpu_resources(folder: pathlib.Path, names: tuple[str, ...]) -> Resources:
    """Return the most that one of a call's kernels uses, from XLA's dump of its module.

    `names` are what the kernels' names begin with. Raises ValueError where the dump
    shows none of them, or launches one whose code it does not show.
    """
    launches = {}
    for file in sorted(folder.glob("*.thunk_sequence.txt")):
        launches |= parse_launches(file.read_text())
    found = {}
    for file in sorted(folder.glob("*.ptx")):
        found |= parse_ptxas(_run_ptxas(file))
    ours = [name for name in launches if name.startswith(names)]
    if not ours or not found.keys() >= set(ours):
        raise ValueError(
            f"the dump shows no kernel {' or '.join(names)}; launched: "
            f"{sorted(launches)}, in PTX: {sorted(found)}"
        )
    return Resources(
        architecture=found[ours[0]].architecture,
        shared_memory=max(found[x].shared_memory + launches[x] for x in ours),
        registers=max(found[x].registers for x in ours),
        spill_bytes=max(found[x].spill_bytes for x in ours),
    )


def _run_ptxas(file: pathlib.Path) -> str:
    """Return what ptxas -v prints of a PTX file, compiled for the target it names."""
    architecture = re.search(r"^\.target (\w+)", file.read_text(), re.MULTILINE)[1]
    command = [targets.ptxas(), "-v", f"-arch={architecture}", "-o", "/dev/null"]
    done = subprocess.run(
        [*command, str(file)], check=True, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def tpu_resources(compiled: jax.stages.Compiled, names: tuple[str, ...]) -> Resources:
    """Return the code size; overflowing vector memory is a compile error already.

    Raises ValueError where the program calls no kernel whose name begins with `names`.
    """
    if not re.search(rf"custom-call.*\b({'|'.join(names)})", compiled.as_text()):
        raise ValueError(f"the program calls no kernel {' or '.join(names)}")
    code = compiled.memory_analysis().generated_code_size_in_bytes
    return Resources(code_bytes=code)


def problems(
    target: targets.Target, used: Resources, bound: kernels.Bound
) -> tuple[str, ...]:
    """Return what exceeds a GPU's shared memory or the bound on spills."""
    if target.platform == "tpu":  # its compiler refuses what does not fit
        return ()
    found = []
    for figure, most, what in (
        (used.shared_memory, target.shared_memory, "shared memory"),
        (used.spill_bytes, bound.most(target.name), "spills"),
    ):
        if figure > most:
            found.append(f"{what}: {figure} bytes; {most} allowed")
    return tuple(found)


def table(rows: Iterable[Row]) -> rich_table.Table:
    """Return the rows as a table; a dash stands for what the device does not have."""
    result = rich_table.Table()
    for name in ("target", "kernel", "variant"):
        result.add_column(name, no_wrap=True)
    for name in ("s", "shared B", "registers", "spill B", "code B"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("result")
    for row in rows:
        used = row.resources
        figures = (used.shared_memory, used.registers, used.spill_bytes)
        result.add_row(
            row.target,
            row.kernel,
            row.variant,
            f"{row.seconds:.1f}",
            *("-" if x is None else str(x) for x in (*figures, used.code_bytes)),
            markup.escape("; ".join(row.problems)) or "ok",
        )
    return result


def summary(rows: Sequence[Row]) -> str:
    """Return one line: how many were compiled, and how many failed."""
    failed = sum(bool(row.problems) for row in rows)
    return f"{len(rows)} compiled, {failed} failed"
