"""The step benchmark on a CPU: that the step is loop.step, floors by hand, wrong input.

Times are never compared: the only clock here is the host's.
"""

import contextlib
import dataclasses
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich import console as rich_console

from models.qwen3_5 import published
from scripts import bench_decode
from scripts.benching import movement, step_parts, step_program, step_report, timing
from scripts.workloads import all as workloads
from treewy_jax import loop

SMALL = dataclasses.replace(
    published.get("qwen3.5-0.8b"),
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    max_position_embeddings=1024,
    eos_token_ids=(),
)
EXPERTS = dataclasses.replace(
    SMALL,
    intermediate_size=None,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    tie_word_embeddings=False,
)
# One GDN layer and one of attention a block: half of what there is to compile.
SHORT = dataclasses.replace(SMALL, full_attention_interval=2, num_hidden_layers=4)
PARTS = [
    "projections", "GDN front", "GDN verify", "attention", "MLP", "commit",
    "head, accept", "draft",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setitem(published.CONFIGS, "small", SMALL)
    monkeypatch.setitem(published.CONFIGS, "experts", EXPERTS)


def subject(name="small", **changes):
    fields = dict(batch=2, context=96, tree="2,2", state_dtype="bfloat16")
    return step_program.subject(name, **(fields | changes))


# --- one run of the command ---------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the command once; what it traced, started from, printed and wrote."""
    folder = tmp_path_factory.mktemp("decode")
    traced, started, timed = [], [], []
    step, start, clocked = loop.step, step_program.start, step_report.clocked

    def traced_step(*arguments):
        traced.append(arguments)
        return step(*arguments)

    def noted_start(*arguments):
        state = start(*arguments)
        started.append(jax.device_get((state.base, state.cache.key[0], state.draft)))
        return state

    def noted_clocked(call, rounds):
        timed.append(call)
        return clocked(call, rounds)

    files = dict(json=folder / "decode.json", plot=folder / "decode.png")
    arguments = ["--models", "short", "--batch", "2", "--context", "96", "--quick"]
    arguments += ["--tree", "2,1", "--copy-tb-s", "0.5"]
    arguments += [word for k, v in files.items() for word in (f"--{k}", str(v))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(published.CONFIGS, "short", SHORT)
        patch.setattr(loop, "step", traced_step)
        patch.setattr(step_program, "start", noted_start)
        patch.setattr(step_report, "clocked", noted_clocked)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = bench_decode.main(arguments)
    return types.SimpleNamespace(
        status=status,
        traced=traced,
        started=started,
        timed=timed,
        printed=printed.getvalue(),
        written=json.loads(files["json"].read_text()),
        plot=files["plot"],
    )


def test_what_is_timed_is_loop_step(run):
    assert run.status == 0
    # Traced once, by the one compilation: what is then called is that program.
    assert len(run.traced) == 1
    whole = run.timed[0]
    state, drafter = whole.arguments[2], whole.arguments[1]
    assert isinstance(state, loop.LoopState)
    assert drafter.parent.tolist() == [-1, 0, 1, 0, 3]
    calls = step_program.CALLS - whole._limit
    assert int(state.steps) == calls > 3
    counts = state.accept_lengths[:, :calls]
    np.testing.assert_array_equal(state.base, 96 + counts.sum(1))
    assert (counts >= 1).all() and not state.done.any()


def test_the_step_can_be_compiled_from_loop_step_alone(monkeypatch):
    monkeypatch.setattr(loop, "step", lambda *_: 1 / 0)
    shapes = [None] * 4
    with pytest.raises(ZeroDivisionError):
        step_program.step.lower(lambda _: None, None, _Unbound(), *shapes[:2])


class _Unbound:
    def bind(self, target):
        return self


jax.tree_util.register_static(_Unbound)


def test_the_state_covers_the_context(run):
    base, key, draft = run.started[0]
    assert base.tolist() == [96, 96] and draft.length.tolist() == [96, 96]
    assert key.shape[1] == 96 + 3 * step_program.CALLS
    prompt = key[:, :64]
    # Every slot is filled; a single number may round to 0 in bfloat16.
    assert np.abs(prompt.astype(np.float32)).max(axis=-1).min() > 0
    assert np.mean(prompt == 0) < 1e-3
    np.testing.assert_array_equal(key[:, 64:96], prompt[:, :32])


def test_parts_sum_and_rest_are_written(run):
    (step,) = run.written["steps"]
    assert run.written["clock"] == "host" and run.written["method"]
    assert [part["name"] for part in step["parts"]] == PARTS
    assert all(part["host_us"]["least"] > 0 for part in step["parts"])
    assert all(part["device_us"] is None for part in step["parts"])
    total = sum(part["host_us"]["median"] for part in step["parts"])
    assert step["sum_us"] == pytest.approx(total)
    rest = step["wall_us"]["median"] - total
    assert step["rest_us"] == pytest.approx(rest)
    for part in step["parts"]:
        assert part["floor_bytes"] > 0
        assert part["floor_us"] == pytest.approx(part["floor_bytes"] / 0.5e6)
    assert step["device_us"] is None and step["problems"] == []
    assert (step["nodes"], step["batch"], step["context"]) == (5, 2, 96)
    assert 1 <= step["tokens_a_step"] <= 3


def test_the_tables_say_whose_clock_it_is(run):
    for name in [*PARTS, "host ms", "whole step, host", "rest", "only move"]:
        assert name in run.printed
    assert "no GPU: the only clock is the host's" in run.printed
    assert "device ms" not in run.printed and "wall" not in run.printed
    assert run.plot.stat().st_size > 1000


# --- floors -------------------------------------------------------------------------


def floors(found):
    """Bytes of each part of a step, and how often, from shapes: nothing is run."""
    params = jax.eval_shape(found.weights)
    state = jax.eval_shape(lambda p: step_program.start(found, p), params)
    bytes_of = {}
    for part in step_parts.of_step(found, params):
        shapes = jax.eval_shape(part.inputs, params, state, step_program.key(0))
        results = jax.eval_shape(part.function, *shapes)
        bytes_of[part.name] = (part.floor_bytes(shapes, results), part.times)
    return bytes_of


def test_floors_of_a_dense_step():
    found = floors(subject())
    nodes, hidden, inner = 2 * 7, 32, 48
    assert found["MLP"] == (4 * 2 * (3 * hidden * inner + 2 * nodes * hidden), 1)
    assert found["head, accept"] == (2 * (64 * hidden + nodes * hidden), 1)
    # A row's state is 4 x 8 x 8, a key head's keys 2 x 8, a value head's values 4 x 8.
    state = 3 * 2 * 2 * 256
    records = 2 * 16 + 4 * 32 + 4 * 4
    window = 3 * 2 * 3 * 64 * 2
    a_node = 3 * (records + 2 * 64) + 2 * 2 * (2 * 2 * 16)
    assert found["commit"] == (2 * (state + window) + 2 * 3 * a_node, 1)
    kv = 2 * 2 * 16 * 2
    q = 2 * 4 * 16 * 2
    attention = 2 * (96 * kv + 7 * kv + 7 * q + 7 * 7 + 4)
    assert found["attention"] == (attention, 1)
    gates = 2 * nodes * 4 * 4
    rows = nodes * (2 * 16 + 32) * 2
    verify = state + 3 * (rows + gates + nodes * 32 * (2 + 4) + nodes * 4 * 4)
    tree = 4 * (nodes + 7 + 2)
    assert abs(found["GDN verify"][0] - verify) <= tree


def test_weights_are_read_once_a_run():
    found = floors(subject(tree="1"))
    deeper = floors(subject(tree="1,1"))
    hidden, inner = 32, 48
    head = 64 * hidden
    mixer = hidden * (2 * 64 + 2 * 32) + 64 * hidden + 2 * 16
    layer = 2 * hidden * hidden + mixer + 3 * hidden * inner + 5 * hidden
    prefix = 2 * 2 * 96 * 2 * 16
    assert found["draft"][0] == pytest.approx(2 * (head + layer + prefix), abs=4)
    assert deeper["draft"][0] == pytest.approx(2 * found["draft"][0], abs=4)


def test_only_the_experts_touched_count():
    found, one = floors(subject("experts")), floors(subject("experts", tree="none"))
    hidden, inner, shared = 32, 16, 24

    def bytes_of(tokens):
        touched = 8 * (1 - (1 - 2 / 8) ** tokens)
        always = hidden * (8 + 1) + 3 * hidden * shared + 2 * tokens * hidden
        return 4 * 2 * (touched * 3 * hidden * inner + always)

    assert found["MoE"][0] == pytest.approx(bytes_of(14), abs=8)
    assert one["MoE"][0] == pytest.approx(bytes_of(2), abs=8)
    assert one["MoE"][0] < found["MoE"][0]
    assert "draft" not in one


def test_parts_of_layers_count_for_every_block():
    found = floors(subject(blocks=2))
    assert [found[name][1] for name in PARTS] == [2, 2, 2, 2, 2, 1, 1, 1]
    assert found["commit"][0] == pytest.approx(2 * floors(subject())["commit"][0])


# --- clocks, kernels and moves ------------------------------------------------------


def test_on_a_gpu_kernels_are_summed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls = [[("tree_verify", 5.0), ("loop_copy_fusion", 2.0)]] * 3
    monkeypatch.setattr(timing, "kernels", lambda call, number: calls)
    clock, problems = step_report.clocked(lambda: jnp.ones(()), 2)
    assert clock.us == 7 and clock.device_us == [7, 7, 7] and problems == []
    assert len(clock.host_us) == 2
    assert clock.kernels == {"tree_verify": 5, "loop_copy_fusion": 2}

    def fail(call, number):
        raise RuntimeError("CUPTI recorded 5 kernels in 3 calls")

    monkeypatch.setattr(timing, "kernels", fail)
    clock, problems = step_report.clocked(lambda: jnp.ones(()), 2)
    assert clock.us > 0 and clock.device_us == []
    assert problems == ["host's clock, CUPTI recorded 5 kernels in 3 calls"]


def result(kernels):
    clock = step_report.Clock([10.0], [12.0], kernels)
    part = step_parts.Part("MLP", None, None, None, times=2)
    timed = step_report.Clock([3.0], [9.0], {})
    return step_report.Result(
        subject(), 7, clock, [(part, timed, 500)], 1.5, [], {"wrapped_slice": "a/b"}, []
    )


def test_ours_and_products_are_told_from_the_rest():
    names = [*workloads.MODULES, "grouped_matmul_up", "mosaic_gpu_tree_verify"]
    names += ["gemm_fusion_dot_7", "nvjet_hsh_128x64", "sm90_xmma_gemm", "cutlass_80"]
    found = result(dict.fromkeys(names, 1.0) | {"wrapped_slice": 1, "copy": 2})
    assert found.others == [("copy", 2), ("wrapped_slice", 1)]
    assert found.explained_us == 6
    record = step_report.record(found, 1e12)
    assert record["neither_ours_nor_products_us"] == {"copy": 2, "wrapped_slice": 1}
    assert record["rest_us"] == 4
    assert record["parts"][0]["device_us"]["median"] == 6
    console = io.StringIO()
    rich_console.Console(file=console, width=120).print(
        step_report.table(found, 1e12), step_report.others_table(found)
    )
    printed = console.getvalue()
    assert "MLP (x 2)" in printed and "whole step, wall" in printed
    assert "a/b" in printed and "device ms" in printed


PROGRAM = """
HloModule jit_step
%slices (w: bf16[2,512,2048], i: s32[]) -> bf16[512,2048] {
  %w = bf16[2,512,2048]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %sum = s32[] add(%i, %zero)
  %cut = bf16[1,512,2048]{2,1,0} dynamic-slice(%w, %sum, %zero, %zero)
  ROOT %flat = bf16[512,2048]{1,0} bitcast(%cut)
}
%updates (old: f32[9,1024,512], new: f32[1024,512], i: s32[]) -> f32[9,1024,512] {
  %old = f32[9,1024,512]{2,1,0} parameter(0)
  %new = f32[1024,512]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %one = f32[1,1024,512]{2,1,0} bitcast(%new)
  ROOT %put = f32[9,1024,512]{2,1,0} dynamic-update-slice(%old, %one, %i, %i, %i)
}
%computes (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %turned = bf16[1024,1024]{0,1} transpose(%x)
  ROOT %twice = bf16[1024,1024]{1,0} add(%x, %turned)
}
%body (carry: (s32[], bf16[2,512,2048])) -> (s32[], bf16[2,512,2048]) {
  %carry = (s32[], bf16[2,512,2048]{2,1,0}) parameter(0)
  %w = bf16[2,512,2048]{2,1,0} get-tuple-element(%carry), index=1
  %i = s32[] get-tuple-element(%carry), index=0
  %start = ((bf16[2,512,2048], s32[]), bf16[512,2048], u32[]) fusion-start(%w, %i), \
calls=%slices, metadata={op_name="scan/slice"}
  %end = bf16[512,2048]{1,0} fusion-done(%start)
  %inner = bf16[1024,1024]{1,0} fusion(%end), kind=kLoop, calls=%computes
  ROOT %out = (s32[], bf16[2,512,2048]{2,1,0}) tuple(%i, %w)
}
%condition (carry: (s32[], bf16[2,512,2048])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (w: bf16[2,512,2048], old: f32[9,1024,512], new: f32[1024,512]) -> s32[] {
  %w = bf16[2,512,2048]{2,1,0} parameter(0)
  %loop = (s32[], bf16[2,512,2048]{2,1,0}) while(%init), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %grown = f32[9,1024,512]{2,1,0} fusion(%old, %new, %i), calls=%updates
  %copy.3 = f32[1024,768]{1,0} copy(%new)
  %tiny = f32[16]{0} copy(%new)
  %numbers = s32[1024,4096]{1,0} copy(%i)
  ROOT %done = s32[] get-tuple-element(%loop), index=0
}
"""


def test_moves_are_read_from_the_program():
    found = movement.moves(PROGRAM)
    assert [(m.name, m.nbytes, m.times) for m in found] == [
        ("start", 2 * 2**20, 5),
        ("copy.3", 3 * 2**20, 1),
        ("grown", 2 * 2**20, 1),
    ]
    assert (found[0].shape, found[0].source) == ("bf16[512,2048]", "scan/slice")
    assert movement.moves(PROGRAM, least=2 * 2**20 + 1)[0].name == "copy.3"
    assert movement.sources(PROGRAM) == {"start": "scan/slice"}


def test_a_scan_over_stacked_weights_shows():
    """What XLA itself writes: one weight a block is cut out of the stack."""

    def scanned(stacked, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]

    shapes = jax.ShapeDtypeStruct((3, 512, 512), jnp.float32), jnp.ones((4, 512))
    text = jax.jit(scanned).lower(*shapes).compile().as_text()
    found = movement.moves(text)
    assert [(m.nbytes, m.times) for m in found] == [(2**20, 3)]


def test_the_cheap_generator_looks_random():
    keys = jax.random.split(step_program.key(0), 3)
    x, y, z = (jax.random.normal(key, (256, 64)) for key in keys)
    for a in (x, y, z):
        assert abs(float(a.mean())) < 0.03 and abs(float(a.std()) - 1) < 0.02
        # Rows are of full rank: a router sends them everywhere.
        assert float(jnp.linalg.svd(a, compute_uv=False)[-1]) > 4
    for a, b in ((x, y), (y, z), (x[1:], x[:-1])):
        assert abs(float((a * b).mean())) < 0.03
    folded = jax.random.fold_in(step_program.key(0), 1)
    assert (jax.random.bits(folded) != jax.random.bits(keys[0])).all()


# --- arguments ----------------------------------------------------------------------


def test_a_state_serves_so_many_steps():
    fed = step_program.Fed(lambda x, y: x + y, [1, 2], 0, limit=2)
    assert (fed(), fed(), fed.arguments) == (3, 5, [5, 2])
    with pytest.raises(RuntimeError, match="no slots are left"):
        fed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "qwen4"], "model 'qwen4': a folder or one of tiny, qwen3.5-0.8b"),
        (["--models"], "models is empty"),
        (["--batch"], "batch is empty"),
        (["--batch", "0"], "batch is 0; 1 or more"),
        (["--context", "0"], "context is 0; 1 or more"),
        (["--context", "900"], "context is 900; small allows 768 at most"),
        (["--blocks", "7"], "blocks is 7; small has 6"),
        (["--tree", "3,x"], "3,x"),
        (["--state-dtype", "int8"], "state_dtype='int8'"),
        (["--dtype", "int8"], "dtype 'int8'"),
        (["--copy-tb-s", "0"], "copy_tb_s is 0.0; a number above 0"),
        (["--json", "."], "no file in a folder that exists"),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    start = [] if arguments[0] == "--models" else ["--models", "small"]
    assert bench_decode.main([*start, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("bench_decode.py: error: ")
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_without_matplotlib_a_plot_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["--models", "small", "--plot", str(tmp_path / "x.png")]
    assert bench_decode.main(arguments) == 2
    assert "plot needs matplotlib" in capsys.readouterr().err
