"""Planned trees against every tree by widths, on the ranks of a measured text."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scripts.accepting import probe, rows
from scripts.decoding import topology
from treewy_jax import planning
from treewy_jax import tree as tree_lib


def planned(
    ranks: Sequence[np.ndarray],
    texts: Sequence[Sequence[int]],
    by_depth: planning.ByDepth,
    sizes: Sequence[int],
    depths: Sequence[int],
) -> list[dict[str, Any]]:
    """Return what planned trees accept, and how that compares, by depth and size."""
    return [
        against_widths(ranks, texts, by_depth, planning.optimal(by_depth[depth], nodes))
        | {"nodes_at_most": nodes, "depth_at_most": depth}
        for depth in depths
        for nodes in sizes
    ]


def against_widths(ranks, texts, by_depth, parents) -> dict[str, Any]:
    """Return what a tree accepts beside the best of no more nodes and no deeper."""
    own, depth = probe.simulate(ranks, parents), planning.depth_of(parents)
    made = [rows.Row(list(t), s) for t, s in zip(texts, own, strict=True)]
    return {
        "parents": list(parents),
        "nodes": len(parents),
        "depth": depth,
        "expected": round(planning.accept_length(parents, by_depth), 4),
        "simulated": rows.summary(made),
        "width_trees": len(list(all_widths(len(parents), depth))),
        "best_width_tree": best_widths(ranks, own, len(parents), depth),
    }


def best_widths(
    ranks: Sequence[np.ndarray], own: Sequence[list[int]], nodes: int, depth: int
) -> dict[str, Any] | None:
    """Return the best tree by widths of this size, and how `own` steps compare.

    "difference" is the mean of `own` less that of this tree, with the interval of
    redrawn prompts.
    """
    tried = list(all_widths(nodes, depth))
    if not tried:
        return None
    widths = max(tried, key=lambda one: _mean(probe.simulate(ranks, _tree(one))))
    steps = probe.simulate(ranks, _tree(widths))
    off, interval = rows.difference(own, steps)
    return {
        "widths": list(widths),
        "accept_length": rows.bootstrap(steps)[0],
        "difference": off,
        "interval": interval,
    }


def _tree(widths: Sequence[int]) -> list[int]:
    return topology.parents_of(tree_lib.DraftTree.from_widths(widths))


def _mean(steps: Sequence[list[int]]) -> float:
    return sum(map(sum, steps)) / max(1, sum(map(len, steps)))


def all_widths(nodes: int, depth: int) -> Iterator[tuple[int, ...]]:
    """Yield the widths of all trees of 1 to `depth` levels and up to `nodes` nodes."""

    def grow(widths, level, total):
        if len(widths) == depth:
            return
        for width in range(1, nodes):
            more = level * width
            if total + more > nodes:
                return
            longer = (*widths, width)
            yield longer
            yield from grow(longer, more, total + more)

    yield from grow((), 1, 1)
