"""Append to a history: one suite over all implementations, against a NumPy loop."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pallas_tpu

from pallas_kernels.history_append import config, op
from pallas_kernels.history_append import spec as specs

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
B, HORIZON, NODES, LENGTH = 3, 6, 7, 4
PAST_COUNT, PATH, COUNT = 3, 7, 8
DTYPES = ("float32", "bfloat16")


def records(
    heads=(2, 4),
    dims=(16, 16),
    *,
    past_count=(0, 2, 1),
    path=((0, 2, 3, 6), (0, 1, 1, 1), (5, 0, 0, 0)),
    count=(4, 2, 0),
    past_dtype="float32",
    dtype="float32",
):
    """Return arguments; NaN is in the slots that are free and on no path's nodes."""
    rng = np.random.default_rng(0)
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    past_count, path, count = (
        jnp.asarray(x, jnp.int32) for x in (past_count, path, count)
    )
    there = np.arange(HORIZON) < past_count[:, None]
    steps = np.arange(LENGTH) < count[:, None]
    chosen = np.clip(path, 0, NODES - 1)[..., None] == np.arange(NODES)
    used = (chosen & steps[..., None]).any(axis=1)

    def draw(where, narrow):
        for rest in ((key_heads, key_dim), (value_heads, value_dim), (value_heads,)):
            x = rng.normal(size=(*where.shape, *rest))
            x[~where] = np.nan
            yield jnp.asarray(x, "float32" if len(rest) == 1 else narrow)

    past, nodes = draw(there, past_dtype), draw(used, dtype)
    return (*past, past_count, *nodes, path, count)


def expected(arguments, fold_above=HORIZON):
    """Write record by record; whatever does not fit is dropped."""
    past = [np.array(x) for x in arguments[:4]]
    nodes = [np.asarray(x) for x in arguments[4:7]]
    *records, past_count = past
    path, count = (np.asarray(arguments[i]) for i in (PATH, COUNT))
    for b in range(len(count)):
        base = min(max(past_count[b], 0), HORIZON)
        base = 0 if base > fold_above else base
        past_count[b] = base
        for i in range(min(count[b], path.shape[1])):
            if base + i < HORIZON:
                past_count[b] += 1
                for old, new in zip(records, nodes, strict=True):
                    node = np.clip(path[b, i], 0, new.shape[1] - 1)
                    old[b, base + i] = new[b, node].astype(old.dtype)
    return past


def same(got, want):
    """Whether all four arrays agree bit by bit, dtypes too."""
    pairs = zip(got, want, strict=True)
    return all(
        np.asarray(x).dtype == y.dtype and np.asarray(x).tobytes() == y.tobytes()
        for x, y in pairs
    )


@functools.cache
def jitted(impl, chosen=None, fold_above=None):
    options = dict(impl=impl, config=chosen, fold_above=fold_above)
    return jax.jit(functools.partial(op.history_append, **options))


@every_implementation
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3), (4, 8)])
def test_records_are_appended_and_no_other_slot_changes(impl, heads):
    arguments = records(heads)
    got = jitted(impl)(*arguments)
    assert same(got, expected(arguments))
    for x, old in zip(got, arguments[:4], strict=True):
        assert np.asarray(x[2]).tobytes() == np.asarray(old[2]).tobytes()  # count 0
    for x in got[:3]:
        assert not np.isnan(np.asarray(x[:2, :4], np.float32)).any()


@every_implementation
@hypothesis.given(st.data())
def test_any_path_count_and_cursor(impl, data):
    """Node numbers and cursors out of range included: clipped and dropped."""

    def draw(least, most, size=B):
        return data.draw(
            st.lists(st.integers(least, most), min_size=size, max_size=size)
        )

    arguments = records(
        past_count=draw(0, HORIZON + 2),
        path=[draw(-3, NODES + 3, LENGTH) for _ in range(B)],
        count=draw(0, LENGTH),
    )
    fold_above = data.draw(st.sampled_from([0, 2, HORIZON - 1]))
    got = jitted(impl, fold_above=fold_above)(*arguments)
    assert same(got, expected(arguments, fold_above))


@every_implementation
def test_a_row_of_more_records_than_fold_above_begins_anew(impl):
    """One that accepts nothing too, as its records are in the state all the same."""
    arguments = records(past_count=(3, 2, 6))
    got = jitted(impl, fold_above=2)(*arguments)
    assert same(got, expected(arguments, fold_above=2))
    assert got.count.tolist() == [4, 4, 0]
    for other in (1, 3, None):
        assert not same(jitted(impl, fold_above=other)(*arguments), got)
    with pytest.raises(ValueError, match="fold_above is -1; 0 or more"):
        op.history_append(*arguments, fold_above=-1)


@every_implementation
@pytest.mark.parametrize("cursor", [-2, -(2**31), 2**31 - 1])
def test_a_wild_cursor_or_count_writes_nowhere_else(impl, cursor):
    """Cursors are taken for the nearest that may be, as in history_verify."""
    arguments = list(records())
    arguments[PAST_COUNT] = jnp.asarray([cursor, 1, HORIZON], jnp.int32)
    arguments[COUNT] = jnp.asarray([LENGTH, LENGTH + 5, -1], jnp.int32)
    got, before = jitted(impl)(*arguments), arguments[:3]
    assert same(got, expected(arguments))
    assert got.count.tolist() == [4 if cursor < 0 else HORIZON, 5, HORIZON]
    for x, old in zip(got[:3], before, strict=True):
        for b in [2] if cursor < 0 else [0, 2]:
            assert np.asarray(x[b]).tobytes() == np.asarray(old[b]).tobytes()


@every_implementation
@pytest.mark.parametrize("past_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_records_take_the_dtype_of_the_history(impl, past_dtype, dtype):
    arguments = records(past_dtype=past_dtype, dtype=dtype)
    got = jitted(impl)(*arguments)
    assert [x.dtype for x in got] == [past_dtype, past_dtype, "float32", "int32"]
    assert same(got, expected(arguments))


@every_implementation
def test_decays_of_another_dtype(impl):
    arguments = list(records())
    for past, node in (("bfloat16", "float32"), ("float32", "bfloat16")):
        arguments[2] = arguments[2].astype(past)
        arguments[6] = arguments[6].astype(node)
        assert same(jitted(impl)(*arguments), expected(arguments))


@every_implementation
def test_sizes_that_are_no_powers_of_two(impl):
    arguments = records((3, 6), (24, 40))
    assert same(jitted(impl)(*arguments), expected(arguments))


@every_implementation
def test_layers_are_one_launch(impl):
    """The model appends to all its layers at once, whose cursors may differ."""
    *arrays, path, count = records(count=(2, 1, 3))

    def layers(x):
        return jnp.stack([jnp.stack([x, 2 * x]), jnp.stack([3 * x, x])])

    stacked = list(map(layers, arrays))
    stacked[PAST_COUNT] = stacked[PAST_COUNT] // 2
    append = functools.partial(op.history_append, impl=impl)
    run = jax.vmap(jax.vmap(lambda *x: append(*x, path, count)))
    got = jax.jit(run)(*stacked)
    for i in range(2):
        for j in range(2):
            alone = (*(x[i, j] for x in stacked), path, count)
            assert same([x[i, j] for x in got], expected(alone))
    if impl != "reference":
        jaxpr = jax.make_jaxpr(run)(*stacked)
        found = list(primitives(jaxpr.jaxpr))
        assert found.count("pallas_call") == 1
        assert not {"while", "scan"} & set(found)


def many(number, **options):
    """Return arguments of `append_layers` and what each layer gives alone."""
    pasts, nodes, alone = [], [], []
    for i in range(number):
        counts = (i % 3, (i + 2) % 5, HORIZON - i % 2)
        *arrays, path, count = records(past_count=counts, **options)
        arrays = [x if x.dtype == jnp.int32 else x * (1 + i / 16) for x in arrays]
        pasts.append(arrays[:4])
        nodes.append(arrays[4:])
        alone.append(expected((*arrays, path, count), fold_above=2))
    return (pasts, nodes, path, count), alone


@every_implementation
@pytest.mark.parametrize("number", [1, 2, 5])
def test_many_layers_at_once(impl, number):
    """Each has its own arrays and counts; a GPU takes one launch."""
    arguments, alone = many(number, past_dtype="bfloat16")
    append = functools.partial(op.append_layers, impl=impl, fold_above=2)
    got = jax.jit(append)(*arguments)
    assert len(got) == number
    assert all(same(*pair) for pair in zip(got, alone, strict=True))
    if impl == "triton":
        found = primitives(jax.make_jaxpr(append)(*arguments).jaxpr)
        assert list(found).count("pallas_call") == 1


def test_more_layers_than_a_launch_takes(monkeypatch):
    triton = op.IMPLEMENTATIONS.module("triton")
    monkeypatch.setattr(triton, "LAYERS", 2)
    arguments, alone = many(5)
    append = functools.partial(op.append_layers, impl="triton", fold_above=2)
    got = append(*arguments)
    assert all(same(*pair) for pair in zip(got, alone, strict=True))
    found = primitives(jax.make_jaxpr(append)(*arguments).jaxpr)
    assert list(found).count("pallas_call") == 3


def test_a_gpu_writes_every_array_of_every_layer_in_place():
    """Counts as well: in a loop, each that is not would cost a copy of its own."""
    (pasts, nodes, *rest), _ = many(30)
    append = functools.partial(op.append_layers, impl="triton", fold_above=2)
    device = jax.sharding.AbstractDevice("NVIDIA H200", 1, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(append, donate_argnums=0).trace(pasts, nodes, *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 30 * 4
    assert text.count("tf.aliasing_output") == 30 * 4


@every_implementation
def test_layers_are_not_mixed_up(impl):
    """The twin: two layers' nodes, or their counts, in each other's place."""
    (pasts, nodes, path, count), alone = many(2)
    append = jax.jit(functools.partial(op.append_layers, impl=impl, fold_above=2))
    mixed = append(pasts, nodes[::-1], path, count)
    assert not any(same(*pair) for pair in zip(mixed, alone, strict=True))
    swapped = [[*a[:3], b[3]] for a, b in zip(pasts, pasts[::-1], strict=True)]
    mixed = append(swapped, nodes, path, count)
    assert not any(same(*pair) for pair in zip(mixed, alone, strict=True))


def test_layers_that_disagree():
    (pasts, nodes, path, count), _ = many(2)
    with pytest.raises(ValueError, match="pasts has 2 layers and nodes 1"):
        op.append_layers(pasts, nodes[:1], path, count)
    with pytest.raises(ValueError, match="pasts has 0 layers"):
        op.append_layers([], [], path, count)
    nodes[1] = [x[:, 1:] for x in nodes[1]]
    with pytest.raises(ValueError, match="layer 1 has .*'nodes': 6.* as in layer 0"):
        op.append_layers(pasts, nodes, path, count)


def primitives(jaxpr):
    """Yield the names of a program's primitives, without what kernels do inside."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(inner, "eqns"):
                    yield from primitives(getattr(inner, "jaxpr", inner))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="interprets a TPU")
@pytest.mark.parametrize("count", [(4, 2, 0), (0, 0, 3)])
def test_a_tpu_sends_no_memory_that_it_did_not_write(monkeypatch, count):
    """Its pipeline sends whole blocks, which begin as NaN here and not as they were."""
    emulate = pallas_tpu.InterpretParams(
        uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    call = pl.pallas_call

    def pallas_call(*arguments, interpret, **options):
        assert interpret
        return call(*arguments, interpret=emulate, **options)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    arguments = records(past_count=(0, 4, HORIZON), count=count)
    got = op.history_append(*arguments, impl="mosaic_tpu")
    assert same(got, expected(arguments))


@every_implementation
def test_donated_arrays_are_overwritten(impl):
    arguments = records()
    want = expected(arguments)
    run = jax.jit(
        functools.partial(op.history_append, impl=impl), donate_argnums=range(4)
    )
    past = [x.copy() for x in arguments[:4]]
    assert same(run(*past, *arguments[4:]), want)
    assert all(x.is_deleted() for x in past)


def test_any_cut_gives_the_same():
    arguments = records((2, 6), (16, 24))
    for size in (1, 2, 4, 16):
        cut = jitted("triton", config.Config(size))
        assert same(cut(*arguments), expected(arguments))
    for size in (0, 3):
        with pytest.raises(ValueError, match=f"records is {size}; a power of two"):
            op.history_append(*arguments, impl="triton", config=config.Config(size))


def test_guesses_fill_registers_and_no_more():
    spec = described(records((16, 32), (128, 128)))
    assert spec.bytes_moved == 2 * 4 * B * LENGTH * (48 * 128 + 32)
    more = dataclasses.replace(spec, layers=30)
    assert more.bytes_moved == 30 * spec.bytes_moved and more.flops == 30 * spec.flops

    def guess(**changes):
        changed = dataclasses.replace(spec, **changes)
        return dataclasses.astuple(config.heuristic(changed))[:2]

    assert guess() == guess(layers=30, batch=256) == (4, 16)
    assert guess(path=3) == (4, 16) and guess(path=16) == (4, 16)
    assert guess(value_heads=2, key_heads=1) == (4, 2)
    assert guess(path=1, value_heads=1, key_heads=1) == (1, 1)


def test_float64_stays_float64(double):
    arguments = [
        jnp.asarray(np.asarray(x, np.float64)) if x.dtype == jnp.float32 else x
        for x in records()
    ]
    got = op.history_append(*arguments)
    assert got[0].dtype == jnp.float64 and got.count.dtype == jnp.int32
    assert same(got, expected(arguments))
    with pytest.raises(NotImplementedError, match="takes float32 and bfloat16"):
        op.history_append(*arguments, impl="triton")


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (B, HORIZON, 16), "past_k has shape .* 4 axes are allowed"),
        (1, (B, HORIZON + 1, 4, 16), "past_pseudo_values has shape"),
        (2, (B, HORIZON, 5), "past_log_decay has shape"),
        (3, (B + 1,), "past_count has shape"),
        (4, (B, NODES, 3, 16), "k has shape"),
        (5, (B, NODES, 4, 17), "pseudo_values has shape"),
        (6, (B, NODES + 1, 4), "log_decay has shape"),
        (7, (B + 1, LENGTH), "path has shape"),
        (8, (B, 1), "count has shape"),
    ],
)
def test_wrong_shapes(position, shape, message):
    arguments = list(records())
    arguments[position] = jnp.zeros(shape, arguments[position].dtype)
    with pytest.raises(ValueError, match=message):
        op.history_append(*arguments)


def described(arguments):
    past, nodes = specs.Past(*arguments[:4]), specs.Nodes(*arguments[4:7])
    return specs.spec_of([past], [nodes], *arguments[7:])


def test_supports_says_why():
    choice = op.IMPLEMENTATIONS.choose(described(records()))
    assert choice.name == "reference" or jax.default_backend() != "cpu"
    odd = described(records((1, 3), (12, 16)))
    reason = op.IMPLEMENTATIONS.module("mosaic_tpu").supports(odd, "tpu")
    assert "key_dim to be a multiple of 8" in reason
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: auto, triton"):
        op.history_append(*records(), impl="cuda")


TWINS = {
    "cursor off by one": (PAST_COUNT, lambda x: x + 1),
    "one record too few": (COUNT, lambda x: jnp.maximum(x - 1, 0)),
    "a record too many": (COUNT, lambda x: x + 1),
    "nodes in place of the path": (PATH, lambda x: jnp.arange(LENGTH) + 0 * x),
}


@every_implementation
@pytest.mark.parametrize("twin", TWINS)
def test_the_suite_sees_a_fault(impl, twin):
    arguments = list(records(count=(3, 2, 0)))
    want = expected(arguments)
    assert same(jitted(impl)(*arguments), want)
    position, change = TWINS[twin]
    arguments[position] = change(arguments[position])
    assert not same(jitted(impl)(*arguments), want)
