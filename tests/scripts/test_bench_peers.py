"""The comparison with other projects, with a PyTorch and an fla that are fakes.

The fakes compute in numpy, so what is checked of the adapters is real: layouts, scales,
which numbers they get and what is held against float64.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import bench_peers, command
from scripts.benching import chains, contenders, layer, peers
from scripts.workloads import base

CHAIN = layer.Work("verify", 2, (-1, 0, 1), key_heads=1, value_heads=2, dim=16)
TREE = layer.Work("verify", 2, (-1, 0, 0), key_heads=1, value_heads=2, dim=16)


@functools.cache
def drawn(work):
    """What `layer.inputs` makes, without compiling a random generator."""
    shapes = jax.eval_shape(functools.partial(layer.inputs, work), jax.random.key(0))
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():  # whoever comes first may be tracing
        arrays = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in shapes[:8]]
        return *arrays, layer.tree(work)


class Tensor(np.ndarray):
    """As much of torch.Tensor as is used here."""

    def clone(self):
        return self.copy()

    def cuda(self):
        return self

    def cpu(self):
        return self

    def float(self):
        return self.astype(np.float32)

    def numpy(self):
        return np.asarray(self)

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def transpose(self, a, b):
        return np.swapaxes(self, a, b)

    def repeat_interleave(self, times, dim):
        return np.repeat(self, times, axis=dim)


class Graph:
    """Records what is called while it is captured, and counts its replays."""

    capturing = None

    def __init__(self):
        self.calls, self.replays = 0, 0

    def replay(self):
        self.replays += 1


@contextlib.contextmanager
def capture(graph):
    Graph.capturing = graph
    yield
    Graph.capturing = None


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 10.0  # milliseconds


class Stream:
    def wait_stream(self, other):
        pass


def recurrence(q, k, v, *, g, beta, initial_state, output_final_state, **options):
    """fla's contract: raw q and k, state [B, Hv, Dk, Dv], scale Dk^-0.5."""
    assert options == {"use_qk_l2norm_in_kernel": True} and output_final_state
    q, k, v, state = (np.asarray(x, np.float64) for x in (q, k, v, initial_state))
    group = v.shape[2] // k.shape[2]
    q, k = (np.repeat(x, group, axis=2) for x in (q, k))
    q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    output = np.empty_like(v)
    for t in range(v.shape[1]):
        state = np.exp(g[:, t])[..., None, None] * state
        u = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * u)
        output[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5
    if Graph.capturing is not None:
        Graph.capturing.calls += 1
    return output.view(Tensor), state.view(Tensor)


@pytest.fixture
def torch(monkeypatch):
    """A PyTorch with a GPU, and an fla."""
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: None,
        Stream=Stream,
        current_stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        CUDAGraph=Graph,
        graph=capture,
        Event=Event,
    )
    module = types.ModuleType("torch")
    module.cuda = cuda
    module.Tensor, module.device, module.dtype = Tensor, type("device", (), {}), type
    module.from_numpy = lambda array: array.view(Tensor)
    module.from_dlpack = lambda array: np.asarray(array).view(Tensor)
    ops = types.ModuleType("fla.ops.gated_delta_rule")
    ops.fused_recurrent_gated_delta_rule = recurrence
    ops.chunk_gated_delta_rule = recurrence
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    return module


@pytest.fixture
def one_chain(monkeypatch):
    monkeypatch.setattr(bench_peers, "comparisons", lambda chosen: [CHAIN])


@pytest.fixture
def cheap(monkeypatch):
    """Take what compiles at once for ours: it returns v and the state."""

    def case(work, op, outputs, donate):
        return base.Case(
            op=op,
            label=work.label,
            kind="",
            spec=work.cost(1),
            inputs=lambda key: drawn(work),
            call=lambda impl, config: lambda *arrays: [arrays[i] for i in outputs],
            exact=lambda arrays, rows: [
                np.asarray(arrays[i], np.float64)[rows] for i in outputs
            ],
            bounds=(1e-9,) * len(outputs),
            donate=donate,
        )

    def cases(work, exact):
        return [
            case(work, "verify", [2], ()),
            case(work, "verify + commit", [2, 7], (7,)),
        ]

    monkeypatch.setattr(layer, "cases", cases)


def adapters(monkeypatch, **functions):
    module = types.ModuleType("fake_adapters")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "fake_adapters", module)


# --- exact results ------------------------------------------------------------------


def test_exact_results_are_those_of_the_chunked_form():
    """Two derivations: node by node, and whole chunks as for a prompt."""
    arrays = drawn(CHAIN)
    prompt = dataclasses.replace(CHAIN, name="prefill")
    pairs = zip(
        layer.exact_rows(CHAIN, arrays, [1]),
        layer.exact_rows(prompt, arrays, [1]),
        strict=True,
    )
    for by_node, by_chunk in pairs:
        np.testing.assert_allclose(by_node, by_chunk, rtol=1e-9, atol=1e-12)


def test_a_tree_branches_off_its_parents():
    arrays = drawn(TREE)
    output, state = layer.exact_rows(TREE, arrays, [0, 1])
    chain = dataclasses.replace(TREE, parents=(-1, 0))
    cut = [*(x[:, [0, 2]] for x in arrays[:5]), *arrays[5:]]
    want = layer.exact_rows(chain, tuple(cut), [0, 1])
    np.testing.assert_allclose(output[:, [0, 2]], want[0], rtol=1e-12)
    np.testing.assert_allclose(state, want[1], rtol=1e-12)
    assert TREE.path() == [0, 2] and not TREE.is_chain and CHAIN.is_chain


@pytest.mark.parametrize("name", ["verify", "decode", "prefill"])
def test_ours_is_right(name):
    work = dataclasses.replace(TREE, name=name)
    if name != "verify":
        count = 1 if name == "decode" else 5
        work = dataclasses.replace(work, parents=tuple(range(-1, count - 1)))
    for case in layer.cases(work, layer.remembered(work)):
        arrays = drawn(work)
        if case.op in ("decode", "fused step"):  # the numbers that are used in earnest
            arrays = jax.jit(case.inputs)(jax.random.key(1))
        outputs = jax.jit(case.call("auto", None))(*arrays)
        errors = base.errors(case, arrays, outputs, [0, 1])
        assert len(errors) == len(case.bounds)
        assert max(errors) < layer.BOUND


# --- a comparison -------------------------------------------------------------------


def compare(tmp_path, *arguments):
    file = tmp_path / "peers.json"
    status = bench_peers.main(["--quick", "--json", str(file), *arguments])
    return status, json.loads(file.read_text())


def test_fla_gets_the_same_numbers(torch, cheap, one_chain, tmp_path, capsys):
    status, written = compare(tmp_path)
    assert status == 0
    rows = {(row["who"], row["computes"]): row for row in written["rows"]}
    fused = rows["fla fused_recurrent", "outputs and the last state; norms in it, "
                 "gates given"]  # fmt: skip
    assert len(fused["errors"]) == 2 and max(fused["errors"]) < 1e-6
    # 10 ms over the replays of one sample, and over the calls of a graph.
    assert fused["in_a_row_us"]["median"] == pytest.approx(1e4 / 5 / 2)
    assert rows["ours", "verify"]["in_a_row_us"]["samples"] == 2
    assert rows["ours", "verify + commit"]["state"] == "ok"
    assert rows["fla chunk", ""]["state"].endswith("fewer than 40 tokens")
    assert "fla fused_recurrent" in capsys.readouterr().out
    assert written["method"] == bench_peers.__doc__ and written["missing"] == ""


def test_trees_are_not_for_fla(torch, cheap, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_peers, "comparisons", lambda chosen: [TREE])
    status, written = compare(tmp_path)
    assert status == 0
    states = {row["who"]: row["state"] for row in written["rows"]}
    assert states["fla fused_recurrent"].endswith("takes chains only")


def walked(tensors):
    """An adapter: node by node, any tree, in float64."""
    gates = tensors["a"], tensors["b"], tensors["A_log"], tensors["dt_bias"]
    log_decay, beta = layer.exact_gates(*(np.asarray(x, np.float64) for x in gates))
    np.testing.assert_allclose(log_decay, tensors["log_decay"], rtol=1e-6)
    np.testing.assert_allclose(beta, tensors["beta"], rtol=1e-6)
    assert tensors["depth"].tolist() == [0, 1, 1]
    parents = tuple(tensors["parent"].tolist())
    work = dataclasses.replace(TREE, parents=parents)
    arrays = tuple(tensors[name] for name in layer.NAMES)

    def call():
        output, _ = layer.exact_rows(work, arrays, [0, 1])
        return {"output": output.view(Tensor)}

    return call, "verify only"


def test_an_adapter_takes_trees(torch, cheap, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_peers, "comparisons", lambda chosen: [TREE])
    adapters(monkeypatch, walked=walked)
    status, written = compare(tmp_path, "--peer", "walk=fake_adapters:walked")
    assert status == 0
    row = written["rows"][-1]
    assert (row["who"], row["computes"]) == ("walk", "verify only")
    assert row["errors"][0] < 1e-6 and row["in_a_row_us"]


def wrong(tensors):
    call, computes = walked(tensors)
    return lambda: {"output": 1.1 * call()["output"]}, computes


def silent(tensors):
    return dict, "nothing"


def broken(tensors):
    raise RuntimeError("Triton: out of resource")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wrong, "wrong: relative errors 1.0e-01"),
        (silent, "output is needed"),
        (broken, "RuntimeError: Triton: out of resource"),
    ],
)
def test_a_peer_that_fails_is_a_row(
    function, message, torch, cheap, monkeypatch, tmp_path
):
    monkeypatch.setattr(bench_peers, "comparisons", lambda chosen: [TREE])
    adapters(monkeypatch, function=function)
    status, written = compare(tmp_path, "--peer", "bad=fake_adapters:function")
    assert status == 1
    row = written["rows"][-1]
    assert message in row["state"] and row["in_a_row_us"] is None
    assert written["rows"][0]["in_a_row_us"], "the others are timed all the same"


def test_inputs_are_copies(torch):
    arrays = drawn(TREE)
    tensors = peers.tensors_of(torch, arrays)
    tensors["state"][:] = 0
    assert np.any(np.asarray(arrays[7])), "a peer may overwrite its state"


def test_on_a_gpu_cupti_times_peers_too(torch, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kernels = [[("verify", 6.0), ("norm", 2.0)]] * 5
    monkeypatch.setattr(peers.timing, "kernels", lambda call, number: kernels)
    case = layer.cases(TREE, layer.remembered(TREE))[0]
    entrant = contenders.Contender(case, "walk", chain=chains.Plan(1, 4))
    arrays = drawn(TREE)
    sets = [peers.tensors_of(torch, arrays)]
    exact = {"output": layer.exact_rows(TREE, arrays, [0, 1])[0]}
    peer = peers.Peer("walk", walked)
    turn = peers.Turn(entrant, peer, torch, sets, exact, [0, 1])
    turn.take()
    assert entrant.device_us == [2.0] * 5
    assert entrant.kernels == {"verify": 1.5, "norm": 0.5}


# --- what is missing, what is wrong -------------------------------------------------


@pytest.mark.parametrize("lost", ["torch", "GPU", "fla"])
def test_what_is_missing_is_said(
    lost, torch, cheap, monkeypatch, one_chain, tmp_path, capsys
):
    message = {
        "torch": "PyTorch is not installed: no peer is timed",
        "GPU": "PyTorch sees no GPU: no peer is timed",
        "fla": "flash-linear-attention cannot be imported",
    }[lost]
    command.parse(bench_peers.Options, "", [])  # tyro asks for torch, the first time
    if lost == "GPU":
        torch.cuda.is_available = lambda: False
    else:
        name = "torch" if lost == "torch" else "fla.ops.gated_delta_rule"
        monkeypatch.setitem(sys.modules, name, None)
    status, written = compare(tmp_path)
    assert status == 0
    assert message in capsys.readouterr().out and message in written["missing"]
    assert {row["who"] for row in written["rows"]} == {"ours"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "train"], "kinds is 'train'; allowed: verify, decode, prefill"),
        (["--state-dtypes", "int8"], "state_dtypes is 'int8'; allowed: float32"),
        (["--batches", "0"], "batches is (0,)"),
        (["--cases", "n=7"], "nothing is selected"),
        (["--peer", "weaver"], "NAME=MODULE:FUNCTION is allowed"),
        (["--peer", "x=no_such_module:f"], "peer x: No module named 'no_such_module'"),
        (["--peer", "x=json:nothing"], "peer x: module 'json' has no attribute"),
        (["--json", "."], "no file in a folder that exists"),
        (["--slow"], "--slow"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    assert bench_peers.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("bench_peers.py: error: ")
    assert message in printed.err and printed.err.count("\n") == 1


def test_comparisons_are_those_of_the_issue(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = bench_peers.comparisons(bench_peers.Options())
    sizes = {(w.name, w.tokens, w.is_chain) for w in found}
    assert sizes == {
        ("verify", 4, True), ("verify", 40, True), ("verify", 15, False),
        ("verify", 40, False), ("decode", 1, True), ("prefill", 4096, True),
    }  # fmt: skip
    assert {w.batch for w in found if w.name == "verify"} == {1, 32, 256}
    assert {(w.batch, w.key_heads) for w in found if w.name == "prefill"} == {
        (1, 32), (8, 32),
    }  # fmt: skip
    assert {(w.key_heads, w.value_heads, w.dim) for w in found} == {
        (16, 32, 128), (32, 32, 128),
    }  # fmt: skip
