"""Acceptance as a figure; imported only when one is asked for."""

import itertools
from typing import Any

from matplotlib import figure

from scripts.accepting import accept_report, rates


def acceptance(found: dict[str, Any]) -> figure.Figure:
    """Return accept length over nodes, and the rates of each rank by depth."""
    deepest = accept_report.deepest(found["rates"])
    panels = 1 + len(deepest)
    size = (4.5 * panels, 4)
    drawn = figure.Figure(figsize=size, layout="constrained", dpi=150)
    left, *others = drawn.subplots(1, panels, squeeze=False)[0]
    groups: dict[tuple, list] = {}
    for cell in found["cells"]:
        groups.setdefault((cell["drafter"], cell["temperature"]), []).append(cell)
    for (drafter, temperature), cells in groups.items():
        _line(left, f"{drafter}, temperature {temperature:g}", cells)
    best = [tree for tree in found["planned"] if tree["simulated"]["lengths"]["mean"]]
    depths = sorted({tree["depth_at_most"] for tree in best})
    for depth, style in zip(depths, itertools.cycle(("--", ":")), strict=False):
        some = [tree for tree in best if tree["depth_at_most"] == depth]
        means = [tree["simulated"]["lengths"]["mean"] for tree in some]
        style = dict(ls=style, marker="s", ms=3, label=f"planned, depth to {depth}")
        left.plot([t["nodes"] for t in some], means, color="black", **style)
    left.set(xlabel="nodes", ylabel="tokens a target pass")
    left.legend(fontsize="x-small")
    for axes, entry in zip(others, deepest, strict=True):
        _ranks(axes, entry)
    return drawn


def _line(axes, name, cells) -> None:
    found = [cell["groups"]["all"]["lengths"] for cell in cells]
    pairs = [(c["nodes"], f) for c, f in zip(cells, found, strict=True) if f["mean"]]
    pairs.sort(key=lambda pair: pair[0])
    means = [one["mean"] for _, one in pairs]
    below = [max(0, one["mean"] - one["interval"][0]) for _, one in pairs]
    above = [max(0, one["interval"][1] - one["mean"]) for _, one in pairs]
    nodes = [count for count, _ in pairs]
    style = dict(marker="o", ms=3, capsize=2, label=name)
    axes.errorbar(nodes, means, yerr=[below, above], **style)


def _ranks(axes, entry) -> None:
    shares = rates.by_depth_and_rank(entry)
    for rank, column in enumerate(shares.T):
        axes.plot(range(1, len(column) + 1), column, marker="o", ms=3, label=rank + 1)
    title = f"{entry['drafter']}, temperature {entry['temperature']:g}"
    axes.set(title=title, xlabel="depth", ylabel="accepted, once the parent is")
    axes.set(ylim=(0, 1))
    axes.legend(title="rank", fontsize="x-small")
