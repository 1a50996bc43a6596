"""Tables of whole decode steps: time, memory, and what was compiled."""

import functools
from typing import Any

from models.qwen3_5 import published, random_weights
from scripts.benching import step_floor, step_run, step_store
from scripts.result_tables import files
from treewy_jax import memory


def memory_a_sequence() -> str:
    """Recurrent states held for one sequence during a verification, in MiB."""
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
    return files.markdown(header, rows)


def whole_steps() -> str:
    """Milliseconds of whole steps of the 35B model beside their bytes and flops."""
    rows = []
    for row in sorted(_timed(MODEL), key=_order):
        point, device = row["point"], row["device_ms"]["median"]
        rows.append(
            [
                f"`{point['tree']}`",
                _lifecycle(point),
                point["state_dtype"],
                str(point["batch"]),
                f"{device:.2f}",
                *_floors(row),
                str(row["launches"]),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    header = ["tree", "commit", "S", "B", "ms", *FLOORS, "launches"]
    return files.markdown([*header, "tokens/s", "peak, GiB"], rows)


FLOORS = ("bytes, ms", "flops, ms", "times the larger")


def _floors(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the floors of a row of one device, and what the step takes of them."""
    rate = files.read("nvidia-h200/kernels")["rates"]["flops_per_s"]
    by_bytes, by_flops = row["floor_ms"], 1e3 * _flops(row["point"]) / rate
    times = row["device_ms"]["median"] / max(by_bytes, by_flops)
    return f"{by_bytes:.2f}", f"{by_flops:.2f}", f"{times:.2f}"


def _flops(fields: dict[str, Any]) -> int:
    """Return the flops of a step, from its shapes: older rows do not have them."""
    point = step_store.Point(**fields)
    config, graphdef, shapes = _model(point)
    subject = step_run.subject_of(point, config, graphdef, shapes)
    return step_floor.flops(subject, shapes)


def _model(point: step_store.Point) -> tuple[Any, Any, Any]:
    config = step_run.config_of(point)
    return config, *_graph(config, point.dtype)


_graph = functools.cache(random_weights.graph)


def against_the_chain() -> str:
    """Tokens a second of each tree at the same batch; the best of a row in bold."""
    groups: dict[tuple, dict[str, float]] = {}
    for row in sorted(_timed(*published.CONFIGS), key=_order):
        point = row["point"]
        if (point["commit"], point["state_dtype"]) == ("reconstruct", "float32"):
            found = groups.setdefault((point["model"], point["batch"]), {})
            found[point["tree"]] = row["tokens_per_s"]
    rows = []
    for (model, batch), found in groups.items():
        best = max(found.values())
        cells = [_beside_chain(found, tree, best) for tree in TREES]
        rows.append([model.removeprefix("qwen3.5-"), str(batch), *cells])
    return files.markdown(["model", "B", *(f"`{tree}`" for tree in TREES)], rows)


def _beside_chain(found: dict[str, float], tree: str, best: float) -> str:
    if tree not in found:
        return ""
    text = f"{found[tree]:,.0f}"
    text = f"**{text}**" if found[tree] == best else text
    chain = max(found.get(chain, 0.0) for chain in CHAINS)
    return f"{text} ({found[tree] / chain:.2f})" if chain != found[tree] else text


def two_devices() -> str:
    """Milliseconds of the 35B model's step on one H200 and spread over two."""
    one, rows = {}, []
    for row in _timed(MODEL):
        one[_but_mesh(row)] = row
    for row in sorted(_timed(MODEL, mesh="tensor=2"), key=_order):
        point, wall = row["point"], row["wall_ms"]["median"]
        alone = one[_but_mesh(row)]["wall_ms"]["median"]
        rows.append(
            [
                f"`{point['tree']}`",
                _lifecycle(point),
                str(point["batch"]),
                f"{alone:.2f}",
                f"{wall:.2f} ({alone / wall:.2f})",
                f"{row['floor_ms']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
                f"{row['verify_error']:.1e}",
            ]
        )
    header = ["tree", "commit", "B", "one, ms", "two, ms", "bytes of one, ms"]
    header += ["tokens/s", "peak of one, GiB", "error of a layer"]
    return files.markdown(header, rows)


def shares() -> str:
    """Milliseconds of a step of one device's share of the 397B model."""
    rows = [
        [
            f"`{row['point']['tree']}`",
            _lifecycle(row["point"]),
            str(row["point"]["batch"]),
            f"{row['device_ms']['median']:.2f}",
            *_floors(row),
            str(row["launches"]),
            f"{row['peak_bytes'] / 2**30:.1f}",
        ]
        for row in sorted(_timed(SHARE), key=_order)
    ]
    header = ["tree", "commit", "B", "ms", *FLOORS, "launches", "peak, GiB"]
    return files.markdown(header, rows)


def largest_batches() -> str:
    """Rows before memory ends, found by running, and what the formula says."""
    rows = []
    for row in files.read("nvidia-h200/step")["rows"]:
        if row["kind"] == "largest":
            point, found, told = row["point"], row["largest"], row["predicted"]
            rows.append(
                [
                    f"`{point['tree']}`",
                    _lifecycle(point),
                    f"{found:,}",
                    f"{told:,}",
                    f"{100 * (told / found - 1):+.1f} %",
                    f"{sum(row['row_bytes'].values()) / 2**20:,.0f}",
                ]
            )
    header = ["tree", "commit", "largest B", "by formula", "off", "MiB a row"]
    return files.markdown(header, rows)


MODEL, SHARE = "qwen3.5-35b-a3b", "qwen3.5-397b-a17b/8"
CHAIN = "1,1,1"
CHAINS = (CHAIN, "1,1,1,1,1,1,1,1")
TREES = ("none", *CHAINS, "2,2,1", "3,3,3", "2,1,1,1,1,1,1")


def _timed(*models: str, mesh: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of these models that have times, of one device or a mesh."""
    return [
        row
        for row in files.read("nvidia-h200/step")["rows"]
        if row["kind"] == "step" and "problem" not in row
        if row["point"]["model"] in models and row["point"].get("mesh") == mesh
    ]


def _but_mesh(row: dict[str, Any]) -> tuple:
    return tuple(str(x) for name, x in row["point"].items() if name != "mesh")


def _order(row: dict[str, Any]) -> tuple:
    point = row["point"]
    tree = TREES.index(point["tree"])
    names = [*published.CONFIGS, SHARE]
    return (
        names.index(point["model"]),
        point["batch"],
        tree,
        point["state_dtype"],
        point["commit"],
    )


def _lifecycle(point: dict[str, Any]) -> str:
    return point["commit"] + (f"-{point['horizon']}" if point["horizon"] else "")


def compiled_peaks() -> str:
    """Peak bytes a device of the 397B model's step, by lifecycle and tree."""
    found: dict[str, dict[int, str]] = {}
    for row in files.read("compiled/qwen3.5-397b-a17b_B200x8")["rows"]:
        gib = f"{row['peak'] / 2**30:.1f}"
        found.setdefault(row["commit"], {})[row["nodes"]] = gib
    sizes = (4, 15, 40)
    rows = [[name, *(found[name].get(n, "") for n in sizes)] for name in found]
    return files.markdown(["GiB a device", *(f"n = {n}" for n in sizes)], rows)


def compiled_by_batch() -> str:
    """Peak bytes a device of the 397B model's step on H200s, by batch and tree."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for row in files.read("compiled/qwen3.5-397b-a17b_H200x8")["rows"]:
        cells = found.setdefault((row["batch"], row["commit"]), {})
        cells[row["tree"]] = f"{row['peak'] / 2**30:.1f}"
    trees = ("none", CHAIN, "3,3,3")
    rows = [
        [str(batch), name, *(cells[tree] for tree in trees)]
        for (batch, name), cells in found.items()
    ]
    return files.markdown(["B", "GiB a device", *(f"`{tree}`" for tree in trees)], rows)


def compiled_largest() -> str:
    """Rows that eight H200s hold by XLA's count, by tree and lifecycle."""
    found = files.read("compiled/qwen3.5-397b-a17b_H200x8_largest")["rows"]
    rows = [
        [
            f"`{row['tree']}`",
            row["commit"],
            str(row["batch"]),
            f"{row['peak'] / 2**30:.1f}",
        ]
        for row in found
    ]
    return files.markdown(["tree", "commit", "B", "GiB a device"], rows)


def steps() -> str:
    """Milliseconds of a decode step by part."""
    found = files.read("nvidia-h200/decode")["steps"]
    parts = [part["name"].replace("MLP", "MLP, MoE") for part in found[0]["parts"]]
    rows = [
        [
            step["model"],
            *(f"{_ms(part) * part['times']:.2f}" for part in step["parts"]),
            f"{_ms(step):.2f}",
        ]
        for step in found
    ]
    return files.markdown(["model", *parts, "whole step"], rows)


def _ms(timed: dict[str, Any]) -> float:
    return timed["device_us"]["median"] / 1e3
