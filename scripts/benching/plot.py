"""Times beside their floors as a figure; imported only when one is asked for."""

from collections.abc import Sequence

from matplotlib import figure

from scripts.benching import contenders, rates, tables


def draw(
    entrants: Sequence[contenders.Contender], limits: rates.Rates
) -> figure.Figure:
    """Return a bar a contender and a mark at the larger of its two floors."""
    timed = [entrant for entrant in entrants if tables.median_us(entrant)]
    height = 1.2 + 0.22 * len(timed)
    drawn = figure.Figure(figsize=(9, height), layout="constrained", dpi=150)
    axes = drawn.subplots()
    impls = list(dict.fromkeys(entrant.impl for entrant in timed))
    for impl in impls:
        places = [i for i, entrant in enumerate(timed) if entrant.impl == impl]
        axes.barh(places, [tables.median_us(timed[i]) for i in places], label=impl)
    floors = [max(limits.floors_us(entrant.case.spec).values()) for entrant in timed]
    axes.scatter(floors, range(len(timed)), marker="|", s=80, color="k", label="floor")
    labels = [f"{entrant.case.op} {entrant.case.label}" for entrant in timed]
    axes.set_yticks(range(len(timed)), labels, fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="microseconds a run (median)")
    axes.legend(fontsize="small")
    return drawn
