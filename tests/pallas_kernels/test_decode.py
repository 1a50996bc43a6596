"""One decoded token against the recurrence in float64, for every implementation."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.decode import config as configs
from pallas_kernels.decode import op
from pallas_kernels.decode import spec as specs

# B, Hk, Hv, Dk, Dv: head ratios 1 to 4, one of everything, Dk != Dv, published dims.
SHAPES = [
    (1, 1, 1, 8, 8),
    (2, 2, 4, 16, 32),
    (3, 1, 3, 32, 16),
    (2, 1, 4, 128, 128),
    (1, 8, 16, 16, 16),
]
DTYPES = ["float32", "bfloat16"]


def runs_here(impl):
    """Whether an implementation runs on this device, a CPU interpreting the kernels."""
    spec = specs.spec_of(*make(SHAPES[1]))
    if impl == "reference":
        return True
    module = op.IMPLEMENTATIONS.module(impl)
    return module.supports(spec, device.platform(), interpret=True) is None


def make(shape, dtype="float32", state_dtype="float32", seed=0):
    """Return correlated keys, decays from none to strong and a full state."""
    batch, key_heads, value_heads, key_dim, value_dim = shape
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, batch, key_heads, key_dim)) + 1
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    heads = (batch, value_heads)
    arrays = (
        keys[0] * key_dim**-0.5,
        keys[1],
        random.normal(size=(*heads, value_dim)),
        -np.exp(random.normal(-3, 3, heads)),
        random.random(heads),
        random.normal(size=(*heads, value_dim, key_dim)),
    )
    kinds = [dtype] * 3 + ["float32"] * 2 + [state_dtype]
    if dtype == "float64":
        kinds = ["float64"] * 6
    return tuple(jnp.asarray(x, k) for x, k in zip(arrays, kinds, strict=True))


def exact(q, k, v, log_decay, beta, state):
    """S' = e^g S + u k^T, u = beta (v - e^g S k), o = S' q, in float64."""
    q, k, v, log_decay, beta, state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state)
    )
    output, new = np.empty_like(v), np.empty_like(state)
    group = v.shape[1] // k.shape[1]
    for b, h in np.ndindex(*v.shape[:2]):
        key = k[b, h // group]
        decayed = np.exp(log_decay[b, h]) * state[b, h]
        pseudo_value = beta[b, h] * (v[b, h] - decayed @ key)
        new[b, h] = decayed + np.outer(pseudo_value, key)
        output[b, h] = new[b, h] @ q[b, h // group]
    return output, new


def error(got, wanted):
    """Relative Frobenius error; NaN never passes a comparison."""
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@functools.partial(jax.jit, static_argnames=("impl", "config", "output_dtype"))
def decode(*arrays, **options):
    return op.decode(*arrays, **options)


over_impls = pytest.mark.parametrize(
    "impl", [name for name in op.IMPLEMENTATIONS.modules if runs_here(name)]
)


@over_impls
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(impl, shape):
    arrays = make(shape)
    output, state = decode(*arrays, impl=impl)
    assert output.dtype == state.dtype == jnp.float32
    wanted = exact(*arrays)
    assert error(output, wanted[0]) < 2e-6
    assert error(state, wanted[1]) < 2e-6


@over_impls
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_bfloat16_rows(impl, state_dtype):
    arrays = make(SHAPES[1], "bfloat16", state_dtype)
    output, state = decode(*arrays, impl=impl)
    assert output.dtype == jnp.bfloat16 and state.dtype == state_dtype
    wanted = exact(*arrays)
    assert error(output, wanted[0]) < 4e-3
    assert error(state, wanted[1]) < (2e-6 if state_dtype == "float32" else 4e-3)
    output, _ = decode(*arrays, impl=impl, output_dtype="float32")
    assert output.dtype == jnp.float32 and error(output, wanted[0]) < 2e-6


@pytest.mark.parametrize("block_v", [8, 16, 32])
def test_every_cut_gives_the_same(block_v):
    if not runs_here("triton"):
        pytest.skip("no GPU, and the interpreter only runs on a CPU")
    arrays = make(SHAPES[1])
    wanted = exact(*arrays)
    got = decode(*arrays, impl="triton", config=configs.Config(block_v, 1))
    assert error(got[0], wanted[0]) < 2e-6 and error(got[1], wanted[1]) < 2e-6


def test_float64_is_computed_in_float64(double):
    arrays = make(SHAPES[2], "float64")
    got, wanted = decode(*arrays), exact(*arrays)
    assert got[0].dtype == got[1].dtype == jnp.float64
    assert error(got[0], wanted[0]) < 1e-14 and error(got[1], wanted[1]) < 1e-14


@over_impls
def test_rows_of_the_batch_keep_to_themselves(impl):
    arrays = make(SHAPES[2])
    before = decode(*arrays, impl=impl)
    poisoned = tuple(x.at[1].set(jnp.nan) for x in arrays)
    after = decode(*poisoned, impl=impl)
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[::2], new[::2])
        assert np.all(np.isnan(new[1]))


@over_impls
def test_no_decay_and_no_writing_leave_the_state(impl):
    q, k, v, log_decay, beta, state = make(SHAPES[1], state_dtype="bfloat16")
    after = decode(q, k, v, 0 * log_decay, 0 * beta, state, impl=impl)[1]
    assert np.array_equal(after, state)


@over_impls
def test_the_state_may_be_donated(impl):
    arrays = make(SHAPES[1])
    wanted = decode(*arrays, impl=impl)
    donating = jax.jit(functools.partial(op.decode, impl=impl), donate_argnums=5)
    got = donating(*arrays[:5], arrays[5] + 0)
    assert all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.parametrize("fault", ["head order", "decay", "transposed", "write"])
def test_broken_twins_are_caught(fault):
    arrays = list(make((2, 2, 4, 16, 16)))
    wanted = exact(*arrays)
    if fault == "head order":  # value head j would read key head j % Hk
        arrays[1] = jnp.tile(arrays[1], (1, 2, 1))
        arrays[0] = jnp.tile(arrays[0], (1, 2, 1))
    elif fault == "decay":
        arrays[3] = -arrays[3]
    elif fault == "transposed":
        arrays[5] = arrays[5].swapaxes(2, 3)
    else:
        arrays[4] = arrays[4] / 2
    got = decode(*arrays)
    assert max(error(*pair) for pair in zip(got, wanted, strict=True)) > 1e-2


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("state has shape", lambda a: a | {"state": a["state"][0]}),
        ("q has shape", lambda a: a | {"q": a["q"][:, :, :8]}),
        ("q has shape", lambda a: a | {"q": jnp.repeat(a["q"], 3, 1)}),
        ("k has shape", lambda a: a | {"k": a["k"][:1]}),
        ("v has shape", lambda a: a | {"v": a["v"][:, :3]}),
        ("log_decay has shape", lambda a: a | {"log_decay": a["beta"][:, :1]}),
        ("beta has shape", lambda a: a | {"beta": a["beta"][..., None]}),
        ("output_dtype is int32", lambda a: a | {"output_dtype": "int32"}),
        ("impl is 'cuda'", lambda a: a | {"impl": "cuda"}),
    ],
)
def test_wrong_arguments_are_named(message, change):
    names = ("q", "k", "v", "log_decay", "beta", "state")
    arguments = change(dict(zip(names, make(SHAPES[1]), strict=True)))
    with pytest.raises(ValueError, match=message):
        op.decode(**arguments)


@pytest.mark.parametrize("block_v", [0, 5, 64])
def test_a_cut_that_does_not_divide_is_refused(block_v):
    spec = specs.spec_of(*make(SHAPES[1]))
    with pytest.raises(ValueError, match=f"block_v is {block_v}"):
        configs.choose(spec, "gpu", "NVIDIA H200", configs.Config(block_v))


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("triton", {"key_dim": 24}, "power of two"),
        ("triton", {"state_dtype": "float16"}, "state dtype float16"),
        ("triton", {"accumulation_dtype": "float64"}, "not float64"),
        ("mosaic_tpu", {"value_dim": 12}, "multiple of 8"),
        ("mosaic_tpu", {"input_dtype": "float16"}, "input dtype float16"),
    ],
)
def test_supports_says_why_not(impl, change, reason):
    module = op.IMPLEMENTATIONS.module(impl)
    platform = {"triton": "gpu", "mosaic_tpu": "tpu"}[impl]
    spec = specs.spec_of(*make(SHAPES[1]))
    assert module.supports(spec, platform) is None
    assert module.supports(spec, "cpu", interpret=True) is None
    assert "the device is a cpu" in module.supports(spec, "cpu")
    assert reason in module.supports(dataclasses.replace(spec, **change), platform)


def test_a_named_implementation_refuses_instead_of_falling_back():
    arrays = make((1, 1, 1, 24, 24))
    with pytest.raises(NotImplementedError, match="triton"):
        op.decode(*arrays, impl="triton")
    assert decode(*arrays)[0].shape == (1, 1, 24)


def test_bytes_of_a_call():
    spec = specs.spec_of(*make((2, 2, 4, 16, 32), "bfloat16"))
    states = 2 * 4 * 32 * 16 * 4
    rows = 2 * (2 * 2 * 16 + 4 * 32) + 2 * 4 * 32 + 2 * 4 * 4
    assert spec.bytes_moved == 2 * (states + rows)


def test_tuned_tables_hold_cuts_that_fit():
    for file in configs.TUNED.glob("*.json"):
        for entry in json.loads(file.read_text()):
            assert 128 % configs.Config(**entry["config"]).block_v == 0
            fields = {field.name for field in dataclasses.fields(specs.Spec)}
            assert set(entry["match"]) <= fields
