"""How many tokens does a target pass yield? By tree, drafter, temperature and prompts.

    python scripts/bench_acceptance.py --trees 1,1,1 2,2,1 2,2,2 3,3,3
    python scripts/bench_acceptance.py --drafters mtp dynamic ngram --temperatures 0 1
    python scripts/bench_acceptance.py --rows 3,2,1@dynamic 3,3,3@mtp@0.5 --resume
    python scripts/bench_acceptance.py --prompts FOLDER --limit 10 --out found.json

Float32, chat format, the first turn of every prompt, stopped at end of text. Greedy, or
sampled and matched, so that the text does not depend on the tree: every tree's texts
are compared with plain decoding, token for token. Two figures stand side by side: all
steps, and only those before a text first repeats one of its own 6-grams, because a loop
is easy to draft. Means are over steps that nothing cut short; intervals are of 2000
bootstrap resamples of the prompts. Beside them the states that a request holds
(store-all: one for each node; here: one), and the paper's own figures for this shape.

Rates: beside plain decoding, the MTP head drafts along the text from every position,
and the rank of each token of the text is kept, --depth tokens deep. That tells what any
static tree accepts, as if it were infinitely wide ("rates", which plan_tree.py reads,
and "planned": the best trees of --plan nodes against all trees by widths).

Rows are decoded side by side in threads, so that one compiles while another runs. The
file is written after every row; --resume keeps those that it has of this code, device
and setting, and adds to them.

The result file:
    trees      {tree: {group: summary, "lossless": ...}} of the MTP head, greedy
    cells      [{"tree", "drafter", "temperature", "nodes", "blocks", "by_depth",
               "paper", "groups": {group: summary}, "lossless"}] of all; of greedy
               dynamic trees "best_width_tree", as in "planned", where ranks are known
    rates      see scripts/accepting/rates.py, as for the next
    ranks      what the rates are made from
    planned    see scripts/accepting/claims.py
    texts      samples of what was written
Exit status: 0; 1 where a greedy text differs and it was no near tie; 2 for wrong input.
"""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import models
from models import checkpoints
from scripts import command, reporting
from scripts.accepting import (
    accept_report,
    claims,
    drafting,
    prompts,
    rates,
    rows,
    wanted,
)
from scripts.accepting import cells as cells_lib
from scripts.decoding import compare, prompt, topology
from treewy_jax import generate as generation_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import sampling as sampling_lib

NAME = "bench_acceptance.py"
PROMPTS = prompts.PROMPTS
Row = rows.Row
read_prompts = prompts.read


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures acceptance on prompts."""

    model: str = "tiny"
    """The model that ships, or a folder."""
    trees: tuple[str, ...] = ("1,1,1", "2,2,1", "2,2,2", "3,3,3")
    """Widths of each tree, or files of plan_tree.py."""
    drafters: tuple[str, ...] = ("mtp",)
    """Drafters by the names that decode.py gives them."""
    rows: tuple[str, ...] = ()
    """TREE[@DRAFTER[@TEMPERATURE]], in place of all that these three lists make."""
    draft_model: str | None = None
    """The model that external drafts with: tiny, or a folder."""
    temperatures: tuple[float, ...] = (0.0,)
    """0 is greedy."""
    seed: int = 0
    """Of the samples."""
    max_new_tokens: int = 128
    """Budget of each prompt."""
    prompts: pathlib.Path = PROMPTS
    """JSON lines with turns, prompt or question, or a folder of such files."""
    limit: int | None = None
    """Take so many prompts of each category."""
    batch: int = 80
    """Prompts decoded together."""
    depth: int = 8
    """Levels of the rates of the MTP head; 0 leaves them out."""
    plan: tuple[int, ...] = (8, 16, 40)
    """Sizes of the planned trees that are held against all trees by widths."""
    samples: int = 3
    """Texts kept of each category."""
    out: pathlib.Path | None = None
    """Result file; by default under scripts/results, by device."""
    resume: bool = False
    """Keep the rows that the file has."""
    plot: pathlib.Path | None = None
    """Draw acceptance and rates into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, NAME, arguments)
        check(chosen)
        asked = wanted.rows(chosen)
        entries = prompts.read(chosen.prompts, chosen.limit)
        show_bar = sys.stderr.isatty()
        model = models.load(chosen.model, dtype="float32", progress=show_bar)
        ids = [encode(model, entry["turns"][0]) for entry in entries]
        check_prompts(model, ids, chosen)
        drafted = {
            one: drafting.make(
                one.drafter, topology.read(one.tree), model, ids, chosen.draft_model
            )
            for one in asked
        }
        path = chosen.out or reporting.result_path("acceptance")
        old = wanted.kept(path, chosen)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse(NAME, error)
    names = {"prompts": chosen.prompts.name, "out": path.name, "plot": None}
    about = {"method": __doc__, "options": dataclasses.asdict(chosen) | names}
    about["setting"] = wanted.setting(chosen)
    for found in run(model, entries, ids, drafted, chosen, old):  # more each time
        reporting.write_result(path, about | found)
    accept_report.show(found, command.console())
    if chosen.plot is not None:
        from scripts.accepting import plots

        plots.acceptance(found).savefig(chosen.plot)
    return int(any(cell["lossless"].get("counted") for cell in found["cells"]))


def check(chosen: Options) -> None:
    """Raise ValueError for options that cannot be measured, before anything runs."""
    command.check_files(chosen.out, chosen.plot)
    command.check_plot(chosen.plot)
    for name in ("trees", "drafters", "temperatures"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    for temperature in chosen.temperatures:
        sampling_lib.Sampling(temperature=temperature)
    for one in wanted.rows(chosen):
        topology.read(one.tree)
    least = {"batch": 1, "depth": 0, "samples": 0, "max_new_tokens": 1}
    for name, low in least.items():
        if getattr(chosen, name) < low:
            raise ValueError(
                f"{name} is {getattr(chosen, name)}; {low} or more is allowed"
            )
    if any(nodes < 2 for nodes in chosen.plan):
        raise ValueError(f"plan is {chosen.plan}; sizes of 2 or more are allowed")


def check_prompts(model: checkpoints.Model, ids, chosen: Options) -> None:
    """Raise ValueError for prompts that the model has no room for."""
    most = model.config.max_position_embeddings
    prompts_lib.check_budget(ids, chosen.max_new_tokens, most)


def run(
    model, entries, ids, drafted, chosen: Options, old=None
) -> Iterator[dict[str, Any]]:
    """Decode every prompt with everything asked for; yields the fields so far."""
    found = old or {name: [] for name in wanted.FIELDS}
    todo = wanted.missing(list(drafted), found)
    decoded = functools.partial(decode_row, model, ids, chosen)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hot = list(dict.fromkeys(one.temperature for one in todo))
        plain = {one: pool.submit(decoded, one) for one in hot}
        ranked = {
            one: pool.submit(rank, model, ids, plain[one], one, chosen)
            for one in hot
            if wants_ranks(list(drafted), found, one, chosen)
        }
        made = {
            one: pool.submit(decoded, one.temperature, one.tree, drafted[one])
            for one in todo
        }
        for temperature in hot:
            texts = plain[temperature].result()
            if not found["texts"]:
                samples = cells_lib.texts(model, entries, texts, chosen.samples)
                found["texts"] = samples
            rows = [one for one in todo if one.temperature == temperature]
            # What takes ranks comes last: they are long in coming.
            rows.sort(key=lambda one: one.drafter == "dynamic")
            for one in rows:
                if one.drafter == "dynamic":
                    add_rates(found, entries, texts, ranked, temperature, chosen)
                some = (made[one].result(), texts)
                add_cell(found, model, entries, ids, one, drafted[one], *some)
                yield result(found)
            add_rates(found, entries, texts, ranked, temperature, chosen)
    yield result(found)


def result(found: dict[str, list]) -> dict[str, Any]:
    """Return the fields of the file."""
    return {"trees": cells_lib.by_tree(found["cells"])} | found


def decode_row(model, ids, chosen, temperature, tree="none", drafter=None) -> list[Row]:
    """Decode all prompts for a row, or plainly."""
    sampling = sampling_lib.Sampling(temperature=temperature)
    made = decode(model, ids, tree, chosen, sampling=sampling, drafter=drafter)
    name = "plain" if drafter is None else f"{type(drafter).__name__} {tree}"
    command.note(f"{name}, temperature {temperature:g}")
    return made


def wants_ranks(asked, found, temperature, chosen: Options) -> bool:
    """Are rates of the MTP head asked for, and not in the file?"""
    known = [one["temperature"] for one in found["ranks"]]
    heads = [one for one in asked if one.drafter == "mtp"]
    drafts = any(one.temperature == temperature for one in heads)
    return bool(chosen.depth) and drafts and temperature not in known


def rank(model, ids, plain, temperature, chosen: Options) -> list:
    """Return the ranks that the MTP head gives to plain texts, once there are any."""
    texts = [row.token_ids for row in plain.result()]
    sampling = sampling_lib.Sampling(temperature=temperature)
    found = cells_lib.ranks(model, ids, texts, sampling, chosen)
    command.note(f"rates of mtp, temperature {temperature:g}")
    return found


def add_rates(found, entries, plain, ranked, temperature, chosen: Options) -> None:
    """Add the rates of the MTP head and, of greedy texts, planned trees; once."""
    if temperature not in ranked:
        return
    ranks = ranked.pop(temperature).result()
    about = ("mtp", temperature, ranks)
    found["rates"] += rates.entries(*about)
    found["ranks"].append(rates.as_text(*about, prompts.halves(entries)))
    if temperature == 0 and chosen.plan:
        texts = [row.token_ids for row in plain]
        known = rates.from_ranks(ranks)
        depths = sorted({min(3, chosen.depth), chosen.depth})
        found["planned"] = claims.planned(ranks, texts, known, chosen.plan, depths)


def add_cell(found, model, entries, ids, one, drafter, made, plain) -> None:
    """Add the cell of a row."""
    sampling = sampling_lib.Sampling(temperature=one.temperature)
    cell = cells_lib.cell(*one, drafter, entries, made)
    cell["lossless"] = compared(model, ids, made, plain, sampling)
    if one.drafter == "dynamic" and sampling.greedy:
        ranks, _ = rates.as_ranks(found["ranks"], "mtp", one.temperature)
        steps, size = [row.lengths for row in made], (drafter.n_max, drafter.depth_max)
        if ranks and size[1] <= ranks[0].shape[1]:
            cell["best_width_tree"] = claims.best_widths(ranks, steps, *size)
    found["cells"].append(cell)


def encode(model: checkpoints.Model, text: str) -> list[int]:
    """Return the ids of one user turn in the chat format."""
    if model.tokenizer is None:
        raise ValueError("model: it has no tokenizer; prompts are text")
    chat = prompt.CHAT.format(text)
    return model.tokenizer.encode(chat, add_special_tokens=False).ids


def decode(
    model, ids, tree, options, commit="reconstruct", sampling=None, drafter=None
) -> list[Row]:
    """Decode every prompt, `options.batch` of them together."""
    made = []
    for first in range(0, len(ids), options.batch):
        generation = generation_lib.generate(
            model,
            ids[first : first + options.batch],
            tree=topology.read(tree),
            max_new_tokens=options.max_new_tokens,
            commit=commit,
            sampling=sampling,
            drafter=drafter,
            seed=getattr(options, "seed", 0),
        )
        parts = (generation.token_ids, generation.accept_lengths, generation.cut)
        for tokens, lengths, cut in zip(*parts, strict=True):
            made.append(Row(tokens, lengths[: len(lengths) - cut]))
    return made


def compared(model, ids, made, plain, sampling) -> dict[str, Any]:
    """Compare with plain decoding; of sampled texts only those that differ."""
    if sampling.greedy:
        return lossless(model, ids, made, plain)
    pairs = enumerate(zip(made, plain, strict=True))
    different = [n for n, (a, b) in pairs if a.token_ids != b.token_ids]
    return {"prompts": len(ids), "different": different}


def lossless(model, ids, made: list[Row], plain: list[Row]) -> dict[str, Any]:
    """Compare with plain decoding; a difference counts where it was no near tie."""
    found = []
    for number, (row, other) in enumerate(zip(made, plain, strict=True)):
        if row.token_ids == other.token_ids:
            continue
        place = compare.first_difference(row.token_ids, other.token_ids)
        gap = compare.logit_gap(model, [*ids[number], *row.token_ids[:place]])
        found.append({"prompt": number, "token": place, "logit_gap": gap})
    counted = sum(difference["logit_gap"] > compare.NEAR_TIE for difference in found)
    return {"prompts": len(ids), "differences": found, "counted": counted}


if __name__ == "__main__":
    sys.exit(main())
