"""Ops on a mesh of eight devices (run by test_sharding.py): equal, and no exchange."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from treewy_jax import accept, attention, commit, lifecycle, mesh, sharding
from treewy_jax import tree as tree_lib

BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 8, 8, 16, 16, 16
MESHES = ("tensor=8", "data=2,tensor=4", "data=8")
EXCHANGES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
TREE = tree_lib.DraftTree.from_widths((2, 1), batch=BATCH)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def inputs(key_heads=KEY_HEADS, value_heads=VALUE_HEADS):
    keys = (BATCH, TREE.n_max, key_heads, KEY_DIM)
    values = (BATCH, TREE.n_max, value_heads)
    k = normal(1, *keys)
    return lifecycle.Inputs(
        q=normal(0, *keys),
        k=k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        v=normal(2, *values, VALUE_DIM),
        log_decay=-jnp.abs(normal(3, *values)),
        beta=jax.nn.sigmoid(normal(4, *values)),
    )


def accepted():
    node = jnp.arange(BATCH, dtype=jnp.int32) % TREE.n_max
    path, count = TREE.path(node)
    return accept.Accepted(node, path, count, jnp.zeros_like(node))


def step(scheme, state, inputs, accepted):
    """Verify and commit twice: histories are read, and folded."""
    for _ in range(2):
        output, records = scheme.verify(state, inputs, TREE)
        state = scheme.commit(state, records, accepted)
    return output, state


def exchanges(compiled):
    return re.findall(rf" ({EXCHANGES})[\w-]*\(", compiled.as_text())


def placed(value, letters, axes):
    """Return a pytree whose arrays lie where their letters say."""
    here = lambda x, text: jax.device_put(x, sharding.spec(text, axes))  # noqa: E731
    return jax.tree.map(here, value, letters)


def arguments(scheme, key_heads=KEY_HEADS, value_heads=VALUE_HEADS):
    shape = (BATCH, value_heads, VALUE_DIM, KEY_DIM)
    state = scheme.init(normal(5, *shape), key_heads)
    return state, inputs(key_heads, value_heads), accepted()


def letters_of(arguments):
    state, rows, path = arguments
    of = sharding.letters_of
    plain = "B Hv Dv Dk" if isinstance(state, jax.Array) else of(type(state), state)
    return plain, of(type(rows), rows), of(type(path), path)


@pytest.mark.parametrize("text", MESHES)
@pytest.mark.parametrize("name", commit.LIFECYCLES)
def test_lifecycles_equal_one_device_and_exchange_nothing(name, text):
    scheme = commit.by_name(name, depth=2, nodes=TREE.n_max, horizon=4)
    given = arguments(scheme)
    output, after = jax.jit(functools.partial(step, scheme))(*given)
    with mesh.use(mesh.make(text)):
        letters = letters_of(given)
        axes = sharding.split(sharding.sizes_of(given, letters))
        spread = placed(given, letters, axes)
        compiled = jax.jit(functools.partial(step, scheme)).lower(*spread).compile()
        ours, state = compiled(*spread)
    assert exchanges(compiled) == []
    assert len(ours.sharding.device_set) == 8 and not ours.is_fully_replicated
    np.testing.assert_allclose(ours, output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        scheme.materialize(state), scheme.materialize(after), rtol=1e-5, atol=1e-5
    )


def test_exchanges_are_seen():
    """The broken twin: heads that are not where the op wants them."""
    scheme = commit.by_name("reconstruct")
    given = arguments(scheme)
    with mesh.use(mesh.make("tensor=8")):
        spread = placed(given, letters_of(given), {"Dv": ("tensor",)})
        compiled = jax.jit(functools.partial(step, scheme)).lower(*spread).compile()
    assert exchanges(compiled)


def test_heads_that_do_not_divide_stay_whole():
    scheme = commit.by_name("reconstruct")
    given = arguments(scheme, 2, 8)  # 8 devices divide the value heads alone
    output, _ = jax.jit(functools.partial(step, scheme))(*given)
    with mesh.use(mesh.make("tensor=8")):
        ours, _ = jax.jit(functools.partial(step, scheme))(*given)
    assert ours.is_fully_replicated
    np.testing.assert_allclose(ours, output, rtol=1e-5, atol=1e-5)


def test_a_kernel_runs_on_its_part():
    """Interpreted, a device at a time: what counts is the shape that it sees."""
    scheme = commit.by_name("reconstruct", impl="triton")
    given = arguments(scheme)
    output, _ = step(commit.by_name("reconstruct"), *given)
    with mesh.use(mesh.make("data=2,tensor=4")):
        ours, _ = jax.jit(functools.partial(step, scheme))(*given)
    np.testing.assert_allclose(ours, output, rtol=1e-4, atol=1e-4)


def test_attention_runs_by_heads():
    heads, kv, dim, slots = 16, 8, 16, 12
    q = normal(0, BATCH, TREE.n_max, heads, dim)
    prefix = tuple(normal(i, BATCH, slots, kv, dim) for i in (1, 2))
    nodes = tuple(normal(i, BATCH, TREE.n_max, kv, dim) for i in (3, 4))
    length = jnp.arange(BATCH, dtype=jnp.int32)
    given = (q, prefix, nodes, length, TREE.ancestors())
    expected = jax.jit(attention.over_tree)(*given)
    with mesh.use(mesh.make("data=2,tensor=4")):
        ours = jax.jit(attention.over_tree)(*given)
    assert ours.sharding.spec == PartitionSpec("data", None, "tensor")
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("vocabulary", [64, 12])  # 8 devices do not divide 12
def test_top_k_keeps_the_order_of_equals(vocabulary, count):
    logits = jnp.round(normal(0, 2, 3, vocabulary))
    expected = lax.top_k(logits, count)
    top_k = jax.jit(sharding.top_k, static_argnums=1)
    with mesh.use(mesh.make("tensor=8")):
        spread = top_k(logits, count)
    for values, tokens in (spread, top_k(logits, count)):
        np.testing.assert_array_equal(values, expected[0])
        np.testing.assert_array_equal(tokens, expected[1])


def test_a_mesh_of_some_axes_is_completed():
    given = jax.make_mesh((4, 2), ("tensor", "data"))
    full = mesh.normal(given)
    assert full.axis_names == mesh.AXES and full.devices.shape == (2, 4, 1)
    assert full.devices[1, 2, 0] == given.devices[2, 1]


def test_wrong_shapes_are_told_as_without_a_mesh():
    scheme = commit.by_name("reconstruct")
    state, rows, _ = arguments(scheme)
    with mesh.use(mesh.make("tensor=8")):
        with pytest.raises(ValueError, match="k has shape"):
            scheme.verify(state, rows._replace(k=rows.k[0]), TREE)
