"""The README says what the result files say, and its Python runs."""

import json
import pathlib
import re

import pytest

from scripts import make_tables
from scripts.result_tables import acceptance, files

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("table", make_tables.TABLES)
def test_tables_are_those_of_the_result_files(table):
    page = ROOT / make_tables.TABLES[table]
    assert table() in page.read_text("utf-8")


def test_sentences_of_the_model_card():
    card = (ROOT / "models/pretrained/tiny/README.md").read_text("utf-8")
    whole, _ = files.read("nvidia-h200/training")["stages"]
    words = " ".join(card.split())
    assert f"{whole['tokens_per_second'] / 1e3:.0f} k tokens a second" in words
    assert f"{whole['parameters']:,}" in words
    trained = whole["steps"] * whole["recipe"]["batch"] * whole["recipe"]["length"]
    assert f"{trained / 1e6:.0f} M tokens" in words


def test_moves_in_the_readme():
    rows = files.read("nvidia-h200/commit")["rows"]
    found = {r["lifecycle"]: r for r in rows if (r["nodes"], r["batch"]) == (4, 128)}
    labels = ("store-all", "reconstruct", "fused", "deferred-16")
    moves = [f"{found[label]['moves_equivalent']:.2f}" for label in labels]
    words = " ".join(README.split())
    assert f"a step takes {', '.join(moves[:3])} and {moves[3]} (horizon 16)" in words


def chains():
    """Return the rows of chains of the 35B model by lifecycle and batch."""
    rows = files.read("nvidia-h200/step")["rows"]
    return {
        (row["point"]["commit"], row["point"]["batch"]): row
        for row in rows
        if row["point"]["tree"] == "1,1,1"
        and row["point"]["model"] == "qwen3.5-35b-a3b"
        and row["point"]["state_dtype"] == "float32"
        and "mesh" not in row["point"]
    }


def test_whole_steps_in_the_readme():
    found, words = chains(), " ".join(README.split())
    ms = {key: row.get("device_ms") for key, row in found.items()}
    one, many = (ms["reconstruct", batch]["median"] for batch in (1, 128))
    floors = [found["reconstruct", batch]["floor_ms"] for batch in (1, 128)]
    assert f"{one:.2f} ms for one row and {many:.1f} for 128" in words
    assert f"{one / floors[0]:.2f} and {many / floors[1]:.2f} times what" in words
    one, many = (ms["deferred", batch]["median"] for batch in (1, 128))
    assert f"deferred commit {one:.2f} and {many:.1f}" in words
    most, stored = (found[name, None]["largest"] for name in SCHEMES)
    assert f"{most} rows fit, {stored} with store-all" in words


def test_two_devices_in_the_readme():
    rows = files.read("nvidia-h200/step")["rows"]
    ms = {
        json.dumps(row["point"]): row["wall_ms"]["median"]
        for row in rows
        if row["kind"] == "step"
    }
    faster = {}
    for row in rows:
        if row["point"].get("mesh") == "tensor=2":
            point = dict(row["point"])
            del point["mesh"]
            alone, both = ms[json.dumps(point)], row["wall_ms"]["median"]
            faster[point["commit"], point["tree"], point["batch"]] = alone / both
    many = [ratio for (*_, batch), ratio in faster.items() if batch > 1]
    one, lazy = (faster[name, "1,1,1", 1] for name in ("reconstruct", "deferred"))
    words = " ".join(README.split())
    assert f"{min(many):.2f} to {max(many):.2f} times as fast" in words
    assert f"they are slower ({one:.2f}, deferred {lazy:.2f})" in words


SCHEMES = ("reconstruct", "store-all")


def test_rows_on_eight_devices_in_the_readme():
    rows = files.read("compiled/qwen3.5-397b-a17b_H200x8_largest")["rows"]
    found = {(row["tree"], row["commit"]): row["batch"] for row in rows}
    most = [[found[tree, name] for name in SCHEMES] for tree in ("1,1,1", "3,3,3")]
    (ours, stored), (tree_ours, tree_stored) = most
    words = " ".join(README.split())
    assert f"room for {ours} rows of chains, {stored} with store-all" in words
    assert f"for {tree_ours} and {tree_stored} of trees of 40 nodes" in words
    page = " ".join((ROOT / "scripts/results/README.md").read_text("utf-8").split())
    told = f"That is {ours / stored:.1f} times what store-all holds for a chain, and "
    assert told + f"{tree_ours / tree_stored:.1f} times with trees" in page
    limits = [
        row["limit_bytes"]
        for row in files.read("nvidia-h200/step")["rows"]
        if row["kind"] == "largest"
    ]
    assert all(0.98 * min(limits) < row["peak"] <= min(limits) for row in rows)


def test_gains_of_deferred_commit_on_the_page():
    page = (ROOT / "scripts/results/README.md").read_text("utf-8")
    ms = {
        key: row["device_ms"]["median"]
        for key, row in chains().items()
        if row["kind"] == "step"
    }
    gains = {
        batch: 100 * (ms["reconstruct", batch] / time - 1)
        for (commit, batch), time in ms.items()
        if commit == "deferred"
    }
    told = ", ".join(f"{gains[batch]:.1f} % at {batch}" for batch in (32, 64))
    told = f"gain {gains[8]:.1f} % at B = 8, {told}, "
    told += f"{gains[128]:.0f} % at 128 and {gains[256]:.0f} % at 256"
    assert told in " ".join(page.split())


def test_distance_in_the_readme():
    rows = files.read("nvidia-h200/lossless")["rows"]
    most = max(row["samples"] for row in rows)
    drawn = [r["tvd"] for r in rows if r["samples"] == most]
    words = " ".join(README.split())
    assert f"in {len(drawn)} settings of rule" in words
    assert f"{most / 1e6:.1f} million texts each" in words
    assert f"within [{max(drawn):.4f} of the target's]" in words


def test_another_result_would_fail(monkeypatch):
    fields = files.read(acceptance.FILE)
    changed = json.loads(json.dumps(fields))
    changed["trees"]["3,3,3"]["all"]["lengths"]["mean"] += 0.01
    monkeypatch.setattr(files, "read", lambda name: changed)
    assert acceptance.acceptance() not in README


def test_first_python_example_runs():
    example = re.search(r"In Python:\n\n```python\n(.*?)```", README, re.S).group(1)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["written"].mean_accept_length > 1
    assert names["model"].tokenizer.decode(names["written"].token_ids[0]).strip()
