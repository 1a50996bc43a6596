"""Plans, and what became of them, as figures; imported only when one is asked for."""

from typing import Any

from matplotlib import figure


def plan(plan: dict[str, Any]) -> figure.Figure:
    """Return expected acceptance over nodes, and what a tree is worth by batch."""
    timed = "batches" in plan
    size = (4.5 * (1 + timed), 4)
    drawn = figure.Figure(figsize=size, layout="constrained", dpi=150)
    panels = drawn.subplots(1, 1 + timed, squeeze=False)[0]
    nodes = range(1, len(plan["acceptance"]) + 1)
    panels[0].plot(nodes, plan["acceptance"], marker="o", ms=3, label="planned trees")
    chains = plan["chains"]
    panels[0].plot(range(1, len(chains) + 1), chains, marker="s", ms=3, label="chains")
    panels[0].set(xlabel="nodes", ylabel="tokens a step, expected")
    panels[0].legend(fontsize="x-small")
    if timed:
        _worth(panels[1], plan)
    return drawn


def checked(found: dict[str, Any]) -> figure.Figure:
    """Return predicted over measured tokens a second, and the errors by cause."""
    drawn = figure.Figure(figsize=(9, 4), layout="constrained", dpi=150)
    left, right = drawn.subplots(1, 2)
    trees = found["trees"]
    pairs = [
        [t[k]["tokens_per_second"] for k in ("measured", "predicted")] for t in trees
    ]
    most = 1.1 * max(map(max, pairs))
    left.plot([0, most], [0, most], color="gray", lw=0.8)
    for tree, pair in zip(trees, pairs, strict=True):
        left.plot(*pair, "o", label=tree["tree"])
    left.set(xlabel="tokens/s, measured", ylabel="tokens/s, predicted")
    left.legend(fontsize="x-small")
    causes = ("accept_length", "milliseconds", "tokens_per_second")
    names = ("tokens a step", "time of a step", "tokens/s")
    for place, cause in enumerate(causes):
        errors = [100 * tree["errors"][cause] for tree in trees]
        at = [number + 0.25 * (place - 1) for number in range(len(trees))]
        right.bar(at, errors, width=0.22, label=names[place])
    right.axhline(0, color="gray", lw=0.8)
    right.set_xticks(range(len(trees)), [tree["tree"] for tree in trees])
    right.set(ylabel="error, %")
    right.legend(fontsize="x-small")
    return drawn


def _worth(axes, plan) -> None:
    batches = [row["batch"] for row in plan["batches"]]
    for name in plan["trees"]:
        ratios = [row["trees"][name]["ratio"] for row in plan["batches"]]
        axes.plot(batches, ratios, marker="o", ms=3, label=f"{name} nodes")
    best = [row["fastest"]["ratio"] for row in plan["batches"]]
    axes.plot(batches, best, "k--", label="fastest tree")
    axes.axhline(1, color="gray", lw=0.8)
    axes.set(xlabel="batch", ylabel="tokens/s over the best chain's", xscale="log")
    axes.legend(fontsize="x-small")
