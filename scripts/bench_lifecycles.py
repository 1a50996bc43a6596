"""Do all lifecycles write the same text? On prompts80, by tree.

    python scripts/bench_lifecycles.py
    python scripts/bench_lifecycles.py --dtype bfloat16 --out bfloat16.json

Greedy, chat format, the first turn of every prompt, stopped at end of text. Each
lifecycle's texts are compared with plain decoding (tree none, reconstruct) token for
token; in float32 a difference counts where the target's top-2 logit gap exceeds 1e-3,
in bfloat16 verification rounds otherwise than plain decoding does, and the share of
equal texts is what is reported. Beside it the mean accept length, and how far it is
from that of store-all.

Exit status: 0; 1 where a difference in float32 counts; 2 for wrong input, with one
line on stderr.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

import models
from scripts import bench_acceptance, command, reporting
from treewy_jax import commit as commit_lib
from treewy_jax import generate as generation_lib

BASELINE = "store-all"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compares the lifecycles on prompts80."""

    model: str = "tiny"
    """The model that ships, or a folder."""
    trees: tuple[str, ...] = ("none", "1,1,1", "3,3,3", "4,2,1")
    """Widths of each tree; none is the root alone."""
    lifecycles: tuple[str, ...] = ("store-all", "reconstruct", "fused", "deferred")
    """Lifecycles of treewy_jax.commit."""
    horizon: int = 16
    """Of deferred."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; states are stored as the model's configuration says."""
    max_new_tokens: int = 64
    """Budget of each prompt."""
    batch: int = 80
    """Prompts decoded together; store-all holds a state a node for each."""
    prompts: pathlib.Path = bench_acceptance.PROMPTS
    """JSON lines with turns, category and source."""
    out: pathlib.Path | None = None
    """Result file; by default under scripts/results, by device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_lifecycles.py", arguments)
        entries = bench_acceptance.read_prompts(chosen.prompts)
        for tree in chosen.trees:
            for name in chosen.lifecycles:
                lifecycle(name, tree, chosen)
        model = models.load(chosen.model, dtype=chosen.dtype)
    except (ValueError, OSError) as error:
        return command.refuse("bench_lifecycles.py", error)
    ids = [bench_acceptance.encode(model, entry["turns"][0]) for entry in entries]
    plain = decode(model, ids, "none", "reconstruct", chosen)
    cells = [(tree, name) for tree in chosen.trees for name in chosen.lifecycles]
    console = rich_console.Console(stderr=True)
    found: dict[str, dict[str, Any]] = {tree: {} for tree in chosen.trees}
    for tree, name in rich_progress.track(cells, "decoding", console=console):
        rows = decode(model, ids, tree, name, chosen)
        found[tree][name] = measure(model, ids, rows, plain, chosen)
        write(chosen, found)
    show(found)
    exact = chosen.dtype == "float32"
    counted = [cell["counted"] for cells in found.values() for cell in cells.values()]
    return int(exact and any(counted))


def lifecycle(name: str, tree: str, chosen: Options) -> commit_lib.Lifecycle:
    """Return a lifecycle that takes `tree`; ValueError where there is none."""
    shape = generation_lib.as_tree(tree)
    sizes = dict(depth=shape.depth_max, nodes=shape.n_max)
    found = commit_lib.by_name(name, horizon=chosen.horizon, **sizes)
    found.check(**sizes)
    return found


def decode(model, ids, tree, name, chosen) -> list[bench_acceptance.Row]:
    """Decode every prompt; states are stored as the model's configuration says."""
    storage = model.config.mamba_ssm_dtype
    found = dataclasses.replace(lifecycle(name, tree, chosen), state_dtype=storage)
    return bench_acceptance.decode(model, ids, tree, chosen, commit=found)


def measure(model, ids, rows, plain, chosen) -> dict[str, Any]:
    """Return the share of equal texts, what differs, and the mean accept length."""
    equal = [a.token_ids == b.token_ids for a, b in zip(rows, plain, strict=True)]
    lengths = [length for row in rows for length in row.lengths]
    found: dict[str, Any] = {
        "equal": sum(equal),
        "prompts": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "mean_accept_length": float(np.mean(lengths)),
        "counted": 0,
    }
    if chosen.dtype == "float32":
        found |= bench_acceptance.lossless(model, ids, rows, plain)
    return found


def write(chosen: Options, found: dict[str, dict]) -> None:
    """Write the result file with what is done."""
    name = "lifecycles" if chosen.dtype == "float32" else f"lifecycles-{chosen.dtype}"
    path = chosen.out or reporting.result_path(name)
    names = {"prompts": chosen.prompts.name, "out": path.name}
    fields = {
        "method": __doc__,
        "options": dataclasses.asdict(chosen) | names,
        "trees": found,
    }
    reporting.write_result(path, fields)


def show(found: dict[str, dict[str, dict]]) -> None:
    """Print equal texts, what counts, and accept lengths with their distance."""
    table = rich_table.Table("tree", "lifecycle", "equal", "counted", "accept length")
    for tree, cells in found.items():
        base = cells.get(BASELINE, {}).get("mean_accept_length")
        for name, cell in cells.items():
            mean = cell["mean_accept_length"]
            apart = f" ({mean - base:+.3f})" if base is not None else ""
            table.add_row(
                tree,
                name,
                f"{cell['equal']} of {cell['prompts']}",
                str(cell["counted"]),
                f"{mean:.3f}{apart}",
            )
    rich_console.Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
