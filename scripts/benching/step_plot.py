"""Step times over the batch as a figure; imported only when one is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure

from scripts.benching import step_store

FIELDS = ("model", "commit", "horizon", "state_dtype", "context", "mesh")


def draw(rows: Sequence[Mapping[str, Any]]) -> figure.Figure:
    """Return a panel for each tree: a line a lifecycle, its byte floor dashed."""
    timed = [row for row in rows if row["kind"] == "step" and row.get("wall_ms")]
    trees = list(dict.fromkeys(row["point"]["tree"] for row in timed)) or ["none"]
    size = (4.5 * len(trees), 4)
    drawn = figure.Figure(figsize=size, layout="constrained", dpi=150)
    panels = drawn.subplots(1, len(trees), squeeze=False)[0]
    for axes, tree in zip(panels, trees, strict=True):
        _panel(axes, [row for row in timed if row["point"]["tree"] == tree])
        axes.set(title=f"tree {tree}", xscale="log", yscale="log", xlabel="batch")
    drawn.axes[0].set_ylabel("milliseconds a step")
    return drawn


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    lines: dict[str, list] = {}
    for row in rows:
        point = row["point"]
        name = " ".join(
            str(point[field]) for field in FIELDS if point.get(field) is not None
        )
        lines.setdefault(name, []).append(row)
    for name, found in lines.items():
        found.sort(key=lambda row: row["point"]["batch"])
        batches = [row["point"]["batch"] for row in found]
        times = [step_store.clock(row)["mean"] for row in found]
        (line,) = axes.plot(batches, times, marker="o", ms=3, label=name)
        floors = [row["floor_ms"] for row in found]
        axes.plot(batches, floors, ls="--", lw=0.8, color=line.get_color())
    axes.legend(fontsize="xx-small")
