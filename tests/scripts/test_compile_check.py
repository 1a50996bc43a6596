"""Compile checks, as far as they go without the compilers: what is read and refused."""

import concurrent.futures
import dataclasses
import json
import os

import jax
import pytest

from scripts import compile_check
from scripts.compiling import kernels, report, targets

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tree_verify' for 'sm_90a'
ptxas info    : Function properties for tree_verify
    1184 bytes stack frame, 840 bytes spill stores, 1640 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1184 bytes cumulative stack size
ptxas info    : Compile time = 1258.811 ms
ptxas info    : Compiling entry function 'input_transpose_fusion' for 'sm_90a'
ptxas info    : Function properties for input_transpose_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 1 barriers, 4224 bytes smem
"""
LAUNCHES = """\
004: kCustomKernel [source | next=008 (4)] input_transpose_fusion grid: [64, 1, 1] \
threads: [128, 1, 1]  shared_memory: 0 bytes
008: kCustomKernel [prev=007 (1) | sink] tree_verify grid: [32, 32, 2] \
threads: [128, 1, 1]  shared_memory: 57344 bytes
"""
PTX = ".version 8.7\n.target sm_90a\n.visible .entry tree_verify()\n"
BOUND = kernels.Bound({"H200": 840, "B200": 0}, reason="a test")
GPU = targets.parse("H200")
TPU = targets.parse("v5e:2x2")


def row(target="H200", found=(), **resources):
    used = report.Resources(**resources)
    return report.Row(target, "tree_verify", "n=4", 1.5, used, tuple(found))


# --- targets ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*targets.DEFAULT, "v4:2x2x1", "tpu7x:2x2x1"])
def test_targets_are_read(name):
    target = targets.parse(name)
    assert target.name == name
    assert target.platform == ("tpu" if ":" in name else "cuda")
    assert target.shared_memory == (None if ":" in name else 232448)


@pytest.mark.parametrize("name", ["H100", "h200", "v5e", "v7x:2x2", "v5e:0x2", ""])
def test_unknown_targets_are_refused(name):
    with pytest.raises(ValueError, match=f"target is {name!r}; allowed: H200, B200"):
        targets.parse(name)


def test_gpus_differ_in_what_they_ask_of_the_compiler():
    texts = [targets._target_config(targets.parse(name)) for name in ("H200", "B200")]
    for text, major in zip(texts, (9, 10), strict=True):
        assert f"major: {major} minor: 0" in text
        assert "shared_memory_per_block_optin: 232448" in text
        assert text.count("{") == text.count("}") == 4


# --- arguments and compilers --------------------------------------------------------


@pytest.fixture
def no_compilers(monkeypatch):
    monkeypatch.setattr(targets, "version", lambda package: None)


@pytest.fixture
def compilers(monkeypatch):
    monkeypatch.setattr(targets, "version", lambda package: "1.0")


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        (["H200"], targets.PACKAGES["cuda"]),
        (["v5e:2x2"], ("libtpu",)),
        (["H200", "B200", "v6e:2x4"], (*targets.PACKAGES["cuda"], "libtpu")),
    ],
)
def test_missing_compilers_are_one_line(names, absent, no_compilers, capsys):
    assert compile_check.main(["--targets", *names]) == 2
    printed = capsys.readouterr()
    expected = f"compile_check.py: error: {', '.join(absent)} not installed; run make"
    assert printed.err.startswith(expected)
    assert printed.err.count("\n") == 1 and printed.out == ""


def test_one_package_may_be_missing(monkeypatch):
    monkeypatch.setattr(
        targets, "version", lambda name: None if name.startswith("nvidia") else "1.0"
    )
    assert targets.missing(GPU) == ["nvidia-cuda-nvcc"]
    assert targets.missing(TPU) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "H300"], "target is 'H300'"),
        (["--kernels", "flash"], "kernels names 'flash'; allowed: tree_verify"),
        (["--kernels"], "kernels is empty"),
        (["--json", "."], "a folder; a file is allowed"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, compilers, capsys):
    assert compile_check.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- what the compilers say ---------------------------------------------------------


def test_ptxas_is_read():
    assert report.parse_ptxas(PTXAS) == {
        "tree_verify": report.Resources("sm_90a", 0, 255, 840),
        "input_transpose_fusion": report.Resources("sm_90a", 4224, 28, 0),
    }


@pytest.mark.parametrize("lost", ["spill stores", "registers"])
def test_ptxas_without_its_figures_is_refused(lost):
    with pytest.raises(ValueError, match="nothing of registers or spills of tree_v"):
        report.parse_ptxas(PTXAS.replace(lost, "things"))


def dump(folder, launches):
    (folder / "module_1.thunk_sequence.txt").write_text(launches)
    (folder / "module_1.kernel.ptx").write_text(PTX)


def test_a_dump_gives_static_and_dynamic_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_run_ptxas", lambda file: PTXAS)
    dump(tmp_path, LAUNCHES)
    used = report.gpu_resources(tmp_path, "tree_verify")
    assert used == report.Resources("sm_90a", 57344, 255, 840)
    used = report.gpu_resources(tmp_path, "input_transpose_fusion")
    assert used.shared_memory == 4224


@pytest.mark.parametrize(("launches", "ptxas"), [("", PTXAS), (LAUNCHES, "")])
def test_a_dump_without_the_kernel_is_no_success(
    launches, ptxas, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "_run_ptxas", lambda file: ptxas)
    dump(tmp_path, launches)
    with pytest.raises(ValueError, match="shows no kernel tree_verify"):
        report.gpu_resources(tmp_path, "tree_verify")


class Program:
    """What tpu_resources asks of a compiled program."""

    generated_code_size_in_bytes = 4096

    def memory_analysis(self):
        return self

    def as_text(self):
        return 'custom-call(x), metadata={op_name="jit(f)/tree_verify"}'


def test_a_tpu_program_must_hold_the_kernel():
    used = report.tpu_resources(Program(), "tree_verify")
    assert used == report.Resources(code_bytes=4096)
    with pytest.raises(ValueError, match="no kernel commit"):
        report.tpu_resources(Program(), "commit")


# --- bounds -------------------------------------------------------------------------


def test_the_bound_itself_is_allowed():
    used = report.Resources("sm_90a", 232448, 255, 840)
    assert report.problems(GPU, used, BOUND) == ()
    assert report.problems(TPU, report.Resources(code_bytes=1), BOUND) == ()


def test_each_gpu_has_a_bound_of_its_own():
    used = report.Resources("sm_100a", 0, 255, 840)
    found = report.problems(targets.parse("B200"), used, BOUND)
    assert found == ("spills: 840 bytes; 0 allowed",)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ({"spill_bytes": 841}, "spills: 841 bytes; 840 allowed"),
        ({"shared_memory": 232449}, "shared memory: 232449 bytes; 232448 allowed"),
    ],
)
def test_a_byte_more_is_a_problem(used, message):
    fits = report.Resources("sm_90a", 232448, 255, 840)
    found = report.problems(GPU, dataclasses.replace(fits, **used), BOUND)
    assert found == (message,)


def test_every_variant_has_a_bound_and_every_bound_a_variant():
    kinds = {
        (name, variant.kind)
        for name, variants in kernels.KERNELS.items()
        for variant in variants()
    }
    assert kinds == kernels.MAX_SPILL.keys()
    for bound in kernels.MAX_SPILL.values():
        assert bound.reason
        assert bound.spill_bytes.keys() == targets.GPUS.keys()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_shapes_fit_their_functions(platform):
    for variants in kernels.KERNELS.values():
        for variant in (variants()[0], variants()[-1]):
            function, shapes = variant.case(platform)
            assert jax.tree.leaves(jax.eval_shape(function, *shapes))


# --- the run ------------------------------------------------------------------------


@pytest.mark.parametrize("found", [(), ("spills: 9 bytes; 8 allowed",)])
def test_status_table_and_json(found, compilers, monkeypatch, tmp_path, capsys):
    rows = {
        "H200": [row(shared_memory=8192, registers=80, spill_bytes=9, found=found)],
        "v5e:2x2": [row("v5e:2x2", code_bytes=4096)],
    }
    monkeypatch.setattr(compile_check, "check_apart", lambda name, _: rows[name])
    file = tmp_path / "result.json"
    status = compile_check.main(
        ["--targets", "H200", "v5e:2x2", "--json", str(file)],
    )
    assert status == (1 if found else 0)
    printed = capsys.readouterr().out
    assert f"2 compiled, {len(found)} failed" in printed
    for text in ("8192", "4096", *found):
        assert text in printed
    written = json.loads(file.read_text())
    assert [r["problems"] for r in written["rows"]] == [list(found), []]
    assert written["rows"][0]["resources"]["registers"] == 80
    assert written["compilers"]["libtpu"] == "1.0"
    assert len(written["max_spill"]) == len(kernels.MAX_SPILL)


def variant(kind):
    return kernels.Variant("n=4", kind, lambda platform: (abs, []))


def test_a_compiler_error_is_a_problem_of_its_row(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("Shared memory size limit exceeded\nmore")

    monkeypatch.setattr(targets, "compile_for", refuse)
    kind = kernels.KERNELS["tree_verify"]()[0].kind
    found = compile_check.check_variant(GPU, "tree_verify", variant(kind))
    assert found.problems == ("RuntimeError: Shared memory size limit exceeded",)
    assert found.resources == report.Resources()


def test_a_spilling_variant_fails_and_its_twin_does_not(monkeypatch):
    name, kind = next(iter(kernels.MAX_SPILL))
    most = kernels.MAX_SPILL[name, kind].spill_bytes[GPU.name]
    for spills, problems in ((most, 0), (most + 1, 1)):
        used = report.Resources("sm_90a", 0, 255, spills)
        monkeypatch.setattr(
            compile_check, "compile_variant", lambda *_, used=used: used
        )
        found = compile_check.check_variant(GPU, name, variant(kind))
        assert len(found.problems) == problems
        assert found.resources == used


def test_each_call_gets_a_process_and_a_dead_one_is_noticed():
    assert compile_check.in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(concurrent.futures.process.BrokenProcessPool):
        compile_check.in_fresh_process(os._exit, 134)


def test_a_compiler_that_dies_is_a_row(monkeypatch):
    def die(*arguments):
        raise concurrent.futures.process.BrokenProcessPool

    monkeypatch.setattr(compile_check, "in_fresh_process", die)
    monkeypatch.setattr(targets, "prepare", lambda target: None)
    (found,) = compile_check.check_apart("H200", ["tree_verify"])
    assert found.problems == ("the compiler ended its process",)
