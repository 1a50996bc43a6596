"""Bytes by formula: the published figures, and the arrays that decoding allocates."""

import dataclasses
import functools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.qwen3_5 import published
from treewy_jax import commit, deferred, generate, loop, memory, prompts, sampling
from treewy_jax import tree as tree_lib

DENSE = pathlib.Path(__file__).parents[1] / "golden" / "tiny" / "dense"
MIB, GIB = 2**20, 2**30
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
NEW_TOKENS = 4
# The prompt's bucket of 16 and the budget: the slots of the KV caches.
SLOTS = prompts.SMALLEST_BUCKET + NEW_TOKENS

every_scheme = pytest.mark.parametrize("scheme", memory.SCHEMES)


def shape_of(name):
    return memory.Shape.from_config(published.get(name))


@functools.cache
def dense(dtype):
    return models.load(DENSE, dtype=dtype)


# --- published figures --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "mib"),
    [
        ("qwen3.5-35b-a3b", "bfloat16", 30),
        ("qwen3.5-35b-a3b", "float32", 60),
        ("qwen3.5-397b-a17b", "bfloat16", 90),
        ("qwen3.5-397b-a17b", "float32", 180),
        ("qwen3.5-0.8b", "float32", 18),
        ("qwen3.5-27b", "bfloat16", 72),
        ("qwen3.8-2.4t-a95b", "float32", 552),
    ],
)
def test_state_of_published_sizes(name, dtype, mib):
    assert memory.state_bytes(shape_of(name), dtype) == mib * MIB


@pytest.mark.parametrize(
    ("name", "conv_mib", "kv_gib"),
    [
        ("qwen3.5-35b-a3b", 1.40625, 0.625),
        ("qwen3.5-397b-a17b", 3.1640625, 0.9375),
        ("qwen3.5-27b", 2.8125, 2.0),
    ],
)
def test_conv_and_kv_of_published_sizes(name, conv_mib, kv_gib):
    shape = shape_of(name)
    assert memory.conv_bytes(shape) == conv_mib * MIB
    assert memory.kv_bytes(shape, 32 * 1024) == kv_gib * GIB
    assert memory.mtp_kv_bytes(shape, 1) * shape.attention_layers == memory.kv_bytes(
        shape, 1
    )


def test_history_of_a_published_size():
    """A record of a layer of 35B: 24.1 KiB in float32, 12.1 in bfloat16.

    The keys of bfloat16 rows stay as they are: 20.1 KiB.
    """
    shape = shape_of("qwen3.5-35b-a3b")
    one = 16 * 128 * 4 + 32 * (128 + 1) * 4
    kept = functools.partial(memory.history_bytes, shape, 16)
    assert kept("float32", "float32") == 30 * (16 * one + 4)
    assert kept() == 30 * (16 * (one - 16 * 128 * 2) + 4)
    half = 16 * 128 * 2 + 32 * (128 * 2 + 4)
    assert kept("bfloat16", "float32") == 30 * (16 * half + 4)


@pytest.mark.parametrize(
    ("widths", "counted"), [((1, 1, 1), 4), ((2, 2, 2), 15), ((3, 3, 3), 40), ((), 1)]
)
def test_blocks(widths, counted):
    assert memory.blocks(widths, "store-all") == (counted, counted + 1)
    assert memory.blocks(widths, "store_all") == (counted, counted + 1)
    for scheme in ("reconstruct", "fused", "deferred"):
        assert memory.blocks(widths, scheme) == (1, 1)
    padded = tree_lib.DraftTree.from_widths(widths, n_max=64, batch=2)
    assert memory.blocks(padded, "store-all") == (counted, 65)


def test_table_of_the_paper():
    shapes = {name: shape_of(name) for name in ("qwen3.5-35b-a3b", "qwen3.5-397b-a17b")}
    rows = memory.table(shapes, [(1, 1, 1), (3, 3, 3)])
    assert len(rows) == 2 * 2 * 2 * 4
    found = {(r.model[8:11], r.state_dtype, r.nodes, r.scheme): r for r in rows}
    # A chain of three drafts on 397B holds 4 x 90 MiB, and a (3, 3, 3) tree 40 x 90.
    chain = found["397", "bfloat16", 4, "store-all"]
    assert (chain.counted, chain.allocated) == (360 * MIB, 450 * MIB)
    assert found["397", "bfloat16", 40, "store-all"].counted == 3600 * MIB
    assert found["35b", "float32", 40, "store-all"].allocated == 41 * 60 * MIB
    for row in rows:
        if row.scheme != "store-all":
            assert row.counted == row.allocated == chain_state(row)
        shape = shapes[row.model]
        per_node = memory.record_bytes(shape, 1, state_dtype=row.state_dtype)
        expected = row.nodes * per_node
        if row.scheme == "store-all":
            expected = row.nodes * rows_and_kv(shape) + 4 * shape.gdn_layers
        if row.scheme in memory.DEFERRING:
            room = 4 if row.scheme == "fused" else 16
            expected += memory.history_bytes(shape, room)
        assert row.records == expected


def chain_state(row):
    mib = {"qwen3.5-35b-a3b": 30, "qwen3.5-397b-a17b": 90}[row.model]
    return mib * MIB * {"bfloat16": 1, "float32": 2}[row.state_dtype]


def rows_and_kv(shape):
    """Both schemes keep a raw row and the KV of a node; bfloat16."""
    return rows_of(shape, 2) + memory.kv_bytes(shape, 1)


def rows_of(shape, itemsize):
    """A row: channels of the conv, two gates a head, and as many columns as values."""
    gates = shape.value_heads * (2 + shape.value_dim)
    channels = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    return shape.gdn_layers * (channels + gates) * itemsize


# --- against arrays -----------------------------------------------------------------


def formula(config, scheme, widths, state_dtype, activation_dtype):
    """Parts of a batch of two."""
    parts = memory.per_sequence(
        memory.Shape.from_config(config),
        scheme,
        widths,
        state_dtype,
        tokens=SLOTS,
        activation_dtype=activation_dtype,
    )
    return {name: 2 * size for name, size in parts.items()}


def parts_of(cache, draft, records):
    """Bytes by part of arrays or of their shapes, added up by hand.

    A state among the records is that of the cache, overwritten.
    """
    return {
        "recurrent": held(cache.recurrent),
        "conv": held(cache.window),
        "kv": held(cache.key, cache.value),
        "mtp_kv": held(getattr(draft, "key", ()), getattr(draft, "value", ())),
        "records": held(records) - written(records.recurrent),
    }


def held(*arrays):
    leaves = jax.tree.leaves(arrays)
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)


def states_of(layers):
    """Return the states in lifecycles' states: plain, or with more."""
    return [getattr(x, "state", getattr(x, "states", x)) for x in layers]


def written(layers):
    """Bytes of what records hold that is a state."""
    names = {commit.Slots: ("states", "index"), deferred.Written: ("state",)}
    return held([getattr(x, name) for x in layers for name in names.get(type(x), ())])


@every_scheme
def test_generation_reports_the_arrays_allocated(scheme, monkeypatch):
    """Formula, report, and the arrays of the loop's last state are the same bytes."""
    model = dense("float32")
    finished = []

    def run(*args, **options):
        finished.append(original(*args, **options))
        return finished[-1]

    original = loop.run
    monkeypatch.setattr(loop, "run", run)
    generation = generate.generate(
        model,
        [PROMPT, PROMPT[:5]],
        tree="1,1,1",
        max_new_tokens=NEW_TOKENS,
        commit=scheme,
    )
    expected = formula(model.config, scheme, (1, 1, 1), "float32", "float32")
    assert generation.state_bytes == expected
    lifecycle = commit.by_name(scheme, state_dtype="float32", depth=3, nodes=4)
    state = finished[-1]

    def verify(params, cache, tree):
        return model.builder(lifecycle)(params).verify(cache, tree)[1]

    records = jax.jit(verify)(model.params, state.cache, state.tree)
    assert parts_of(state.cache, state.draft, records) == expected
    states = held(states_of(state.cache.recurrent))
    one = memory.state_bytes(memory.Shape.from_config(model.config), "float32")
    assert states == 2 * memory.blocks((1, 1, 1), scheme).allocated * one


@every_scheme
@pytest.mark.parametrize("widths", [(), (1, 1, 1), (2, 2)])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_formula_is_the_size_of_the_loop_state(scheme, widths, state_dtype, dtype):
    """For every mix of dtypes, by the shapes that the loop traces; nothing runs."""
    model = dense(dtype)
    tree = tree_lib.DraftTree.from_widths(widths)
    sizes = dict(depth=len(widths), nodes=tree.n_max)
    lifecycle = commit.by_name(scheme, state_dtype=state_dtype, **sizes)
    build = model.builder(lifecycle)
    drafter = generate.default_drafter(widths, model.config)

    def first_step(params, tokens, lengths, rules):
        state = loop.start(
            build,
            params,
            drafter,
            tokens,
            lengths,
            rules,
            capacity=SLOTS,
            max_new_tokens=NEW_TOKENS,
            sampling=sampling.Sampling(),
        )
        return state, build(params).verify(state.cache, state.tree)[1]

    rules = loop.Rules(jnp.full(2, NEW_TOKENS), jnp.zeros(1, int), jax.random.key(0))
    tokens = jnp.zeros((2, prompts.SMALLEST_BUCKET), jnp.int32)
    state, records = jax.eval_shape(
        first_step, model.params, tokens, jnp.array([12, 5]), rules
    )
    expected = formula(model.config, scheme, widths, state_dtype, dtype)
    assert parts_of(state.cache, state.draft, records) == expected


@every_scheme
@pytest.mark.parametrize("activation", ["bfloat16", "float32", "float64"])
def test_records_of_a_published_layer(scheme, activation, double):
    """One GDN layer of 35B at n = 40, by the shapes that verification returns."""
    shape = dataclasses.replace(
        shape_of("qwen3.5-35b-a3b"), gdn_layers=1, attention_layers=0
    )
    n, tree = 40, tree_lib.DraftTree.from_widths((3, 3, 3))
    like = jax.ShapeDtypeStruct
    keys = like((1, n, shape.key_heads, shape.key_dim), activation)
    values = like((1, n, shape.value_heads, shape.value_dim), activation)
    gates = like((1, n, shape.value_heads), "float32")
    state = like((1, shape.value_heads, shape.value_dim, shape.key_dim), "float32")
    lifecycle = commit.by_name(scheme, impl="reference", nodes=n)
    inputs = commit.Inputs(keys, keys, values, gates, gates)
    _, records = jax.eval_shape(
        lambda s, i: lifecycle.verify(
            lifecycle.init(s, shape.key_heads, activation), i, tree
        ),
        state,
        inputs,
    )
    recurrent = held(records) - written([records])
    rows = rows_of(shape, np.dtype(activation).itemsize)
    assert recurrent + n * rows == memory.record_bytes(
        shape, n, scheme, state_dtype="float32", activation_dtype=activation
    )


# --- wrong arguments ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: memory.blocks((1,), "keep-all"), "'keep-all'.*store-all"),
        (lambda s: memory.record_bytes(s, -1), "n is -1"),
        (lambda s: memory.kv_bytes(s, -5), "tokens is -5"),
        (lambda s: memory.state_bytes(s, "int8"), "dtype is int8"),
        (lambda s: memory.blocks((3, 0), "store-all"), r"widths\[1\] is 0"),
        (lambda s: dataclasses.replace(s, key_heads=-2), "key_heads is -2"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(shape_of("qwen3.5-35b-a3b"))


def test_config_without_a_size():
    config = types.SimpleNamespace(num_hidden_layers=4)
    with pytest.raises(ValueError, match="full_attention_interval"):
        memory.Shape.from_config(config)
