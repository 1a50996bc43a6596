"""bench_plan.py: what it times, what it predicts from that, and what it writes."""

import json

import numpy as np
import pytest

from scripts import bench_plan
from scripts.accepting import probe, prompts, rates
from scripts.planning import checks, runs
from tests.scripts import byte_model
from treewy_jax import planning

CHAIN = [-1, 0, 1, 2]
WORDS = "--dtype float32 --fit none --trees 1,1 --plan 4 --max-new-tokens 6"


def entry(depth):
    """Rates that have nothing to do with the model."""
    accepted = [[[600, 200, 80]]] * depth
    about = {"drafter": "mtp", "temperature": 0.0, "depth": depth}
    return about | {"reached": [[1000]] * depth, "accepted": accepted}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = byte_model.write(tmp_path_factory.mktemp("model"))
    rng = np.random.default_rng(0)
    ranks = [rng.integers(0, 3, (9, 2)) for _ in range(4)]
    found = {"rates": [entry(depth) for depth in (1, 2)]}
    found["ranks"] = [rates.as_text("mtp", 0.0, ranks, [0, 1, 0, 1])]
    (made / "acceptance.json").write_text(json.dumps(found))
    return made


def arguments(folder, *more):
    words = ["--model", folder, "--prompts", folder / "prompts.jsonl"]
    words += ["--from", folder / "acceptance.json", *WORDS.split(), *more]
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def ran(folder):
    """One run of the command, with a bound that no clock breaks: status and result."""
    out = folder / "plan.json"
    more = ["--json", out, "--plot", out.with_suffix(".png")]
    more += ["--batch", "2", "--rounds", "2", "--within", "1e9"]
    status = bench_plan.main(arguments(folder, *more))
    assert out.with_suffix(".png").stat().st_size > 0
    return status, json.loads(out.read_text()), more


def test_what_is_written(ran):
    status, found, _ = ran
    assert status == 0
    assert [row["tree"] for row in found["fit"]] == ["none"]
    widths, planned = found["trees"]
    assert widths["tree"] == "1,1" and planned["tree"] == "planned, 4 nodes"
    assert widths["parents"] == [-1, 0, 1] and planned["nodes"] == 4
    for tree in found["trees"]:
        assert tree["differ_from_plain"] == []
        for one in (tree, *tree["halves"]):
            for name, beside in (("tokens_per_second",) * 2, ("milliseconds",) * 2):
                ratio = one["predicted"][name] / one["measured"][beside]
                assert one["errors"][name] == pytest.approx(ratio - 1)
        # Both halves are all prompts; texts of six tokens, one of the prompt pass.
        tokens = [one["measured"]["tokens"] for one in tree["halves"]]
        assert sum(tokens) == tree["measured"]["tokens"] == 3 * 5
    assert {row["batch"] for row in found["rows"]} == {2}


def test_predictions_are_those_of_the_planner(ran, folder):
    """And errors multiply: of tokens a step, and of the time of a step."""
    found = ran[1]
    known = rates.read(folder / "acceptance.json", "mtp", 0.0)
    for tree in found["trees"]:
        told, errors = tree["predicted"], tree["errors"]
        accepted = planning.accept_length(tree["parents"], known)
        assert told["accept_length"] == pytest.approx(accepted)
        both = (1 + errors["accept_length"]) / (1 + errors["milliseconds"])
        assert 1 + errors["tokens_per_second"] == pytest.approx(both)


def test_resumed_runs_time_nothing_again(ran, folder, monkeypatch):
    _, found, more = ran
    asked = []
    monkeypatch.setattr(runs, "programs", lambda work, trees: asked.append(trees) or [])
    assert bench_plan.main(arguments(folder, *more, "--resume")) == 0
    assert asked == []
    again = json.loads((folder / "plan.json").read_text())
    assert again["rows"] == found["rows"] and again["trees"] == found["trees"]
    # Another number of rounds is another measurement.
    with pytest.raises(ValueError):
        bench_plan.main(arguments(folder, *more, "--resume", "--rounds", "3"))
    assert len(asked) == 1 and len(asked[0]) == 3


def row(nodes, depth, ms, parents=None, steps=100, tokens=250):
    half = dict(
        half=0, steps=steps, row_steps=steps, tokens=tokens, whole_steps=steps,
        whole_tokens=tokens, run_s=[ms * steps / 1e3] * 3, start_s=[0.1] * 3,
    )  # fmt: skip
    about = dict(nodes=nodes, depth=depth, parents=parents, batch=1, texts={})
    return about | {"halves": [half]}


def test_a_line_is_given_back_and_what_is_off_it_is_seen():
    def law(nodes, depth):
        return 1 + 0.01 * nodes + 0.1 * depth

    shapes = ((1, 0), (4, 1), (9, 8), (40, 3))
    fit = checks.step_times([row(n, d, law(n, d)) for n, d in shapes])
    known = {3: planning.Rates(np.full((3, 1, 1), 0.5))}
    tokens = round(100 * planning.expected(CHAIN, known[3]))
    exact = row(4, 3, law(4, 3), CHAIN, tokens=tokens)
    errors = checks.check(exact, known, fit)["errors"]
    assert max(map(abs, errors.values())) < 5e-3
    # The broken twin: a step that takes a quarter longer than was fitted.
    slow = row(4, 3, 1.25 * law(4, 3), CHAIN, tokens=tokens)
    errors = checks.check(slow, known, fit)["errors"]
    assert errors["tokens_per_second"] == pytest.approx(0.25, abs=0.01)
    assert errors["milliseconds"] == pytest.approx(-0.2, abs=0.01)


def test_a_tree_that_is_off_is_status_1(folder, ran, monkeypatch):
    more = [*ran[2], "--resume", "--within", "1e-9"]
    assert bench_plan.main(arguments(folder, *more)) == 1


def test_idle_rows_scale_what_is_predicted():
    known = {3: planning.Rates(np.full((3, 1, 1), 0.5))}
    fit = planning.StepTimes.fit([(4, 3, 1.0)])
    idle = row(4, 3, 1.0, CHAIN) | {"batch": 2}  # 100 of 200 row steps
    found = checks.check(idle, known, fit)
    assert found["measured"]["busy"] == 0.5
    assert found["predicted"]["tokens_per_second"] == pytest.approx(1875)


def test_batches_hold_every_prompt_once_and_one_half_each():
    found = runs.batches([0, 0, 1, 0, 1], 2)
    assert [tuple(one) for one in found] == [(0, (0, 1)), (0, (3, -1)), (1, (2, 4))]
    assert runs.batches([0, 0, 1, 0, 1], 2, most=1) == [(0, (0, -1))]


def test_categories_take_turns():
    kinds = "aaabbc"
    entries = [
        {"source": "s", "category": kind, "id": n} for n, kind in enumerate(kinds)
    ]
    turned = prompts.rotated(entries)
    assert [one["id"] for one in turned] == [0, 3, 5, 1, 4, 2]
    assert prompts.halves(entries) == [0, 1, 0, 0, 1, 0]
    assert prompts.halves(turned) == [0, 0, 0, 1, 1, 0]


def test_ranks_are_read_back(tmp_path):
    rng = np.random.default_rng(1)
    ranks = [rng.integers(-1, 12, (20, 2)) for _ in range(4)]
    path = tmp_path / "found.json"
    told = rates.as_text("mtp", 0.0, ranks, [0, 1, 0, 1])
    about = {"rates": rates.entries("mtp", 0.0, ranks), "ranks": [told]}
    path.write_text(json.dumps(about))
    found, wanted = rates.read(path, "mtp", 0.0), rates.from_ranks(ranks)
    for depth in (1, 2):
        np.testing.assert_array_equal(found[depth].table, wanted[depth].table)
    (first, second) = rates.read_halves(path, "mtp", 0.0)
    np.testing.assert_array_equal(first[2].table, rates.from_ranks(ranks[::2])[2].table)
    assert not np.array_equal(first[2].table, second[2].table)
    path.write_text(json.dumps(about | {"ranks": []}))
    assert rates.read_halves(path, "mtp", 0.0) == []
    told["prompts"][0]["ranks"] = "01x"
    path.write_text(json.dumps(about | {"ranks": [told]}))
    with pytest.raises(ValueError, match="wrong ranks"):
        rates.read(path, "mtp", 0.0)


def test_rates_of_a_size_predict_chains_where_text_is_easy_and_hard():
    """A chain begins more of its steps in hard text than a large tree does."""
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random(4000) < 0.5, 8)
    draws = rng.random(32000)
    right = np.where(easy, 0.97, 0.4)
    token = np.where(draws < right, 0, np.where(draws < right + 0.25, 1, 9))
    ranks = [np.stack([np.roll(token, -depth) for depth in range(4)], axis=1)]
    known = rates.from_ranks(ranks)
    chain = [-1, 0, 1, 2, 3]
    mean = np.mean(probe.simulate(ranks, chain)[0])
    assert planning.accept_length(chain, known) == pytest.approx(mean, rel=0.01)
    # The broken twin: rates at the roots of trees of 16 nodes.
    assert planning.expected(chain, known[4]) / mean - 1 > 0.03


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fit", "2", "--trees", "2"], "tree 2: its step time is fitted"),
        (["--trees", "1,1,1"], "tree of depth 3"),
        (["--trees", "3,x"], "level 2 is 'x'"),
        (["--plan", "1"], "sizes of 2 or more"),
        (["--batch", "0"], "batch is 0"),
        (["--rounds", "0"], "rounds is 0"),
        (["--within", "0"], "within is 0.0"),
        (["--resume"], "with --json FILE alone"),
        (["--commit", "later"], "later"),
        (["--from", "missing.json"], "No such file"),
        (["--prompts", "missing.jsonl"], "prompts missing.jsonl"),
    ],
)
def test_wrong_input_is_one_line(folder, more, message, capsys):
    assert bench_plan.main(arguments(folder, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
