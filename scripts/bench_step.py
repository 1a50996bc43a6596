"""How long does a whole decode step take? By batch, tree and lifecycle.

    python scripts/bench_step.py --batch 1 8 32 128 --json step.json
    python scripts/bench_step.py --trees none 1,1,1 3,3,3 --commit reconstruct store-all
    python scripts/bench_step.py --trees 1,1,1 --find-max-batch --json step.json
    python scripts/bench_step.py --model qwen3.5-397b-a17b --mesh tensor=8

The program is `treewy_jax.loop.step` with its state donated: draft, verify, accept,
commit. Weights of published sizes are random, experts are used evenly (or by Zipf), and
what is accepted is drawn from the table `--accept`: shares of steps that accept at
least 1, 2, ... drafts, as vLLM's synthetic rejection sampler takes them. Only the
choice of the target is replaced, in the expression whose argmax is taken
(scripts/benching/step_inject.py): drafts, output heads and the commit of the accepted
path are the real ones. Keys and values of a context longer than the prompt of 64 tokens
repeat those of the prompt, and so do the rows.

With --mesh the step is spread over devices of one host: rows over `data`, heads over
`tensor`, experts over `expert` and `tensor` (models/qwen3_5/sharding.py). Before it is
timed, a layer has to verify the tree on the mesh as the reference does on one device
(scripts/benching/step_gate.py). Then floor, peak, weights and bytes of a row are those
of one device, without what devices exchange; batch and tokens are of all. Times are the
host's clock alone.

A point is a model, tree, lifecycle, context, batch and mesh. Its row is in `--json` as
soon as it is done, {"kind": "step", "point", "code", ...} with
    wall_ms, device_ms      least, median, mean: the host's clock over calls that are
                            sent without waiting; kernels of a call (CUPTI), else null
    tokens_per_s            rows * mean accept length / mean wall time
    launches, launches_per_layer   kernels a step (CUPTI)
    floor_bytes, floor_ms   by part (scripts/benching/step_floor.py), at the copy's rate
    floor_flops             of products with weights
    floor_and_launches_ms   floor and 4 us a kernel: what one row can hope for
    peak_bytes              arguments, results, temporaries of the step (XLA's count)
    device_peak_bytes       most that the process held so far (the allocator's count)
    parts                   with --parts, see scripts/bench_decode.py
    devices, verify_error   with --mesh: how many; the relative error of a layer.
                            device_ms and launches are null there
    problem                 where the device's memory ended, instead of times
Steps compile side by side, --together of them, and are timed alone after that.
A run that is started again leaves out the points whose row was made by the same code
(digest of models, treewy_jax, pallas_kernels, JAX and the device). `--find-max-batch`
adds rows {"kind": "largest", "point", "largest", "predicted", "tried", ...}.

For simulators, the timed rows are also merged into scripts/results/DEVICE/steptime.json
(a CPU's only where `--steptime` names a file):
    {"schema": "steptime/1", "device", "date", "versions", "entries": [
      {"model", "layers": null or how many, "dtype", "state_dtype",
       "lifecycle", "horizon": null or an int, "tree": "none" or "3,3,3",
       "batch", "context", "accept": [shares], "router",
       "ms": mean wall milliseconds of a step, "device_ms": of its kernels, or null,
       "nodes", "accept_length": tokens a step and row, "floor_ms", "peak_bytes",
       "code"}, ...]}
One entry for each value of the fields before "ms"; those of a mesh have "mesh", too,
such as "tensor=2".

The allocator of JAX takes 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says
otherwise: 35B in bfloat16 needs .95 of 140 GB for large batches.

Exit status: 0; 1 where something could not be timed; 2 for wrong input, with one line
on stderr.
"""

import dataclasses
import gc
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
from rich import table as rich_table

from models.qwen3_5 import published
from scripts import command, reporting
from scripts.benching import (
    rates,
    step_fit,
    step_inject,
    step_mesh,
    step_run,
    step_share,
    step_store,
)

NAME = "bench_step.py"


@dataclasses.dataclass(frozen=True)
class Options:
    """Times whole decode steps with a given acceptance."""

    model: str = "qwen3.5-35b-a3b"
    """A published size with random weights, "tiny", or a folder. With /8 behind a size:
    the share of one of eight devices (scripts/benching/step_share.py)."""
    random_weights: bool = False
    """As in decode.py; here published sizes have no others."""
    layers: int | None = None
    """First layers of a published size, a multiple of 4; by default all."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Rows."""
    trees: tuple[str, ...] = ("none", "1,1,1", "3,3,3")
    """Widths of each tree; none is the root alone."""
    commit: tuple[str, ...] = ("reconstruct",)
    """Lifecycles: reconstruct, store-all, fused, deferred."""
    horizon: int = 16
    """Of deferred."""
    context: tuple[int, ...] = (1024,)
    """Tokens that the state covers."""
    accept: str = "0.78,0.60,0.47"
    """Shares of steps that accept at least 1, 2, ... drafts, or a .json result of
    decode.py or bench_acceptance.py."""
    router: Literal["uniform", "zipf"] = "uniform"
    """Loads of the experts."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights."""
    mesh: str | None = None
    """Devices of this host, such as tensor=2 or data=2,tensor=4; by default one."""
    state_dtype: str = "float32"
    """Storage of the recurrent state."""
    together: int = 8
    """Steps that compile side by side, before they are timed one by one."""
    parts: bool = False
    """Time the parts of a step, too; of reconstruct only."""
    find_max_batch: bool = False
    """Find the largest batch of each tree and lifecycle in place of timing."""
    first_batch: int | None = None
    """Where that begins; by default at what the formula says."""
    memory_gib: float | None = None
    """Memory that may be used; by default the allocator's."""
    max_seconds: float | None = None
    """Start no other point after so many seconds."""
    copy_tb_s: float | None = None
    """Rate of a large copy, TB/s, read and written; by default measured."""
    json: pathlib.Path | None = None
    """Rows are kept in this file, and not measured again."""
    steptime: pathlib.Path | None = None
    """The simulator's file; by default under scripts/results, by device."""
    plot: pathlib.Path | None = None
    """Draw the rows of the file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, NAME, arguments)
        points = select(chosen)
        store = step_store.Store(chosen.json, {"method": __doc__})
        steptime = _steptime(chosen)
        if steptime is not None:
            step_store.read_steptime(steptime)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse(NAME, error)
    kind = "largest" if chosen.find_max_batch else "step"
    fields = ["parts"] if chosen.parts and kind == "step" else []
    open_points = [point for point in points if not store.has(kind, point, *fields)]
    command.note(f"{len(points) - len(open_points)} of {len(points)} points are there")
    status = run(chosen, kind, open_points, store, steptime)
    console = command.console()
    console.print(table(store.rows, kind, points))
    if chosen.plot is not None:
        from scripts.benching import step_plot

        step_plot.draw(store.rows).savefig(chosen.plot)
    return status


def select(chosen: Options) -> list[step_store.Point]:
    """Return the points, small batches first.

    Raises ValueError or NotImplementedError for what cannot be measured.
    """
    command.check_files(chosen.json, chosen.steptime, chosen.plot)
    command.check_plot(chosen.plot)
    for name in ("copy_tb_s", "memory_gib", "max_seconds"):
        command.check_rate(name, getattr(chosen, name))
    for name in ("batch", "trees", "commit", "context"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    if chosen.parts and set(chosen.commit) != {step_run.PARTS_OF}:
        raise NotImplementedError(
            f"parts: of {step_run.PARTS_OF} only, its records are what their inputs are"
        )
    if chosen.random_weights:
        published.get(step_share.parse(chosen.model)[0])
    mesh = step_mesh.canonical(chosen.mesh)
    if chosen.parts and mesh is not None:
        raise NotImplementedError(f"parts: on one device only, not on mesh {mesh}")
    if chosen.together < 1:
        raise ValueError(f"together is {chosen.together}; 1 or more is allowed")
    if chosen.first_batch is not None and chosen.first_batch < 1:
        raise ValueError(f"first_batch is {chosen.first_batch}; 1 or more is allowed")
    if chosen.find_max_batch and step_run.limit_bytes(chosen.memory_gib) is None:
        raise ValueError("memory_gib is needed: this device tells no limit")
    batches = (None,) if chosen.find_max_batch else sorted(set(chosen.batch))
    points = [
        point(chosen, mesh, tree, commit, context, batch)
        for context in chosen.context
        for batch in batches
        for tree in chosen.trees
        for commit in chosen.commit
    ]
    for one in points:
        step_run.check(one)
    step_run.check_room(points[0])
    return points


def point(chosen: Options, mesh, tree, commit, context, batch) -> step_store.Point:
    """Return one point of the options."""
    commit = commit.replace("_", "-")
    return step_store.Point(
        model=chosen.model,
        layers=chosen.layers,
        dtype=chosen.dtype,
        state_dtype=chosen.state_dtype,
        tree=tree,
        commit=commit,
        horizon=chosen.horizon if commit == "deferred" else None,
        accept=step_inject.rates(chosen.accept, tree),
        router=chosen.router,
        context=context,
        batch=batch,
        mesh=mesh,
    )


def run(
    chosen: Options,
    kind: str,
    points: Sequence[step_store.Point],
    store: step_store.Store,
    steptime: pathlib.Path | None,
) -> int:
    """Answer the points; returns 1 where one could not be."""
    if not points:
        return 0
    rate = None if chosen.find_max_batch else rates.copy(chosen.copy_tb_s)
    limit = step_run.limit_bytes(chosen.memory_gib)
    held, status = None, 0
    programs: dict[step_store.Point, Any] = {}
    for number, one in enumerate(points):
        late = time.perf_counter() - command.BEGIN
        if chosen.max_seconds is not None and late > chosen.max_seconds:
            command.note(f"{one.label}: not started, {late:.0f} s are over")
            break
        held = held or step_run.hold(one)
        if kind == "step" and one not in programs:
            some = points[number : number + chosen.together]
            command.note(f"compiling {len(some)} steps from {one.label} on")
            made = step_run.side_by_side(some, held, limit)
            programs = dict(zip(some, made, strict=True))
        command.note(one.label)
        answer = _answer(chosen, one, held, programs.pop(one, None), rate, limit)
        store.add(kind, one, answer)
        command.note(f"{one.label}: {_told(answer)}")
        if steptime is not None:
            step_store.merge_steptime(steptime, store.rows)
        status |= int("problem" in answer or bool(answer.get("problems")))
        gc.collect()
    return status


def _answer(chosen, one, held, program, rate, limit) -> dict[str, Any]:
    if program is None:
        return step_fit.search(one, held, limit, chosen.first_batch)
    try:
        built = program.result()
        return step_run.measure(one, held, built, rate, parts=chosen.parts)
    except step_run.OutOfMemory as error:
        return {"problem": f"out of memory: {error}"}


def _told(answer: dict[str, Any]) -> str:
    if "largest" in answer:
        return f"largest batch {answer['largest']}, by formula {answer['predicted']}"
    if "problem" in answer:
        return answer["problem"]
    clock = step_store.clock(answer)
    return f"{clock['mean']:.3f} ms, floor {answer['floor_ms']:.3f} ms"


def _steptime(chosen: Options) -> pathlib.Path | None:
    if chosen.steptime is not None or chosen.find_max_batch:
        return chosen.steptime
    if jax.default_backend() == "cpu":
        return None
    return reporting.result_path("steptime")


COLUMNS = (
    "tree", "commit", "B", "context", "wall ms", "device ms", "floor ms", "x floor",
    "launches", "tokens/s", "peak GiB", "compile s",
)  # fmt: skip
LARGEST = ("tree", "commit", "context", "largest B", "by formula", "KiB a row")


def table(rows, kind: str, points) -> rich_table.Table:
    """Return the rows of these points."""
    asked = [point.as_json() for point in points]
    found = [row for row in rows if row["kind"] == kind and row["point"] in asked]
    drawn = rich_table.Table()
    for name in LARGEST if kind == "largest" else COLUMNS:
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in sorted(found, key=lambda row: asked.index(row["point"])):
        cells = _largest(row) if kind == "largest" else _step(row)
        drawn.add_row(*(cell if isinstance(cell, str) else f"{cell}" for cell in cells))
    return drawn


def _largest(row) -> list[Any]:
    one, held = row["point"], sum(row["row_bytes"].values())
    sizes = (row["largest"], row["predicted"], held // 1024)
    return [one["tree"], one["commit"], one["context"], *sizes]


def _step(row) -> list[Any]:
    one = row["point"]
    name = one["commit"] + (f" {one['horizon']}" if one["horizon"] else "")
    start = [one["tree"], name, one["batch"], one["context"]]
    if "problem" in row:
        return [*start, "out of memory"]
    wall, device = row["wall_ms"]["mean"], (row["device_ms"] or {}).get("mean")
    peak, counted = row["peak_bytes"], step_store.clock(row)["mean"]
    return [
        *start,
        f"{wall:.3f}",
        f"{device:.3f}" if device else "-",
        f"{row['floor_ms']:.3f}",
        f"{counted / row['floor_ms']:.2f}",
        row["launches"] or "-",
        f"{row['tokens_per_s']:,.0f}",
        f"{peak / 2**30:.2f}" if peak else "-",
        f"{row['lower_s'] + row['compile_s']:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
