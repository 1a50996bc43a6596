"""Compile checks, as far as they go without the compilers: what is read and refused."""

import concurrent.futures
import dataclasses
import json
import os

import jax
import pytest

from scripts import compile_check
from scripts.compiling import kernels, report, targets
from scripts.workloads import all as workloads

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
    texts = [targets.target_config(targets.parse(name)) for name in ("H200", "B200")]
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
        (["--kernels", "flash"], "kernels names 'flash'; allowed: "),
        (["--workers", "0"], "workers is 0; 1 or more are allowed"),
        (["--target", "H200"], "--target"),
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
    used = report.gpu_resources(tmp_path, ("tree_verify",))
    assert used == report.Resources("sm_90a", 57344, 255, 840)
    used = report.gpu_resources(tmp_path, ("input_transpose_fusion",))
    assert used.shared_memory == 4224


def test_of_several_kernels_the_worst_figures_count(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_run_ptxas", lambda file: PTXAS)
    dump(tmp_path, LAUNCHES)
    used = report.gpu_resources(tmp_path, ("input_", "tree_"))
    assert used == report.Resources("sm_90a", 57344, 255, 840)
    dump(tmp_path, LAUNCHES.replace("57344", "16"))
    assert report.gpu_resources(tmp_path, ("input_", "tree_")).shared_memory == 4224


@pytest.mark.parametrize(
    ("launches", "ptxas"),
    [("", PTXAS), (LAUNCHES, ""), (LAUNCHES, PTXAS.split("ptxas info    : Co")[0])],
)
def test_a_dump_without_the_kernel_is_no_success(
    launches, ptxas, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "_run_ptxas", lambda file: ptxas)
    dump(tmp_path, launches)
    with pytest.raises(ValueError, match="shows no kernel tree_verify"):
        report.gpu_resources(tmp_path, ("tree_verify",))


def test_a_kernel_that_is_launched_without_its_code_is_no_success(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "_run_ptxas", lambda file: PTXAS)
    dump(tmp_path, LAUNCHES + "009: kCustomKernel tree_verify_2 grid: [1, 1, 1] "
         "threads: [128, 1, 1]  shared_memory: 0 bytes\n")  # fmt: skip
    with pytest.raises(ValueError, match="shows no kernel tree_verify"):
        report.gpu_resources(tmp_path, ("tree_verify",))


class Program:
    """What tpu_resources asks of a compiled program."""

    generated_code_size_in_bytes = 4096

    def memory_analysis(self):
        return self

    def as_text(self):
        return 'custom-call(x), metadata={op_name="jit(f)/tree_verify"}'


def test_a_tpu_program_must_hold_the_kernel():
    used = report.tpu_resources(Program(), ("other", "tree_verify"))
    assert used == report.Resources(code_bytes=4096)
    with pytest.raises(ValueError, match="no kernel commit"):
        report.tpu_resources(Program(), ("commit",))


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


def test_the_next_jax_may_have_bounds_of_its_own(monkeypatch):
    bound = kernels.Bound({"H200": 8}, "a test", newer={"H200": 16})
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert (bound.most("H200"), BOUND.most("H200")) == (8, 840)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert (bound.most("H200"), BOUND.most("H200")) == (16, 840)


def test_every_bound_is_that_of_a_kind_and_of_every_gpu():
    cases = workloads.cases(tags=["compile", "compile-cuda"])
    kinds = {(case.op, case.kind) for case in cases}
    assert kinds >= {key for key in kernels.MAX_SPILL if key[0] in workloads.MODULES}
    for bound in (*kernels.MAX_SPILL.values(), kernels.NO_SPILL):
        assert bound.reason
        assert bound.spill_bytes.keys() == targets.GPUS.keys()
        assert bound.newer is None or bound.newer.keys() == targets.GPUS.keys()


# --- the run ------------------------------------------------------------------------


@pytest.mark.parametrize("found", [(), ("spills: 9 bytes; 8 allowed",)])
def test_status_table_and_json(found, compilers, monkeypatch, tmp_path, capsys):
    rows = {
        "H200": [row(shared_memory=8192, registers=80, spill_bytes=9, found=found)],
        "v5e:2x2": [row("v5e:2x2", code_bytes=4096)],
    }
    monkeypatch.setattr(compile_check, "check_apart", lambda name, _: rows[name])
    monkeypatch.setattr(targets, "prepare", lambda target: None)
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


@pytest.fixture
def bounds(monkeypatch):
    """Bounds of the op `blend`."""
    bound = kernels.Bound({"H200": 8, "B200": 0}, "a test")
    monkeypatch.setitem(kernels.MAX_SPILL, ("blend", "any"), bound)


def test_a_compiler_error_is_a_problem_of_its_row(monkeypatch, blend_op):
    def refuse(*arguments, **options):
        raise RuntimeError("Shared memory size limit exceeded\nmore")

    monkeypatch.setattr(targets, "compile_for", refuse)
    found = compile_check.check_case(GPU, blend_op[0], "triton")
    assert found.problems == ("RuntimeError: Shared memory size limit exceeded",)
    assert found.resources == report.Resources()


def test_a_spilling_case_fails_and_its_twin_does_not(monkeypatch, blend_op, bounds):
    for spills, problems in ((8, 0), (9, 1)):
        used = report.Resources("sm_90a", 0, 255, spills)
        monkeypatch.setattr(compile_check, "compile_case", lambda *_, used=used: used)
        found = compile_check.check_case(GPU, blend_op[0], "triton")
        assert len(found.problems) == problems
        assert found.resources == used


def test_a_kind_without_a_bound_may_spill_nothing(monkeypatch, blend_op):
    for spills, problems in ((0, ()), (1, ("spills: 1 bytes; 0 allowed",))):
        used = report.Resources("sm_90a", 0, 255, spills)
        monkeypatch.setattr(compile_check, "compile_case", lambda *_, used=used: used)
        assert compile_check.check_case(GPU, blend_op[0], "triton").problems == problems


@pytest.mark.parametrize("target", [GPU, TPU])
def test_each_platform_compiles_its_implementation(target, monkeypatch, blend_op):
    asked = []
    case = dataclasses.replace(
        blend_op[0], call=lambda impl, config: asked.append((impl, config)) or abs
    )

    def compile_for(target, function, *shapes, donate, compiler_options):
        asked.append((function, [x.shape for x in shapes], donate))

    monkeypatch.setattr(targets, "compile_for", compile_for)
    monkeypatch.setattr(report, "gpu_resources", lambda folder, names: names)
    monkeypatch.setattr(report, "tpu_resources", lambda compiled, names: names)
    impl = "triton" if target is GPU else "mosaic_tpu"
    assert compile_check.compile_case(target, case, impl) == ("blend",)
    assert asked == [(impl, None), (abs, [(3, 8), (3,), (3, 8)], (2,))]


def test_only_tagged_cases_are_compiled(monkeypatch, blend_op):
    (case,) = blend_op
    tags = {"a": {"compile"}, "b": {"compile-tpu"}, "c": {"compile-cuda"}, "d": set()}
    blend_op[:] = [
        dataclasses.replace(case, label=label, tags=frozenset(found))
        for label, found in tags.items()
    ]
    monkeypatch.setattr(
        compile_check, "check_case", lambda target, case, impl: (case.label, impl)
    )
    found = [("a", "triton"), ("c", "triton")]
    assert compile_check.check("H200", ["blend"]) == found
    found = [("a", "mosaic_tpu"), ("b", "mosaic_tpu")]
    assert compile_check.check("v5e:2x2", ["blend"]) == found


def test_leaves_of_one_generation_are_compiled_beside(monkeypatch, blend_op):
    """They print no resources, so no bound holds for them; errors are seen."""
    monkeypatch.setitem(kernels.ALSO, ("H200", "blend"), ("mosaic_gpu",))
    monkeypatch.setattr(targets, "compile_for", lambda *_, **__: None)
    monkeypatch.setattr(report, "gpu_resources", lambda *_: report.Resources())
    rows = compile_check.check("H200", ["blend"])
    label = blend_op[0].label
    assert [row.variant for row in rows] == [label, f"{label} mosaic_gpu"]
    assert rows[1].problems == ()

    def refuse(*_, **__):
        raise ValueError("too much shared memory")

    monkeypatch.setattr(targets, "compile_for", refuse)
    assert all(row.problems for row in compile_check.check("H200", ["blend"]))


def test_targets_side_by_side_keep_their_order(monkeypatch):
    prepared = []
    monkeypatch.setattr(targets, "prepare", lambda target: prepared.append(target))
    monkeypatch.setattr(compile_check, "check_apart", lambda name, _: [name] * 2)
    assert compile_check.check_all([TPU, GPU], ["blend"], 2) == [
        "v5e:2x2", "v5e:2x2", "H200", "H200",
    ]  # fmt: skip
    assert prepared == [TPU, GPU]


def test_each_call_gets_a_process_and_a_dead_one_is_noticed():
    assert compile_check.in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(concurrent.futures.process.BrokenProcessPool):
        compile_check.in_fresh_process(os._exit, 134)


def test_a_compiler_that_dies_is_a_row(monkeypatch):
    def die(*arguments):
        raise concurrent.futures.process.BrokenProcessPool

    monkeypatch.setattr(compile_check, "in_fresh_process", die)
    (found,) = compile_check.check_apart("H200", ["tree_verify"])
    assert found.problems == ("the compiler ended its process",)
