"""plan_tree.py: what it plans and writes, and that decode.py takes it."""

import json
import pathlib

import numpy as np
import pytest

import models
from scripts import decode, plan_tree
from scripts.decoding import topology
from scripts.planning import report, step_times
from treewy_jax import generate, planning
from treewy_jax import tree as tree_lib

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/tiny/dense"
# Accepted of 1000 by depth and rank; without context.
ACCEPTED = [[600, 200, 80], [500, 150, 60], [400, 100, 50], [300, 100, 50]]
SETTINGS = dict(
    model="m", layers=None, dtype="bfloat16", state_dtype="float32",
    lifecycle="reconstruct", horizon=None, context=1024, router="uniform",
)  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """A result of bench_acceptance.py, as far as it is read."""
    path = tmp_path / "acceptance.json"
    entries = [
        {
            "drafter": "mtp",
            "temperature": 0.0,
            "depth": depth,
            "reached": [[1000]] * depth,
            "accepted": [[row] for row in ACCEPTED[:depth]],
        }
        for depth in (1, 2, 3, 4)
    ]
    path.write_text(json.dumps({"rates": entries}))
    return path


@pytest.fixture
def rates():
    return planning.Rates(np.array(ACCEPTED)[:, None] / 1000)


def law(batch, nodes, depth):
    """Milliseconds of a step: a pass over weights, then what rows and levels cost."""
    return 10 + 0.01 * batch * nodes + 0.5 * depth


SHAPES = {
    "none": (1, 0), "1,1,1": (4, 3), "1,1,1,1": (5, 4),
    "2,2,2": (15, 3), "3,3,3": (40, 3),
}  # fmt: skip


def step_file(tmp_path, shapes=SHAPES, **changes):
    """A file as bench_step.py merges it."""
    entries = [
        SETTINGS
        | dict(batch=batch, tree=tree, accept=[], ms=law(batch, *shape))
        | changes
        for batch in (1, 8, 256)
        for tree, shape in shapes.items()
    ]
    path = tmp_path / "steptime.json"
    old = json.loads(path.read_text())["entries"] if path.exists() else []
    path.write_text(json.dumps({"schema": "steptime/1", "entries": old + entries}))
    return path


def run(results, *arguments):
    return plan_tree.main(["--from", str(results), *map(str, arguments)])


def test_by_acceptance_alone(results, rates, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run(results, "--nodes", "8,4", "--out", out) == 0
    written = json.loads(out.read_text())
    assert list(written["trees"]) == ["4", "8"]
    best = planning.optimal(rates, 8)
    assert written["parents"] == written["trees"]["8"]["parents"] == best
    assert written["accept_length"] == pytest.approx(planning.expected(best, rates))
    assert written["chains"][3] == pytest.approx(1 + 0.6 + 0.3 + 0.12)
    assert len(written["acceptance"]) == 8
    printed = capsys.readouterr().out
    assert "#1  60.0 %" in printed and "recommended: 8 nodes" in printed


def test_a_depth_limit(results, capsys):
    assert run(results, "--nodes", "9", "--depth", "1", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parents"] == [-1, 0, 0, 0] and plan["depth"] == 1


def test_with_step_times(results, rates, tmp_path, capsys):
    out, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    times = step_file(tmp_path)
    more = ("--step-time", times, "--out", out, "--plot", plot, "--batch", "1,64,256")
    assert run(results, "--nodes", "8,16", *more) == 0
    plan = json.loads(out.read_text())
    assert [row["batch"] for row in plan["batches"]] == [1, 64, 256]
    for row in plan["batches"]:
        # The file's law is a line, which the fit has to give back, between batches too.
        for one in (row["chain"], row["fastest"], *row["trees"].values()):
            depth = max(tree_lib._depths(one["parents"]))
            shape = (len(one["parents"]), depth)
            assert one["milliseconds"] == pytest.approx(law(row["batch"], *shape))
            per_step = planning.expected(one["parents"], rates)
            speed = 1e3 * row["batch"] * per_step / law(row["batch"], *shape)
            assert one["tokens_per_second"] == pytest.approx(speed)
        assert row["fastest"]["ratio"] >= 1 - 1e-9
    wins = plan["crossover"]
    assert 1 in wins["16"] and 256 not in wins["16"]
    assert plan["parents"] == plan["batches"][0]["fastest"]["parents"]
    assert len(plan["batches"][2]["fastest"]["parents"]) < len(plan["parents"])
    assert not plan["extrapolated"] and plot.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "tree of 16 nodes against the best chain: faster at B = 1" in printed


def test_beyond_what_was_timed_is_said(results, tmp_path, capsys):
    times = step_file(tmp_path)
    assert run(results, "--nodes", "50", "--step-time", times) == 0
    assert "extrapolated" in capsys.readouterr().out
    times.unlink()
    flat = step_file(tmp_path, {"none": (1, 0), "2": (3, 1), "39": (40, 1)})
    for depth, told in (("1", False), ("3", True)):
        options = ("--nodes", "9", "--depth", depth, "--json")
        assert run(results, *options, "--step-time", flat) == 0
        assert json.loads(capsys.readouterr().out)["extrapolated"] is told


def test_settings_have_to_be_chosen_where_they_differ(results, tmp_path, capsys):
    step_file(tmp_path)
    times = step_file(tmp_path, lifecycle="store-all")
    assert run(results, "--step-time", times) == 2
    assert "several values of commit" in capsys.readouterr().err
    assert run(results, "--step-time", times, "--commit", "store_all") == 0
    table, settings = step_times.read(times, {"lifecycle": "store-all"})
    assert settings["lifecycle"] == "store-all" and table.batches == (1, 8, 256)


def test_step_times_of_a_mesh_are_taken_when_asked_for(results, tmp_path, capsys):
    times = step_file(tmp_path, mesh="tensor=2")
    assert run(results, "--step-time", times) == 2
    error = capsys.readouterr().err
    assert "no entry has mesh none; there are tensor=2" in error
    step_file(tmp_path, context=2048)
    _, settings = step_times.read(times, {})
    assert settings["context"] == 2048 and "mesh" not in settings
    _, settings = step_times.read(times, {"mesh": "tensor=2"})
    assert settings["context"] != 2048 and settings["mesh"] == "tensor=2"
    assert run(results, "--step-time", times, "--mesh", "tensor=2") == 0
    assert run(results, "--step-time", times, "--mesh", "tensor=4") == 2
    assert "there are one device, tensor=2" in capsys.readouterr().err


def test_step_times_of_the_benchmark_are_read(results, tmp_path):
    """What step_store writes is what is read here."""
    from scripts.benching import step_store

    point = step_store.Point(
        model="m", layers=None, dtype="bfloat16", state_dtype="float32", tree="1,1",
        commit="fused", horizon=None, accept=(0.5, 0.2), router="uniform", context=64,
        batch=2,
    )  # fmt: skip
    row = {"kind": "step", "point": point.as_json(), "code": "c", "nodes": 3}
    row |= {"wall_ms": {"mean": 4.0}, "device_ms": None, "floor_ms": 1.0}
    row |= {"accept_length": 1.7, "peak_bytes": 1}
    path = tmp_path / "steptime.json"
    step_store.merge_steptime(path, [row])
    table, settings = step_times.read(path, {})
    assert table.at(2, 3, 2) == pytest.approx(4.0)
    assert settings["lifecycle"] == "fused" and settings["context"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "8,x"], "'x' is no positive integer"),
        (["--nodes", "0"], "'0' is no positive integer"),
        (["--nodes", "8,4097"], "nodes is 4097; at most 4096 are allowed"),
        (["--depth", "9"], "depth is 9; allowed are 1, 2, 3, 4"),
        (
            ["--drafter", "ngram"],
            "no rates of ngram at temperature 0; the file has mtp",
        ),
        (["--temperature", "1"], "no rates of mtp at temperature 1"),
        (["--batch", "1"], "batch: only allowed with --step-time"),
        (["--step-time", "missing.json"], "missing.json: no such file"),
        (["--out", "no/such/plan.json"], "no file in a folder that exists"),
        (["--nods", "3"], "--nods"),
    ],
)
def test_wrong_input_is_one_line(results, arguments, message, capsys):
    assert run(results, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no rates of bench_acceptance.py"),
        ('{"trees": {}}', "no rates of bench_acceptance.py"),
        ('{"rates": []}', "the file has none"),
        (
            '{"rates": [{"drafter": "mtp", "temperature": 0, "depth": 1, '
            '"reached": [[1, 2]], "accepted": [[[1]]]}]}',
            "rates are no counts (shapes (1, 2) and (1, 1, 1), depth 1)",
        ),
    ],
)
def test_results_that_hold_no_rates(tmp_path, content, message, capsys):
    path = tmp_path / "found.json"
    if content is not None:
        path.write_text(content)
    assert run(path) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_wrong_step_times(results, tmp_path, capsys):
    path = step_file(tmp_path)
    assert run(results, "--step-time", path, "--batch", "512") == 2
    assert (
        "batch is 512; the step times are of 1 to 256 rows" in capsys.readouterr().err
    )
    assert run(results, "--step-time", path, "--model", "other") == 2
    assert "no entry has model other; there are m" in capsys.readouterr().err
    path.write_text('{"entries": []}')
    assert run(results, "--step-time", path) == 2
    assert "it has no entry" in capsys.readouterr().err


def test_shapes_are_named():
    assert report.shape([-1]) == "root alone"
    assert report.shape([-1, 0, 1]) == "chain of 2"
    assert report.shape([-1, 0, 0]) == "3 nodes, depth 1"


# --- the file, as a topology --------------------------------------------------------


@pytest.fixture
def plan(results, tmp_path):
    out = tmp_path / "plan.json"
    assert run(results, "--nodes", "4,8", "--out", out) == 0
    return out


def test_a_plan_is_read_back(plan):
    written = json.loads(plan.read_text())
    tree = topology.read(str(plan))
    assert tree.parent.tolist() == written["parents"] and tree.n_max == 8
    assert topology.parents(f"{plan}:4") == written["trees"]["4"]["parents"]
    assert topology.parents("2,1") == [-1, 0, 1, 0, 3]


@pytest.mark.parametrize(
    ("content", "suffix", "message"),
    [
        (None, "", "No such file"),
        ("[1", "", "no JSON"),
        ("[1]", "", "no file of plan_tree.py"),
        ('{"schema": "tree/1"}', "", "parents is None"),
        ('{"schema": "tree/1", "parents": [0]}', "", "the root comes first"),
        ('{"schema": "tree/1", "parents": [-1, 0, 5]}', "", "in preorder"),
        ('{"schema": "tree/1", "parents": [-1, 0]}', ":16", "has trees of none nodes"),
    ],
)
def test_decode_refuses_bad_files_in_one_line(
    tmp_path, content, suffix, message, capsys
):
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_text(content)
    assert decode.main(["--tree", f"{path}{suffix}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_decode_keeps_to_the_largest_envelope(plan, capsys):
    assert decode.main(["--tree", str(plan), "--n-max", "5"]) == 2
    assert "n_max = 5" in capsys.readouterr().err


def test_decode_takes_a_plan(plan, tmp_path):
    """The text is that of decoding without drafts."""
    out = tmp_path / "decoded.json"
    arguments = ["--tree", f"{plan}:4", "--model", str(GOLDEN), "--json", str(out)]
    arguments += ["--prompt-ids", "1,2,3", "--max-new-tokens", "4", "--compare"]
    assert decode.main(arguments) == 0
    found = json.loads(out.read_text())
    trees = json.loads(plan.read_text())["trees"]
    assert found["tree"] == {"nodes": 4, "parents": trees["4"]["parents"]}
    assert found["compare"]["equal"]


def test_the_library_takes_a_topology(plan):
    tree = topology.read(str(plan))
    assert generate.as_tree(tree) is tree
    config = models.load(str(GOLDEN), dtype="float32").config
    drafter = generate.default_drafter(tree, config)
    assert drafter.parent.tolist() == json.loads(plan.read_text())["parents"]
