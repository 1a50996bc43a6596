"""Every implementation of chunk_prefill against the recurrence in float64.

On a CPU the kernels are interpreted, on a GPU they are compiled.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.chunk_prefill import body, mosaic_tpu, op, triton
from pallas_kernels.chunk_prefill import config as configs
from pallas_kernels.chunk_prefill import spec as specs
from scripts.workloads import chunk_prefill as workloads

# B, T, Hk, Hv, Dk, Dv. The first is used wherever nothing else is asked for, so that
# it is compiled once; then one token, whole chunks, one short of a chunk.
RAGGED = (2, 37, 2, 4, 16, 32)
SHAPES = [RAGGED, (1, 1, 1, 1, 16, 16), (1, 32, 1, 3, 32, 16), (1, 15, 1, 4, 16, 16)]
GATES = ("mixed", "correlated", "zero", "strong")
BOUNDS = {"float32": 1e-5, "bfloat16": 6e-3}
SMALL = configs.Config(chunk=16, block_v=16)
run = jax.jit(op.chunk_prefill, static_argnames=("impl", "config"))


def make_spec(**changes):
    sizes = dict(batch=1, tokens=9, key_heads=1, value_heads=1, key_dim=16)
    sizes |= dict(value_dim=16, chunk=16, input_dtype="float32")
    sizes |= dict(state_dtype="float32", output_dtype="float32")
    return specs.Spec(**sizes | changes)


def runs_here(impl):
    if impl == "reference":
        return True
    module = op.IMPLEMENTATIONS.module(impl)
    platform = jax.default_backend()
    return module.supports(make_spec(), platform, interpret=True) is None


IMPLS = [name for name in op.IMPLEMENTATIONS.modules if runs_here(name)]
KERNELS = [name for name in IMPLS if name != "reference"]
over_impls = pytest.mark.parametrize("impl", IMPLS)
over_kernels = pytest.mark.parametrize("impl", KERNELS)


def make(shape, dtype="float32", gates="mixed", seed=0, state_dtype="float32"):
    """Return q, k, v, log_decay, beta, state as a layer makes them."""
    batch, tokens, key_heads, value_heads, key_dim, value_dim = shape
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, batch, tokens, key_heads, key_dim))
    if gates == "correlated":
        keys[1] = keys[1, :, :1] + 0.1 * keys[1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    rows = (batch, tokens, value_heads)
    log_decay, beta = {
        "mixed": lambda: (-np.exp(random.normal(-3, 2, rows)), random.random(rows)),
        "correlated": lambda: (np.full(rows, -1e-3), np.full(rows, 0.99)),
        "zero": lambda: (np.zeros(rows), random.random(rows)),
        "strong": lambda: (np.full(rows, -60.0), random.random(rows)),
    }[gates]()
    state = random.normal(size=(batch, value_heads, value_dim, key_dim))
    values = random.normal(size=(*rows, value_dim))
    narrow = [np.asarray(x, dtype) for x in (keys[0] * key_dim**-0.5, keys[1], values)]
    gates = [np.asarray(x, np.float32) for x in (log_decay, beta)]
    return (*narrow, *gates, np.asarray(state, state_dtype))


def recurrence(q, k, v, log_decay, beta, state):
    """S <- e^g S; S <- S + beta (v - S k) k^T; o = S q, token by token in float64."""
    arrays = (q, k, v, log_decay, beta, state)
    q, k, v, log_decay, beta, state = (np.asarray(x, np.float64) for x in arrays)
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        read = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - read)
        state = state + update[..., None] * k[:, t, :, None]
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return np.stack(outputs, axis=1), state


def error(got, wanted):
    """Return the largest relative error of the arrays; NaN never passes."""
    pairs = zip(got, wanted, strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


@over_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(impl, shape):
    arrays = make(shape)
    got = run(*arrays, impl=impl, config=SMALL)
    assert got[0].dtype == got[1].dtype == jnp.float32
    assert error(got, recurrence(*arrays)) < BOUNDS["float32"]


@over_impls
def test_bfloat16(impl):
    arrays = make(RAGGED, "bfloat16", state_dtype="bfloat16")
    got = run(*arrays, impl=impl, config=SMALL)
    assert got[0].dtype == got[1].dtype == jnp.bfloat16
    bound = BOUNDS["bfloat16"] * (2 if impl == "reference" else 1)
    assert error(got, recurrence(*arrays)) < bound


@over_kernels
@pytest.mark.parametrize("gates", GATES)
def test_gates_and_correlated_keys(impl, gates):
    """In chunks of 64, where the powers of a triangle would cancel."""
    arrays = make((1, 128, 1, 1, 16, 16), gates=gates)
    got = run(*arrays, impl=impl, config=configs.Config(block_v=16))
    assert error(got, recurrence(*arrays)) < 2e-5


@over_kernels
def test_small_decay_after_a_large_one_keeps_its_digits(impl):
    arrays = list(make(RAGGED))
    arrays[3] = np.full_like(arrays[3], -0.1)
    arrays[3][:, 5] = -3000
    got = run(*arrays, impl=impl, config=SMALL)
    assert error(got, recurrence(*arrays)) < 1e-5


@over_kernels
def test_tokens_that_write_nothing_change_no_bit(impl):
    """Rows with beta = log_decay = 0, whatever they hold, as ragged batches have."""
    arrays = make(RAGGED)
    real = np.arange(37) < 20
    for x in arrays[3:5]:
        x[:, ~real] = 0
    first = run(*arrays, impl=impl, config=SMALL)
    for x in arrays[:3]:
        x[:, ~real] = 1e3
    second = run(*arrays, impl=impl, config=SMALL)
    assert np.array_equal(first[1], second[1])
    assert np.array_equal(first[0][:, real], second[0][:, real])
    short = [x[:, real] for x in arrays[:5]]
    assert error([first[0][:, real], first[1]], recurrence(*short, arrays[5])) < 1e-5


@over_kernels
def test_later_tokens_change_no_bit_of_earlier_ones(impl):
    arrays = make(RAGGED)
    first = run(*arrays, impl=impl, config=SMALL)[0]
    for x in arrays[:5]:
        x[:, 22:] *= 0.5
    second = run(*arrays, impl=impl, config=SMALL)[0]
    assert np.array_equal(first[:, :22], second[:, :22])
    assert not np.array_equal(first[:, 22:], second[:, 22:])


def test_gradients_are_those_of_the_reference():
    arrays = make((1, 7, 1, 2, 16, 16))
    weights = [np.cos(np.arange(x.size)).reshape(x.shape) for x in arrays[2::3]]

    def loss(arrays, impl):
        output, state = op.chunk_prefill(*arrays, impl=impl, config=SMALL)
        return jnp.sum(weights[0] * output) + jnp.sum(weights[1] * state)

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    wanted = gradient(arrays, "reference")
    for impl in KERNELS:
        got = gradient(arrays, impl)
        assert error(got[1], wanted[1]) < 1e-6
        assert error(got[:1], wanted[:1]) < 1e-4 and got[0] != wanted[0]


@over_kernels
def test_broken_twins_are_caught(impl, monkeypatch):
    """A wrong head ratio, an inverse that is none, a decay that is counted twice."""
    arrays = list(make(RAGGED))
    wanted = recurrence(*arrays)
    turned = [x[:, :, ::-1] for x in arrays[:2]]
    assert error(run(*turned, *arrays[2:], impl=impl, config=SMALL), wanted) > 1e-2
    for name, broken in (
        ("unit_lower_inverse", lambda x, parts: jnp.eye(x.shape[0], dtype=x.dtype)),
        ("coarse_and_fine", lambda x: (x, x)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(body, name, broken)
            # A new function: jit would find the trace of the sound one.
            fresh = jax.jit(lambda *x: op.chunk_prefill(*x, impl=impl, config=SMALL))
            assert error(fresh(*arrays), wanted) > 1e-2


@over_kernels
def test_mixed_dtypes_are_widened(impl):
    arrays = list(make((1, 15, 1, 4, 16, 16)))
    arrays[2] = np.asarray(arrays[2], "bfloat16")
    got = run(*arrays, impl=impl, config=SMALL)
    assert got[0].dtype == jnp.bfloat16
    wanted = recurrence(*arrays)
    assert error(got[1:], wanted[1:]) < 1e-5


def test_supports_says_why_not():
    assert triton.supports(make_spec(), "gpu") is None
    assert mosaic_tpu.supports(make_spec(), "tpu") is None
    for module, change, reason in (
        (triton, dict(key_dim=24), "needs key_dim to be a power of two >= 16, not 24"),
        (triton, dict(value_dim=8), "needs value_dim to be a power of two >= 16"),
        (triton, dict(input_dtype="float64"), "not input dtype float64"),
        (mosaic_tpu, dict(key_dim=20), "needs key_dim to be a multiple of 8, not 20"),
        (mosaic_tpu, dict(state_dtype="float16"), "not state dtype float16"),
    ):
        platform = "gpu" if module is triton else "tpu"
        assert reason in module.supports(make_spec(**change), platform)
    assert "needs a GPU; the device is a tpu" in triton.supports(make_spec(), "tpu")
    assert "needs a TPU; the device is a gpu" in mosaic_tpu.supports(make_spec(), "gpu")


def test_choice_of_implementation():
    arrays = [jnp.asarray(x) for x in make((1, 5, 1, 1, 8, 8))]
    with pytest.raises(ValueError, match=r"impl is 'fast'; allowed: auto, triton"):
        op.chunk_prefill(*arrays, impl="fast")
    if "triton" in IMPLS:
        with pytest.raises(NotImplementedError, match="needs key_dim to be a power"):
            op.chunk_prefill(*arrays, impl="triton")
    assert error(op.chunk_prefill(*arrays, impl="auto"), recurrence(*arrays)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk=24), "chunk is 24; allowed: a power of two"),
        (dict(chunk=8), "chunk is 8; allowed: a power of two"),
        (dict(block_v=48), "block_v is 48; allowed: a power of two"),
        (dict(block_v=64), "block_v is 64; allowed: at most Dv = 16"),
    ],
)
def test_wrong_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        configs.choose(make_spec(), "gpu", "", configs.Config(**change))


def test_configuration_comes_from_the_table(tmp_path, monkeypatch):
    entry = {"match": {"tokens": 9}, "config": {"block_v": 16, "scan_stages": 5}}
    (tmp_path / "some_card.json").write_text(json.dumps([entry]))
    monkeypatch.setattr(configs, "TUNED", tmp_path)
    tuned = configs.choose(make_spec(), "gpu", "Some card")
    assert tuned == configs.Config(block_v=16, scan_stages=5)
    guess = configs.choose(make_spec(tokens=8), "gpu", "Some card")
    assert guess != tuned and guess.block_v == 16
    assert configs.choose(make_spec(), "gpu", "Some card", SMALL) is SMALL


def test_heuristic_fills_the_card_first():
    """Few heads are cut in more programs; float32 operands take more registers."""
    sizes = dict(value_dim=128, key_dim=128, value_heads=32, input_dtype="bfloat16")
    for change, cut in (
        (dict(batch=1), (32, 4)),
        (dict(batch=8), (128, 8)),
        (dict(batch=8, value_dim=64), (64, 4)),
        (dict(batch=8, input_dtype="float32"), (64, 8)),
        (dict(batch=1, value_dim=16), (16, 4)),
    ):
        found = configs.heuristic(make_spec(**sizes | change), "gpu")
        assert (found.block_v, found.scan_warps) == cut


def test_tuned_tables_are_valid():
    for file in configs.TUNED.glob("*.json"):
        for entry in json.loads(file.read_text()):
            assert set(entry["match"]) <= set(specs.Spec.__dataclass_fields__)
            configs.Config(**entry["config"])
    assert tuning.slug("NVIDIA H200") == "nvidia_h200"


def test_workloads_check_against_the_recurrence():
    arrays = make((2, 100, 2, 4, 16, 32))
    wanted = recurrence(*arrays)
    got = workloads.exact(arrays, [1])
    assert error(got, [x[1:] for x in wanted]) < 1e-12
    for case in workloads.cases():
        shapes = jax.eval_shape(case.inputs, jax.random.key(0))
        assert specs.make_spec(*shapes) == case.spec
        assert case.configs and set(case.match) <= set(specs.Spec.__dataclass_fields__)
