"""The tuner on a CPU, with times that the tests make up."""

import dataclasses
import json

import jax
import pytest

from pallas_kernels import tuning
from scripts import autotune, bench_kernels
from scripts.benching import contenders


@pytest.fixture
def made_up(blend_op, monkeypatch, tmp_path):
    """Make a GPU of the CPU, its times by block and label, its tables in a folder."""
    times = {}

    def time_all(entrants, rounds, progress, after):
        for entrant in entrants:
            if ends == [entrant.case.label]:
                raise KeyboardInterrupt
            block = entrant.config and entrant.config.block
            us = times.get((entrant.case.label, block), times.get(block, 9.0))
            if isinstance(us, str):
                entrant.problem = us
            else:
                entrant.device_us = [us, us + 1, us + 2]
            after()

    ends = times.setdefault("ends", [])
    monkeypatch.setattr(bench_kernels, "time_all", time_all)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(autotune, "KERNELS", tmp_path)
    (tmp_path / "blend").mkdir()
    return times


def tune(tmp_path, *arguments):
    file = tmp_path / "times.json"
    return autotune.main(["--ops", "blend", "--json", str(file), *arguments])


def table(tmp_path):
    return json.loads((tmp_path / "blend" / "tuned" / "cpu.json").read_text())


def test_the_fastest_is_written_and_found(made_up, blend_op, tmp_path, capsys):
    made_up |= {None: 5.0, 4: 3.0, 7: "wrong: errors", 13: 2.0, 8: 2.5}
    assert tune(tmp_path) == 0
    assert table(tmp_path) == [{"match": {"width": 8}, "config": {"block": 13}}]
    folder = tmp_path / "blend" / "tuned"
    assert tuning.lookup(folder, "cpu", blend_op[0].spec) == {"block": 13}
    printed = capsys.readouterr().out
    assert "width=8): Config(block=13): B=3 D=8 3.0 us (before 6.0)" in printed
    assert "as chosen today" in printed and "wrong: errors" in printed
    written = json.loads((tmp_path / "times.json").read_text())
    (entry,) = written["entries"]
    assert entry["config"] == {"block": 13} and entry["us"] == {"B=3 D=8": 3.0}
    assert [row["us"] for row in written["rows"]] == [6.0, 4.0, None, 3.0, 3.5]


def test_an_equal_match_is_replaced_and_others_stay(made_up, tmp_path):
    file = tmp_path / "blend" / "tuned" / "cpu.json"
    file.parent.mkdir()
    others = [{"match": {"width": w}, "config": {"block": 1}} for w in (4, 8, 16)]
    file.write_text(json.dumps(others))
    made_up |= {8: 1.0}
    assert tune(tmp_path) == 0
    blocks = {e["match"]["width"]: e["config"]["block"] for e in table(tmp_path)}
    assert blocks == {4: 1, 8: 8, 16: 1}
    file.write_text(json.dumps([{"match": {}, "config": {"block": 1}}]))
    assert tune(tmp_path) == 0
    assert table(tmp_path)[0]["config"] == {"block": 8}, "behind one that always agrees"


def test_cases_of_one_entry_are_decided_together(made_up, blend_op, tmp_path):
    blend_op.append(dataclasses.replace(blend_op[0], label="other"))
    first, other = (case.label for case in blend_op)
    made_up |= {
        (first, 4): 1.0, (other, 4): 99.0,  # best of one, bad for the other
        (first, 7): 0.1, (other, 7): "does not compile",
        (first, 8): 5.0, (other, 8): 5.0,
    }  # fmt: skip
    assert tune(tmp_path) == 0
    assert table(tmp_path) == [{"match": {"width": 8}, "config": {"block": 8}}]


def test_a_run_that_is_ended_early_leaves_what_it_has(made_up, blend_op, tmp_path):
    wider = dataclasses.replace(blend_op[0].spec, width=16)
    blend_op.append(dataclasses.replace(blend_op[0], label="other", spec=wider))
    made_up[8] = 1.0
    made_up["ends"].append("other")
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path)
    assert table(tmp_path) == [{"match": {"width": 8}, "config": {"block": 8}}]


def test_a_dry_run_writes_nothing(made_up, tmp_path):
    assert autotune.main(["--ops", "blend", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "blend"]
    assert list((tmp_path / "blend").iterdir()) == []


def test_where_nothing_runs_the_status_says_so(made_up, tmp_path, capsys):
    made_up |= dict.fromkeys((None, 4, 7, 13, 8), "RuntimeError: no")
    assert tune(tmp_path) == 1
    assert "no configuration runs" in capsys.readouterr().out
    assert not (tmp_path / "blend" / "tuned" / "cpu.json").exists()


def test_configurations_are_run_and_checked_for_real(blend_op, tmp_path, capsys):
    """Nothing is made up: one does not compile, one is wrong."""
    assert tune(tmp_path, "--dry-run", "--rounds", "1") == 0
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    states = {row["config"] and row["config"]["block"]: row["state"] for row in rows}
    assert states[None] == states[4] == states[8] == "ok"
    assert states[7] == "RuntimeError: 7 is too much shared memory"
    assert states[13].startswith("wrong: relative errors")
    assert [row["us"] is None for row in rows] == [False, False, True, True, False]


def test_contenders_do_not_share_what_they_measure(blend_op):
    found = autotune.select(autotune.Options(ops=("blend",), dry_run=True))
    found[0].device_us.append(1.0)
    assert [len(entrant.device_us) for entrant in found] == [1, 0, 0, 0, 0]
    assert isinstance(found[0], contenders.Contender)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a cpu has nothing to tune; --dry-run is allowed"),
        (["--dry-run", "--impl", "cuda"], "impl is 'cuda'; blend has triton, mosaic"),
        (["--dry-run", "--rounds", "0"], "rounds is 0; 1 or more"),
        (["--dry-run", "--cases", "B=9"], "cases is B=9; labels are"),
        (["--dry-run", "--json", "."], "no file in a folder that exists"),
    ],
)
def test_wrong_input_is_one_line(blend_op, arguments, message, capsys):
    assert autotune.main(["--ops", "blend", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autotune.py: error: ")
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("lost", ["configs", "match"])
def test_cases_without_what_tuning_needs_are_refused(blend_op, lost, capsys):
    blend_op[:] = [dataclasses.replace(blend_op[0], **{lost: ()})]
    assert autotune.main(["--ops", "blend", "--dry-run"]) == 2
    assert "blend B=3 D=8: no configs, or none to match" in capsys.readouterr().err
