"""What one tree, drafter and temperature gave, as the result file holds it."""

from collections.abc import Sequence
from typing import Any

from scripts.accepting import paper, probe, rows
from scripts.decoding import topology
from treewy_jax import memory

TIES = 8  # of so many texts one may hold a near tie that is rounded another way


def ranks(model, ids, written, sampling, chosen: Any) -> list:
    """Return the ranks of all texts, `chosen.batch` of them together."""
    found = []
    for first in range(0, len(ids), chosen.batch):
        some = slice(first, first + chosen.batch)
        options = dict(depth=chosen.depth, sampling=sampling, seed=chosen.seed)
        options["tolerated"] = len(ids[some]) // TIES
        found += probe.ranks(model, ids[some], written[some], **options)
    return found


def cell(tree, name, temperature, drafter, entries, made) -> dict[str, Any]:
    """Return what one tree, drafter and temperature gave."""
    held = topology.read(tree)
    nodes = drafter.n_max
    return {
        "tree": tree,
        "drafter": name,
        "temperature": temperature,
        "nodes": nodes,
        "depth": drafter.depth_max,
        "blocks": {
            "store-all": nodes,
            "treewy": memory.blocks(held, "reconstruct").counted,
        },
        "by_depth": rows.by_depth(made, drafter.depth_max),
        "paper": paper.beside(tree) if name == "mtp" and not temperature else None,
        "groups": rows.measure(entries, made),
    }


def by_tree(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the greedy cells of the MTP head by tree, which tables are made from."""
    return {
        cell["tree"]: cell["groups"] | {"lossless": cell["lossless"]}
        for cell in cells
        if cell["drafter"] == "mtp" and not cell["temperature"]
    }


def texts(
    model, entries, made: Sequence[rows.Row], samples: int
) -> list[dict[str, Any]]:
    """Return the first texts of each category, those of hand-written prompts first."""
    kept: dict[str, list] = {}
    pairs = zip(entries, made, strict=True)
    for entry, row in sorted(pairs, key=lambda pair: pair[0]["source"] == "generated"):
        group = kept.setdefault(entry["category"], [])
        if len(group) < samples:
            text = model.tokenizer.decode(row.token_ids)
            group.append({"prompt": entry["turns"][0], "text": text})
    return [{"category": name, "texts": group} for name, group in kept.items()]
