"""Conv, norms and gates against float64, for every implementation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.gdn_front import config as configs
from pallas_kernels.gdn_front import op, reference
from pallas_kernels.gdn_front import spec as specs

# B, n, Hk, Hv, Dk, Dv, W: one of everything, odd sizes, head ratios, Dk != Dv.
SHAPES = [
    (1, 1, 1, 1, 8, 8, 4),
    (2, 7, 2, 4, 16, 32, 4),
    (1, 5, 1, 3, 32, 16, 2),
    (3, 2, 2, 8, 16, 16, 4),
]
NAMES = ("rows", "window", "taps", "A_log", "dt_bias", "windows")
BEHIND = 5  # columns that nobody reads


def make(shape, dtype="float32", seed=0):
    """Return random arguments; every node's conv window is along random ancestors.

    Rows are q | k | v | b | a, and NaN behind them.
    """
    batch, nodes, key_heads, value_heads, key_dim, value_dim, width = shape
    random = np.random.default_rng(seed)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    normal = random.normal
    rows = [
        normal(size=(batch, nodes, channels)),
        3 * normal(size=(batch, nodes, 2 * value_heads)),
        np.full((batch, nodes, BEHIND), np.nan),
    ]
    arrays = [
        np.concatenate(rows, axis=-1),
        normal(size=(batch, width - 1, channels)),
        normal(size=(channels, width)),
        normal(size=value_heads),
        normal(size=value_heads) - 2,
    ]
    parents = [[random.integers(-1, t) for t in range(nodes)] for _ in range(batch)]
    windows = [tree_windows(parent, width) for parent in parents]
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    if dtype == "bfloat16":  # as the model has them
        arrays[3:] = [x.astype(jnp.float32) for x in arrays[3:]]
    return (*arrays, jnp.asarray(np.array(windows), jnp.int32))


def tree_windows(parent, width):
    """Return the rows of [window; rows] of each node, oldest first."""
    found = []
    for node in range(len(parent)):
        path = []
        while node >= 0:
            path.append(width - 1 + node)
            node = parent[node]
        path += range(width - 2, -1, -1)
        found.append(path[:width][::-1])
    return found


def gates_of(rows, value_heads):
    """Return a and b of rows with NaN behind them."""
    b = rows[..., -2 * value_heads - BEHIND : -value_heads - BEHIND]
    return rows[..., -value_heads - BEHIND : -BEHIND], b


def exact(arrays, key_heads, key_dim):
    """Each node by itself: gather, convolve, activate, split and normalise."""
    rows, window, taps, log_rate, dt_bias, windows = (
        np.asarray(x, np.float64) for x in arrays
    )
    value_heads = len(log_rate)
    a, b = gates_of(rows, value_heads)
    rows = rows[..., : window.shape[-1]]
    outputs = [], [], []
    for b_, t in np.ndindex(*rows.shape[:2]):
        inputs = np.concatenate([window[b_], rows[b_]])[windows[b_, t].astype(int)]
        mixed = np.sum(inputs * taps.T, axis=0)
        mixed = mixed / (1 + np.exp(-mixed))
        parts = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim])
        heads = (key_heads, key_heads, value_heads)
        for found, part, count in zip(outputs, parts, heads, strict=True):
            found.append(part.reshape(count, -1))
    q, k, v = (np.array(x).reshape(*rows.shape[:2], *x[0].shape) for x in outputs)
    return *normalized(q, k), v, *gates(a, b, log_rate, dt_bias)


def normalized(q, k):
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return q / np.sqrt(q.shape[-1]), k


def gates(a, b, log_rate, dt_bias):
    return -np.exp(log_rate) * np.log1p(np.exp(a + dt_bias)), 1 / (1 + np.exp(-b))


def error(got, wanted):
    """Relative Frobenius error; NaN never passes a comparison."""
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def errors(got, wanted):
    return [error(*pair) for pair in zip(got, wanted, strict=True)]


STATIC = ("impl", "config")
SIZES = ("key_heads", "key_dim", "value_dim")
gdn_front = jax.jit(op.gdn_front, static_argnames=(*STATIC, *SIZES))
normalize_and_gate = jax.jit(op.normalize_and_gate, static_argnames=STATIC)


def call(arrays, shape, **options):
    return gdn_front(*arrays, **sizes(shape), **options)


def sizes(shape):
    return dict(key_heads=shape[2], key_dim=shape[4], value_dim=shape[5])


def spec_for(shape, dtype="float32"):
    return specs.spec_of_rows(*make(shape, dtype), **sizes(shape))


def ways():
    """Return implementations and cuts that run on this device."""
    found = {"reference": dict(impl="reference")}
    for impl in ("triton", "mosaic_tpu"):
        module = op.IMPLEMENTATIONS.module(impl)
        spec = spec_for(SHAPES[1])
        if module.supports(spec, device.platform(), interpret=True) is None:
            found[impl] = dict(impl=impl)
    if found.pop("triton", None):
        found["triton spans"] = dict(impl="triton", config=configs.Config(1, span=4))
    return found


WAYS = ways()
over_ways = pytest.mark.parametrize("way", WAYS)


@over_ways
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(way, shape):
    arrays = make(shape)
    got = call(arrays, shape, **WAYS[way])
    assert all(x.dtype == jnp.float32 for x in got)
    assert max(errors(got, exact(arrays, shape[2], shape[4]))) < 1e-6


@over_ways
def test_bfloat16_rows(way):
    shape = SHAPES[1]
    arrays = make(shape, "bfloat16")
    got = call(arrays, shape, **WAYS[way])
    assert [x.dtype for x in got] == [jnp.bfloat16] * 3 + [jnp.float32] * 2
    found = errors(got, exact(arrays, shape[2], shape[4]))
    assert max(found[:3]) < 4e-3 and max(found[3:]) < 1e-6


def make_gates():
    """Return raw gates, and parameters of the decay."""
    rows, _, _, *decay, _ = make(SHAPES[1])
    return *gates_of(rows, len(decay[0])), *decay


@over_ways
def test_without_the_convolution(way):
    random = np.random.default_rng(1)
    q, k = (jnp.asarray(random.normal(size=(2, 7, 2, 16)), "float32") for _ in "qk")
    others = make_gates()
    got = normalize_and_gate(q, k, *others, **WAYS[way])
    wanted = normalized(*(np.asarray(x, np.float64) for x in (q, k)))
    wanted += gates(*(np.asarray(x, np.float64) for x in others))
    assert max(errors(got, wanted)) < 1e-6


def test_a_width_of_one_has_no_window():
    shape = (1, 3, 2, 2, 8, 16, 1)
    arrays = make(shape)
    assert max(errors(call(arrays, shape), exact(arrays, 2, 8))) < 1e-6


def test_float64_is_computed_in_float64(double):
    shape = SHAPES[1]
    arrays = make(shape, "float64")
    got = call(arrays, shape)
    assert all(x.dtype == jnp.float64 for x in got)
    assert max(errors(got, exact(arrays, shape[2], shape[4]))) < 1e-14


@over_ways
def test_a_row_reaches_only_the_nodes_that_read_it(way):
    shape = SHAPES[1]
    arrays = make(shape)
    before = call(arrays, shape, **WAYS[way])
    poisoned = [*arrays]
    channels = arrays[1].shape[-1]
    poisoned[0] = arrays[0].at[1, 2, :channels].set(jnp.nan)
    poisoned[1] = arrays[1].at[1, 0].set(jnp.nan)
    after = call(poisoned, shape, **WAYS[way])
    reads = np.isin(arrays[-1], [0, shape[-1] - 1 + 2]).any(-1)
    reads[0] = False
    assert 0 < reads.sum() < shape[1]
    for old, new in zip(before[:3], after[:3], strict=True):
        assert np.array_equal(old[~reads], new[~reads])
        assert np.all(np.isnan(new[reads]))
    assert all(np.array_equal(x, y) for x, y in zip(before[3:], after[3:], strict=True))


@over_ways
def test_numbers_beyond_the_ends_take_the_nearest_row(way):
    shape = SHAPES[1]
    arrays = make(shape)
    rows = shape[-1] - 1 + shape[1]
    far = [*arrays[:-1], arrays[-1].at[0, 3].set(-9).at[0, 4].set(rows + 9)]
    near = [*arrays[:-1], arrays[-1].at[0, 3].set(0).at[0, 4].set(rows - 1)]
    got, wanted = (call(x, shape, **WAYS[way]) for x in (far, near))
    assert all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True))


@over_ways
def test_extreme_gates_stay_finite(way):
    shape = SHAPES[1]
    arrays = [*make(shape)]
    channels = arrays[1].shape[-1]
    extreme = jnp.where(arrays[0] > 0, 200.0, -200.0)
    arrays[0] = extreme.at[..., :channels].set(1e4 * arrays[0][..., :channels])
    got = call(arrays, shape, **WAYS[way])
    assert all(np.all(np.isfinite(x)) for x in got)
    assert np.all(got[3] <= 0) and np.all((got[4] >= 0) & (got[4] <= 1))


def test_zero_rows_give_zero_keys():
    shape = SHAPES[1]
    arrays = [*make(shape)]
    arrays[:2] = map(jnp.zeros_like, arrays[:2])
    q, k, v, *_ = call(arrays, shape)
    assert not np.any(q) and not np.any(k) and not np.any(v)


@over_ways
def test_columns_behind_are_not_read(way):
    """Any number of them, none too, changes no bit."""
    shape = SHAPES[1]
    rows, *others = make(shape)
    wanted = call((rows, *others), shape, **WAYS[way])
    for more in (jnp.zeros((*rows.shape[:2], 0)), jnp.full((*rows.shape[:2], 91), 7.0)):
        joined = jnp.concatenate([rows[..., :-BEHIND], more], axis=-1)
        got = call((joined, *others), shape, **WAYS[way])
        assert all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True))


FAULTS = ["taps reversed", "window order", "windows", "scale", "gates", "column"]


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_twins_are_caught(fault):
    shape = SHAPES[1]
    arrays = [*make(shape)]
    wanted = exact(arrays, shape[2], shape[4])
    channels, gate = arrays[1].shape[-1], shape[3]
    if fault == "gates":  # a in front of b
        b, a = (arrays[0][..., i : i + gate] for i in (channels, channels + gate))
        swapped = jnp.concatenate([a, b], axis=-1)
        arrays[0] = arrays[0].at[..., channels : channels + 2 * gate].set(swapped)
    elif fault == "column":  # gates are read one column too early
        arrays[0] = jnp.roll(arrays[0], 1, axis=-1)
        arrays[0] = arrays[0].at[..., 0].set(0.0)
    elif fault == "taps reversed":
        arrays[2] = arrays[2][:, ::-1]
    elif fault == "window order":
        arrays[1] = arrays[1][:, ::-1]
    elif fault == "windows":  # the causal windows of a sequence, on a tree
        along = jnp.arange(shape[1])[:, None] + jnp.arange(shape[-1])
        arrays[-1] = jnp.broadcast_to(along.astype(jnp.int32), arrays[-1].shape)
    got = [*call(arrays, shape)]
    if fault == "scale":
        got[0] = got[0] * shape[4] ** 0.5
    assert max(errors(got, wanted)) > 1e-2


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("rows has shape", lambda a: a | {"rows": a["rows"][0]}),
        ("window has shape", lambda a: a | {"window": a["window"][:, :2]}),
        ("taps has shape", lambda a: a | {"taps": a["taps"][:5]}),
        (
            "rows has shape .* at least 200",
            lambda a: a | {"rows": a["rows"][..., :199]},
        ),
        ("A_log has shape", lambda a: a | {"A_log": a["A_log"][:, None]}),
        ("dt_bias has shape", lambda a: a | {"dt_bias": a["dt_bias"][:2]}),
        ("windows has shape", lambda a: a | {"windows": a["windows"][..., :3]}),
        ("key_heads is 3", lambda a: a | {"key_heads": 3}),
        ("taps has shape .* = 320", lambda a: a | {"key_dim": 48}),
        ("taps has shape .* = 188", lambda a: a | {"value_dim": 31}),
        ("key_dim is 0", lambda a: a | {"key_dim": 0}),
        ("value_dim is 0", lambda a: a | {"value_dim": 0}),
        ("impl is 'cuda'", lambda a: a | {"impl": "cuda"}),
    ],
)
def test_wrong_arguments_are_named(message, change):
    arguments = dict(zip(NAMES, make(SHAPES[1]), strict=True))
    arguments = change(arguments | sizes(SHAPES[1]))
    with pytest.raises(ValueError, match=message):
        op.gdn_front(**arguments)


GATES = ("a", "b", "A_log", "dt_bias")


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q has shape", lambda a: a | {"q": a["q"][0]}),
        ("k has shape", lambda a: a | {"k": a["k"][:, :, :1]}),
        ("a has shape", lambda a: a | {"a": a["a"][:, :3]}),
        ("b has shape", lambda a: a | {"b": a["b"][..., :2]}),
        ("key_heads is 2", lambda a: a | {n: a[n][..., :3] for n in GATES}),
    ],
)
def test_wrong_heads_are_named(message, change):
    arguments = dict(zip(GATES, make_gates(), strict=True))
    heads = jnp.ones((2, 7, 2, 16))
    with pytest.raises(ValueError, match=message):
        op.normalize_and_gate(**change(arguments | {"q": heads, "k": heads}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configs.Config(3), "block_heads is 3"),
        (configs.Config(4), "block_heads is 4"),
        (configs.Config(2, span=0), "span is 0"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        configs.choose(spec_for(SHAPES[1]), "gpu", "NVIDIA H200", config)


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("triton", {"key_dim": 24}, "power of two"),
        ("triton", {"value_dim": 24}, "power of two"),
        ("triton", {"width": 1}, "width 2 or more"),
        ("mosaic_tpu", {"width": 1}, "width 2 or more"),
        ("triton", {"rows_dtype": "float16"}, "rows dtype float16"),
        ("mosaic_tpu", {"value_dim": 12}, "multiple of 8"),
        ("mosaic_tpu", {"nodes": 1 << 20}, "elements a row of the batch"),
        ("mosaic_tpu", {"accumulation_dtype": "float64"}, "not float64"),
    ],
)
def test_supports_says_why_not(impl, change, reason):
    module = op.IMPLEMENTATIONS.module(impl)
    platform = {"triton": "gpu", "mosaic_tpu": "tpu"}[impl]
    spec = spec_for(SHAPES[1])
    assert module.supports(spec, platform) is None
    assert module.supports(spec, "cpu", interpret=True) is None
    assert "the device is a cpu" in module.supports(spec, "cpu")
    assert reason in module.supports(dataclasses.replace(spec, **change), platform)


def test_bytes_of_a_call():
    shape = (2, 7, 2, 4, 16, 32, 4)
    spec = spec_for(shape, "bfloat16")
    channels = 2 * 2 * 16 + 4 * 32
    rows = 2 * (2 * 7 + 3) * channels
    assert spec.bytes_moved == 2 * (rows + 2 * 7 * 4 * (2 + 4) + 4 * 7 * 4)


def test_tuned_tables_hold_cuts_that_fit():
    for file in configs.TUNED.glob("*.json"):
        for entry in json.loads(file.read_text()):
            assert 16 % configs.Config(**entry["config"]).block_heads == 0
            fields = {field.name for field in dataclasses.fields(specs.Spec)}
            assert set(entry["match"]) <= fields


def test_epsilon_is_under_the_root():
    assert reference.EPSILON == 1e-6
    tiny = jnp.full((1, 1, 1, 16), 1e-4)
    others = [x[:1, :1, :1] for x in make_gates()[:2]]
    zero = jnp.zeros(1)
    _, k, *_ = op.normalize_and_gate(tiny, tiny, *others, zero, zero)
    norm = np.sqrt(16 * 1e-8)
    assert abs(np.linalg.norm(k) - norm / np.sqrt(norm**2 + 1e-6)) < 1e-6
