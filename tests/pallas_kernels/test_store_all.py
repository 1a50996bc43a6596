"""The state after every node of a tree against float64, for every implementation."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.store_all import config as configs
from pallas_kernels.store_all import op
from pallas_kernels.store_all import spec as specs

# Parents in preorder; depth, and what the tree is good for.
TREES = {
    "root": ([-1], 0),
    "chain": (list(range(-1, 6)), 6),
    "star": ([-1, 0, 0, 0, 0], 1),
    "bushy": ([-1, 0, 1, 1, 0, 4, 5, 5, 4, 8, 0], 3),
}
HEADS = (1, 3, 16, 32)  # Hk, Hv, Dk, Dv


def tree(name, batch):
    parent, depth = TREES[name]
    return np.tile(np.array(parent, np.int32), (batch, 1)), depth


def make(parent, heads=HEADS, dtype="float32", state_dtype="float32", seed=0, spare=0):
    """Return correlated keys, decays from none to strong, a ring, and the parents.

    Every slot holds another state; `spare` more than the tree needs.
    """
    key_heads, value_heads, key_dim, value_dim = heads
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, *parent.shape, key_heads, key_dim)) + 1
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    rows, slots = (*parent.shape, value_heads), parent.shape[1] + 1 + spare
    arrays = (
        keys[0] * key_dim**-0.5,
        keys[1],
        random.normal(size=(*rows, value_dim)),
        -np.exp(random.normal(-3, 3, rows)),
        random.random(rows),
        random.normal(size=(len(parent), slots, value_heads, value_dim, key_dim)),
    )
    kinds = [dtype] * 3 + ["float32"] * 2 + [state_dtype]
    if dtype == "float64":
        kinds = ["float64"] * 6
    made = [jnp.asarray(x, k) for x, k in zip(arrays, kinds, strict=True)]
    index = jnp.asarray(random.integers(slots, size=len(parent)), jnp.int32)
    return (*made, index, jnp.asarray(parent))


def exact(q, k, v, log_decay, beta, ring, index, parent):
    """Visit node by node from the parent's state, in float64."""
    parent = np.asarray(parent)
    q, k, v, log_decay, beta, ring = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, ring)
    )
    state = ring[np.arange(len(ring)), np.asarray(index)]
    output, states = np.empty_like(v), np.empty((*v.shape, k.shape[-1]))
    group = v.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*v.shape[:3]):
        before = state[b, h] if parent[b, t] < 0 else states[b, parent[b, t], h]
        key = k[b, t, h // group]
        decayed = np.exp(log_decay[b, t, h]) * before
        pseudo_value = beta[b, t, h] * (v[b, t, h] - decayed @ key)
        states[b, t, h] = decayed + np.outer(pseudo_value, key)
        output[b, t, h] = states[b, t, h] @ q[b, t, h // group]
    return output, states


def error(got, wanted):
    """Relative Frobenius error; NaN never passes a comparison."""
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@functools.partial(
    jax.jit, static_argnames=("impl", "config", "depth_max", "output_dtype")
)
def store_all(*arrays, **options):
    """Return outputs and the states of the nodes, out of the ring."""
    output, ring = op.store_all(*arrays, **options)
    slots = node_slots(arrays[6], output.shape[1], ring.shape[1])
    return output, jnp.take_along_axis(ring, slots[..., None, None, None], axis=1)


def node_slots(index, nodes, slots):
    return (index[:, None] + 1 + np.arange(nodes)) % slots


def ways():
    """Return implementations and cuts that run on this device."""
    parent, depth = tree("bushy", 1)
    spec = specs.spec_of(*make(parent), depth_max=depth)
    found = {"reference": dict(impl="reference")}
    for impl in ("triton", "mosaic_tpu"):
        module = op.IMPLEMENTATIONS.module(impl)
        if module.supports(spec, device.platform(), interpret=True) is None:
            found[impl] = dict(impl=impl)
    if found.pop("triton", None):
        found["triton reload"] = dict(impl="triton", config=configs.Config(16))
        resident = configs.Config(16, resident=True)
        found["triton resident"] = dict(impl="triton", config=resident)
    return found


WAYS = ways()
over_ways = pytest.mark.parametrize("way", WAYS)


def options_for(way, depth):
    options = dict(WAYS[way], depth_max=depth)
    if way == "triton resident" and depth > configs.MOST_RESIDENT:
        options["config"] = configs.Config(16)
    return options


@over_ways
@pytest.mark.parametrize("name", ["root", "chain", "bushy"])
def test_equals_float64(way, name):
    parent, depth = tree(name, 2)
    arrays = make(parent)
    output, states = store_all(*arrays, **options_for(way, depth))
    assert output.dtype == states.dtype == jnp.float32
    wanted = exact(*arrays)
    assert error(output, wanted[0]) < 3e-6
    assert error(states, wanted[1]) < 3e-6


@over_ways
@pytest.mark.parametrize("spare", [0, 3])
def test_only_the_slots_behind_the_committed_state_are_written(way, spare):
    """From every slot of the ring; what it held before plays no part in the rest."""
    slots = 12 + spare
    parent, depth = tree("bushy", slots)
    arrays = list(make(parent, (1, 1, 8, 8), spare=spare))
    arrays[6] = jnp.arange(slots, dtype=jnp.int32)
    options = options_for(way, depth)
    if options.get("config"):
        options["config"] = dataclasses.replace(options["config"], block_v=8)
    run = jax.jit(functools.partial(op.store_all, **options))
    output, ring = run(*arrays)
    written = np.zeros((slots, slots), bool)
    np.put_along_axis(written, np.asarray(node_slots(arrays[6], 11, slots)), True, 1)
    assert not written[np.arange(slots), np.arange(slots)].any()
    for before, after in zip(arrays[5][~written], ring[~written], strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    wanted = exact(*arrays)
    assert error(output, wanted[0]) < 3e-6
    assert error(store_all(*arrays, **options)[1], wanted[1]) < 3e-6
    arrays[5] = jnp.where(written[..., None, None, None], jnp.nan, arrays[5])
    poisoned = run(*arrays)
    for clean, other in zip((output, ring), poisoned, strict=True):
        assert np.array_equal(clean, other)


@over_ways
@pytest.mark.parametrize("heads", [(1, 1, 8, 8), (2, 8, 32, 16)])
def test_head_ratios_and_sizes(way, heads):
    parent, depth = tree("bushy", 1)
    arrays = make(parent, heads)
    options = options_for(way, depth)
    if options.get("config"):
        options["config"] = dataclasses.replace(options["config"], block_v=8)
    got, wanted = store_all(*arrays, **options), exact(*arrays)
    assert error(got[0], wanted[0]) < 3e-6 and error(got[1], wanted[1]) < 3e-6


@over_ways
def test_bfloat16(way):
    parent, depth = tree("bushy", 2)
    arrays = make(parent, dtype="bfloat16", state_dtype="bfloat16")
    output, states = store_all(*arrays, **options_for(way, depth))
    assert output.dtype == states.dtype == jnp.bfloat16
    wanted = exact(*arrays)
    assert error(output, wanted[0]) < 5e-3 and error(states, wanted[1]) < 5e-3


def test_float64_is_computed_in_float64(double):
    arrays = make(tree("bushy", 2)[0], dtype="float64")
    got, wanted = store_all(*arrays), exact(*arrays)
    assert got[0].dtype == got[1].dtype == jnp.float64
    assert error(got[0], wanted[0]) < 1e-14 and error(got[1], wanted[1]) < 1e-14


@over_ways
def test_trees_differ_within_a_batch_and_padding_plays_no_part(way):
    names = ("star", "bushy")
    parent = np.full((2, 11), -1, np.int32)
    for row, name in zip(parent, names, strict=True):
        row[: len(TREES[name][0])] = TREES[name][0]
    arrays = make(parent)
    options = options_for(way, 3)
    before = store_all(*arrays, **options)
    wanted = exact(*arrays)
    for b, name in enumerate(names):
        size = len(TREES[name][0])
        for got, want in zip(before, wanted, strict=True):
            assert error(got[b, :size], want[b, :size]) < 3e-6
    padding = jnp.asarray(
        np.arange(11) >= np.array([len(TREES[name][0]) for name in names])[:, None]
    )
    poisoned = tuple(
        jnp.where(padding.reshape(2, 11, *(1,) * (x.ndim - 2)), jnp.nan, x)
        for x in arrays[:5]
    )
    after = store_all(*poisoned, *arrays[5:], **options)
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[~padding], new[~padding])
        assert np.all(np.isnan(np.asarray(new)[padding]))


@over_ways
def test_a_node_changes_only_what_is_below_it(way):
    parent, depth = tree("bushy", 2)
    arrays = make(parent)
    before = store_all(*arrays, **options_for(way, depth))
    changed = tuple(x.at[:, 4].set(jnp.nan) for x in arrays[:5])
    after = store_all(*changed, *arrays[5:], **options_for(way, depth))
    below = [t in (4, 5, 6, 7, 8, 9) for t in range(11)]
    for old, new in zip(before, after, strict=True):
        same = [np.array_equal(old[:, t], new[:, t]) for t in range(11)]
        assert same == [not x for x in below]


@pytest.mark.parametrize("fault", ["previous node", "head order", "decay", "slot"])
def test_broken_twins_are_caught(fault):
    arrays = list(make(tree("bushy", 1)[0], (2, 4, 16, 16)))
    wanted = exact(*arrays)
    if fault == "previous node":
        arrays[7] = jnp.arange(-1, 10, dtype=jnp.int32)[None]
    elif fault == "head order":
        arrays[:2] = [jnp.tile(x, (1, 1, 2, 1)) for x in arrays[:2]]
    elif fault == "slot":
        arrays[6] = (arrays[6] + 1) % arrays[5].shape[1]
    else:
        arrays[3] = jnp.roll(arrays[3], 1, axis=1)
    got = store_all(*arrays)
    assert max(error(*pair) for pair in zip(got, wanted, strict=True)) > 1e-2


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("states has shape", lambda a: a | {"states": a["states"][0]}),
        ("states has 11 slots; 12", lambda a: a | {"states": a["states"][:, 1:]}),
        ("index has shape", lambda a: a | {"index": a["index"][:1]}),
        ("q has shape", lambda a: a | {"q": a["q"][..., :8]}),
        ("k has shape", lambda a: a | {"k": a["k"][:, :3]}),
        ("v has shape", lambda a: a | {"v": a["v"][:, :, :2]}),
        ("log_decay has shape", lambda a: a | {"log_decay": a["beta"][:, :1]}),
        ("beta has shape", lambda a: a | {"beta": a["beta"][..., None]}),
        ("parent has shape", lambda a: a | {"parent": a["parent"][0]}),
        ("depth_max is 11", lambda a: a | {"depth_max": 11}),
        ("output_dtype is int32", lambda a: a | {"output_dtype": "int32"}),
        ("impl is 'cuda'", lambda a: a | {"impl": "cuda"}),
    ],
)
def test_wrong_arguments_are_named(message, change):
    names = ("q", "k", "v", "log_decay", "beta", "states", "index", "parent")
    arrays = make(tree("bushy", 2)[0])
    arguments = change(dict(zip(names, arrays, strict=True)))
    with pytest.raises(ValueError, match=message):
        op.store_all(**arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configs.Config(5), "block_v is 5"),
        (configs.Config(8, resident=True), "resident is True"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(config, message):
    spec = specs.spec_of(*make(tree("chain", 1)[0]))
    with pytest.raises(ValueError, match=message):
        configs.choose(spec, "gpu", "NVIDIA H200", config)


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("triton", {"key_dim": 24}, "power of two"),
        ("triton", {"state_dtype": "float16"}, "state dtype float16"),
        ("mosaic_tpu", {"value_dim": 12}, "multiple of 8"),
        ("mosaic_tpu", {"nodes": 8192}, "bytes of states"),
        ("mosaic_tpu", {"accumulation_dtype": "float64"}, "not float64"),
    ],
)
def test_supports_says_why_not(impl, change, reason):
    module = op.IMPLEMENTATIONS.module(impl)
    platform = {"triton": "gpu", "mosaic_tpu": "tpu"}[impl]
    spec = specs.spec_of(*make(tree("bushy", 1)[0]))
    assert module.supports(spec, platform) is None
    assert module.supports(spec, "cpu", interpret=True) is None
    assert "the device is a cpu" in module.supports(spec, "cpu")
    assert reason in module.supports(dataclasses.replace(spec, **change), platform)


def test_heuristics_keep_short_paths_of_trees_resident():
    def chosen(name):
        parent, depth = tree(name, 1)
        spec = specs.spec_of(*make(parent), depth_max=depth)
        return configs.heuristic(spec, "gpu").resident

    assert chosen("bushy") and chosen("star")
    assert not chosen("chain") and not chosen("root")


def test_bytes_of_a_call():
    spec = specs.spec_of(*make(tree("star", 2)[0], (2, 4, 16, 32), "bfloat16"))
    states = 6 * 4 * 32 * 16 * 4
    rows = 2 * (2 * 2 * 16 + 4 * 32) + 2 * 4 * 32 + 2 * 4 * 4 + 4
    assert spec.bytes_moved == 2 * (states + 5 * rows)


def test_tuned_tables_hold_cuts_that_fit():
    for file in configs.TUNED.glob("*.json"):
        for entry in json.loads(file.read_text()):
            assert 128 % configs.Config(**entry["config"]).block_v == 0
            fields = {field.name for field in dataclasses.fields(specs.Spec)}
            assert set(entry["match"]) <= fields
