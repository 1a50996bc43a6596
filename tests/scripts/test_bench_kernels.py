"""The kernel benchmark on a CPU: what is timed, what is refused, what is written.

Times are never compared: CUPTI is a fake here, and the host's clock is a CPU's.
"""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from scripts import bench_kernels
from scripts.benching import chains, contenders, rates, tables, timing
from treewy_jax import pytree

RATES = ["--copy-tb-s", "4", "--product-tflop-s", "800"]


def run(*arguments):
    return bench_kernels.main(["--ops", "blend", "--quick", *RATES, *arguments])


# --- the chain of runs --------------------------------------------------------------


def arrays(case, sets, seed=0):
    keys = jax.random.split(jax.random.key(seed), sets)
    return [jax.tree.leaves(case.inputs(key)) for key in keys]


def execute(case, chain, sets, impl="triton"):
    structure = jax.tree.structure(case.shapes())
    program = chains.chained(case.call(impl, None), structure, chain)
    return jax.jit(program)(*chains.divide(sets, chain))


def test_one_state_is_fed_back(blend_op):
    (case,) = blend_op
    chain = chains.plan(case, "triton", evict=0, least_runs=3, seconds=20e-6)
    assert chain == chains.Plan(1, 3, trips=3, varied=(0,), overwrites=((2, 0),))
    assert chain.total == 9
    sets = arrays(case, 1)
    owned, _ = execute(case, chain, sets)
    x, weight, state = sets[0]
    for _ in range(9):
        # The first output of its shape takes the place of the state.
        state, _ = case.call("reference", None)(x, weight, state)
    np.testing.assert_allclose(owned[0][2], state, rtol=1e-5)


def test_sets_take_turns_and_an_output_is_carried(blend_op):
    case = dataclasses.replace(blend_op[0], donate=())
    size = pytree.nbytes(case.shapes())
    chain = chains.plan(case, "triton", evict=2 * size, least_runs=4, seconds=15e-6)
    assert chain == chains.Plan(2, 4, trips=2, varied=(0, 2), carried=(0, 0))
    sets = arrays(case, 2)
    _, given = execute(case, chain, sets)
    carried, weight, _ = sets[0]  # the weights are few: the same in all sets
    for number in range(8):
        state = sets[number % 2][2]
        carried, _ = case.call("reference", None)(carried, weight, state)
    np.testing.assert_allclose(given, carried, rtol=1e-5)


def test_each_set_has_a_state_of_its_own(blend_op):
    (case,) = blend_op
    size = pytree.nbytes(case.shapes())
    chain = chains.plan(case, "triton", evict=2 * size, least_runs=1, seconds=0)
    assert (chain.sets, chain.runs, chain.carried) == (2, 2, (0, 1))
    sets = arrays(case, 2)
    owned, given = execute(case, chain, sets)
    x, weight, first = sets[0]
    first, x = case.call("reference", None)(x, weight, first)
    second, x = case.call("reference", None)(x, weight, sets[1][2])
    np.testing.assert_allclose(owned[0][2], first, rtol=1e-6)
    np.testing.assert_allclose(owned[1][2], second, rtol=1e-6)
    np.testing.assert_allclose(given, x, rtol=1e-6)


def sums(case):
    """The case with a sum as its only output: nothing of its shape goes in."""

    def call(impl, config):
        return lambda x, weight, state: (x * weight[:, None] + state).sum(0)

    return dataclasses.replace(case, call=call, donate=(), bounds=(1e-5,))


def test_a_nudge_changes_nothing_and_cannot_be_dropped(blend_op, monkeypatch):
    case = sums(blend_op[0])
    chain = chains.plan(case, "triton", evict=0, least_runs=2, seconds=0)
    assert chain.nudged == 1 and chain.carried is None  # the smallest: the weights
    seen = []
    watched = dataclasses.replace(
        case,
        call=lambda *how: (
            lambda *xs: jax.debug.callback(seen.append, xs[1]) or case.call(*how)(*xs)
        ),
    )
    sets = arrays(case, 1)
    weights = sets[0][1]
    jax.block_until_ready(execute(watched, chain, sets))
    jax.effects_barrier()
    assert len(seen) == 2 and all((x == weights).all() for x in seen)
    sets[0][2] = sets[0][2].at[0, 0].set(jnp.nan)
    seen.clear()
    jax.block_until_ready(execute(watched, chain, sets))
    jax.effects_barrier()
    assert np.isnan(seen[1]).all(), "the second run did not wait for the first"


def test_every_chain_says_what_it_is_chained_by():
    assert "of the next" in chains.Plan(1, 2, carried=(0, 0)).chained_by
    assert "one more kernel" in chains.Plan(1, 2, nudged=1).chained_by
    assert "state" in chains.Plan(1, 2, overwrites=((2, 1),)).chained_by


def test_a_state_that_no_output_replaces_is_refused(blend_op):
    case = dataclasses.replace(sums(blend_op[0]), donate=(2,))
    with pytest.raises(ValueError, match="blend: no output can replace argument 2"):
        chains.plan(case, "triton")


def test_many_sets_for_small_data_and_one_for_large(blend_op):
    assert chains.plan(blend_op[0], "triton").sets == chains.MOST_SETS
    assert chains.plan(blend_op[0], "triton", evict=1).sets == 1
    assert chains.plan(blend_op[0], "reference").sets == 1


# --- CUPTI --------------------------------------------------------------------------


def fake_cupti(monkeypatch, *, lost=0):
    """The profiler's `measure`; every call of the measured thing runs two kernels."""

    def measure(f, *, aggregate=True, iterations=1):
        assert isinstance(f, (jax.stages.Wrapped, jax.stages.Compiled))
        assert not aggregate and iterations == 1

        def wrapped():
            jax.block_until_ready(f())
            out = f()
            kernels = [("op", 0.002), ("loop_add_fusion", 0.001)] * f._number
            return out, kernels[: len(kernels) - lost] or None

        return wrapped

    monkeypatch.setattr(profiler, "measure", measure)


def test_kernels_are_told_apart_by_call(monkeypatch):
    fake_cupti(monkeypatch)
    called = []
    found = timing.kernels(lambda: called.append(1), 3)
    assert found == [[("op", 2.0), ("loop_add_fusion", 1.0)]] * 3
    assert len(called) == 6  # once to warm up
    assert timing.by_name(found, 2) == {"op": 1.0, "loop_add_fusion": 0.5}


@pytest.mark.parametrize(("lost", "left"), [(1, 5), (6, 0)])
def test_lost_kernels_are_an_error(monkeypatch, lost, left):
    fake_cupti(monkeypatch, lost=lost)
    with pytest.raises(RuntimeError, match=f"{left} kernels in 3 calls"):
        timing.kernels(lambda: None, 3)


def on_a_gpu(monkeypatch):
    fake_cupti(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_on_a_gpu_both_clocks_are_written(blend_op, monkeypatch, tmp_path, capsys):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(chains, "MOST_SETS", 3)
    file = tmp_path / "kernels.json"
    assert run("--json", str(file)) == 0
    triton, _, reference = json.loads(file.read_text())["rows"]
    runs = triton["chain"]["runs"]
    assert (triton["chain"]["input_sets"], runs) == (3, 9 * 38)
    assert triton["device_us"]["median"] == pytest.approx(3 / runs)
    assert triton["kernels_us"] == {"op": 0.006, "loop_add_fusion": 0.003}
    assert triton["in_jit_us"]["samples"] == 2
    assert triton["times_floor"] == pytest.approx(3 / runs / 0.25)
    assert reference["impl"] == "reference" and reference["device_us"]
    assert json.loads(file.read_text())["clock"] == "cupti"


def test_rates_are_measured_or_given(monkeypatch):
    given = rates.get(4e12, 8e14)
    assert (given.bytes_per_s, given.flops_per_s) == (4e12, 8e14)
    fake_cupti(monkeypatch)
    measured = rates.get(None, 8e14)
    assert measured.bytes_per_s > 0
    assert measured.origin == "copy measured in this run, product given"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rates.copy_rate(1000) == pytest.approx(8000 / 3e-6)
    assert rates.product_rate(100) == pytest.approx(2e6 / 3e-6)


# --- the gate -----------------------------------------------------------------------


def test_table_and_json_on_a_cpu(blend_op, tmp_path, capsys):
    file, picture = tmp_path / "kernels.json", tmp_path / "kernels.png"
    assert run("--json", str(file), "--plot", str(picture)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"blend +│ B=3 D=8 │ triton .* ok ", printed)
    assert "does not run here: needs a TPU" in printed
    assert "the only clock is the host's" in printed
    assert picture.stat().st_size > 1000
    written = json.loads(file.read_text())
    assert written["clock"] == "host" and written["method"] == bench_kernels.__doc__
    triton, absent, _ = written["rows"]
    assert triton["device_us"] is None and triton["in_jit_us"]["least"] > 0
    assert triton["spec"]["width"] == 8 and len(triton["errors"]) == 2
    assert absent["in_jit_us"] is None and "needs a TPU" in absent["state"]


@pytest.mark.parametrize("wrong", [1e-4, float("nan")])
def test_a_wrong_result_is_reported_and_not_timed(blend_op, wrong, tmp_path, capsys):
    (case,) = blend_op

    def call(impl, config):
        right = case.call(impl, config)
        if impl == "reference":
            return right
        return lambda *arrays: (right(*arrays)[0], right(*arrays)[1].at[-1].add(wrong))

    blend_op[:] = [dataclasses.replace(case, call=call)]
    file = tmp_path / "kernels.json"
    assert run("--json", str(file)) == 1
    triton, _, reference = json.loads(file.read_text())["rows"]
    assert triton["state"].startswith("wrong: relative errors")
    assert triton["in_jit_us"] is None
    assert reference["state"] == "ok" and reference["in_jit_us"]


def test_an_error_of_one_is_not_the_end(blend_op, tmp_path, capsys):
    (case,) = blend_op

    def call(impl, config):
        if impl == "reference":
            return case.call(impl, config)
        raise RuntimeError("ptxas: too many registers\nmore")

    blend_op[:] = [dataclasses.replace(case, call=call)]
    assert run() == 1
    assert "RuntimeError: ptxas: too many registers" in capsys.readouterr().out


def test_the_memory_of_outputs_is_filled_before_the_check(blend_op, monkeypatch):
    asked = []
    monkeypatch.setattr(contenders, "poison", lambda shapes: asked.append(shapes))
    assert run("--impl", "triton") == 0
    (shapes,) = asked
    assert [x.shape for x in shapes] == [(3, 8), (3, 8)]


@pytest.mark.parametrize("wrong_call", [None, 2, 20])
def test_one_wrong_bit_of_a_later_call_is_found(blend_op, wrong_call):
    (case,) = blend_op
    entrant = contenders.Contender(case, "triton", chain=chains.plan(case, "triton"))
    data = contenders.Data(case, entrant.chain)
    calls = []

    def single(*arguments):
        calls.append(None)
        outputs = jax.tree.leaves(case.call("reference", None)(*arguments))
        if len(calls) - 1 == wrong_call:
            outputs[0] = outputs[0].at[1, 3].add(1e-6)  # of a row that no one looks at
        return outputs

    entrant.single = single
    contenders.check(entrant, data, repeats=20)
    wrong = "wrong: outputs differ from call to call"
    assert entrant.problem == (None if wrong_call is None else wrong)


def test_poison_takes_every_dtype():
    contenders.poison([jax.ShapeDtypeStruct((2,), x) for x in ("int32", "bfloat16")])


def test_cases_of_one_group_are_timed_in_the_same_rounds(blend_op, monkeypatch):
    (case,) = blend_op
    blend_op[:] = [
        dataclasses.replace(case, label=label, group=group)
        for label, group in (("a", "x"), ("b", ""), ("c", "x"))
    ]
    rounds = []
    monkeypatch.setattr(
        contenders, "run", lambda es, _: rounds.append([e.case.label for e in es])
    )
    assert run("--impl", "triton") == 0
    assert rounds == [["a", "c"], ["b"]]


def test_turns_alternate(blend_op, monkeypatch):
    order = []
    take = contenders.Turn.take

    def noted(turn):
        order.append(turn.entrant.impl)
        take(turn)

    monkeypatch.setattr(contenders.Turn, "take", noted)
    assert run() == 0
    assert order == ["triton", "reference"] * 2


def test_what_cannot_be_imported_does_not_run_here(blend_op, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fake_blend.mosaic_tpu", None)
    assert run() == 0
    assert "does not run here: cannot be imported" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


# --- arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "blur"], "op is 'blur'; allowed: "),
        (["--ops"], "ops is empty"),
        (["--impl", "cuda"], "impl names 'cuda'; allowed: triton, mosaic_tpu, ref"),
        (["--cases", "B=9"], "cases is B=9; labels are 'B=3 D=8'"),
        (["--copy-tb-s", "0"], "copy_tb_s is 0.0; a number above 0"),
        (["--json", "."], "no file in a folder that exists"),
        (["--plot", "nowhere/at/all.png"], "no file in a folder that exists"),
        (["--fast"], "--fast"),
        (["--copy-tb-s", "many"], "many"),
    ],
)
def test_wrong_input_is_one_line(blend_op, arguments, message, capsys):
    start = [] if arguments[0] == "--ops" else ["--ops", "blend"]
    assert bench_kernels.main([*start, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("bench_kernels.py: error: ")
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_without_matplotlib_a_plot_is_refused(blend_op, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("--plot", str(tmp_path / "x.png")) == 2
    assert "plot needs matplotlib" in capsys.readouterr().err


def test_without_small_cases_a_cpu_times_nothing(blend_op, capsys):
    blend_op[:] = [dataclasses.replace(blend_op[0], tags=frozenset({"bench"}))]
    assert run() == 2
    assert "blend: no case is tagged 'small'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("us", "text"), [(None, "-"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_microseconds_have_three_digits(us, text):
    assert tables.number(us) == text
