"""The comparison of lifecycles: what counts as a difference, and what is written."""

import dataclasses
import json

import pytest

from scripts import bench_acceptance, bench_lifecycles
from treewy_jax import commit

ROW = bench_acceptance.Row


@pytest.fixture
def texts(monkeypatch):
    """Decode nothing: rows by lifecycle, of two prompts; returns them to be changed."""
    rows = {
        name: [ROW([1, 2, 3], [2, 1]), ROW([4, 5, 6, 7], [3, 1])]
        for name in commit.LIFECYCLES
    }
    asked = []

    def decode(model, ids, tree, name, chosen):
        asked.append((tree, name))
        return rows[name]

    monkeypatch.setattr(bench_lifecycles, "decode", decode)
    monkeypatch.setattr(bench_acceptance, "encode", lambda model, text: [1])
    monkeypatch.setattr(
        bench_acceptance.compare, "logit_gap", lambda model, ids: gap[0]
    )
    gap = [1.0]
    return rows, gap, asked


def run(tmp_path, *more):
    out = tmp_path / "found.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n')
    arguments = [
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--trees",
        "1,1,1",
        *more,
    ]
    status = bench_lifecycles.main(arguments)
    return status, json.loads(out.read_text()) if out.exists() else None


def test_equal_texts_of_all(texts, tmp_path, capsys):
    status, written = run(tmp_path)
    assert status == 0
    assert texts[2][0] == ("none", "reconstruct")
    cells = written["trees"]["1,1,1"]
    assert list(cells) == ["store-all", "reconstruct", "fused", "deferred"]
    for cell in cells.values():
        assert (cell["equal"], cell["counted"]) == (2, 0)
        assert cell["mean_accept_length"] == 7 / 4
    assert "2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(("gap", "status"), [(1.0, 1), (1e-4, 0)])
def test_a_difference_counts_unless_it_is_a_near_tie(texts, gap, status, tmp_path):
    rows, gaps, _ = texts
    rows["deferred"] = [ROW([1, 2, 9], [2, 1]), rows["deferred"][1]]
    gaps[0] = gap
    found, written = run(tmp_path)
    cell = written["trees"]["1,1,1"]["deferred"]
    assert found == status
    assert (cell["equal"], cell["counted"]) == (1, status)
    assert cell["differences"][0]["token"] == 2


def test_bfloat16_reports_shares_only(texts, tmp_path):
    rows, _, _ = texts
    rows["fused"] = [ROW([1, 9], [1]), rows["fused"][1]]
    status, written = run(tmp_path, "--dtype", "bfloat16")
    assert status == 0
    assert written["trees"]["1,1,1"]["fused"]["equal"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--horizon", "3"], "horizon is 3; a path of this tree has up to 4"),
        (["--lifecycles", "never"], "commit='never': allowed are"),
        (["--trees", "3,x"], "level 2 is 'x'"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, capsys):
    assert run(tmp_path, *arguments) == (2, None)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_lifecycles_get_the_depth_of_the_tree():
    chosen = dataclasses.replace(bench_lifecycles.Options(), horizon=8)
    assert bench_lifecycles.lifecycle("fused", "1,1,1", chosen).depth == 3
    assert bench_lifecycles.lifecycle("deferred", "none", chosen).horizon == 8
