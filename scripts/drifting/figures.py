"""Errors of states as figures: how large, how they grow, and what is called drift."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import markup
from rich import table as rich_table

RATIO = 2.0  # a state is inexact above this many errors of sequential float32
SLOPE = 0.3  # of log error against log tokens; that of a random walk is 0.5
BEGIN = 1 / 8  # of the tokens: before, states that start at 0 are still filling up


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared; None where a lifecycle has no such option."""

    lifecycle: str
    state_dtype: str
    record_dtype: str | None = None
    horizon: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the setting asks its lifecycle for."""
        found = {k: v for k, v in vars(self).items() if v is not None}
        return {k: v for k, v in found.items() if k != "lifecycle"}

    @property
    def float32(self) -> bool:
        """Tell whether nothing is stored in less than float32."""
        return {self.state_dtype, self.record_dtype} <= {"float32", None}


@dataclasses.dataclass(frozen=True)
class Row:
    """One stream under one setting.

    Attributes:
        name: of the stream.
        error: from float64 at each checkpoint, relative, the RMS over heads.
        from_float32: distance from sequential float32 at the last checkpoint.
        end: RMS of `error` over the last quarter of the checkpoints.
        ratio: `end` in units of that of sequential float32.
        worst_ratio: the largest at any checkpoint of the second half.
        slope: least squares of log error against log tokens, from `BEGIN` on.
        slope_float32: the same of sequential float32.
        last_over_first: of the errors.
        inexact: `ratio` is above `RATIO`.
        drifts: `slope` is above `SLOPE`, and the state is inexact or on its way there:
            `slope` is above `slope_float32` by as much.
    """

    setting: Setting
    name: str
    error: list[float]
    from_float32: float
    end: float
    ratio: float
    worst_ratio: float
    slope: float
    slope_float32: float
    last_over_first: float
    inexact: bool
    drifts: bool

    @property
    def mark(self) -> str:
        """Name what is wrong, the worse of two; empty where nothing is."""
        return "drifts" if self.drifts else "inexact" * self.inexact


def errors(states: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return relative errors [checkpoints, B], the RMS over heads."""
    shape = (*states.shape[:3], -1)
    differences = (states.astype(exact.dtype) - exact).reshape(shape)
    scale = np.linalg.norm(exact.reshape(shape), axis=-1)
    relative = np.linalg.norm(differences, axis=-1) / scale
    return np.sqrt(np.mean(relative**2, axis=-1))


def slope(error: np.ndarray, reached: np.ndarray) -> float:
    """Fit log error against log tokens, from `BEGIN` on."""
    used = reached >= BEGIN * reached[-1]
    return float(np.polyfit(np.log(reached[used]), np.log(error[used]), 1)[0])


def rows(
    setting: Setting,
    names: Sequence[str],
    reached: np.ndarray,
    states: np.ndarray,
    exact: np.ndarray,
    sequential: np.ndarray,
) -> list[Row]:
    """Return a row a stream; all states are [checkpoints, B, Hv, Dv, Dk]."""
    found = errors(states, exact).T
    base = errors(sequential, exact).T
    distance = errors(states, sequential)[-1]
    return [
        _row(setting, name, reached, *streams)
        for name, *streams in zip(names, found, base, distance, strict=True)
    ]


def _row(setting, name, reached, error, base, distance) -> Row:
    quarter, half = max(1, len(error) // 4), len(error) // 2
    end, base_end = (np.sqrt(np.mean(x[-quarter:] ** 2)) for x in (error, base))
    slopes = [slope(x, reached) for x in (error, base)]
    inexact = bool(end > RATIO * base_end)
    grows_faster = slopes[0] > slopes[1] + SLOPE
    return Row(
        setting=setting,
        name=name,
        error=[short(x) for x in error],
        from_float32=short(distance),
        end=short(end),
        ratio=short(end / base_end),
        worst_ratio=short(np.max(error[half:] / base[half:])),
        slope=short(slopes[0]),
        slope_float32=short(slopes[1]),
        last_over_first=short(error[-1] / error[0]),
        inexact=inexact,
        drifts=slopes[0] > SLOPE and (inexact or grows_faster),
    )


def short(x: float) -> float:
    """Return three digits of x."""
    return float(f"{x:.3g}")


def record(row: Row) -> dict[str, Any]:
    """Return the row for a JSON file, setting first."""
    fields = dataclasses.asdict(row)
    return fields.pop("setting") | fields


def grouped(found: Sequence[Row]) -> dict[tuple[Setting, str], list[Row]]:
    """Return the rows of each setting and kind of stream, the largest error first."""
    order = list(dict.fromkeys(row.setting for row in found))
    groups: dict[tuple[Setting, str], list[Row]] = {}
    for row in sorted(found, key=lambda row: (order.index(row.setting), -row.end)):
        kind = "model" if row.name.startswith("layer") else "synthetic"
        groups.setdefault((row.setting, kind), []).append(row)
    return groups


def table(found: Sequence[Row]) -> rich_table.Table:
    """Return a line for each setting and kind of stream."""
    columns = (
        "lifecycle", "S", "records", "horizon", "inputs", "largest error", "at end",
        "slope", "last / first", "x float32", "at most", "mark",
    )  # fmt: skip
    drawn = rich_table.Table(*columns)
    for (setting, kind), group in grouped(found).items():
        first = group[0]
        cells = (
            *("" if x is None else str(x) for x in vars(setting).values()),
            kind,
            first.name,
            f"{first.end:.2g}",
            f"{first.slope:.2f}",
            f"{first.last_over_first:.2g}",
            f"{max(row.ratio for row in group):.3g}",
            f"{max(row.worst_ratio for row in group):.3g}",
            min((row.mark for row in group if row.mark), default=""),
        )
        drawn.add_row(*map(markup.escape, cells))
    return drawn


def draw(found: Sequence[Row], reached: Sequence[int], base: dict[str, list[float]]):
    """Return the largest errors against tokens, a panel for each kind of stream."""
    from matplotlib import figure

    groups = grouped(found)
    kinds = list(dict.fromkeys(kind for _, kind in groups))
    size = (5 * len(kinds) + 2.5, 4.5)
    drawn = figure.Figure(figsize=size, layout="constrained", dpi=150)
    panels = drawn.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for (setting, other), group in groups.items():
            if other == kind:
                axes.plot(reached, group[0].error, **_line(setting))
        for name, error in base.items():
            if name.startswith("layer") == (kind == "model"):
                axes.plot(reached, error, "k:", lw=0.8)
        axes.set(title=kind, xscale="log", yscale="log", xlabel="tokens committed")
    panels[0].set_ylabel("relative error of the state (dotted: sequential float32)")
    drawn.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right", fontsize=5
    )
    return drawn


def _line(setting: Setting) -> dict[str, Any]:
    """Return how a setting is drawn: dtypes are colours, lifecycles are marks."""
    rounded = (setting.state_dtype, setting.record_dtype or "float32")
    colors = {
        ("float32", "float32"): "tab:blue",
        ("float32", "bfloat16"): "tab:green",
        ("bfloat16", "float32"): "tab:red",
    }
    marks = {
        "store-all": "s",
        "reconstruct": "o",
        "fused": "x",
        8: "v",
        16: "^",
        32: "D",
    }
    return dict(
        color=colors.get(rounded, "tab:purple"),
        marker=marks.get(setting.horizon or setting.lifecycle, "*"),
        label=" ".join(map(str, filter(None, vars(setting).values()))),
        ms=4, mfc="none", lw=0.6,
    )  # fmt: skip
