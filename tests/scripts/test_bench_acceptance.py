"""bench_acceptance.py: ranks that predict every tree, counts, and what is written."""

import gzip
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import models
from scripts import bench_acceptance
from scripts.accepting import (
    claims,
    drafting,
    paper,
    probe,
    prompts,
    rates,
    rows,
    wanted,
)
from scripts.benching import step_inject
from scripts.decoding import topology
from scripts.result_tables import acceptance as tables
from scripts.result_tables import files
from tests.scripts import byte_model
from treewy_jax import planning, sampling

TREE = "31,1"
NEW = 20
CHAIN = [-1, 0, 1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """One run of the command: status and result file."""
    out = tmp_path_factory.mktemp("out") / "acceptance.json"
    arguments = ["--model", folder, "--prompts", folder / "prompts.jsonl"]
    arguments += [
        "--trees",
        TREE,
        "--max-new-tokens",
        NEW,
        "--depth",
        "3",
        "--plan",
        "4",
        "--out",
        out,
    ]
    arguments += ["--resume", "--plot", out.with_suffix(".png")]
    status = bench_acceptance.main([str(argument) for argument in arguments])
    assert out.with_suffix(".png").stat().st_size > 0
    return status, json.loads(out.read_text())


@pytest.fixture(scope="module")
def measured(folder):
    """The same model and prompts by hand: greedy texts, and the ranks of these."""
    model = models.load(str(folder), dtype="float32")
    entries = prompts.read(folder / "prompts.jsonl")
    ids = [bench_acceptance.encode(model, entry["turns"][0]) for entry in entries]
    plain = bench_acceptance.decode(model, ids, "none", chosen())
    texts = [row.token_ids for row in plain]
    return model, ids, texts, probe.ranks(model, ids, texts, depth=3)


def chosen(**changes):
    return bench_acceptance.Options(max_new_tokens=NEW, **changes)


# --- ranks --------------------------------------------------------------------------


def test_ranks_predict_what_is_decoded(measured):
    """Step for step, what the loop accepts, of which some are drafts."""
    model, ids, texts, ranks = measured
    made = bench_acceptance.decode(model, ids, TREE, chosen())
    lengths = [row.lengths for row in made]
    assert [row.token_ids for row in made] == texts
    assert probe.simulate(ranks, topology.parents(TREE)) == lengths
    assert sum(map(sum, lengths)) > sum(map(len, lengths)) + 2
    # The broken twin: each root reads the ranks of the next one.
    moved = [np.roll(one, -1, axis=0) for one in ranks]
    assert probe.simulate(moved, topology.parents(TREE)) != lengths


def test_sampled_texts_have_ranks_of_their_own(measured):
    model, ids, texts, ranks = measured
    hot = dict(sampling=sampling.Sampling(temperature=1.0))
    plain = bench_acceptance.decode(model, ids, "none", chosen(seed=3), **hot)
    sampled = [row.token_ids for row in plain]
    found = probe.ranks(model, ids, sampled, depth=3, seed=3, **hot)
    assert [len(one) for one in found] == [len(text) - 1 for text in sampled]
    assert sampled != texts
    with pytest.raises(RuntimeError, match="the model wrote"):
        probe.ranks(model, ids, sampled, depth=3, seed=4, **hot)


def test_a_text_that_the_model_does_not_write_is_refused(measured):
    model, ids, texts, _ = measured
    wrong = [[*text[:4], (text[4] + 1) % 100, *text[5:]] for text in texts]
    with pytest.raises(RuntimeError, match="prompt 0: the model wrote"):
        probe.ranks(model, ids, wrong, depth=3, tolerated=2)


def test_a_near_tie_ends_a_text(measured):
    """Its roots before keep the ranks that they had."""
    model, ids, texts, ranks = measured
    near = [[*texts[0][:4], (texts[0][4] + 1) % 100, *texts[0][5:]], *texts[1:]]
    found = probe.ranks(model, ids, near, depth=3, tolerated=1)
    assert [len(one) for one in found[1:]] == [len(one) for one in ranks[1:]]
    np.testing.assert_array_equal(found[1], ranks[1])
    np.testing.assert_array_equal(found[0][0], ranks[0][0])  # tokens 1 to 3
    assert found[0].shape == (4, 3) and found[0][-1].tolist()[1:] == [-1, -1]


def test_equal_logits_go_to_the_lower_id():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0]])
    found = [int(probe.rank(logits, jnp.array([token]))[0]) for token in range(4)]
    assert found == [2, 0, 1, 3]


def test_steps_are_cut_at_the_end_as_the_loop_does():
    everything = np.array([[0, 0, 0], [0, 0, -1], [0, -1, -1]])  # a text of 4 tokens
    nothing = np.array([[1, 0, 0], [2, 0, -1], [1, -1, -1]])
    one = np.array([[0, 1, 0], [0, 0, -1], [0, -1, -1]])
    # Three drafts reach the last token; the second step of the last text does so, too.
    ranks = [everything, nothing, one]
    assert probe.simulate(ranks, CHAIN) == [[], [1, 1, 1], [2]]
    kept = probe.at_roots(ranks, CHAIN)
    assert [len(rows_) for rows_ in kept] == [0, 3, 1]
    assert kept[2].tolist() == [[0, 1, 0]]
    with pytest.raises(ValueError, match="tree of depth 3"):
        probe.simulate([np.zeros((2, 2), int)], CHAIN)


def test_a_child_is_taken_by_its_rank():
    tree = [-1, 0, 0, 2]  # two children, the second has one
    assert probe.simulate([np.array([[1, 0], [0, 0], [5, -1], [5, -1]])], tree) == [
        [3, 1]
    ]


# --- the result ---------------------------------------------------------------------


def test_what_is_written(ran):
    status, found = ran
    assert status == 0
    assert list(found["trees"]) == [TREE]
    (greedy,) = found["cells"]
    assert (greedy["nodes"], greedy["blocks"]) == (63, {"store-all": 63, "treewy": 1})
    assert list(greedy["groups"]) == ["all", "made", "a", "b"]
    assert greedy["groups"]["a"]["prompts"] == 2
    assert greedy["lossless"]["counted"] == 0
    shares, mean = greedy["by_depth"], greedy["groups"]["all"]["lengths"]["mean"]
    assert len(shares) == 2 and 1 + sum(shares) == pytest.approx(mean, abs=1e-3)
    assert greedy["paper"]["accept_length"] is None


def test_rows_by_name():
    named = bench_acceptance.Options(rows=("3,3@mtp@0.5", "1,1", "1,1@ngram", "1,1"))
    assert wanted.rows(named) == [
        ("1,1", "mtp", 0.0),
        ("1,1", "ngram", 0.0),
        ("3,3", "mtp", 0.5),
    ]
    lists = bench_acceptance.Options(trees=("1", "2"), temperatures=(1.0, 0.0))
    assert [one.temperature for one in wanted.rows(lists)] == [0, 0, 1, 1]


def test_rows_are_added_to_a_file(ran, folder, tmp_path):
    """Those that it has stay as they are, and what was decoded with them."""
    out = tmp_path / "acceptance.json"
    out.write_text(json.dumps(ran[1]))
    words = ["--model", folder, "--prompts", folder / "prompts.jsonl", "--depth", "3"]
    words += ["--max-new-tokens", NEW, "--out", out, "--resume", "--rows"]
    words += ["1,1@ngram", "2,1@dynamic"]
    assert bench_acceptance.main([str(word) for word in words]) == 0
    found = json.loads(out.read_text())
    assert found["cells"][:-2] == ran[1]["cells"]
    assert [cell["drafter"] for cell in found["cells"]] == ["mtp", "ngram", "dynamic"]
    assert all(cell["lossless"]["counted"] == 0 for cell in found["cells"])
    best = found["cells"][-1]["best_width_tree"]
    mean = found["cells"][-1]["groups"]["all"]["lengths"]["mean"]
    assert mean - best["accept_length"] == pytest.approx(best["difference"], abs=2e-4)
    for name in ("trees", "rates", "ranks", "planned", "texts"):
        assert found[name] == ran[1][name] and found[name]
    # Another budget is another measurement.
    other = chosen(resume=True, prompts=folder / "prompts.jsonl", seed=1)
    assert wanted.kept(out, other)["cells"] == []


def test_the_paper_stands_beside_ours():
    assert paper.beside("2,2,1")["accept_length"] == 3.38
    assert paper.beside("3,3,3")["blocks"] == {"store-all": 40, "treewy": 1}


def test_rates_are_read_back(ran, measured, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(ran[1]))
    found = rates.read(path, "mtp", 0.0)
    assert list(found) == [1, 2, 3]
    assert found[3].table.shape == (3, rates.CONTEXTS, rates.WIDTH)
    entry = next(one for one in ran[1]["rates"] if one["depth"] == 2)
    begun = probe.at_roots([one[:, :2] for one in measured[-1]], entry["reference"])
    first = np.concatenate(begun)[:, 0]
    assert entry["reached"][0] == [len(first), 0, 0]
    shares = [np.mean(first == rank) for rank in range(rates.WIDTH)]
    np.testing.assert_allclose(found[2].table[0, 0], shares)


def test_rates_at_roots_predict_the_tree_that_they_were_measured_with():
    """And those at all positions do not, where text is easy and hard in turn."""
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random(4000) < 0.5, 8)
    right = np.where(easy, 0.97, 0.3) > rng.random(32000)
    token = np.where(right, 0, 9)
    ranks = np.stack([np.roll(token, -depth) for depth in range(4)], axis=1)
    (entry,) = [one for one in rates.entries("mtp", 0.0, [ranks]) if one["depth"] == 4]
    known = rates.from_entries(pathlib.Path("x"), [entry])
    chain = [-1, 0, 1, 2, 3]
    assert entry["reference"] == chain
    mean = np.mean(probe.simulate([ranks], chain)[0])
    off = planning.accept_length(chain, known) / mean - 1
    everywhere = planning.Rates.from_ranks([ranks], width=8, contexts=3)
    assert abs(off) < 0.01
    assert planning.expected(chain, everywhere) / mean - 1 > 0.1


def test_other_scripts_read_it(ran, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(ran[1]))
    shares = step_inject.rates(str(path), TREE)
    mean = ran[1]["trees"][TREE]["all"]["lengths"]["mean"]
    assert 1 + sum(shares) == pytest.approx(mean)


def test_a_greedy_difference_fails(monkeypatch, measured):
    model, ids, texts, _ = measured
    plain = [rows.Row(text, [1]) for text in texts]
    other = [rows.Row([*texts[0][:3], 1, 2], [1]), *plain[1:]]
    gaps = iter([0.5, 1e-5])
    monkeypatch.setattr(
        bench_acceptance.compare, "logit_gap", lambda model, ids: next(gaps)
    )
    greedy = sampling.Sampling()
    counted = [
        bench_acceptance.compared(model, ids, other, plain, greedy)["counted"]
        for _ in range(2)
    ]
    assert counted == [1, 0]
    hot = sampling.Sampling(temperature=1.0)
    found = bench_acceptance.compared(model, ids, other, plain, hot)
    assert found["different"] == [0]


def test_tables_of_the_shapes_and_of_planned_trees(monkeypatch):
    lengths = {"mean": 3.0, "interval": [2.5, 3.5]}
    trees = {tree: {"all": {"lengths": lengths}} for tree in tables.SHAPES}
    trees["3,3,3"] = {"all": {"lengths": lengths | {"mean": 3.5}}}
    best = {"widths": [3, 2, 1], "accept_length": 3.2}
    best |= {"difference": 0.1, "interval": [0.05, 0.15]}
    plan = {"depth_at_most": 3, "nodes": 16, "expected": 3.3, "best_width_tree": best}
    plan["simulated"] = {"lengths": {"mean": 3.3}}
    fields = {"trees": trees, "planned": [plan]}
    monkeypatch.setattr(files, "read", lambda name: fields)
    last = tables.shapes().splitlines()[-1]
    assert last == (
        "| `3,3,3` | 40 | 3.50 (2.50 to 3.50) | +0.020 | 40 | 1 | 3.58 | 40 | 1 |"
    )
    last = tables.planned().splitlines()[-1]
    assert last == (
        "| 3 | 16 | 3.30 | 3.30 | `3,2,1` | 3.20 | +0.10 (+0.05 to +0.15) |"
    )


def test_rows_do_not_wait_for_ranks(folder, measured, monkeypatch):
    """A run that is ended while ranks are made leaves what was decoded."""
    model, ids, *_ = measured
    entries = prompts.read(folder / "prompts.jsonl")
    options = chosen(trees=(TREE,), depth=3)
    (row,) = wanted.rows(options)
    drafter = drafting.make(row.drafter, topology.read(TREE), model, ids, None)
    monkeypatch.setattr(bench_acceptance, "rank", lambda *_: 1 / 0)
    made = bench_acceptance.run(model, entries, ids, {row: drafter}, options)
    found = next(made)
    assert [cell["tree"] for cell in found["cells"]] == [TREE] and not found["rates"]
    with pytest.raises(ZeroDivisionError):
        next(made)


# --- planned trees ------------------------------------------------------------------


def test_all_widths_are_tried():
    found = set(claims.all_widths(8, 3))
    assert found == {
        *((w,) for w in range(1, 8)),
        *((a, b) for a in range(1, 4) for b in range(1, 7) if 1 + a + a * b <= 8),
        *(
            (a, b, c)
            for a in range(1, 4)
            for b in range(1, 4)
            for c in range(1, 6)
            if 1 + a + a * b + a * b * c <= 8
        ),
    }
    assert (2, 2, 1) not in found and (1, 2, 2) in found


def test_a_planned_tree_is_held_against_all_of_them():
    rng = np.random.default_rng(0)
    lengths = range(20, 30)
    ranks = [
        np.where(
            np.arange(n)[::-1, None] >= np.arange(3), rng.integers(0, 4, (n, 3)), -1
        )
        for n in lengths
    ]
    texts = [list(range(n + 1)) for n in lengths]
    known = rates.from_entries(pathlib.Path("x"), rates.entries("mtp", 0.0, ranks))
    (tree,) = claims.planned(ranks, texts, known, [6], [2])
    assert tree["nodes"] <= 6 and tree["depth"] <= 2
    assert tree["width_trees"] == len(set(claims.all_widths(tree["nodes"], 2)))
    best = tree["best_width_tree"]
    mean = tree["simulated"]["lengths"]["mean"]
    assert mean - best["accept_length"] == pytest.approx(best["difference"], abs=2e-4)


def test_a_poor_tree_is_found_out(measured):
    """The broken twin: a tree that drafts nothing of use loses against the chain."""
    texts, ranks = measured[2:]
    always = [np.where(one >= 0, 0, -1) for one in ranks]
    known = {2: planning.Rates(np.full((2, 1, 4), 0.2))}
    star = claims.against_widths(always, texts, known, [-1, 0, 0, 0, 3])
    assert star["best_width_tree"]["interval"][1] < 0


# --- statistics, prompts, drafters --------------------------------------------------


def test_intervals_of_differences_are_of_pairs():
    rng = np.random.default_rng(0)
    theirs = [rng.integers(1, 5, 20).tolist() for _ in range(30)]
    ours = [[length + 1 for length in steps] for steps in theirs]
    assert rows.difference(ours, theirs) == (1.0, [1.0, 1.0])
    assert rows.bootstrap([[], []]) == (None, None)


def test_steps_behind_a_loop_are_left_out():
    row = rows.Row([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 3])
    assert rows.first_repeat(row.token_ids) == 11
    assert row.unlooped == [3, 3, 3]


def test_prompts_of_a_folder(tmp_path):
    lines = [{"question": "one?"}, {"question": "two?"}, {"question": "three?"}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with gzip.open(tmp_path / "Code.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "def f():", "source": "web"}) + "\n")
    (tmp_path / "other.csv").write_text("1,2\n")
    found = prompts.read(tmp_path, limit=2)
    assert [entry["turns"][0] for entry in found] == ["def f():", "one?", "two?"]
    assert [entry["category"] for entry in found] == ["Code", "sums", "sums"]
    assert [entry["source"] for entry in found] == ["web", "sums", "sums"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trees", "3,x"], "level 2 is 'x'"),
        (["--trees", "no.json"], "tree no.json: No such file"),
        (["--drafters", "oracle"], "'oracle' came; allowed are mtp"),
        (["--drafters", "external"], "external needs --draft-model"),
        (["--temperatures", "-1"], "temperature"),
        (["--rows", "1,1@mtp@hot"], "rows: '1,1@mtp@hot'"),
        (["--rows", "1,1@"], "TREE@DRAFTER@TEMPERATURE is allowed"),
        (["--rows", "1,1@oracle"], "'oracle' came"),
        (["--prompts", "missing.jsonl"], "prompts missing.jsonl"),
        (["--limit", "0"], "limit is 0"),
        (["--batch", "0"], "batch is 0; 1 or more"),
        (["--plan", "1"], "sizes of 2 or more"),
        (["--max-new-tokens", "99999999"], "max_new_tokens"),
        (["--out", "no/such/file.json"], "no file in a folder"),
    ],
)
def test_wrong_input_is_one_line(folder, arguments, message, capsys):
    common = ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl")]
    assert bench_acceptance.main([*common, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("line", ["{", "{}", '{"turns": []}', '{"prompt": 3}', "[1]"])
def test_lines_without_text_are_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match="line 2 has no text"):
        prompts.read(path)


@pytest.mark.parametrize("name", [one for one in drafting.NAMES if one != "external"])
def test_drafters_keep_to_the_size_of_the_tree(measured, name):
    model, ids, *_ = measured
    tree = topology.read("3,2,1")
    made = drafting.make(name, tree, model, ids)
    assert made.depth_max <= 3 and made.n_max <= tree.n_max
    assert drafting.make(name, topology.read("none"), model, ids).n_max == 1
