"""A plan of plan_tree.py for the terminal: trees, acceptance, and the crossover."""

import json
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console
from rich import table as rich_table

from treewy_jax import planning
from treewy_jax import tree as tree_lib


def as_json(plan: dict[str, Any]) -> str:
    """Return the plan as JSON, without what the result file says of itself."""
    return json.dumps(plan, indent=1, allow_nan=False) + "\n"


def show(plan: dict[str, Any], console: rich_console.Console) -> None:
    """Print the trees, then how they compare, then step times where there are any."""
    for nodes, tree in plan["trees"].items():
        console.print(
            f"\n[bold]at most {nodes} nodes[/]: {tree['nodes']} nodes, depth "
            f"{tree['depth']}, {tree['accept_length']:.3f} tokens a step expected"
        )
        console.print(draw(tree))
    console.print()
    console.print(_acceptance(plan))
    if "batches" in plan:
        console.print(_speed(plan))
        _crossover(plan, console)
    how = (
        f"fastest of those up to the largest size at B = {plan['chosen_for_batch']}"
        if "batches" in plan
        else "accepts most; no step times"
    )
    console.print(f"recommended: {plan['nodes']} nodes, depth {plan['depth']} ({how})")


def draw(tree: dict[str, Any]):
    """Return the tree as text: the rank of each draft, and its chance."""
    parents, reach = tree["parents"], tree["reach"]
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    labels = ["root"] + [
        f"#{rank + 1}  {100 * chance:.1f} %"
        for rank, chance in zip(ranks[1:], reach[1:], strict=True)
    ]
    spine = [0]
    for node, parent in enumerate(parents[1:], 1):
        if parent == spine[-1] and ranks[node] == 0:
            spine.append(node)
    return tree_lib.DraftTree.from_parents(parents).render(labels, spine)


def _acceptance(plan) -> rich_table.Table:
    table = rich_table.Table(
        "nodes at most", "nodes", "depth", "tokens a step, expected"
    )
    for nodes, tree in plan["trees"].items():
        cells = (tree["nodes"], tree["depth"], f"{tree['accept_length']:.3f}")
        table.add_row(nodes, *map(str, cells))
    for drafts, accepted in enumerate(plan["chains"]):
        table.add_row("chain", str(drafts + 1), str(drafts), f"{accepted:.3f}")
    return table


def _speed(plan) -> rich_table.Table:
    table = rich_table.Table("B", "best chain", "tokens/s")
    for nodes in plan["trees"]:
        table.add_column(f"tree of {nodes}, times chain", justify="right")
    table.add_column("fastest tree")
    table.add_column("times chain", justify="right")
    for row in plan["batches"]:
        chain, fastest = row["chain"], row["fastest"]
        table.add_row(
            str(row["batch"]),
            f"{len(chain['parents']) - 1} drafts",
            f"{chain['tokens_per_second']:,.0f}",
            *(f"{row['trees'][nodes]['ratio']:.3f}" for nodes in plan["trees"]),
            shape(fastest["parents"]),
            f"{fastest['ratio']:.3f}",
        )
    return table


def _crossover(plan, console) -> None:
    batches = [row["batch"] for row in plan["batches"]]
    for nodes, wins in plan["crossover"].items():
        told = f"B = {_listed(wins)}" if wins else "no batch"
        console.print(f"tree of {nodes} nodes against the best chain: faster at {told}")
    wins = [row["batch"] for row in plan["batches"] if row["fastest"]["ratio"] > 1]
    told = f"at B = {_listed(wins)}" if wins else f"at none of B = {_listed(batches)}"
    console.print(f"some tree is faster than every chain {told}")
    if plan["extrapolated"]:
        console.print(
            "some of these trees are larger or deeper than all that were timed: their "
            "times are extrapolated"
        )


def shape(parents: Sequence[int]) -> str:
    """Return nodes and depth of a tree, in words."""
    depth = planning.depth_of(parents)
    if depth == len(parents) - 1:
        return f"chain of {depth}" if depth else "root alone"
    return f"{len(parents)} nodes, depth {depth}"


def _listed(batches: Sequence[int]) -> str:
    return ", ".join(map(str, batches))
