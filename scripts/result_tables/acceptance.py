"""Tables of the shipped model: what it accepts, by tree and drafter, and its losses."""

from typing import Any

from scripts.accepting import paper
from scripts.result_tables import files
from treewy_jax import memory

FILE = "nvidia-h200/acceptance"
SHAPES = ("1,1,1", "2,2,1", "2,2,2", "3,3,3")


def acceptance() -> str:
    """Tokens a target pass on prompts80: all steps / before a text loops."""
    fields = files.read(FILE)["trees"]
    groups = ("all", "handwritten", "generated")

    def cell(summary: dict[str, Any]) -> str:
        mean, unlooped = summary["lengths"]["mean"], summary["unlooped"]["mean"]
        return f"{mean:.2f} / {unlooped:.2f}"

    rows = [
        [f"`{tree}`", str(nodes(tree)), *(cell(fields[tree][g]) for g in groups)]
        for tree in SHAPES
    ]
    return files.markdown(["tree", "nodes", *groups], rows)


def nodes(tree: str) -> int:
    """Return the nodes of a tree by widths, the root included."""
    total = level = 1
    for width in map(int, tree.split(",")):
        level *= width
        total += level
    return total


def shapes() -> str:
    """Shapes of Table 2: what they accept, and the states that a request holds."""
    found = files.read(FILE)["trees"]
    rows, before = [], None
    for tree in SHAPES:
        count, lengths = nodes(tree), found[tree]["all"]["lengths"]
        mean, (low, high) = lengths["mean"], lengths["interval"]
        more = "" if before is None else _a_node(count - before[0], mean - before[1])
        stored, held = (
            memory.blocks(tuple(map(int, tree.split(","))), scheme).counted
            for scheme in ("store-all", "reconstruct")
        )
        told = paper.beside(tree)
        theirs = [told["accept_length"], *told["blocks"].values()]
        rows.append(
            [
                f"`{tree}`",
                str(count),
                f"{mean:.2f} ({low:.2f} to {high:.2f})",
                more,
                str(stored),
                str(held),
                *("" if value is None else f"{value}" for value in theirs),
            ]
        )
        before = count, mean
    header = ["tree", "n", "tokens a step", "more a node added"]
    header += ["states, store-all", "states, here"]
    header += [f"paper: {name}" for name in ("tokens a step", "store-all", "TreeWY")]
    return files.markdown(header, rows)


def _a_node(nodes: int, tokens: float) -> str:
    return f"{tokens / nodes:+.3f}"


def planned() -> str:
    """Planned trees beside the best tree by widths of no more nodes and no deeper."""
    rows = []
    for tree in files.read(FILE)["planned"]:
        best, own = tree["best_width_tree"], tree["simulated"]["lengths"]
        low, high = best["interval"]
        rows.append(
            [
                str(tree["depth_at_most"]),
                str(tree["nodes"]),
                f"{tree['expected']:.2f}",
                f"{own['mean']:.2f}",
                f"`{','.join(map(str, best['widths']))}`",
                f"{best['accept_length']:.2f}",
                f"{best['difference']:+.2f} ({low:+.2f} to {high:+.2f})",
            ]
        )
    header = ["depth at most", "nodes", "expected", "on prompts80"]
    header += ["best by widths", "it accepts", "difference (95 %)"]
    return files.markdown(header, rows)


def drafts() -> str:
    """Tokens a target pass by tree, drafter and temperature, on a GPU."""
    rows = []
    for cell in files.read(FILE)["cells"]:
        found = cell["groups"]
        mean, (low, high) = (found["all"]["lengths"][x] for x in ("mean", "interval"))
        best = cell.get("best_width_tree")
        rows.append(
            [
                f"`{cell['tree'].split('/')[-1]}`",
                cell["drafter"],
                f"{cell['temperature']:g}",
                str(cell["nodes"]),
                f"{mean:.2f} ({low:.2f} to {high:.2f})",
                f"{found['all']['unlooped']['mean']:.2f}",
                *(f"{found[g]['lengths']['mean']:.2f}" for g in GROUPS),
                "" if best is None else _against(best),
            ]
        )
    header = ["tree", "drafter", "T", "n", "tokens a step", "before a loop", *GROUPS]
    return files.markdown([*header, "over the best widths (95 %)"], rows)


GROUPS = ("handwritten", "generated")


def _against(best: dict[str, Any]) -> str:
    """Difference to the best tree by widths of no more nodes and no deeper."""
    low, high = best["interval"]
    widths = ",".join(map(str, best["widths"]))
    return f"`{widths}` {best['difference']:+.2f} ({low:+.2f} to {high:+.2f})"


def plans() -> str:
    """Tokens a second that the planner predicts, beside those measured."""
    rows = []
    for tree in files.read("nvidia-h200/plan")["trees"]:
        told, found, off = (tree[x] for x in ("predicted", "measured", "errors"))
        rows.append(
            [
                f"`{tree['tree']}`",
                str(tree["nodes"]),
                f"{told['accept_length']:.3f} / {found['tokens_a_step']:.3f}",
                f"{told['milliseconds']:.4f} / {found['milliseconds']:.4f}",
                f"{told['tokens_per_second']:,.0f}",
                f"{found['tokens_per_second']:,.0f}",
                f"{100 * off['tokens_per_second']:+.1f} %",
            ]
        )
    header = ["tree", "nodes", "tokens a step", "ms a step", "tokens/s, predicted"]
    return files.markdown([*header, "measured", "error"], rows)


def lossless() -> str:
    """Distance of millions of short texts from the target's distribution, by rule."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in files.read("nvidia-h200/lossless")["rows"]:
        kind = "twins, which have to fail" if row["fault"] else f"`{row['rule']}`"
        groups.setdefault(kind, []).append(row)
    rows = [
        [
            kind,
            str(len(found)),
            f"{sum(row['samples'] for row in found) / 1e6:,.0f} M",
            f"{min(row['tvd'] for row in found):.4f}",
            f"{max(row['tvd'] for row in found):.4f}",
            f"{max(row['exact_mean'] for row in found):.4f}",
            f"{max(row['sigmas'] for row in found):,.1f}",
        ]
        for kind, found in groups.items()
    ]
    header = ["rule", "rows", "texts", "least TVD", "largest", "exact draws, at most"]
    return files.markdown([*header, "sigmas above, at most"], rows)


def validation() -> str:
    """Losses of the shipped model, and how often its head names the target's choice."""
    whole, head = files.read("nvidia-h200/training")["stages"]
    rows = [
        [
            source,
            f"{whole['validation'][source]['ce']:.3f}",
            *(f"{100 * found[f'top{k}_{d}']:.1f}" for d in (1, 2, 3) for k in (1, 3)),
        ]
        for source, found in head["validation"].items()
    ]
    agree = [f"draft {d}, top {k} %" for d in (1, 2, 3) for k in (1, 3)]
    return files.markdown(["source", "cross-entropy", *agree], rows)
