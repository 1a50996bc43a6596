"""The files that decode.py writes: checked before decoding, complete or not at all.

The JSON result has these fields. Of one prompt they are plain; of several, those marked
* are lists with a value for each prompt.

    token_ids*, text*     the new tokens and their text (null without a tokenizer)
    accept_lengths*       accepted drafts + 1, step by step
    cut*                  the last of them was cut short by end of text or budget
    steps                 target passes after the prompt
    mean_accept_length    over all prompts, steps cut short left out; null without any
    accept_length_histogram   {"1": steps, ...} of the same steps
    seconds, tokens_per_second   wall time with compilation, and without warm-up
    state_bytes           {scheme: {part: bytes}}; records of the unused one computed
    tree                  nodes, and their parents; null where they change each step
    verify                which implementation ran, and why no faster one
    device, versions, options
    compare               with --compare: equal, differences (row, index, token,
                          plain_token, logit_gap), near_tie, steps, seconds
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
from typing import Any

import numpy as np

from scripts import reporting
from scripts.decoding import compare, request, result, text
from scripts.decoding import options as options_lib


def check(options: options_lib.Options) -> None:
    """Refuse paths that cannot be written, and a plot without matplotlib.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is None:
            continue
        folder = path.parent
        if not folder.is_dir():
            raise ValueError(
                f"{name} {path}: no folder {folder}; a file in a folder that exists "
                "is allowed"
            )
        if path.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{name} {path}: a file that can be written is allowed")
    if options.plot is not None:
        _check_plot(options.plot)


def _check_plot(path: pathlib.Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plot {path}: allowed once matplotlib is installed")
    from matplotlib import figure

    known = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"plot {path}: allowed endings are {', '.join(known)}")


def write(
    found: result.Result, asked: request.Request, options: options_lib.Options
) -> None:
    """Write the files that were asked for."""
    if options.json is not None:
        fields = as_json(found, asked, options)
        document = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        save = lambda path: path.write_text(document, "utf-8")  # noqa: E731
        reporting.replace(options.json, save)
    if options.plot is not None:
        from scripts.decoding import plot

        drawn = plot.draw(found, asked, options)
        kind = options.plot.suffix[1:].lower()
        reporting.replace(options.plot, lambda path: drawn.savefig(path, format=kind))


def as_json(
    found: result.Result, asked: request.Request, options: options_lib.Options
) -> dict[str, Any]:
    """Return the fields listed at the top of this module."""
    generation, tokenizer = found.generation, asked.model.tokenizer
    texts = [
        None if tokenizer is None else text.decode(tokenizer, ids)
        for ids in generation.token_ids
    ]
    rows = {
        "token_ids": generation.token_ids,
        "text": texts,
        "accept_lengths": generation.accept_lengths,
        "cut": generation.cut,
    }
    if len(asked.prompts) == 1:
        rows = {name: values[0] for name, values in rows.items()}
    lengths = generation.whole_accept_lengths
    fields = rows | {
        "steps": generation.steps,
        "mean_accept_length": generation.mean_accept_length if lengths else None,
        "accept_length_histogram": result.histogram(generation, asked),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "state_bytes": result.state_bytes(generation, asked, options.commit),
        "tree": {
            "nodes": asked.tree.n_max,
            "parents": _parents(asked),
        },
        "verify": asked.verify,
        "device": reporting.device(),
        "versions": reporting.versions(),
        "options": json.loads(json.dumps(dataclasses.asdict(options), default=str)),
    }
    if found.plain is not None:
        fields["compare"] = _compared(found.plain)
    return fields


def _parents(asked: request.Request) -> list[int] | None:
    """Return the parents of the nodes; None where they change from step to step."""
    parents = np.asarray(asked.tree.parent).tolist()
    return None if len(parents) > 1 and max(parents) < 0 else parents


def _compared(plain: result.Plain) -> dict[str, Any]:
    return {
        "equal": not plain.differences,
        "differences": [difference._asdict() for difference in plain.differences],
        "near_tie": compare.NEAR_TIE,
        "steps": plain.generation.steps,
        "seconds": plain.seconds,
    }
