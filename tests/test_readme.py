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


def test_distance_in_the_readme():
    rows = files.read("nvidia-h200/lossless")["rows"]
    most = max(row["samples"] for row in rows)
    drawn = [r["tvd"] for r in rows if r["samples"] == most]
    words = " ".join(README.split())
    assert f"in {len(drawn)} settings of rule" in words
    assert f"{most / 1e6:.1f} million texts each" in words
    assert f"within [{max(drawn):.4f} of the target's]" in words


def test_another_result_would_fail(monkeypatch):
    fields = files.read("cpu/acceptance")
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
