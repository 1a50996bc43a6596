"""What a planner says of a tree beside what was measured (scripts/bench_plan.py)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from treewy_jax import planning

COUNTS = ("steps", "row_steps", "tokens", "whole_steps", "whole_tokens")


def step_times(rows: Sequence[Mapping[str, Any]]) -> planning.StepTimes:
    """Fit the milliseconds of a step to the rows of `runs.measure`."""
    return planning.StepTimes.fit(
        [(row["nodes"], row["depth"], measured(row)["milliseconds"]) for row in rows]
    )


def measured(row: Mapping[str, Any], half: int | None = None) -> dict[str, Any]:
    """Return what a tree did on all prompts, or on those of one half.

    Of the rounds the median counts. "accept_length" is of whole steps, as rates are;
    "tokens_a_step" of all steps of a row, those cut short by the end of a text, too.
    """
    some = [one for one in row["halves"] if half in (None, one["half"])]
    total = {name: sum(one[name] for one in some) for name in COUNTS}
    runs, starts = (
        [sum(round_) for round_ in zip(*(one[name] for one in some), strict=True)]
        for name in ("run_s", "start_s")
    )
    seconds = statistics.median(runs)
    tokens = total["tokens"]
    return {
        "steps": total["steps"],
        "tokens": tokens,
        "accept_length": total["whole_tokens"] / max(1, total["whole_steps"]),
        "tokens_a_step": tokens / max(1, total["row_steps"]),
        "busy": total["row_steps"] / max(1, total["steps"] * row["batch"]),
        "milliseconds": 1e3 * seconds / max(1, total["steps"]),
        "least_milliseconds": 1e3 * min(runs) / max(1, total["steps"]),
        "tokens_per_second": tokens / seconds,
        "with_prompts": tokens / (seconds + statistics.median(starts)),
    }


def check(
    row: Mapping[str, Any],
    by_depth: planning.ByDepth,
    fit: planning.StepTimes,
    half: int | None = None,
) -> dict[str, Any]:
    """Return what was predicted of a tree, what was measured, and relative errors.

    A prediction is for rows that are busy; with several rows a batch it is scaled by
    the share of them that were.
    """
    found = measured(row, half)
    told = planning.choice(row["parents"], by_depth, fit, row["batch"])
    predicted = {
        "accept_length": told.accept_length,
        "milliseconds": told.milliseconds,
        "tokens_per_second": found["busy"] * told.tokens_per_second,
    }
    beside = {
        "accept_length": found["tokens_a_step"],
        "milliseconds": found["milliseconds"],
        "tokens_per_second": found["tokens_per_second"],
    }
    errors = {name: predicted[name] / beside[name] - 1 for name in predicted}
    return {"predicted": predicted, "measured": found, "errors": errors}


def different(row: Mapping[str, Any], plain: Mapping[str, Any]) -> list[int]:
    """Return the prompts whose text is another one than in the row `plain`."""
    texts = plain["texts"]
    return [int(n) for n, text in row["texts"].items() if texts.get(n, text) != text]
