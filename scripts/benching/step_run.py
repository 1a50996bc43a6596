"""Measuring one point of the step benchmark: compile `loop.step`, start, time, report.

Models are held between points, with their parameters and one prompted state.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import models
from models import checkpoints
from models.qwen3_5 import published, random_weights, target
from scripts import room
from scripts.benching import (
    step_floor,
    step_gate,
    step_inject,
    step_mesh,
    step_parts,
    step_program,
    step_report,
    step_share,
    step_state,
    step_store,
)
from treewy_jax import commit as commit_lib
from treewy_jax import generate, loop
from treewy_jax import mesh as mesh_lib

WARM = 8  # steps before the first that counts: rows part, histories fill
ROUNDS = 2
SECONDS = 0.5  # of a sample
PARTS_OF = "reconstruct"
LAUNCH_US = 4.0


class OutOfMemory(Exception):
    """The device has less memory than a point needs; the text says who told."""


@dataclasses.dataclass
class Held:
    """A model on the device, and a state of one row that its prompt pass left.

    `mesh` is that over which both are spread, if any.
    """

    config: Any
    graphdef: Any
    params: Any
    start: loop.LoopState
    seconds: float
    mesh: step_mesh.Mesh = None


def hold(point: step_store.Point) -> Held:
    """Load a model, or make one of random weights, and run its prompt."""
    begin, mesh = time.perf_counter(), step_mesh.make(point.mesh)
    options = dict(dtype=point.dtype, mesh=mesh)
    if is_published(point.model):
        options |= dict(router=point.router)
        model = random_weights.of(config_of(point), point.model, **options)
    else:
        model = models.load(point.model, **options)
    shared = (model.config, model.graphdef, model.params)
    with mesh_lib.use(mesh):
        start = jax.block_until_ready(step_state.prompted(point.model, *shared))
    return Held(*shared, start, time.perf_counter() - begin, mesh)


def check(point: step_store.Point) -> None:
    """Raise ValueError for a point that cannot be: nothing is computed."""
    config = config_of(point)
    drafter = generate.default_drafter(point.tree, config)
    lifecycle_of(point, drafter).check(drafter.depth_max, drafter.n_max)
    for name in ("batch", "context"):
        size = getattr(point, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; 1 or more is allowed")
    most = config.max_position_embeddings
    most -= step_program.CALLS * (drafter.depth_max + 1)
    if point.context > most:
        raise ValueError(
            f"context is {point.context}; {point.model} allows {most} at most here"
        )
    if point.batch is not None:
        mesh_lib.check_batch(point.batch, step_mesh.make(point.mesh))
    checkpoints.memory_dtype(point.dtype)
    random_weights.expert_loads(config, point.router)


def check_room(point: step_store.Point) -> None:
    """Raise ValueError for a model that is made and has no room; nothing is."""
    if is_published(point.model):
        mesh = step_mesh.make(point.mesh)
        room.check(point.model, config_of(point), point.dtype, mesh)


def is_published(model: str) -> bool:
    """Tell whether a model is a published size, or the share of a device in one."""
    return step_share.parse(model)[0].lower() in published.CONFIGS


def config_of(point: step_store.Point) -> Any:
    """Return the configuration; ValueError for an unknown model or wrong layers."""
    if is_published(point.model):
        name, devices = step_share.parse(point.model)
        return step_share.of(random_weights.cut(name, point.layers), devices)
    if point.layers is not None:
        raise ValueError(
            f"layers is {point.layers}; allowed for published sizes only, not for "
            f"{point.model}"
        )
    if point.router != "uniform":
        raise ValueError(f"router is {point.router}; {point.model} has its own weights")
    if point.model != "tiny" and not pathlib.Path(point.model).is_dir():
        known = ", ".join(["tiny", *published.CONFIGS])
        raise ValueError(
            f"model {point.model!r}: unknown, expected a folder or one of {known}"
        )
    return checkpoints.read_config(checkpoints.resolve(point.model))


def lifecycle_of(point: step_store.Point, drafter: Any) -> commit_lib.Lifecycle:
    """Return the point's lifecycle for its trees."""
    horizon = {} if point.horizon is None else {"horizon": point.horizon}
    return commit_lib.by_name(
        point.commit,
        state_dtype=point.state_dtype,
        depth=drafter.depth_max,
        nodes=drafter.n_max,
        **horizon,
    )


def subject_of(point: step_store.Point, config, graphdef, params) -> Any:
    """Return what is timed; `params` may be shapes."""
    drafter = generate.default_drafter(point.tree, config)
    build = target.Builder(graphdef, lifecycle_of(point, drafter))
    build, weights = step_inject.join(build, params, point.accept)
    return step_program.Subject(
        name=point.model,
        config=config,
        build=build,
        drafter=drafter,
        weights=lambda: weights,
        batch=point.batch,
        context=point.context,
    )


@dataclasses.dataclass
class Compiled:
    """The step of a point as a program, and what it needs."""

    subject: step_program.Subject
    weights: Any
    program: Any
    lower_s: float
    compile_s: float

    @property
    def peak_bytes(self) -> int | None:
        """Arguments, results and temporaries at once, as XLA lays them out."""
        sizes = self.program.memory_analysis()
        if sizes is None:
            return None
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return held + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes


class Lowered(NamedTuple):
    """The step of a point, traced: `finished` compiles it."""

    subject: step_program.Subject
    weights: Any
    lowered: Any
    seconds: float


def lowered(point: step_store.Point, held: Held) -> Lowered:
    """Trace `loop.step`."""
    begin = time.perf_counter()
    subject = subject_of(point, held.config, held.graphdef, held.params)
    weights = subject.weights()
    weights = weights._replace(rates=step_mesh.whole(weights.rates, held.mesh))
    with mesh_lib.use(held.mesh):
        arguments = step_mesh.shapes(subject, weights, held.start, held.mesh)
        program = step_mesh.program(arguments[1], held.mesh)
        found = program.lower(subject.build, weights, *arguments)
    return Lowered(subject, weights, found, time.perf_counter() - begin)


def finished(traced: Lowered, limit: int | None) -> Compiled:
    """Compile what is traced; OutOfMemory where XLA's count exceeds `limit`."""
    begin = time.perf_counter()
    try:
        program = traced.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise _memory_or(error) from error
    seconds = time.perf_counter() - begin
    found = Compiled(traced.subject, traced.weights, program, traced.seconds, seconds)
    if limit is not None and found.peak_bytes and found.peak_bytes > limit:
        gib = found.peak_bytes / 2**30
        raise OutOfMemory(f"XLA counts {gib:.2f} GiB, {limit / 2**30:.2f} are there")
    return found


def compiled(point: step_store.Point, held: Held, limit: int | None) -> Compiled:
    """Compile `loop.step`; raises OutOfMemory where XLA's count exceeds `limit`."""
    return finished(lowered(point, held), limit)


def side_by_side(
    points: Sequence[step_store.Point], held: Held, limit: int | None
) -> list[concurrent.futures.Future]:
    """Compile the steps of some points in threads; returns once all are done."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [pool.submit(finished, lowered(one, held), limit) for one in points]


def running(built: Compiled, held: Held, steps: int) -> step_program.Fed:
    """Start a state and take some steps; raises OutOfMemory where there is no room."""
    subject = built.subject
    try:
        with mesh_lib.use(held.mesh):
            made = step_mesh.arrays(subject, built.weights, held.start, held.mesh)
        arguments = [built.weights, *made]
        del made  # its state is donated by the first step
        stepping = step_program.Fed(built.program, arguments, 2, step_program.CALLS)
        for _ in range(steps):
            stepping()
        jax.block_until_ready(stepping.arguments[2].emitted)
    except jax.errors.JaxRuntimeError as error:
        raise _memory_or(error) from error
    return stepping


def _memory_or(error: Exception) -> Exception:
    """Return OutOfMemory for an error that means it, and other errors as they are."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OutOfMemory(" ".join(text.split())[:200])
    return error


def limit_bytes(gib: float | None) -> int | None:
    """Return the memory that may be used: what is given, or what the device says."""
    if gib is not None:
        return int(gib * 2**30)
    return _device_memory().get("bytes_limit")


def _device_memory() -> dict[str, int]:
    return jax.devices()[0].memory_stats() or {}


def measure(
    point: step_store.Point,
    held: Held,
    built: Compiled,
    bytes_per_s: float,
    *,
    parts: bool = False,
) -> dict[str, Any]:
    """Start and time the step of a point; returns the fields of a row.

    On a mesh a layer has to verify as the reference does, or the row says so. Raises
    OutOfMemory.
    """
    gate, wrong = _gate(point, held, built)
    stepping = running(built, held, WARM)
    devices = {} if held.mesh is None else {"devices": held.mesh.size}
    clock, problems = step_report.clocked(stepping, ROUNDS, SECONDS, **devices)
    problems = wrong + problems
    state = stepping.arguments[2]
    row = _row(point, held, built, clock, bytes_per_s) | devices | gate
    steps = float(state.steps)
    row["measured_accept_length"] = float((state.emitted - 1).mean()) / steps
    row["steps"] = int(steps)
    if parts:
        row["parts"], found = _parts(built, state)
        problems += found
    return row | {"problems": problems}


def _gate(point, held, built) -> tuple[dict[str, float], list[str]]:
    """Compare a layer on the mesh with the reference; returns error and problems."""
    if held.mesh is None:
        return {}, []
    dtype = jax.numpy.dtype(point.dtype).name
    case = step_gate.Case.of(built.subject, dtype, held.mesh)
    error, bound = step_gate.verify_error(case, held.mesh), step_gate.bound(case)
    told = f"verify on the mesh: error {error:.1e}, {bound:.0e} allowed"
    return {"verify_error": error}, [] if error <= bound else [told]


def _row(point, held, built, clock, bytes_per_s) -> dict[str, Any]:
    subject = built.subject
    accept_length = step_inject.mean_length(point.accept)
    activation = jax.numpy.dtype(point.dtype).name
    floor = step_floor.of_step(
        subject,
        held.params,
        accept_length,
        router=point.router,
        activation=activation,
        mesh=held.mesh,
    )
    wall, device = _times(clock.host_us), _times(clock.device_us)
    floor_ms = 1e3 * floor["total"] / bytes_per_s
    layers, launches = held.config.num_hidden_layers, clock.launches
    return {
        "nodes": subject.drafter.n_max,
        "accept_length": accept_length,
        "wall_ms": wall,
        "device_ms": device,
        "tokens_per_s": 1e3 * point.batch * accept_length / wall["mean"],
        "launches": launches,
        "launches_per_layer": launches and launches / layers,
        "floor_bytes": floor,
        "floor_flops": step_floor.flops(subject, held.params, mesh=held.mesh),
        "floor_ms": floor_ms,
        "floor_and_launches_ms": launches and floor_ms + 1e-3 * LAUNCH_US * launches,
        "copy_bytes_per_s": bytes_per_s,
        "weight_bytes": step_mesh.nbytes(held.params),
        "row_bytes": step_floor.per_row(subject, activation, held.mesh),
        "peak_bytes": built.peak_bytes,
        "device_peak_bytes": _device_memory().get("peak_bytes_in_use"),
        "kernels_us": clock.kernels,
        "lower_s": built.lower_s,
        "compile_s": built.compile_s,
        "model_s": held.seconds,
    }


def _times(us: list[float]) -> dict[str, Any] | None:
    """Return least, median and mean milliseconds of samples."""
    if not us:
        return None
    return {
        "least": 1e-3 * min(us),
        "median": 1e-3 * statistics.median(us),
        "mean": 1e-3 * statistics.fmean(us),
        "samples": len(us),
    }


def _parts(built: Compiled, state: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Time the parts of a step, one after the other; see `step_parts`."""
    found, problems = [], []
    arguments = (built.weights, state, step_program.key(2))
    parts = step_parts.of_step(built.subject, built.weights)
    lowered = [step_report.lower_part(part, *arguments) for part in parts]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(lambda x: x.compile(), itertools.chain(*lowered)))
    for part, make, run in zip(parts, programs[::2], programs[1::2], strict=True):
        clock, floor, trouble = step_report.time_part(part, make, run, arguments, 1)
        found.append(
            {
                "name": part.name,
                "times": part.times,
                "ms": 1e-3 * part.times * clock.us,
                "launches": clock.launches and part.times * clock.launches,
                "floor_bytes": floor,
            }
        )
        problems += [f"{part.name}: {problem}" for problem in trouble]
    return found, problems
