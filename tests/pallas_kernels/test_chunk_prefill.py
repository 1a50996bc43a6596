"""The chunked forward against the recurrence, token by token, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.chunk_prefill import linear, reference
from pallas_kernels.chunk_prefill import reference as op
from pallas_kernels.chunk_prefill import spec as spec_lib

# B, T, Hk, Hv, Dk, Dv: one token, one short of a chunk, odd lengths and ratios.
SHAPES = [
    (1, 1, 1, 1, 8, 8),
    (2, 15, 2, 4, 16, 24),
    (1, 70, 1, 3, 16, 8),
]
GATES = ("mixed", "correlated", "zero", "strong")


def make(shape, dtype, seed=0, gates="mixed"):
    batch, tokens, key_heads, value_heads, key_dim, value_dim = shape
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, batch, tokens, key_heads, key_dim))
    if gates == "correlated":
        keys[1] = np.sqrt(0.99) * keys[1, :, :1] + 0.1 * keys[1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    rows = (batch, tokens, value_heads)
    log_decay, beta = {
        "mixed": lambda: (-np.exp(random.normal(-3, 3, rows)), random.random(rows)),
        "correlated": lambda: (np.full(rows, -1e-3), np.full(rows, 0.99)),
        "zero": lambda: (np.zeros(rows), random.random(rows)),
        "strong": lambda: (np.full(rows, -60.0), random.random(rows)),
    }[gates]()
    values = random.normal(size=(*rows, value_dim))
    state = random.normal(size=(batch, value_heads, value_dim, key_dim))
    arrays = (keys[0] * key_dim**-0.5, keys[1], values, log_decay, beta, state)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


prefill = jax.jit(op.chunk_prefill, static_argnames="chunk")


@jax.jit
def recurrence(q, k, v, log_decay, beta, state):
    """S <- e^g S; S <- S + beta (v - S k) k^T; o = S q, one token at a time."""
    high = lax.Precision.HIGHEST
    group = v.shape[2] // k.shape[2]

    def step(state, token):
        q, k, v, log_decay, beta = token
        q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
        state = jnp.exp(log_decay)[..., None, None] * state
        read = jnp.einsum("bhvk,bhk->bhv", state, k, precision=high)
        update = beta[..., None] * (v - read)
        state = state + update[..., None] * k[:, :, None, :]
        return state, jnp.einsum("bhvk,bhk->bhv", state, q, precision=high)

    rows = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta)]
    state, output = lax.scan(step, state, tuple(rows))
    return jnp.moveaxis(output, 0, 1), state


def error(got, wanted):
    """Relative Frobenius error over all arrays; NaN never passes a comparison."""
    got = [np.asarray(x, np.float64).ravel() for x in got]
    wanted = [np.asarray(x, np.float64).ravel() for x in wanted]
    return max(
        np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-300)
        for a, b in zip(got, wanted, strict=True)
    )


def as_float64(arrays):
    return [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_equals_recurrence_in_float64(shape, gates):
    with jax.enable_x64(True):
        arrays = make(shape, jnp.float64, gates=gates)
        got = prefill(*arrays, chunk=32)
        assert got[0].dtype == got[1].dtype == jnp.float64
        assert error(got, recurrence(*arrays)) < 1e-12


@pytest.mark.parametrize("gates", GATES)
def test_float32_is_as_good_as_the_float32_recurrence(gates):
    arrays = make((1, 130, 2, 4, 32, 32), jnp.float32, gates=gates)
    got, sequential = prefill(*arrays, chunk=128), recurrence(*arrays)
    with jax.enable_x64(True):
        wanted = recurrence(*as_float64(arrays))
    assert error(got, wanted) < max(4 * error(sequential, wanted), 1e-5)


def test_small_decay_after_a_large_one_keeps_its_digits():
    arrays = list(make((2, 40, 2, 4, 16, 16), jnp.float32))
    log_decay = np.full(arrays[3].shape, -0.1, np.float32)
    log_decay[:, 5] = -300
    arrays[3] = jnp.asarray(log_decay)
    with jax.enable_x64(True):
        wanted = recurrence(*as_float64(arrays))
    assert error(prefill(*arrays), wanted) < 1e-6
    # The single rounded sum that the split replaces misses by much more.
    total = jnp.cumsum(arrays[3], axis=1)
    naive = jnp.exp(total[:, 20] - total[:, 10])
    exact = np.exp(np.float64(np.float32(-0.1)) * 10)
    assert error([naive], [np.full(naive.shape, exact)]) > 1e-5


def test_bfloat16_operands_stay_near():
    arrays = make((2, 100, 1, 2, 64, 64), jnp.float32)
    low = [x.astype(jnp.bfloat16) for x in arrays[:3]]
    output, state = prefill(*low, *arrays[3:])
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    exact = [x.astype(jnp.float32) for x in low]
    assert error((output, state), recurrence(*exact, *arrays[3:])) < 1.5e-2


def test_gradients_equal_those_of_the_recurrence():
    with jax.enable_x64(True):
        shape = (2, 37, 1, 2, 8, 8)
        arrays = make(shape, jnp.float64)
        weights = [np.cos(np.arange(x.size)).reshape(x.shape) for x in arrays[2::3]]

        def loss(arrays, function):
            output, state = function(*arrays)
            return jnp.sum(weights[0] * output) + jnp.sum(weights[1] * state)

        gradient = jax.jit(jax.grad(loss), static_argnums=1)
        chunked = functools.partial(op.chunk_prefill, chunk=16)
        for gates in GATES[:3]:  # "strong" leaves gradients of 1e-26: only rounding
            arrays = make(shape, jnp.float64, gates=gates)
            got, wanted = gradient(arrays, chunked), gradient(arrays, recurrence)
            assert error(got, wanted) < 1e-11, gates


def test_bfloat16_gradients_point_the_same_way():
    arrays = make((2, 70, 1, 2, 32, 32), jnp.float32)
    low = tuple(x.astype(jnp.bfloat16) for x in arrays[:3])
    exact = tuple(x.astype(jnp.float32) for x in low)

    def loss(arrays, function):
        return jnp.sum(jnp.square(function(*arrays, *arrays_rest)[0].astype("f4")))

    arrays_rest = arrays[3:]
    got = jax.jit(jax.grad(loss), static_argnums=1)(low, op.chunk_prefill)
    wanted = jax.grad(loss)(exact, recurrence)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert error(got, wanted) < 3e-2


def test_padding_rows_leave_the_state_bit_equal():
    arrays = make((2, 40, 2, 4, 16, 16), jnp.float32)
    q, k, v, log_decay, beta, state = arrays
    still = prefill(q, k, v, 0 * log_decay, 0 * beta, state)[1]
    assert np.array_equal(still, state)
    mask = (jnp.arange(40) < 20)[None, :, None]
    padded = prefill(q, k, v, log_decay * mask, beta * mask, state)
    short = prefill(*(x[:, :20] for x in arrays[:5]), state)
    assert error([padded[0][:, :20], padded[1]], short) < 1e-6


def test_two_calls_continue_one_sequence():
    arrays = make((2, 40, 2, 4, 16, 16), jnp.float32)
    whole = prefill(*arrays)
    first, state = prefill(*(x[:, :20] for x in arrays[:5]), arrays[5])
    second, state = prefill(*(x[:, 20:] for x in arrays[:5]), state)
    assert error([jnp.concatenate([first, second], 1), state], whole) < 2e-6


def test_future_tokens_do_not_reach_back():
    arrays = make((2, 40, 2, 4, 16, 16), jnp.float32)
    changed = [x.at[:, 25:].add(1.0) for x in arrays[:3]]
    got = prefill(*changed, *arrays[3:])[0]
    assert np.array_equal(got[:, :25], prefill(*arrays)[0][:, :25])


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverse_survives_correlated_keys(size):
    lower = np.tril(np.full((size, size), 0.98), -1)
    got = linear.unit_lower_inverse(jnp.asarray(lower[None], jnp.float32))
    assert error(got, np.linalg.inv(np.eye(size) + lower)[None]) < 1e-5


def test_broken_twins_are_caught():
    """A wrong head ratio, decay after the read or an unmasked diagonal must show."""
    arrays = make((2, 40, 2, 4, 16, 16), jnp.float32)
    q, k, v, log_decay, beta, state = arrays
    wanted = recurrence(*arrays)
    tiled = [jnp.tile(x, (1, 1, 2, 1)) for x in (q, k)]
    late = jnp.roll(log_decay, 1, axis=1).at[:, 0].set(0)
    assert error(prefill(*tiled, *arrays[2:]), wanted) > 1e-2
    assert error(prefill(q, k, v, late, beta, state), wanted) > 1e-2
    between = reference.chunk_decays(log_decay[None, None].swapaxes(-1, -2)).between
    assert not np.any(np.triu(np.asarray(between), 1))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k has", lambda a: a | {"k": a["k"][:, :3]}),
        ("v has", lambda a: a | {"v": a["v"][:, :4]}),
        ("log_decay has", lambda a: a | {"log_decay": a["log_decay"][..., None]}),
        ("beta has", lambda a: a | {"beta": a["beta"].astype(int)}),
        ("state has", lambda a: a | {"state": a["state"].swapaxes(2, 3)}),
        ("chunk is", lambda a: a | {"chunk": 48}),
    ],
)
def test_wrong_arguments_are_named(name, change):
    arrays = make((1, 5, 2, 4, 8, 16), jnp.float32)
    names = ("q", "k", "v", "log_decay", "beta", "state")
    arguments = change(dict(zip(names, arrays, strict=True)) | {"chunk": 64})
    chunk = arguments.pop("chunk")
    with pytest.raises(ValueError, match=name):
        spec_lib.make_spec(*(arguments[n] for n in names), chunk)


def test_spec_counts():
    arrays = make((1, 100, 1, 2, 128, 128), jnp.bfloat16)
    spec = spec_lib.make_spec(*arrays, 64)
    assert (spec.chunks, spec.padding, spec.group) == (2, 28, 2)
    assert spec.compute_dtype == jnp.bfloat16
    assert spec.accumulator_dtype == jnp.float32
    gates, states = 100 * 2 * 2 * 4, 2 * 2 * 2 * 128 * 128
    assert spec.bytes_moved == 100 * 2 * 6 * 128 + gates + states
    assert spec_lib.make_spec(*(x[:, :5] for x in arrays[:5]), arrays[5], 64).chunk == 8
