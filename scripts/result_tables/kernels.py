"""Tables of single layers on a GPU: kernels, lifecycles, other projects."""

from typing import Any

from scripts.result_tables import files


def verification() -> str:
    """Microseconds of one layer's tree verification, by implementation."""
    rows = []
    for case, found in _by_case("verify", "tree_verify").items():
        floor = found["triton"]["floors"]["bytes_us"]
        rows.append([case, f"{floor:.3g}", *(_time(found[i]) for i in VERIFIERS)])
    header = ["one layer, n nodes", "byte floor", "`mosaic_gpu`", "`triton`"]
    return files.markdown(header, rows)


VERIFIERS = ("mosaic_gpu", "triton")


def verification_in_short() -> str:
    """The largest batch and a bfloat16 state: floor and both GPU kernels."""
    found = _by_case("verify", "tree_verify")
    rows = []
    for nodes in (4, 15, 40):
        row = found[f"n={nodes} B=256 S=bfloat16 fast"]
        floor = row["triton"]["floors"]["bytes_us"]
        rows.append([str(nodes), f"{floor:.3g}", *(_time(row[i]) for i in VERIFIERS)])
    return files.markdown(["nodes", "byte floor", "`mosaic_gpu`", "`triton`"], rows)


def other_kernels() -> str:
    """Microseconds of the other ops and how many times their floor that is."""
    rows = []
    ops = [("verify", op) for op in ("commit", "store_all")]
    for name, op in (*ops, *(("kernels", op) for op in OTHERS)):
        for case, found in _by_case(name, op).items():
            floor = max(found["triton"]["floors"].values())
            rows.append([f"`{op}`", case, f"{floor:.3g}", _time(found["triton"])])
    return files.markdown(["op", "case", "floor", "median (times floor)"], rows)


OTHERS = ("decode", "chunk_prefill", "gdn_front", "grouped_matmul", "tree_attention")


def commits() -> str:
    """Microseconds a layer and step of every lifecycle, and passes over its states."""
    groups: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in files.read("nvidia-h200/commit")["rows"]:
        groups.setdefault((row["nodes"], row["batch"]), {})[row["lifecycle"]] = row
    rows = []
    for (count, batch), found in sorted(groups.items()):
        cells = [_moves(found[label]) for label in LIFECYCLES]
        rows.append([str(count), str(batch), *cells])
    return files.markdown(["n", "B", *LIFECYCLES], rows)


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


def texts() -> str:
    """Texts of prompts80 that are those of plain decoding, by lifecycle."""
    rows = []
    for dtype, file in (("float32", "lifecycles"), ("bfloat16", "lifecycles-bfloat16")):
        for tree, found in files.read(f"cpu/{file}")["trees"].items():
            cells = [
                f"{one['equal']} of {one['prompts']}, {one['mean_accept_length']:.2f}"
                for one in (found[name] for name in TEXTS)
            ]
            rows.append([dtype, f"`{tree}`", *cells])
    return files.markdown(["weights", "tree", *TEXTS], rows)


TEXTS = ("store-all", "reconstruct", "fused", "deferred")


def peers() -> str:
    """Microseconds of a layer, raw rows in, beside kernels of other projects."""
    groups: dict[str, dict[str, Any]] = {}
    for row in files.read("nvidia-h200/peers")["rows"]:
        found = groups.setdefault(row["comparison"]["label"], {})
        if row["in_a_row_us"] is not None:
            who = row["computes"] if row["who"] == "ours" else row["who"]
            who = "ours" if who == row["comparison"]["name"] else who
            found[who] = row["in_a_row_us"]["median"]
    rows = [
        [label, *(_beside(found, name) for name in PEERS)]
        for label, found in groups.items()
    ]
    return files.markdown(["one layer", *PEERS.values()], rows)


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


def _by_case(name: str, op: str) -> dict[str, dict[str, Any]]:
    """Return the timed rows of an op, by case and implementation."""
    found: dict[str, dict[str, Any]] = {}
    for row in files.read(f"nvidia-h200/{name}")["rows"]:
        if row["op"] == op and row["device_us"] is not None:
            found.setdefault(row["case"], {})[row["impl"]] = row
    return found


def _time(row: dict[str, Any]) -> str:
    return f"{row['device_us']['median']:.3g} ({row['times_floor']:.2f})"
