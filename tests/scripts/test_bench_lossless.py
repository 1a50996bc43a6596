"""The check that sampling is lossless: what it counts, and when it says so."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import bench_lossless
from scripts.sampling_checks import cases, drafts, exact, measure, toys, twins
from treewy_jax import accept

ROWS = 2000


def found(distance, *, fault=None, mean=0.003, sigma=0.0001):
    case = cases.Case("rejection", "3,3", True, "near", "T 1", fault)
    return measure.Found(case, 10, distance, exact.Yardstick(mean, sigma), 0.5, 1.0)


def test_a_row_passes_below_the_limit_and_like_an_exact_sampler():
    assert found(0.0031).passed
    assert not found(0.0036).passed  # six sigmas
    assert not found(0.02).passed
    # An exact sampler of few draws is above the limit itself.
    assert found(0.021, mean=0.02, sigma=0.001).passed
    assert not found(0.026, mean=0.02, sigma=0.001).passed
    assert not found(0.012, mean=0.009, sigma=0.0001).passed
    # A certain text has no deviation.
    assert found(0.0, mean=0.0, sigma=0.0).passed
    assert not found(1e-6, mean=0.0, sigma=0.0).passed


def test_a_twin_passes_when_it_fails():
    assert found(0.5, fault=twins.AT_ZERO).passed
    assert not found(0.0031, fault=twins.AT_ZERO).passed


def test_the_yardstick_is_that_of_exact_draws():
    wanted = exact.joint(cases.TABLES["near"][0], cases.SETTINGS["T 1.5"])
    mean, sigma = exact.yardstick(wanted, 2**22)
    # The mean of |x| of a normal of deviation sqrt(p (1 - p) / N).
    deviation = np.sqrt(wanted * (1 - wanted) / 2**22)
    assert mean == pytest.approx(np.sum(deviation) / np.sqrt(2 * np.pi), rel=0.02)
    assert mean < 0.004 and mean + measure.SIGMAS * sigma < measure.LIMIT
    assert wanted.sum() == pytest.approx(1)


def test_texts_are_counted_by_their_tokens_after_the_first():
    tokens = jnp.asarray([[2, 1, 0, 7], [2, 1, 0, 7], [2, 7, 7, 7]])
    counted = np.asarray(measure.counts(tokens))
    assert counted[[64 + 7, 511]].tolist() == [2, 1] and counted.sum() == 3


def test_every_rule_goes_with_every_drafter_that_fits():
    chosen = cases.choose(*bench_lossless.ALLOWED.values())
    pairs = {(c.rule, c.drafter) for c in chosen}
    assert {name for rule, name in pairs if rule == "match"} == set(drafts.NAMES)
    for rule in ("rejection", "traversal"):
        assert {name for r, name in pairs if r == rule} == set(drafts.DRAWN)
        settings = {c.setting for c in chosen if (c.rule, c.drafter) == (rule, "3,3")}
        assert settings == {n for n, s in cases.SETTINGS.items() if not s.greedy}
    assert ("block", "1,1,1") in pairs and ("block", "3,3") not in pairs
    assert len(set(chosen)) == len(chosen)
    assert {(c.rule, c.fault) for c in chosen if c.fault} == set(twins.TWINS)
    for case in chosen:
        case.accept.check(measure.arguments(case)[1], case.sampling)


@pytest.mark.parametrize("name", drafts.NAMES)
def test_trees_are_of_the_size_that_is_said(name):
    case = cases.Case("match", name, name in drafts.DRAWN, "near", "T 1")
    tables, drafter = measure.arguments(case)
    keys = jax.random.split(jax.random.key(0), 3)
    options = dict(sampling=case.sampling, accept=case.accept)
    state = jax.eval_shape(lambda: toys.write(tables, drafter, keys, **options))
    assert state.tree.tokens.shape == (3, drafter.n_max)
    if name == "by row":
        assert state.tree.parent.shape == (3, 7)


def test_the_command(tmp_path, capsys):
    """A rule and its twin, on texts enough to tell them apart."""
    file = tmp_path / "o.json"
    words = "--rules block --settings all --drafts near --chunk 2000 --samples 4000"
    status = bench_lossless.main([*words.split(), "--json", str(file)])
    out = capsys.readouterr().out
    assert status == 0
    assert "1 of 1 rows are lossless" in out and "1 of 1 faults seen" in out
    right, twin = json.loads(file.read_text())["rows"]
    assert right["samples"] == 4000 and right["accepted"] > 0.5
    assert (right["fault"], twin["fault"]) == (None, twins.AT_ZERO)
    assert right["sigmas"] < 5 < twin["sigmas"] and twin["tvd"] > 0.1
    assert right["passed"] and twin["passed"]


def test_a_run_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Rows of the same samples, seed and code stay; others are measured anew."""
    file, asked = tmp_path / "o.json", []

    def measured(chosen, samples, rows, seed):
        for case in chosen:
            if len(asked) == 3 and not resumed:
                raise KeyboardInterrupt
            asked.append(case)
            right = exact.Yardstick(0.003, 0.0001)
            distance = 0.0031 if case.fault is None else 0.5
            yield measure.Found(case, samples, distance, right, 0.5, 1.0)

    monkeypatch.setattr(measure, "measure", measured)
    words = "--rules block traversal --drafters 1,1,1 --settings all --samples 4000"
    resumed, words = False, [*words.split(), "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        bench_lossless.main(words)
    assert len(json.loads(file.read_text())["rows"]) == 3
    resumed = True
    assert bench_lossless.main([*words, "--resume"]) == 0
    rows = json.loads(file.read_text())["rows"]
    whole = cases.choose(*bench_lossless.ALLOWED.values())
    order = [whole.index(cases.Case(*list(row.values())[:6])) for row in rows]
    assert len(rows) == len(set(asked)) == len(asked) and order == sorted(order)
    assert bench_lossless.main([*words, "--resume"]) == 0  # nothing is left
    assert len(asked) == len(rows)
    assert bench_lossless.main([*words, "--resume", "--seed", "1"]) == 0
    assert len(asked) == 2 * len(rows)
    file.write_text('{"rows": []}')
    assert bench_lossless.main([*words, "--resume"]) == 2
    assert "no such result" in capsys.readouterr().err


def test_programs_run_in_the_order_of_the_cases():
    """Those that agree share one, and each case has its own texts."""
    chosen = [
        cases.Case("greedy", "1,1,1", False, kind, setting)
        for setting in ("T 0", "T 0, penalties")
        for kind in ("near", "adversarial")
    ]
    made = list(measure.measure(chosen, 64, 64, 0))
    assert [one.case for one in made] == chosen
    assert all(one.passed for one in made)
    assert made[0].accepted > made[1].accepted


def test_a_faulty_rule_is_status_1(monkeypatch, capsys):
    """The match of a twin in place of the rule, and a fault that nobody sees."""
    rules = accept.RULES | {"match": twins.TWINS["match", twins.AT_ZERO]}
    monkeypatch.setattr(accept, "RULES", rules)
    words = "--rules match --drafters 1,1,1 --drafts adversarial --samples 2000"
    status = bench_lossless.main([*words.split(), "--settings", "top-k"])
    assert status == 1 and "0 of 1 rows are lossless" in capsys.readouterr().out
    monkeypatch.setattr(measure, "measure", lambda *_: [found(0.0031, fault="x")])
    assert bench_lossless.main([]) == 1
    assert "NOT SEEN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rules best", "rules 'best' 'match' 'traversal'"),
        ("--drafters 9", "drafters '9' 'by row'"),
        ("--samples 0", "samples 0 1 or more"),
        ("--chunk -1", "chunk -1 1 or more"),
        ("--samples 2147483647", "samples 2147483647 2**31"),
        ("--seed -1", "seed -1 2**32"),
        ("--json no/o.json", "no/o.json folder"),
        ("--resume", "resume --json"),
    ],
)
def test_wrong_input_is_one_line(words, told, capsys):
    assert bench_lossless.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("bench_lossless.py: error: ") and err.count("\n") == 1
    assert all(word in err for word in told.split())
