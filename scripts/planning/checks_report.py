"""The planner against measured tokens a second, for the terminal."""

from typing import Any

import rich.markup
from rich import console as rich_console
from rich import table as rich_table

HALVES = ("first half", "second half")


def show(found: dict[str, Any], console: rich_console.Console) -> None:
    """Print the fit, what it predicts, and what halves tell of each other."""
    console.print(fit(found))
    console.print(checked(found["trees"]))
    if all(tree["halves"] for tree in found["trees"]):
        console.print(halves(found["trees"]))
    worst = max(abs(tree["errors"]["tokens_per_second"]) for tree in found["trees"])
    differ = {len(tree.get("differ_from_plain", ())) for tree in found["trees"]}
    console.print(
        f"tokens a second are off by {100 * worst:.1f} % at most; at most "
        f"{max(differ)} texts of a tree are not those of plain decoding",
        soft_wrap=True,
    )


def fit(found: dict[str, Any]) -> rich_table.Table:
    """Trees whose step times were fitted."""
    level = found["level_milliseconds"]
    title = f"fitted; a level of drafting {level:.4f} ms"
    table = rich_table.Table("tree", "nodes", "depth", "steps", "ms a step",
                             "least", title=title)  # fmt: skip
    for row in found["fit"]:
        one = row["measured"]
        cells = [rich.markup.escape(row["tree"]), row["nodes"], row["depth"]]
        cells += [one["steps"], f"{one['milliseconds']:.4f}"]
        table.add_row(*map(str, cells), f"{one['least_milliseconds']:.4f}")
    return table


def checked(trees: list[dict]) -> rich_table.Table:
    """Predicted, measured and the error of each tree that was not fitted."""
    table = rich_table.Table(
        "tree", "nodes", "tokens a step: predicted", "measured", "error",
        "ms: predicted", "measured", "error", "tokens/s: predicted", "measured",
        "error", "with prompts",
    )  # fmt: skip
    for tree in trees:
        table.add_row(
            rich.markup.escape(tree["tree"]),
            str(tree["nodes"]),
            *_triple(tree, "accept_length", "tokens_a_step", "{:.3f}"),
            *_triple(tree, "milliseconds", "milliseconds", "{:.4f}"),
            *_triple(tree, "tokens_per_second", "tokens_per_second", "{:,.0f}"),
            f"{tree['measured']['with_prompts']:,.0f}",
        )
    return table


def halves(trees: list[dict]) -> rich_table.Table:
    """The same in tokens a second, each half of the prompts by rates of the other."""
    table = rich_table.Table(
        "tree", "rates of", "measured on", "tokens/s: predicted", "measured", "error",
        "of it tokens a step",
    )  # fmt: skip
    for tree in trees:
        for half, one in enumerate(tree["halves"]):
            table.add_row(
                rich.markup.escape(tree["tree"]),
                HALVES[half],
                HALVES[1 - half],
                *_triple(one, "tokens_per_second", "tokens_per_second", "{:,.0f}"),
                f"{100 * one['errors']['accept_length']:+.1f} %",
            )
    return table


def _triple(one, name, beside, style) -> tuple[str, str, str]:
    predicted, measured = one["predicted"][name], one["measured"][beside]
    error = f"{100 * one['errors'][name]:+.1f} %"
    return style.format(predicted), style.format(measured), error
