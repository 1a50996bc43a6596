"""Measuring a decode step and its parts, and showing what came out."""

import concurrent.futures
import dataclasses
import os
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich import markup
from rich import table as rich_table

from scripts.benching import movement, step_parts, step_program, timing
from scripts.workloads import all as workloads

MATMUL = re.compile("gemm|dot|cutlass|cublas|nvjet|xmma|splitk", re.IGNORECASE)
OTHERS = 10  # kernels listed that are neither ours nor products
LISTED_MOVES = 10


@dataclasses.dataclass
class Clock:
    """Samples of one program, microseconds; `kernels` by name, of a call.

    `launches` are the kernels of a call, None where no clock of the device tells.
    """

    device_us: list[float]
    host_us: list[float]
    kernels: dict[str, float]
    launches: int | None = None

    @property
    def us(self) -> float:
        """The median of the device's clock, of the host's where there is none."""
        return statistics.median(self.device_us or self.host_us)


@dataclasses.dataclass
class Result:
    """What was measured of one subject.

    Attributes:
        whole: the step, as compiled from `loop.step`.
        parts: each with its clock and its floor in bytes, of all its times in a step.
        tokens: emitted tokens a step and row, on average.
        moves, sources: of the compiled step (`movement`).
        problems: what failed, a line each.
    """

    subject: step_program.Subject
    nodes: int
    whole: Clock
    parts: list[tuple[step_parts.Part, Clock, int]]
    tokens: float
    moves: list[movement.Move]
    sources: dict[str, str]
    problems: list[str]

    @property
    def explained_us(self) -> float:
        """The sum of the parts."""
        return sum(part.times * clock.us for part, clock, _ in self.parts)

    @property
    def others(self) -> list[tuple[str, float]]:
        """Kernels that are neither ours nor products, the longest first."""
        known = [*workloads.MODULES, "mosaic"]  # Mosaic GPU puts its own name first
        found = [
            (name, us)
            for name, us in self.whole.kernels.items()
            if not any(x in name for x in known) and not MATMUL.search(name)
        ]
        return sorted(found, key=lambda pair: -pair[1])


def measure(
    subject: step_program.Subject,
    rounds: int,
    advance: Callable[[], Any] = lambda: None,
) -> Result:
    """Compile the step and its parts side by side, then time one after the other."""
    params = subject.weights()
    state = step_program.start(subject, params)
    rules = step_program.rules(subject.batch)
    arguments = [params, subject.drafter, state, rules]
    lowered = [step_program.step.lower(subject.build, *arguments)]
    parts = step_parts.of_step(subject, params)
    key = step_program.key(2)
    for part in parts:
        lowered += lower_part(part, params, state, key)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        whole, *programs = pool.map(lambda program: program.compile(), lowered)
    advance()
    stepping = step_program.Fed(whole, arguments, 2, step_program.CALLS)
    del state, arguments
    clock, problems = clocked(stepping, rounds)
    state = stepping.arguments[2]
    problems = [f"step: {problem}" for problem in problems]
    found = []
    for part, make, run in zip(parts, programs[::2], programs[1::2], strict=True):
        timed, floor, trouble = time_part(part, make, run, (params, state, key), rounds)
        found.append((part, timed, floor))
        problems += [f"{part.name}: {problem}" for problem in trouble]
        advance()
    text = whole.as_text()
    return Result(
        subject=subject,
        nodes=state.tree.n_max,
        whole=clock,
        parts=found,
        tokens=float((state.emitted - 1).mean() / state.steps),
        moves=movement.moves(text),
        sources=movement.sources(text),
        problems=problems,
    )


def lower_part(part, params, state, key) -> list[Any]:
    """Return the programs that make a part's inputs and that run it, not compiled."""
    make = jax.jit(part.inputs).lower(params, state, key)
    donated = 0 if part.fed else ()
    shapes = jax.eval_shape(part.inputs, params, state, key)
    return [make, jax.jit(part.function, donate_argnums=donated).lower(*shapes)]


def time_part(part, make, run, arguments, rounds) -> tuple[Clock, int, list[str]]:
    """Time one part; returns its clock, its floor in bytes a step, and problems."""
    inputs = make(*arguments)
    floor = part.floor_bytes(inputs, jax.eval_shape(part.function, *inputs))
    if part.fed:
        call = step_program.Fed(run, list(inputs), 0)
    else:

        def call():
            return run(*inputs)

    timed, problems = clocked(call, rounds)
    return timed, part.times * floor, problems


def clocked(
    call: Callable[[], Any],
    rounds: int,
    seconds: float = 0.05,
    most: int = 10,
    devices: int = 1,
) -> tuple[Clock, list[str]]:
    """Time a call by both clocks; without a GPU, or where CUPTI fails, by the host's.

    Calls that fill `seconds`, `most` at most, are a sample; 55 calls in three rounds.
    Of several `devices` only the host's: the CUPTI client that JAX ships gathers all
    their kernels in one list without a lock, and has corrupted the heap with two.
    """
    number = timing.enough(call, seconds, most)
    clock = Clock([], [timing.host_us(call, number) for _ in range(rounds)], {})
    if jax.default_backend() != "gpu" or devices > 1:
        return clock, []
    try:
        calls = timing.kernels(call, number)
    except RuntimeError as error:
        return clock, [f"host's clock, {error}"]
    clock.device_us = [sum(us for _, us in kernels) for kernels in calls]
    clock.kernels = timing.by_name(calls, 1)
    clock.launches = len(calls[0])
    return clock, []


def title(result: Result) -> str:
    """Return what a table is about."""
    subject = result.subject
    lifecycle = subject.build.lifecycle
    return (
        f"{subject.name}, {subject.config.num_blocks} block(s), B={subject.batch}, "
        f"context {subject.context}, {result.nodes} nodes, state "
        f"{lifecycle.state_dtype}; {result.tokens:.2f} tokens a step and row"
    )


def table(result: Result, bytes_per_s: float) -> rich_table.Table:
    """Return the parts, their sum, the whole, and what no part explains."""
    clock = "device" if result.whole.device_us else "host"
    drawn = rich_table.Table()
    drawn.add_column("part", no_wrap=True)
    for name in (f"{clock} ms", "% of step", "byte floor ms", "x floor", "MB"):
        drawn.add_column(name, justify="right", no_wrap=True)

    def add(name: str, us: float, floor: int | None = None) -> None:
        least = floor and 1e6 * floor / bytes_per_s
        drawn.add_row(
            name,
            ms(us),
            f"{100 * us / result.whole.us:.1f}",
            ms(least) if least else "-",
            f"{us / least:.2f}" if least else "-",
            f"{floor / 1e6:,.1f}" if floor else "-",
        )

    for part, timed, floor in result.parts:
        times = f" (x {part.times})" if part.times > 1 else ""
        add(part.name + times, part.times * timed.us, floor)
    drawn.add_section()
    add("sum", result.explained_us, sum(floor for *_, floor in result.parts))
    add("rest", result.whole.us - result.explained_us)
    add(f"whole step, {clock}", result.whole.us)
    if result.whole.device_us:
        add("whole step, wall", statistics.median(result.whole.host_us))
    return drawn


def others_table(result: Result) -> rich_table.Table:
    """Return the longest kernels of the step that are neither ours nor products."""
    total = sum(us for _, us in result.others)
    heading = f"{len(result.others)} kernels neither ours nor products"
    drawn = rich_table.Table(heading, f"ms, of {ms(total)}", "from")
    for name, us in result.others[:OTHERS]:
        source = result.sources.get(name, "")
        drawn.add_row(markup.escape(name), ms(us), markup.escape(source[-70:]))
    return drawn


def moves_table(result: Result) -> rich_table.Table:
    """Return the largest copies that XLA's program makes."""
    total = sum(move.nbytes * move.times for move in result.moves) / 1e6
    heading = f"{len(result.moves)} instructions that only move"
    written = f"MB, of {total:,.1f}"
    drawn = rich_table.Table(heading, "shape", written, "x", "from")
    for move in result.moves[:LISTED_MOVES]:
        drawn.add_row(
            markup.escape(move.name),
            markup.escape(move.shape[:50]),
            f"{move.nbytes / 1e6:,.1f}",
            str(move.times),
            markup.escape(move.source[-50:]),
        )
    return drawn


def record(result: Result, bytes_per_s: float) -> dict[str, Any]:
    """Return a result as JSON can hold it; times in microseconds a step."""
    subject, whole = result.subject, result.whole

    def samples(us: list[float], times: int = 1) -> dict[str, Any] | None:
        return timing.times([times * x for x in us])._asdict() if us else None

    return {
        "model": subject.name,
        "config": dataclasses.asdict(subject.config),
        "batch": subject.batch,
        "context": subject.context,
        "nodes": result.nodes,
        "state_dtype": subject.build.lifecycle.state_dtype,
        "tokens_a_step": result.tokens,
        "device_us": samples(whole.device_us),
        "wall_us": samples(whole.host_us),
        "parts": [
            {
                "name": part.name,
                "times": part.times,
                "device_us": samples(timed.device_us, part.times),
                "host_us": samples(timed.host_us, part.times),
                "floor_bytes": floor,
                "floor_us": 1e6 * floor / bytes_per_s,
                "kernels_us": timed.kernels,
            }
            for part, timed, floor in result.parts
        ],
        "sum_us": result.explained_us,
        "rest_us": whole.us - result.explained_us,
        "kernels_us": whole.kernels,
        "neither_ours_nor_products_us": dict(result.others),
        "moves": [move._asdict() for move in result.moves],
        "problems": result.problems,
    }


def draw(results: Sequence[Result]) -> Any:
    """Return a figure: a bar a subject, a piece a part; needs matplotlib."""
    from matplotlib import figure

    height = 1.5 + 0.5 * len(results)
    drawn = figure.Figure(figsize=(9, height), layout="constrained", dpi=150)
    axes = drawn.subplots()
    names = dict.fromkeys(part.name for result in results for part, *_ in result.parts)
    left = [0.0] * len(results)
    for name in [*names, "rest"]:
        widths = [_piece_ms(result, name) for result in results]
        axes.barh(range(len(results)), widths, left=left, label=name)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    labels = [f"{r.subject.name} B={r.subject.batch}" for r in results]
    axes.set_yticks(range(len(results)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a step (median)")
    axes.legend(
        fontsize="x-small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    return drawn


def _piece_ms(result: Result, name: str) -> float:
    if name == "rest":
        return max(0.0, 1e-3 * (result.whole.us - result.explained_us))
    return 1e-3 * sum(p.times * c.us for p, c, _ in result.parts if p.name == name)


def ms(us: float) -> str:
    """Return microseconds as milliseconds."""
    return f"{1e-3 * us:.3f}"
