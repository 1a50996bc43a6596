"""Commit: one suite over all implementations, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.commit import config, op, reference
from pallas_kernels.commit import spec as specs

# A CPU interprets every kernel; elsewhere a kernel runs on its own device alone.
DEVICES = {"triton": "gpu", "mosaic_tpu": "tpu", "reference": jax.default_backend()}
every_implementation = pytest.mark.parametrize(
    "impl",
    [
        name
        for name in op.IMPLEMENTATIONS.modules
        if jax.default_backend() in ("cpu", DEVICES[name])
    ],
)
B, DIM = 3, 16
BOUNDS = {"float32": 1e-6, "bfloat16": 4e-3}


def records(nodes, heads, length, state_dtype="float32", key_dtype="float32", seed=0):
    """Return arguments whose counts run over 0, the whole path and one in between."""
    key_heads, value_heads = heads
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(B, value_heads, DIM, DIM))
    k = rng.normal(size=(B, nodes, key_heads, DIM)) / DIM**0.5
    u = rng.normal(size=(B, nodes, value_heads, DIM))
    log_decay = -np.exp(rng.normal(size=(B, nodes, value_heads)) - 1)
    rows = [rng.permutation(nodes)[:length] for _ in range(B)]
    path = np.sort(rows).astype(np.int32)
    count = np.array([0, length, max(1, length // 2)], np.int32)
    return (
        jnp.asarray(state, state_dtype),
        jnp.asarray(k, key_dtype),
        jnp.asarray(u, jnp.float32),
        jnp.asarray(log_decay, jnp.float32),
        jnp.asarray(path),
        jnp.asarray(count),
    )


def oracle(state, k, u, log_decay, path, count):
    state, k, u, log_decay = (np.array(x, np.float64) for x in (state, k, u, log_decay))
    k = np.repeat(k, u.shape[2] // k.shape[2], axis=2)
    for row, (nodes, steps) in enumerate(zip(path, count, strict=True)):
        for node in nodes[: int(steps)]:
            outer = u[row, node][:, :, None] * k[row, node][:, None, :]
            decay = np.exp(log_decay[row, node])[:, None, None]
            state[row] = decay * state[row] + outer
    return state


def relative(got, want):
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@functools.cache
def jitted(impl, chosen=None):
    return jax.jit(functools.partial(op.commit, impl=impl, config=chosen))


@every_implementation
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3), (2, 8)])
@pytest.mark.parametrize(("nodes", "length"), [(1, 1), (3, 2), (7, 4), (39, 12)])
def test_it_writes_the_path(impl, heads, nodes, length):
    arguments = records(nodes, heads, length)
    got = jitted(impl)(*arguments)
    assert relative(got, oracle(*arguments)) < BOUNDS["float32"]
    assert np.array_equal(got[0], arguments[0][0])  # count 0: not a bit


@every_implementation
@pytest.mark.parametrize("state_dtype", BOUNDS)
@pytest.mark.parametrize("key_dtype", BOUNDS)
def test_dtypes(impl, state_dtype, key_dtype):
    arguments = records(7, (2, 4), 4, state_dtype, key_dtype)
    got = jitted(impl)(*arguments)
    assert got.dtype == state_dtype
    assert relative(got, oracle(*arguments)) < BOUNDS[state_dtype]


@every_implementation
def test_nodes_on_no_path_are_not_read(impl):
    arguments = list(records(7, (2, 4), 3))
    path, count = np.asarray(arguments[4]), np.asarray(arguments[5])
    good = np.asarray(jitted(impl)(*arguments))
    for i in (1, 2, 3):
        poisoned = np.full(arguments[i].shape, np.nan, np.float32)
        for row in range(B):
            used = path[row, : count[row]]
            poisoned[row, used] = np.asarray(arguments[i])[row, used]
        arguments[i] = jnp.asarray(poisoned)
    assert np.array_equal(jitted(impl)(*arguments), good)


@every_implementation
def test_small_decays_behind_a_cliff_keep_their_digits(impl):
    arguments = list(records(4, (1, 1), 4))
    arguments[4] = jnp.tile(jnp.arange(4, dtype=jnp.int32), (B, 1))
    arguments[5] = jnp.full((B,), 4, jnp.int32)
    cliff = jnp.asarray([-0.1, -300.0, -0.1, -0.001])
    arguments[3] = jnp.broadcast_to(cliff[None, :, None], (B, 4, 1))
    assert relative(jitted(impl)(*arguments), oracle(*arguments)) < 1e-6


@every_implementation
def test_layers_may_be_mapped_over(impl):
    """The model commits all its layers at once: stacked leaves, one path."""
    *leaves, path, count = records(7, (2, 4), 4)
    stacked = [jnp.stack([x, 2 * x]) for x in leaves]
    run = jax.vmap(lambda *x: op.commit(*x, path, count, impl=impl))
    both = jax.jit(run)(*stacked)
    for layer in range(2):
        alone = [x[layer] for x in stacked]
        assert relative(both[layer], oracle(*alone, path, count)) < 1e-6


def test_any_cut_gives_the_same():
    arguments = records(7, (2, 4), 4)
    whole = jitted("triton")(*arguments)
    for block_v in (1, 4, 8):
        cut = jitted("triton", config.Config(block_v, num_warps=1))(*arguments)
        assert relative(cut, np.asarray(whole, np.float64)) < 1e-7
    with pytest.raises(ValueError, match="block_v is 3"):
        op.commit(*arguments, impl="triton", config=config.Config(3))


def test_float64_stays_float64(double):
    *arrays, path, count = records(7, (2, 4), 4)
    arrays = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
    got = op.commit(*arrays, path, count)
    assert got.dtype == jnp.float64
    assert relative(got, oracle(*arrays, path, count)) < 1e-15


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (B, 4, DIM), "state has shape .* 4 axes are allowed"),
        (1, (B, 7, 3, DIM), "k has shape .* Hk divides Hv = 4"),
        (2, (B, 7, 4, DIM + 1), "pseudo_values has shape"),
        (3, (B, 6, 4), "log_decay has shape"),
        (5, (B + 1,), "count has shape"),
    ],
)
def test_wrong_shapes(position, shape, message):
    arguments = list(records(7, (2, 4), 4))
    arguments[position] = jnp.zeros(shape, arguments[position].dtype)
    with pytest.raises(ValueError, match=message):
        op.commit(*arguments)


def test_supports_says_why():
    spec = specs.spec_of(*records(7, (2, 4), 4))
    assert op.IMPLEMENTATIONS.choose(spec).name == "reference" or (
        jax.default_backend() != "cpu"
    )
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: auto, triton"):
        op.commit(*records(7, (2, 4), 4), impl="cuda")


def test_the_suite_sees_a_path_in_the_wrong_order():
    """A broken twin: decays of the path applied to the wrong nodes."""
    arguments = list(records(7, (2, 4), 4))
    want = oracle(*arguments)
    arguments[3] = jnp.flip(arguments[3], axis=1)
    spec = specs.spec_of(*arguments)
    assert relative(reference.commit(*arguments, spec=spec), want) > 1e-2
