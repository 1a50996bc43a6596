"""`compile_check.py --model`: options, bytes a device, copies; nothing is compiled."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.qwen3_5 import published
from scripts import compile_check
from scripts.compiling import hosts, model_check, model_copies, model_step, targets
from treewy_jax import memory, mesh

MODEL = "qwen3.5-35b-a3b"
SMALL = dict(model=MODEL, target="H200x8", layers=4, batch=8, context=256)
PROGRAM = """\
ENTRY %main (a: f32[8,4,128,128]) -> f32[8,4,128,128] {
  %a = f32[8,4,128,128]{3,2,1,0} parameter(0)
  %copy.1 = f32[8,4,128,128]{3,2,1,0} copy(%a), metadata={op_name="state.recurrent"}
  %copy.2 = f32[8,4,128,128]{3,2,1,0:S(1)} copy(%a)
  %copy.3 = f32[8,4,64,256]{3,2,1,0} copy(%a)
  %all-gather.1 = f32[8,4]{1,0} all-gather(%a), dimensions={0}
  %tree_verify.2 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/tree_verify/pallas_call"}
  %f.2 = f32[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/history_verify"}
  %gemm.1 = f32[8]{0} custom-call(%a), custom_call_target="__cublas$gemm"
  ROOT %r = f32[8,4,128,128]{3,2,1,0} bitcast(%copy.1)
}
"""


GATHERS = """\
ENTRY %main (a: f32[4,1]) -> f32[32,1] {
  %all-gather.1 = f32[32,1]{1,0} all-gather(%a), dimensions={0}
  %s.1 = ((f32[4,1]{1,0}), (f32[32,1]{1,0})) all-gather-start(%a), dimensions={0}
  %all-gather.2 = f32[16,2]{1,0} all-gather(%a), dimensions={0}
  %sum.1 = f32[32,1]{1,0} all-reduce(%a), to_apply=%add
}
"""


@pytest.fixture
def compilers(monkeypatch):
    """Compilers that are there, for a host whose devices are a CPU's."""
    monkeypatch.setattr(targets, "version", lambda package: "1.0")
    monkeypatch.setattr(targets, "prepare", lambda target: None)
    monkeypatch.setattr(model_step, "make_mesh", lambda case: None)


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [("H200", 1), ("H200x8", 8), ("B200x16", 16), ("v5p:2x2x2", None)],
)
def test_hosts_are_read(name, count):
    found = hosts.parse(name)
    assert (found.name, found.count) == (name, count)
    assert (found.memory is None) == (count is None)


@pytest.mark.parametrize("name", ["H100x8", "H200x0", "H200x", "h200", "v5p", ""])
def test_unknown_hosts_are_refused(name):
    with pytest.raises(ValueError, match=f"target is {name!r}; allowed: H200, H200x8"):
        hosts.parse(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "H200"], "--target is H200; allowed with --model only"),
        (["--model", MODEL], "target is missing"),
        (["--model", "gpt", "--target", "H200"], "model 'gpt'"),
        (["--model", MODEL, "--target", "H300x8"], "target is 'H300x8'"),
        (["--model", MODEL, "--target", "H200", "--layers", "3"], "layers is 3"),
        (["--model", MODEL, "--target", "H200", "--batch", "0"], "batch is 0"),
        (["--model", MODEL, "--target", "H200", "--context", "300000"], "context is"),
        (["--model", MODEL, "--target", "H200", "--commit", "x"], "commit='x'"),
        (["--model", MODEL, "--target", "H200", "--mesh", "x=2"], "mesh axis 'x'"),
        (["--model", MODEL, "--target", "H200", "--tree", "3,x"], "tree '3,x'"),
        (["--model", MODEL, "--target", "H200", "--tree"], "tree"),
        (["--tree", "1,1,1"], "--tree is ('1,1,1',); allowed with --model only"),
        (["--model", MODEL, "--kernels", "commit"], "kernels: not allowed"),
        (["--model", MODEL, "--targets", "H200"], "targets: not allowed"),
        (["--model", MODEL, "--target", "H200", "--workers", "0"], "workers is 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, compilers, capsys):
    assert compile_check.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(targets, "version", lambda package: None)
    assert compile_check.main(["--model", MODEL, "--target", "v5p:2x2x2"]) == 2
    error = capsys.readouterr().err
    assert "libtpu not installed; run make" in error and error.count("\n") == 1


@pytest.mark.parametrize("sizes", ["tensor=2", "data=2"])
def test_all_devices_of_a_host_are_needed(sizes, monkeypatch):
    four = [jax.devices()[0]] * 4
    monkeypatch.setattr(hosts, "devices", lambda host: four)
    with pytest.raises(ValueError, match="2 devices; H200x4 has 4, and all are needed"):
        hosts.mesh(hosts.parse("H200x4"), sizes)


# --- bytes --------------------------------------------------------------------------


def spread(sizes):
    """Return a mesh of one device many times: only its shape is read."""
    devices = np.array(jax.devices()[:1] * int(np.prod(list(sizes.values()))))
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


@pytest.fixture(scope="module", params=["reconstruct", "store-all", "deferred"])
def arguments(request):
    """A case, its subject, and the arguments of its step on eight devices."""
    case = model_step.Case(**SMALL, commit=request.param)
    subject, shapes = model_step.subject_of(case)
    where = spread({"data": 1, "tensor": 8, "expert": 1})
    return case, subject, where, model_step.arguments_of(subject, shapes, where)


def test_a_device_holds_its_part_by_formula(arguments):
    """Two key-value heads are there four times on eight devices; the rest once."""
    case, subject, where, made = arguments
    found = model_step.parts_of(*made)
    config = dataclasses.replace(published.get(MODEL), num_hidden_layers=4)
    shape = memory.Shape.from_config(config)
    options = dict(tokens=subject.capacity, horizon=case.horizon)
    row = memory.per_sequence(shape, case.commit, (3, 3, 3), "float32", **options)
    rows = case.batch
    counts = 4 * shape.gdn_layers * rows  # an int32 a row and layer, on each device
    counts = 0 if case.commit == "reconstruct" else counts
    recurrent = found["states"] + found["history"] - counts
    assert recurrent == (row["recurrent"] * rows - counts) // 8
    assert (found["history"] > 0) == (case.commit != "reconstruct")
    assert found["conv"] == row["conv"] * rows // 8
    assert found["kv"] == found["mtp_kv"] == row["kv"] * rows * 4 // 8
    records = model_step.records_of(case, subject, where)
    kv = 40 * memory.kv_bytes(shape, 1)
    assert records == rows * (row["records"] - kv + 4 * kv) // 8


def test_weights_are_spread_and_nothing_is_made(arguments):
    *_, made = arguments
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made[0]))
    weights = model_step.parts_of(*made)["weights"]
    assert whole / 8 < weights < whole / 7.5
    leaves = jax.tree.leaves(made)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_layers_left_out_are_counted_by_formula():
    """From 4 of 8 layers follows what all 8 of a model that is no larger keep."""
    where = spread({"data": 1, "tensor": 8, "expert": 1})
    name = "qwen3.5-0.8b"
    case = model_step.Case(name, "H200x8", layers=4, batch=8, context=256, tree="2")
    every = published.get(name).num_hidden_layers
    more = model_step.kept_by_more_layers(case, where)
    some, whole = (
        model_step._kept(dataclasses.replace(case, layers=n), where) for n in (4, every)
    )
    assert 0 < more == whole - some
    for layers in (None, every):
        full = dataclasses.replace(case, layers=layers)
        assert model_step.kept_by_more_layers(full, where) == 0


# --- copies -------------------------------------------------------------------------


def array(*shape, dtype=jnp.float32, where=None):
    where = where or spread({"tensor": 1})
    place = NamedSharding(where, PartitionSpec(None, "tensor"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(model_copies, "LEAST", 1)


def test_a_copy_of_a_devices_part_is_found(any_size):
    """Not one to the chip's own memory, nor one of another shape of the same size."""
    state = array(8, 32, 128, 128, where=spread({"tensor": 8}))
    (found,) = model_copies.whole(PROGRAM, {"states": [state], "kv": [array(8, 9)]})
    assert found.kinds == ("states",)
    assert (found.times, found.nbytes) == (1, 4 * 8 * 4 * 128 * 128)
    assert found.source == "state.recurrent"


@pytest.mark.parametrize(
    "other",
    [array(8, 32, 128, 128), array(8, 4, 128, 128, dtype=jnp.bfloat16)],
    ids=["whole", "dtype"],
)
def test_the_twin_without_a_copy_is_clean(other, any_size):
    assert model_copies.whole(PROGRAM, {"states": [other]}) == []
    no_copy = PROGRAM.replace(" copy(", " bitcast(")
    assert model_copies.whole(no_copy, {"states": [array(8, 4, 128, 128)]}) == []


def test_an_array_put_together_on_every_device_is_found(any_size):
    """Not one that is whole already, nor one of another dtype."""
    spread_out = array(1, 32, where=spread({"tensor": 8}))
    (found,) = model_copies.gathered(GATHERS, {"weights": [spread_out]})
    assert (found.kinds, found.times) == (("weights",), 2)
    assert (found.shape, found.nbytes) == ("f32[32,1]", 4 * 32)
    others = [array(32, 1), array(32, 8, where=spread({"tensor": 8}))]
    others += [array(1, 32, dtype=jnp.bfloat16, where=spread({"tensor": 8}))]
    assert model_copies.gathered(GATHERS, {"weights": others}) == []


@pytest.mark.parametrize("scanned", [True, False])
def test_slices_of_scanned_layers_are_found(scanned, any_size):
    """A scan over stacked layers copies each; layers kept apart are read in place."""
    layers = tuple(jnp.full((64, 64), i, jnp.float32) for i in range(3))

    def loop(x, layers):
        stacked = jnp.stack(layers)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]

    def unrolled(x, layers):
        for weight in layers:
            x = jnp.tanh(x @ weight)
        return x

    run = jax.jit(loop if scanned else unrolled)
    text = run.lower(jnp.ones((5, 64)), layers).compile().as_text()
    found = model_copies.whole(text, {"weights": [array(64, 64)]})
    assert bool(found) == scanned


def test_kernels_and_collectives_are_counted():
    """Those of Pallas, whatever platform compiled them."""
    assert model_copies.kernels(PROGRAM) == {"tree_verify": 1, "history_verify": 1}
    assert model_copies.collectives(PROGRAM) == {"all-gather": 1}


# --- the run ------------------------------------------------------------------------


def result(commit="reconstruct", **fields):
    parts = {"weights": 2**30, "states": 2**29, "rest": 7}
    usual = dict(devices=8, parts=parts, records=5, limit=10, peak=10, temporaries=3)
    return model_step.Result(commit=commit, **({"nodes": 40} | usual | fields))


COPY = model_copies.Copy(("kv",), "bf16[8]", 2**20, 3, "x")
WRONG = [
    ({"problem": "XlaError: no"}, "XlaError: no"),
    ({"peak": 11}, "peak: 11 bytes; the device has 10"),
    ({"whole_peak": 11}, "peak: 11 bytes; the device has 10"),
    (
        {"temporaries": model_check.MOST_TEMPORARY + 6},
        "temporaries: 4294967297 bytes beside the records; 4294967296 allowed, layers "
        "may be copied",
    ),
    ({"copies": (COPY,)}, "copied whole: kv"),
]


@pytest.mark.parametrize(("fields", "message"), [({}, None), *WRONG])
def test_status_table_and_json(
    fields, message, compilers, monkeypatch, tmp_path, capsys
):
    """Problems of the baseline are shown, those of what was asked for decide."""
    monkeypatch.setattr(
        compile_check,
        "in_fresh_process",
        lambda run, case: result(
            case.commit, **(fields if case.commit == "fused" else {"peak": 99})
        ),
    )
    file = tmp_path / "result.json"
    asked = ["--model", MODEL, "--target", "H200x8", "--commit", "fused"]
    status = compile_check.main([*asked, "--json", str(file)])
    assert status == (1 if message else 0)
    printed = capsys.readouterr().out
    assert "1.000" in printed and "0.500" in printed and "store-all" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [row["commit"] for row in rows] == ["fused", "store-all"]
    assert rows[0]["problems"] == ([message] if message else [])
    assert rows[1]["problems"] == ["peak: 99 bytes; the device has 10"]
    assert rows[0]["batch"] == 64 and rows[0]["parts"]["rest"] == 7


@pytest.mark.parametrize(("most", "status"), [(103, 0), (104, 1)])
def test_a_peak_that_grows_with_the_tree_is_wrong(
    most, status, compilers, monkeypatch, tmp_path, capsys
):
    """Of all layers, at three trees; the baseline may grow."""
    nodes = {"1,1,1": 4, "2,2,2": 15, "3,3,3": 40}

    def compiled(run, case):
        ours = {4: 100, 15: 101, 40: most}[nodes[case.tree]]
        peak = 9 * nodes[case.tree] if case.commit == "store-all" else ours
        fields = dict(nodes=nodes[case.tree], whole_peak=peak, limit=200)
        return result(case.commit, **fields)

    monkeypatch.setattr(compile_check, "in_fresh_process", compiled)
    file = tmp_path / "result.json"
    asked = ["--model", MODEL, "--target", "H200x8", "--json", str(file)]
    asked += ["--layers", "4", "--tree", *nodes]
    assert compile_check.main(asked) == status
    printed = capsys.readouterr().out
    assert "reconstruct: the peak grows by 3.0%" in printed or most == 104
    assert "store-all: the peak grows by 900.0%" in printed
    rows = json.loads(file.read_text())["rows"]
    kinds = [(row["tree"], row["nodes"], row["commit"]) for row in rows]
    assert kinds == [
        (tree, n, commit)
        for tree, n in nodes.items()
        for commit in ("reconstruct", "store-all")
    ]


def test_small_conv_windows_may_be_copied():
    copy = COPY._replace(kinds=("conv",))
    assert model_check.problems(result(copies=(copy,))) == []


def test_a_compiler_error_is_a_problem(monkeypatch):
    one = spread(dict.fromkeys(mesh.AXES, 1))
    monkeypatch.setattr(model_step, "make_mesh", lambda case: one)

    def refuse(*arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED\nmore")

    monkeypatch.setattr(model_step, "_compile", refuse)
    case = model_step.Case(model="qwen3.5-0.8b", target="H200", layers=4, batch=1)
    found = model_step.compile_case(case)
    assert found.problem == "RuntimeError: RESOURCE_EXHAUSTED"
    assert found.parts["kv"] > 0 and found.peak is None
