"""Acceptance for the terminal: by prompts, by rank and depth, planned trees."""

from typing import Any

import rich.markup
from rich import console as rich_console
from rich import table as rich_table

from scripts.accepting import rates


def show(found: dict[str, Any], console: rich_console.Console) -> None:
    """Print every table of a result."""
    console.print(acceptance(found["cells"]))
    console.print(states(found["cells"]))
    for entry in deepest(found["rates"]):
        console.print(ranks(entry))
    if found["planned"]:
        console.print(planned(found["planned"]))
    changing = [cell for cell in found["cells"] if cell.get("best_width_tree")]
    if changing:
        console.print(dynamic(changing))


def label(cell: dict[str, Any]) -> str:
    """Name a cell: the tree, and what is not the default."""
    parts = [cell["tree"]]
    if cell["drafter"] != "mtp":
        parts.append(cell["drafter"])
    if cell["temperature"]:
        parts.append(f"t={cell['temperature']:g}")
    return " ".join(parts)


def acceptance(cells: list[dict]) -> rich_table.Table:
    """Mean accept lengths by group: all steps / before a text loops."""

    def shown(found: dict[str, Any]) -> str:
        means = (found[name]["mean"] for name in ("lengths", "unlooped"))
        return " / ".join("none" if mean is None else f"{mean:.2f}" for mean in means)

    names = [rich.markup.escape(label(cell)) for cell in cells]
    table = rich_table.Table("prompts", *names)
    for group in cells[0]["groups"]:
        table.add_row(group, *(shown(cell["groups"][group]) for cell in cells))
    table.add_row("differ from plain", *(differing(cell) for cell in cells))
    return table


def differing(cell: dict[str, Any]) -> str:
    """How many texts differ from plain decoding; of greedy ones, without near ties."""
    found = cell["lossless"]
    return str(found["counted"] if "counted" in found else len(found["different"]))


def states(cells: list[dict]) -> rich_table.Table:
    """Acceptance and states a request, the paper's beside ours."""
    table = rich_table.Table(
        "tree", "n", "tokens a step", "95 %", "states, store-all", "states, here",
        "paper: tokens", "paper: store-all", "paper: TreeWY",
    )  # fmt: skip
    for cell in cells:
        all_ = cell["groups"]["all"]["lengths"]
        beside = cell["paper"] or {"accept_length": None, "blocks": {}}
        told = (beside["accept_length"], *beside["blocks"].values())
        told = [*told, None, None][:3]
        interval = all_["interval"] and "{:.2f} to {:.2f}".format(*all_["interval"])
        table.add_row(
            rich.markup.escape(label(cell)),
            str(cell["nodes"]),
            "none" if all_["mean"] is None else f"{all_['mean']:.3f}",
            interval or "-",
            *(str(count) for count in cell["blocks"].values()),
            *("-" if value is None else f"{value}" for value in told),
        )
    return table


def deepest(entries: list[dict]) -> list[dict]:
    """Return the entries of the deepest trees: one a drafter and temperature."""
    kept: dict[tuple, dict] = {}
    for entry in sorted(entries, key=lambda entry: entry["depth"]):
        kept[entry["drafter"], entry["temperature"]] = entry
    return list(kept.values())


def ranks(entry: dict[str, Any]) -> rich_table.Table:
    """Percent accepted of each rank at each depth, once the parent is."""
    shares = rates.by_depth_and_rank(entry)
    title = f"{entry['drafter']}, temperature {entry['temperature']:g}: accepted, %"
    names = [f"#{rank + 1}" for rank in range(shares.shape[1])]
    table = rich_table.Table("depth", *names, title=title)
    for depth, row in enumerate(shares, 1):
        table.add_row(str(depth), *(f"{100 * share:.1f}" for share in row))
    return table


def planned(trees: list[dict]) -> rich_table.Table:
    """Planned trees: expected, simulated on the ranks, and the best tree by widths."""
    table = rich_table.Table(
        "nodes at most", "depth at most", "nodes", "depth", "expected", "simulated",
        "best by widths", "its tokens", "difference", "95 %",
    )  # fmt: skip
    for tree in trees:
        best = tree["best_width_tree"]
        cells = [tree[name] for name in ("nodes_at_most", "depth_at_most", "nodes")]
        cells += [tree["depth"], f"{tree['expected']:.3f}"]
        cells.append(f"{tree['simulated']['lengths']['mean']:.3f}")
        if best:
            cells.append(",".join(map(str, best["widths"])))
            cells += [f"{best['accept_length']:.3f}", f"{best['difference']:+.3f}"]
            cells.append("{:+.3f} to {:+.3f}".format(*best["interval"]))
        table.add_row(*map(str, cells))
    return table


def dynamic(cells: list[dict]) -> rich_table.Table:
    """Dynamic trees, and the best tree by widths of as many nodes and levels."""
    table = rich_table.Table(
        "tree", "nodes", "depth", "tokens a step", "best by widths", "its tokens",
        "difference", "95 %",
    )  # fmt: skip
    for cell in cells:
        best, mean = cell["best_width_tree"], cell["groups"]["all"]["lengths"]["mean"]
        row = [rich.markup.escape(label(cell)), cell["nodes"], cell["depth"]]
        row += ["none" if mean is None else f"{mean:.3f}"]
        row += [",".join(map(str, best["widths"])), f"{best['accept_length']:.3f}"]
        row += [f"{best['difference']:+.3f}"]
        row += ["{:+.3f} to {:+.3f}".format(*best["interval"])]
        table.add_row(*map(str, row))
    return table
