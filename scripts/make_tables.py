"""Print the tables of the README and the model card from the result files.

    python scripts/make_tables.py

tests/test_readme.py fails when those pages do not hold exactly these.
"""

import json
import pathlib
from typing import Any

from treewy_jax import memory

RESULTS = pathlib.Path(__file__).parent / "results"


def read(name: str) -> dict[str, Any]:
    """Return the fields of a result file, named by device and script."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def acceptance() -> str:
    """Tokens a target pass on prompts80: all steps / before a text loops."""
    fields = read("cpu/acceptance")["trees"]
    groups = ("all", "handwritten", "generated")

    def cell(summary: dict[str, Any]) -> str:
        mean, unlooped = summary["lengths"]["mean"], summary["unlooped"]["mean"]
        return f"{mean:.2f} / {unlooped:.2f}"

    rows = [
        [f"`{tree}`", str(nodes(tree)), *(cell(found[g]) for g in groups)]
        for tree, found in fields.items()
    ]
    return markdown(["tree", "nodes", *groups], rows)


def nodes(tree: str) -> int:
    """Return the nodes of a tree by widths, the root included."""
    total = level = 1
    for width in map(int, tree.split(",")):
        level *= width
        total += level
    return total


def shapes() -> str:
    """Shapes of Table 2: what they accept, and the states that a request holds."""
    from scripts.accepting import paper

    found = read("cpu/acceptance")["trees"]
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
    return markdown(header, rows)


SHAPES = ("1,1,1", "2,2,1", "2,2,2", "3,3,3")


def _a_node(nodes: int, tokens: float) -> str:
    return f"{tokens / nodes:+.3f}"


def planned() -> str:
    """Planned trees beside the best tree by widths of no more nodes and no deeper."""
    rows = []
    for tree in read("cpu/acceptance")["planned"]:
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
    return markdown(header, rows)


def lossless() -> str:
    """Distance of millions of short texts from the target's distribution, by rule."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in read("nvidia-h200/lossless")["rows"]:
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
    return markdown([*header, "sigmas above, at most"], rows)


def validation() -> str:
    """Losses of the shipped model, and how often its head names the target's choice."""
    whole, head = read("nvidia-h200/training")["stages"]
    rows = [
        [
            source,
            f"{whole['validation'][source]['ce']:.3f}",
            *(f"{100 * found[f'top{k}_{d}']:.1f}" for d in (1, 2, 3) for k in (1, 3)),
        ]
        for source, found in head["validation"].items()
    ]
    agree = [f"draft {d}, top {k} %" for d in (1, 2, 3) for k in (1, 3)]
    return markdown(["source", "cross-entropy", *agree], rows)


def memory_a_sequence() -> str:
    """Recurrent states held for one sequence during a verification, in MiB."""
    from models.qwen3_5 import published

    rows = []
    for name in ("qwen3.5-35b-a3b", "qwen3.5-397b-a17b"):
        shape = memory.Shape.from_config(published.get(name))
        for dtype in ("bfloat16", "float32"):
            one = memory.state_bytes(shape, dtype) / 2**20
            stored = [f"{one * n:,.0f}" for n in (4, 15, 40)]
            rows.append([name, dtype, *stored, f"{one:,.0f}"])
    header = [
        "model",
        "state",
        "store-all `1,1,1`",
        "`2,2,2`",
        "`3,3,3`",
        "TreeWY, any",
    ]
    return markdown(header, rows)


def verification() -> str:
    """Microseconds of one layer's tree verification, by implementation."""
    rows = []
    for case, found in _by_case("verify", "tree_verify").items():
        floor = found["triton"]["floors"]["bytes_us"]
        rows.append([case, f"{floor:.3g}", *(_time(found[i]) for i in VERIFIERS)])
    header = ["one layer, n nodes", "byte floor", "`mosaic_gpu`", "`triton`"]
    return markdown(header, rows)


VERIFIERS = ("mosaic_gpu", "triton")


def verification_in_short() -> str:
    """The largest batch and a bfloat16 state: floor and both GPU kernels."""
    found = _by_case("verify", "tree_verify")
    rows = []
    for nodes in (4, 15, 40):
        row = found[f"n={nodes} B=256 S=bfloat16 fast"]
        floor = row["triton"]["floors"]["bytes_us"]
        rows.append([str(nodes), f"{floor:.3g}", *(_time(row[i]) for i in VERIFIERS)])
    return markdown(["nodes", "byte floor", "`mosaic_gpu`", "`triton`"], rows)


def other_kernels() -> str:
    """Microseconds of the other ops and how many times their floor that is."""
    rows = []
    files = [("verify", op) for op in ("commit", "store_all")]
    for name, op in (*files, *(("kernels", op) for op in OTHERS)):
        for case, found in _by_case(name, op).items():
            floor = max(found["triton"]["floors"].values())
            rows.append([f"`{op}`", case, f"{floor:.3g}", _time(found["triton"])])
    return markdown(["op", "case", "floor", "median (times floor)"], rows)


def commits() -> str:
    """Microseconds a layer and step of every lifecycle, and passes over its states."""
    groups: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in read("nvidia-h200/commit")["rows"]:
        groups.setdefault((row["nodes"], row["batch"]), {})[row["lifecycle"]] = row
    rows = []
    for (count, batch), found in sorted(groups.items()):
        cells = [_moves(found[label]) for label in LIFECYCLES]
        rows.append([str(count), str(batch), *cells])
    return markdown(["n", "B", *LIFECYCLES], rows)


def texts() -> str:
    """Texts of prompts80 that are those of plain decoding, by lifecycle."""
    rows = []
    for dtype, file in (("float32", "lifecycles"), ("bfloat16", "lifecycles-bfloat16")):
        for tree, found in read(f"cpu/{file}")["trees"].items():
            cells = [
                f"{one['equal']} of {one['prompts']}, {one['mean_accept_length']:.2f}"
                for one in (found[name] for name in TEXTS)
            ]
            rows.append([dtype, f"`{tree}`", *cells])
    return markdown(["weights", "tree", *TEXTS], rows)


TEXTS = ("store-all", "reconstruct", "fused", "deferred")


LIFECYCLES = (
    "store-all",
    "reconstruct",
    "fused",
    "deferred-8",
    "deferred-16",
    "deferred-32",
)


def _moves(row: dict[str, Any]) -> str:
    us, moves = row["device_us"]["median"], row["moves_equivalent"]
    return f"{us:.3g} ({moves:.2f} / {row['ideal_moves']:.2f})"


def peers() -> str:
    """Microseconds of a layer, raw rows in, beside kernels of other projects."""
    groups: dict[str, dict[str, Any]] = {}
    for row in read("nvidia-h200/peers")["rows"]:
        found = groups.setdefault(row["comparison"]["label"], {})
        if row["in_a_row_us"] is not None:
            who = row["computes"] if row["who"] == "ours" else row["who"]
            who = "ours" if who == row["comparison"]["name"] else who
            found[who] = row["in_a_row_us"]["median"]
    rows = [
        [label, *(_beside(found, name) for name in PEERS)]
        for label, found in groups.items()
    ]
    return markdown(["one layer", *PEERS.values()], rows)


PEERS = {
    "ours": "ours",
    "verify + commit": "ours, verify + commit",
    "fused step": "ours, fused",
    "fla fused_recurrent": "FLA fused_recurrent",
    "fla chunk": "FLA chunk",
    "treewy": "TreeWY's: commit + verify",
    "weaver_tf32": "Weaver's, tf32",
    "weaver_bf16": "Weaver's, bf16",
}


def _beside(found: dict[str, float], name: str) -> str:
    if name not in found:
        return ""
    times = f" ({found[name] / found['ours']:.2f})"
    return f"{found[name]:.3g}" + (times if name != "ours" else "")


def whole_steps() -> str:
    """Milliseconds of whole steps of the 35B model beside their bytes."""
    rows = []
    for row in read("nvidia-h200/step")["rows"]:
        point = row["point"]
        horizon = f"-{point['horizon']}" if point["horizon"] else ""
        rows.append(
            [
                f"`{point['tree']}`",
                point["commit"] + horizon,
                str(point["batch"]),
                f"{row['device_ms']['median']:.2f}",
                f"{row['floor_ms']:.2f}",
                str(row["launches"]),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    header = ["tree", "commit", "B", "ms", "floor, ms", "launches", "tokens/s"]
    return markdown([*header, "peak, GiB"], rows)


def compiled_peaks() -> str:
    """Peak bytes a device of the 397B model's step, by lifecycle and tree."""
    found: dict[str, dict[int, str]] = {}
    for row in read("compiled/qwen3.5-397b-a17b_B200x8")["rows"]:
        gib = f"{row['peak'] / 2**30:.1f}"
        found.setdefault(row["commit"], {})[row["nodes"]] = gib
    sizes = (4, 15, 40)
    rows = [[name, *(found[name].get(n, "") for n in sizes)] for name in found]
    return markdown(["GiB a device", *(f"n = {n}" for n in sizes)], rows)


OTHERS = ("decode", "chunk_prefill", "gdn_front", "grouped_matmul", "tree_attention")


def steps() -> str:
    """Milliseconds of a decode step by part."""
    found = read("nvidia-h200/decode")["steps"]
    parts = [part["name"].replace("MLP", "MLP, MoE") for part in found[0]["parts"]]
    rows = [
        [
            step["model"],
            *(f"{_ms(part) * part['times']:.2f}" for part in step["parts"]),
            f"{_ms(step):.2f}",
        ]
        for step in found
    ]
    return markdown(["model", *parts, "whole step"], rows)


def _ms(timed: dict[str, Any]) -> float:
    return timed["device_us"]["median"] / 1e3


def _by_case(name: str, op: str) -> dict[str, dict[str, Any]]:
    """Return the timed rows of an op, by case and implementation."""
    found: dict[str, dict[str, Any]] = {}
    for row in read(f"nvidia-h200/{name}")["rows"]:
        if row["op"] == op and row["device_us"] is not None:
            found.setdefault(row["case"], {})[row["impl"]] = row
    return found


def _time(row: dict[str, Any]) -> str:
    return f"{row['device_us']['median']:.3g} ({row['times_floor']:.2f})"


TABLES = {
    acceptance: "README.md",
    shapes: "scripts/results/README.md",
    planned: "scripts/results/README.md",
    lossless: "scripts/results/README.md",
    memory_a_sequence: "README.md",
    validation: "models/pretrained/tiny/README.md",
    verification_in_short: "README.md",
    verification: "scripts/results/README.md",
    other_kernels: "scripts/results/README.md",
    commits: "scripts/results/README.md",
    texts: "scripts/results/README.md",
    peers: "scripts/results/README.md",
    compiled_peaks: "scripts/results/README.md",
    steps: "scripts/results/README.md",
    whole_steps: "scripts/results/README.md",
}

if __name__ == "__main__":
    for table, page in TABLES.items():
        print(f"{page}: {table.__doc__}\n\n{table()}\n")
