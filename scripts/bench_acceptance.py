"""How many tokens does a target pass yield? By tree and kind of prompt, on prompts80.

    python scripts/bench_acceptance.py --trees 1,1,1 2,2,1 2,2,2 3,3,3

Greedy, float32, chat format, the first turn of every prompt, stopped at end of text.
Each tree's texts are also compared with plain decoding, token for token. Two figures
stand side by side: all steps, and only those before a text first repeats one of its own
6-grams, because a loop is easy to draft.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

import models
from models import checkpoints
from scripts import reporting
from scripts.decoding import compare, prompt
from treewy_jax import generate as generation_lib

PROMPTS = pathlib.Path(__file__).parent / "data" / "prompts80.jsonl"
GRAM = 6
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure acceptance on prompts80.

    Attributes:
        model: "tiny" or a folder.
        trees: widths of each tree to measure.
        max_new_tokens: budget of each prompt.
        prompts: JSON lines with turns, category and source.
        batch: prompts decoded together.
        samples: texts kept of each category.
        out: result file; by default under scripts/results, by device.
    """

    model: str = "tiny"
    trees: tuple[str, ...] = ("1,1,1", "2,2,1", "2,2,2", "3,3,3")
    max_new_tokens: int = 128
    prompts: pathlib.Path = PROMPTS
    batch: int = 80
    samples: int = 3
    out: pathlib.Path | None = None


class Row(NamedTuple):
    """One prompt decoded with one tree; `lengths` are of steps not cut short."""

    token_ids: list[int]
    lengths: list[int]

    @property
    def unlooped(self) -> list[int]:
        """The steps that end before the text repeats a 6-gram of its own."""
        ends = 1 + np.cumsum(self.lengths)
        kept = ends <= first_repeat(self.token_ids)
        return [a for a, keep in zip(self.lengths, kept, strict=True) if keep]


def main(options: Options) -> None:
    """Decode every prompt with every tree, print a table, write the result file."""
    model = models.load(options.model, dtype="float32", progress=sys.stderr.isatty())
    entries = read_prompts(options.prompts)
    ids = [encode(model, entry["turns"][0]) for entry in entries]
    console = rich_console.Console(stderr=True)
    trees = ("none", *options.trees)
    written = {
        tree: decode(model, ids, tree, options)
        for tree in rich_progress.track(trees, "decoding", console=console)
    }
    plain = written.pop("none")
    found = {
        tree: measure(entries, rows) | {"lossless": lossless(model, ids, rows, plain)}
        for tree, rows in written.items()
    }
    path = options.out or reporting.result_path("acceptance")
    names = {"prompts": options.prompts.name, "out": path.name}
    fields = {
        "method": __doc__,
        "options": dataclasses.asdict(options) | names,
        "trees": found,
        "texts": texts(model, entries, plain, options.samples),
    }
    reporting.write_result(path, fields)
    show(found)


def read_prompts(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the prompts of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


def encode(model: checkpoints.Model, text: str) -> list[int]:
    """Return the ids of one user turn in the chat format."""
    chat = prompt.CHAT.format(text)
    return model.tokenizer.encode(chat, add_special_tokens=False).ids


def decode(model, ids, tree, options, commit="reconstruct") -> list[Row]:
    """Decode every prompt, `options.batch` of them together."""
    rows = []
    for first in range(0, len(ids), options.batch):
        generation = generation_lib.generate(
            model,
            ids[first : first + options.batch],
            tree=tree,
            max_new_tokens=options.max_new_tokens,
            commit=commit,
        )
        parts = (generation.token_ids, generation.accept_lengths, generation.cut)
        for tokens, lengths, cut in zip(*parts, strict=True):
            rows.append(Row(tokens, lengths[: len(lengths) - cut]))
    return rows


def first_repeat(tokens: list[int], gram: int = GRAM) -> int:
    """Return how many tokens come before the first 6-gram that occurred before ends."""
    seen = set()
    for end in range(gram, len(tokens) + 1):
        piece = tuple(tokens[end - gram : end])
        if piece in seen:
            return end - 1
        seen.add(piece)
    return len(tokens)


def lossless(model, ids, rows: list[Row], plain: list[Row]) -> dict[str, Any]:
    """Compare with plain decoding; a difference counts where it was no near tie."""
    found = []
    for number, (row, other) in enumerate(zip(rows, plain, strict=True)):
        if row.token_ids == other.token_ids:
            continue
        place = compare.first_difference(row.token_ids, other.token_ids)
        gap = compare.logit_gap(model, [*ids[number], *row.token_ids[:place]])
        found.append({"prompt": number, "token": place, "logit_gap": gap})
    counted = sum(difference["logit_gap"] > compare.NEAR_TIE for difference in found)
    return {"prompts": len(ids), "differences": found, "counted": counted}


def measure(entries: list[dict], rows: list[Row]) -> dict[str, Any]:
    """Return acceptance over all rows, by source and by category."""
    groups = {"all": rows}
    for name in ("source", "category"):
        for value in sorted({entry[name] for entry in entries}):
            pairs = zip(entries, rows, strict=True)
            groups[value] = [row for entry, row in pairs if entry[name] == value]
    return {name: summary(group) for name, group in groups.items()}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return mean accept lengths with 95 % bootstrap intervals over prompts."""
    fields: dict[str, Any] = {
        "prompts": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
    }
    for name in ("lengths", "unlooped"):
        steps = [getattr(row, name) for row in rows]
        mean, interval = bootstrap(steps)
        fields[name] = {
            "mean": mean,
            "interval": interval,
            "steps": sum(map(len, steps)),
        }
    return fields


def bootstrap(steps: list[list[int]]) -> tuple[float | None, list[float] | None]:
    """Return the mean over all steps, and its interval when prompts are redrawn."""
    sums, counts = (np.array([f(s) for s in steps], float) for f in (sum, len))
    if not counts.sum():
        return None, None
    drawn = np.random.default_rng(0).integers(len(steps), size=(RESAMPLES, len(steps)))
    means = sums[drawn].sum(1) / np.maximum(counts[drawn].sum(1), 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return round(sums.sum() / counts.sum(), 4), [round(low, 3), round(high, 3)]


def texts(model, entries, rows: list[Row], samples: int) -> list[dict[str, Any]]:
    """Return the first texts of each category, those of hand-written prompts first."""
    kept: dict[str, list] = {}
    pairs = zip(entries, rows, strict=True)
    for entry, row in sorted(pairs, key=lambda pair: pair[0]["source"] == "generated"):
        group = kept.setdefault(entry["category"], [])
        if len(group) < samples:
            text = model.tokenizer.decode(row.token_ids)
            group.append({"prompt": entry["turns"][0], "text": text})
    return [{"category": name, "texts": group} for name, group in kept.items()]


def show(trees: dict[str, dict]) -> None:
    """Print mean accept lengths by group, all steps / before loops."""

    def cell(found: dict[str, Any]) -> str:
        means = (found[name]["mean"] for name in ("lengths", "unlooped"))
        return " / ".join("none" if mean is None else f"{mean:.2f}" for mean in means)

    table = rich_table.Table("prompts", *trees)
    for group, found in next(iter(trees.values())).items():
        if "lengths" in found:
            table.add_row(group, *(cell(fields[group]) for fields in trees.values()))
    differ = (str(fields["lossless"]["counted"]) for fields in trees.values())
    table.add_row("differ from plain", *differ)
    rich_console.Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
