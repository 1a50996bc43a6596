"""The loop around the step: batches in order, logs, validation, checkpoints, time."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import rich.progress

from scripts.training import checkpoint, data, step


@dataclasses.dataclass(frozen=True)
class Plan:
    """When to do what, counted in steps.

    Attributes:
        total: length of the schedule.
        tail: first step of the last part, with its own mix.
        log: steps between log lines.
        evaluate: steps between validations; the last step has one, too.
        save: steps between checkpoints; the end has one, too.
        deadline: `time.monotonic()` after which to stop, or None.
    """

    total: int
    tail: int
    log: int
    evaluate: int
    save: int
    deadline: float | None = None


class Log:
    """JSON lines, one an event, appended as they come."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def write(self, **event: Any) -> None:
        """Append one event."""
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def run(
    state: step.State,
    train: Callable[[step.State, Any], tuple[step.State, dict]],
    sampler: data.Sampler,
    validate: Callable[[step.State], dict[str, dict]],
    checkpoints: checkpoint.Checkpoints,
    log: Log,
    plan: Plan,
) -> tuple[step.State, bool]:
    """Train to the end of the schedule or to the deadline; says whether it finished.

    Step i always sees batch i, so a resumed run continues the same sequence.
    """
    first = int(state.step)
    with _Progress(plan.total, first) as progress:
        mark = (time.monotonic(), first)
        for i in range(first, plan.total):
            state, metrics = train(state, sampler.batch(i, tail=i >= plan.tail))
            done = i + 1
            if done % plan.log and done != plan.total:
                continue
            # Reading a metric waits for the device: the only wait between logs.
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            now = time.monotonic()
            rate = (now - mark[0]) / (done - mark[1])
            log.write(event="train", step=done, seconds_per_step=rate, **values)
            progress(done, values, rate)
            late = plan.deadline is not None and now > plan.deadline
            if late or done == plan.total or done % plan.evaluate < plan.log:
                log.write(event="validate", step=done, sources=validate(state))
            if late or done == plan.total or done % plan.save < plan.log:
                checkpoints.save(state)
            if late:
                break
            mark = (time.monotonic(), done)
    return state, int(state.step) >= plan.total


class _Progress:
    """A rich progress bar on stderr that shows the loss and the rate."""

    def __init__(self, total: int, first: int):
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
        )
        self._task = self._bar.add_task("compiling", total=total, completed=first)

    def __enter__(self) -> Callable[[int, dict[str, float], float], None]:
        self._bar.start()
        return self._update

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def _update(self, done: int, values: dict[str, float], rate: float) -> None:
        text = f"loss {values['ce']:.3f}  mtp1 {values['mtp1']:.3f}  {rate:.3f} s/step"
        self._bar.update(self._task, completed=done, description=text)
