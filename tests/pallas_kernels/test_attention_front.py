"""Norms and rotary embedding against float64, for every implementation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.attention_front import config as configs
from pallas_kernels.attention_front import op
from pallas_kernels.attention_front import spec as specs

# B, T, heads, kv heads, D, R: one of everything, odd counts, all channels rotated.
SHAPES = [
    (1, 1, 2, 1, 128, 32),
    (2, 7, 4, 2, 128, 64),
    (1, 5, 6, 3, 128, 128),
    (3, 1, 2, 2, 256, 64),
]
# Smaller than a lane of a TPU: the models of the tests.
TINY = [(2, 5, 4, 2, 16, 4), (1, 3, 3, 1, 32, 8), (2, 2, 2, 1, 8, 2)]
SHAPE = SHAPES[1]
NAMES = ("q_and_gate", "k", "v", "q_weight", "k_weight", "positions")
THETA, EPSILON = 1e7, 1e-6
LONGEST = 262144


def make(shape, dtype="float32", seed=0, most=LONGEST):
    """Return random arguments, with NaN in place of the gates."""
    batch, tokens, heads, kv_heads, dim, _ = shape
    random = np.random.default_rng(seed)
    q_and_gate = random.normal(size=(batch, tokens, heads, 2 * dim))
    q_and_gate[..., dim:] = np.nan
    arrays = [q_and_gate.reshape(batch, tokens, -1)]
    arrays += [random.normal(size=(batch, tokens, kv_heads * dim)) for _ in "kv"]
    # Of few digits: the gains are rounded to float32 in float64 too.
    arrays += [random.integers(-32, 32, dim) / 64 for _ in "qk"]
    positions = random.integers(0, most, (batch, tokens))
    positions.flat[-1] = most - 1
    return *(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(positions, jnp.int32)


def exact(arrays, shape, angles=None):
    """Each head by itself: divide by the root mean square and turn pairs."""
    heads, kv_heads, dim, rotary = shape[2:]
    *floats, positions = arrays
    q, k, v, *weights = (np.asarray(x, np.float64) for x in floats)
    rows = q.shape[:2]
    q = q.reshape(*rows, heads, 2 * dim)[..., :dim]
    k, v = (x.reshape(*rows, kv_heads, dim) for x in (k, v))
    if angles is None:
        angles = float32_angles(positions, rotary)
    turns = np.exp(1j * angles)[:, :, None]
    return *(
        turned(normed(x, w), turns) for x, w in zip((q, k), weights, strict=True)
    ), v


def float32_angles(positions, rotary):
    """Return position theta^(-2i / R), factors and product in float32."""
    frequency = (THETA ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    return (np.asarray(positions, np.float32)[..., None] * frequency).astype(np.float64)


def normed(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * (1 + weight)


def turned(x, turns):
    """Multiply complex numbers: real parts come first, then the imaginary ones."""
    half = turns.shape[-1]
    product = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
    return np.concatenate([product.real, product.imag, x[..., 2 * half :]], axis=-1)


def errors(got, wanted):
    """Relative Frobenius errors; NaN never passes a comparison."""
    pairs = zip(got, wanted, strict=True)
    return [
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        for x, y in pairs
    ]


STATIC = ("heads", "kv_heads", "rotary_dim", "theta", "eps", "impl", "config")
front = jax.jit(op.attention_front, static_argnames=STATIC)


def sizes(shape):
    return dict(
        heads=shape[2], kv_heads=shape[3], rotary_dim=shape[5], theta=THETA, eps=EPSILON
    )


def call(arrays, shape, **options):
    return front(*arrays, **sizes(shape) | options)


def spec_for(shape, dtype="float32"):
    return specs.spec_of(*make(shape, dtype), **sizes(shape))


def ways():
    """Return implementations and cuts that run on this device."""
    found = {"reference": dict(impl="reference")}
    for impl in ("triton", "mosaic_tpu"):
        module = op.IMPLEMENTATIONS.module(impl)
        platform = device.platform()
        if module.supports(spec_for(SHAPE), platform, interpret=True) is None:
            found[impl] = dict(impl=impl)
    if "triton" in found:
        found["triton blocks"] = dict(impl="triton", config=configs.Config(4, 2))
    return found


WAYS = ways()
over_ways = pytest.mark.parametrize("way", WAYS)


@over_ways
@pytest.mark.parametrize("shape", SHAPES + TINY, ids=str)
def test_equals_float64(way, shape):
    """At positions up to the longest context; gates are not read."""
    if way == "mosaic_tpu" and shape in TINY:
        pytest.skip("heads of whole lanes only")
    arrays = make(shape)
    got = call(arrays, shape, **WAYS[way])
    assert all(x.dtype == jnp.float32 for x in got)
    assert max(errors(got, exact(arrays, shape))) < 1e-6
    assert np.array_equal(got[2].ravel(), arrays[2].ravel())


@over_ways
def test_bfloat16_rows(way):
    arrays = make(SHAPE, "bfloat16")
    got = call(arrays, SHAPE, **WAYS[way])
    assert [x.dtype for x in got] == [jnp.bfloat16] * 3
    assert max(errors(got, exact(arrays, SHAPE))) < 5e-3


@over_ways
def test_bfloat16_is_rounded_where_the_model_rounds(way):
    """After the norm, cos, sin, each product and the sum; sums of norms may differ."""
    arrays = make(SHAPE, "bfloat16")
    got = call(arrays, SHAPE, **WAYS[way])
    *_, dim, rotary = SHAPE
    turns = np.exp(1j * float32_angles(arrays[-1], rotary))[:, :, None]
    cos, sin = (bfloat16(x) for x in (turns.real, turns.imag))
    q_in = np.asarray(arrays[0], np.float64).reshape(*got[0].shape[:3], 2 * dim)
    k_in = np.asarray(arrays[1], np.float64).reshape(got[1].shape)
    for x, weight, found in zip(
        (q_in[..., :dim], k_in), arrays[3:5], got, strict=False
    ):
        x = bfloat16(normed(x, np.asarray(weight, np.float64)))
        first, second, rest = np.split(x, [rotary // 2, rotary], axis=-1)
        parts = [
            bfloat16(bfloat16(first * cos) - bfloat16(second * sin)),
            bfloat16(bfloat16(second * cos) + bfloat16(first * sin)),
            rest,
        ]
        different = np.concatenate(parts, axis=-1) != np.asarray(found, np.float64)
        assert np.mean(different) < 0.01


def bfloat16(x):
    return np.asarray(x, np.float64).astype(jnp.bfloat16).astype(np.float64)


def test_float64_is_computed_in_float64(double):
    """But for the angles, which are float32."""
    arrays = make(SHAPE, "float64")
    got = call(arrays, SHAPE)
    assert all(x.dtype == jnp.float64 for x in got)
    wanted = exact(arrays, SHAPE)
    assert max(errors(got, wanted)) < 1e-6
    behind = [x[..., SHAPE[-1] :] for x in got], [x[..., SHAPE[-1] :] for x in wanted]
    assert max(errors(*behind)) < 1e-14


@over_ways
def test_scores_depend_on_the_distance_only(way):
    arrays = make(SHAPE, most=64)
    products = []
    for offset in (0, 1, 1000):
        q, k, _ = call((*arrays[:-1], arrays[-1] + offset), SHAPE, **WAYS[way])
        products.append(np.einsum("bthd,bskd->bhkts", q, k))
    assert max(errors(products[1:], products[:1] * 2)) < 2e-4
    q, k, _ = call((*arrays[:-1], 2 * arrays[-1]), SHAPE, **WAYS[way])
    far = np.einsum("bthd,bskd->bhkts", q, k)
    assert errors([far], products[:1])[0] > 1e-2


@over_ways
def test_at_position_zero_nothing_turns(way):
    arrays = make(SHAPE, most=1)
    got = call(arrays, SHAPE, **WAYS[way])
    still = exact(arrays, SHAPE, angles=np.zeros((*SHAPE[:2], SHAPE[-1] // 2)))
    assert max(errors(got, still)) < 1e-6


@over_ways
def test_a_row_reaches_itself_only(way):
    arrays = [*make(SHAPE)]
    before = call(arrays, SHAPE, **WAYS[way])
    arrays[:3] = [x.at[1, 2].set(jnp.nan) for x in arrays[:3]]
    after = call(arrays, SHAPE, **WAYS[way])
    others = np.ones(SHAPE[:2], bool)
    others[1, 2] = False
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[others], new[others])
        assert np.all(np.isnan(new[~others]))


@over_ways
def test_a_head_reaches_itself_only(way):
    arrays = [*make(SHAPE)]
    dim = SHAPE[4]
    before = call(arrays, SHAPE, **WAYS[way])
    arrays[0] = arrays[0].at[..., 2 * dim : 3 * dim].set(1.0)
    arrays[1] = arrays[1].at[..., dim:].set(1.0)
    after = call(arrays, SHAPE, **WAYS[way])
    for old, new in zip(before[:2], after[:2], strict=True):
        same = [np.array_equal(old[..., h, :], new[..., h, :]) for h in range(2)]
        assert same == [True, False]
        assert np.array_equal(old[..., 2:, :], new[..., 2:, :])


@over_ways
def test_extreme_rows_stay_finite(way):
    arrays = [*make(SHAPE)]
    arrays[:2] = [x * 1e15 for x in arrays[:2]]
    got = call(arrays, SHAPE, **WAYS[way])
    assert max(errors(got, exact(arrays, SHAPE))) < 1e-6
    arrays[:2] = [0 * jnp.nan_to_num(x) for x in arrays[:2]]
    q, k, _ = call(arrays, SHAPE, **WAYS[way])
    assert not np.any(q) and not np.any(k)


@over_ways
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_is_that_of_the_reference(way, dtype):
    *floats, positions = make(SHAPE, dtype)
    floats[0] = jnp.nan_to_num(floats[0])
    random = np.random.default_rng(7)
    cotangents = [random.normal(size=x.shape) for x in call(make(SHAPE), SHAPE)]

    def loss(floats, **options):
        got = call((*floats, positions), SHAPE, **options)
        wide = (x.astype(jnp.float32) * y for x, y in zip(got, cotangents, strict=True))
        return sum(map(jnp.sum, wide))

    got = jax.grad(loss)(floats, **WAYS[way])
    wanted = jax.grad(loss)(floats, impl="reference")
    assert all(x.dtype == dtype for x in got)
    assert max(errors(got, [np.asarray(x, np.float64) for x in wanted])) < 1e-6
    gates = got[0].reshape(*SHAPE[:3], 2, SHAPE[4])[..., 1, :]
    assert not np.any(gates)


def test_gradient_is_the_slope(double):
    *floats, positions = make(TINY[0], "float64")
    floats[0] = jnp.nan_to_num(floats[0])
    steps = [jnp.cos(x) for x in floats]

    def loss(t):
        moved = [x + t * step for x, step in zip(floats, steps, strict=True)]
        q, k, v = call((*moved, positions), TINY[0])
        return jnp.sum(jnp.sin(q)) + jnp.sum(jnp.sin(k)) + jnp.sum(v)

    small = 1e-3  # gains are float32
    slope = (loss(small) - loss(-small)) / (2 * small)
    assert abs(jax.grad(loss)(0.0) - slope) < 1e-3 * abs(slope)


FAULTS = (
    "gate first", "neighbours", "other way", "no gain of 1", "weights swapped",
    "theta", "heads",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_twins_are_caught(fault):
    arrays, options = [*make(SHAPE, most=64)], {}
    wanted = exact(arrays, SHAPE)
    arrays[0] = jnp.nan_to_num(arrays[0])
    batch, tokens, heads, kv_heads, dim, rotary = SHAPE
    if fault == "gate first":
        arrays[0] = jnp.roll(arrays[0], dim, axis=-1)
    elif fault == "neighbours":  # pairs (2i, 2i + 1)
        order = np.arange(dim)
        order[:rotary] = order[:rotary].reshape(2, -1).T.ravel()
        arrays[1] = arrays[1].reshape(-1, dim)[:, order].reshape(arrays[1].shape)
    elif fault == "other way":
        arrays[-1] = -arrays[-1]
    elif fault == "no gain of 1":
        arrays[3] = arrays[3] - 1
    elif fault == "weights swapped":
        arrays[3:5] = arrays[4], arrays[3]
    elif fault == "theta":
        options = dict(theta=1e4)
    elif fault == "heads":
        k = arrays[1].reshape(batch, tokens, kv_heads, dim)
        arrays[1] = k[:, :, ::-1].reshape(arrays[1].shape)
    assert max(errors(call(arrays, SHAPE, **options), wanted)) > 1e-2


def test_angles_of_short_reductions_are_caught():
    """Cos and sin that know only some digits of 2 pi fail at long contexts."""
    arrays = make(SHAPE)
    angles = float32_angles(arrays[-1], SHAPE[-1]).astype(np.float32)
    around = np.float32(2 * np.pi)
    short = angles - np.round(angles / around) * around
    found = errors(exact(arrays, SHAPE, angles=short), exact(arrays, SHAPE))
    assert max(found[:2]) > 1e-4  # a hundred times what passes


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q_and_gate has shape", lambda a: a | {"q_and_gate": a["q_and_gate"][0]}),
        (
            r"q_and_gate has shape .* \(2, 7, 1024\)",
            lambda a: a | {"q_and_gate": a["q_and_gate"][..., 1:]},
        ),
        (r"k has shape .* \(2, 7, 256\)", lambda a: a | {"k": a["k"][:, 1:]}),
        ("v has shape", lambda a: a | {"v": a["v"][..., :128]}),
        ("q_weight has shape", lambda a: a | {"q_weight": a["q_weight"][None]}),
        ("k_weight has shape", lambda a: a | {"k_weight": a["k_weight"][:5]}),
        ("positions has shape", lambda a: a | {"positions": a["positions"][0]}),
        ("k has dtype float16", lambda a: a | {"k": a["k"].astype("float16")}),
        ("v has dtype bfloat16", lambda a: a | {"v": a["v"].astype("bfloat16")}),
        (r"q_and_gate has shape .* 768\)", lambda a: a | {"heads": 3}),
        ("heads is 0", lambda a: a | {"heads": 0}),
        ("kv_heads is 0", lambda a: a | {"kv_heads": 0}),
        ("rotary_dim is 7", lambda a: a | {"rotary_dim": 7}),
        ("rotary_dim is 0", lambda a: a | {"rotary_dim": 0}),
        ("rotary_dim is 130; .* D = 128", lambda a: a | {"rotary_dim": 130}),
        ("impl is 'cuda'", lambda a: a | {"impl": "cuda"}),
    ],
)
def test_wrong_arguments_are_named(message, change):
    arguments = dict(zip(NAMES, make(SHAPE), strict=True)) | sizes(SHAPE)
    with pytest.raises(ValueError, match=message):
        op.attention_front(**change(arguments))


@pytest.mark.parametrize("size", [0, 3])
def test_a_cut_that_does_not_fit_is_refused(size):
    with pytest.raises(ValueError, match=f"block_heads is {size}"):
        configs.choose(spec_for(SHAPE), "NVIDIA H200", configs.Config(size))


def test_blocks_divide_the_heads():
    counts = {1: 1, 2: 2, 3: 1, 6: 2, 16: 4, 24: 4}
    config = configs.Config(4)
    assert {n: configs.block(n, config) for n in counts} == counts


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("triton", {"head_dim": 96}, "power of two"),
        ("triton", {"rotary_dim": 24}, "power of two"),
        ("triton", {"rows_dtype": "float16"}, "rows dtype float16"),
        ("triton", {"weight_dtype": "float16"}, "weight dtype float16"),
        ("triton", {"accumulation_dtype": "float64"}, "not float64"),
        ("mosaic_tpu", {"head_dim": 64}, "multiple of 128"),
        ("mosaic_tpu", {"rows_dtype": "float16"}, "rows dtype float16"),
        ("mosaic_tpu", {"accumulation_dtype": "float64"}, "not float64"),
    ],
)
def test_supports_says_why_not(impl, change, reason):
    module = op.IMPLEMENTATIONS.module(impl)
    platform = {"triton": "gpu", "mosaic_tpu": "tpu"}[impl]
    spec = spec_for(SHAPE)
    assert module.supports(spec, platform) is None
    assert module.supports(spec, "cpu", interpret=True) is None
    assert "the device is a cpu" in module.supports(spec, "cpu")
    assert reason in module.supports(dataclasses.replace(spec, **change), platform)


def test_bytes_of_a_call():
    """Neither gates nor values move."""
    spec = spec_for(SHAPE, "bfloat16")
    assert spec.bytes_moved == 2 * 7 * (2 * (4 + 2) * 128 * 2 + 4) + 2 * 128 * 2


def test_tuned_tables_hold_cuts_that_fit():
    fields = {field.name for field in dataclasses.fields(specs.Spec)}
    for file in configs.TUNED.glob("*.json"):
        for entry in json.loads(file.read_text()):
            config = configs.Config(**entry["config"])
            assert configs.choose(spec_for(SHAPE), "", config) == config
            assert set(entry["match"]) <= fields
