"""Sum of parts, residual and norm against float64, for every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, gpu
from pallas_kernels.residual_norm import mosaic_tpu, op, triton
from pallas_kernels.residual_norm import spec as specs

# T, P, H: one of everything, sizes of no power of two, more rows than a TPU's program.
SHAPES = [(1, 1, 128), (4, 8, 256), (3, 9, 640), (11, 3, 384)]
NAMES = ("h", "parts", "weight")
EPS = 1e-6
run = jax.jit(op.residual_norm, static_argnames=("eps", "impl"))


def make(shape, dtype="float32", parts_dtype=None, seed=0):
    """Return random arguments; the parts nearly cancel the rows of the stream."""
    tokens, parts, hidden = shape
    random = np.random.default_rng(seed)
    h = 3 * random.normal(size=(tokens, hidden))
    each = random.normal(size=(tokens, parts, hidden)) - 0.9 * h[:, None] / parts
    return [
        jnp.asarray(h, dtype),
        jnp.asarray(each, parts_dtype or dtype),
        jnp.asarray(0.3 * random.normal(size=hidden), dtype),
    ]


def exact(h, parts, weight):
    """Row by row: add what there is, then norm."""
    new_h, x = np.array(h, np.float64), np.zeros(h.shape)
    for t, row in enumerate(new_h):
        for part in np.asarray(parts[t], np.float64):
            row += part
        root = np.sqrt(row @ row / len(row) + EPS)
        x[t] = row / root * (1 + np.asarray(weight, np.float64))
    return new_h, x


def errors(got, wanted):
    """Relative Frobenius errors; NaN never passes a comparison."""
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(got, wanted, strict=True)
    ]


def spec_for(shape, dtype="float32", **options):
    return specs.spec_of(*make(shape, dtype, **options))


def runs_here(impl):
    if impl == "reference":
        return True
    module, spec = op.IMPLEMENTATIONS.module(impl), spec_for(SHAPES[0])
    return module.supports(spec, device.platform(), interpret=True) is None


IMPLS = [name for name in op.IMPLEMENTATIONS.modules if runs_here(name)]
KERNELS = [name for name in IMPLS if name != "reference"]
# On a CPU XLA keeps more digits of what an interpreted kernel rounds.
ROUND = ("reference",) if device.platform() == "cpu" else IMPLS
over_impls = pytest.mark.parametrize("impl", IMPLS)


@over_impls
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(impl, shape):
    arrays = make(shape)
    got = run(*arrays, eps=EPS, impl=impl)
    assert all(each.dtype == jnp.float32 for each in got)
    assert max(errors(got, exact(*arrays))) < 1e-6


@over_impls
@pytest.mark.parametrize("parts_dtype", ["bfloat16", "float32"])
def test_bfloat16_rows(impl, parts_dtype):
    arrays = make(SHAPES[2], "bfloat16", parts_dtype=parts_dtype)
    got = run(*arrays, eps=EPS, impl=impl)
    assert all(each.dtype == jnp.bfloat16 for each in got)
    assert max(errors(got, exact(*arrays))) < 1e-2


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@over_impls
def test_the_sum_is_rounded_where_it_was_before(impl):
    """The sum of the parts to bfloat16, and once more with the stream added."""
    h, parts, weight = make((8, 5, 256), "bfloat16", parts_dtype="float32")
    # Parts of few bits: any order of the float32 sum is exact.
    parts = jnp.round(parts * 64) / 64
    y = rounded(np.sum(np.asarray(parts, np.float64), axis=1))
    wanted = rounded(np.asarray(h, np.float64) + y)
    new_h, _ = run(h, parts, weight, eps=EPS, impl=impl)
    assert np.array_equal(np.asarray(new_h, np.float64), wanted)
    once = rounded(np.asarray(h, np.float64) + np.sum(np.asarray(parts), axis=1))
    assert not np.array_equal(wanted, once)


@pytest.mark.parametrize("impl", [name for name in IMPLS if name in ROUND])
def test_the_norm_is_that_of_the_rounded_stream(impl):
    h, parts, weight = make((8, 5, 256), "bfloat16", parts_dtype="float32")
    new_h, x = run(h, parts, weight, eps=EPS, impl=impl)
    _, normed = exact(new_h, np.zeros_like(parts), weight)
    np.testing.assert_allclose(np.asarray(x, np.float64), normed, rtol=2**-8)
    _, unrounded = exact(h, np.asarray(parts, np.float64), weight)
    off = np.abs(np.asarray(x, np.float64) / unrounded - 1)
    assert np.max(off) > 2**-8


@pytest.mark.skipif(device.platform() != "cpu", reason="XLA for a CPU leaves it out")
def test_a_stream_that_is_not_rounded_is_seen():
    """A sum in bfloat16, of which XLA keeps more digits within a program."""

    def unrounded(h, parts, weight, *, eps):
        h = h + jnp.sum(parts, axis=-2).astype(h.dtype)
        x = h.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        return h, (x * (1 + weight.astype(jnp.float32))).astype(h.dtype)

    h, parts, weight = make((8, 5, 256), "bfloat16", parts_dtype="float32")
    new_h, x = jax.jit(unrounded, static_argnames="eps")(h, parts, weight, eps=EPS)
    _, normed = exact(new_h, np.zeros_like(parts), weight)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        np.testing.assert_allclose(np.asarray(x, np.float64), normed, rtol=2**-8)


@over_impls
def test_any_leading_dimensions(impl):
    h, parts, weight = make((6, 3, 128))
    flat = run(h, parts, weight, eps=EPS, impl=impl)
    more = [x.reshape(2, 3, *x.shape[1:]) for x in (h, parts)]
    got = run(*more, weight, eps=EPS, impl=impl)
    assert all(x.shape == (2, 3, 128) for x in got)
    for ours, wanted in zip(got, flat, strict=True):
        np.testing.assert_allclose(ours.reshape(6, 128), wanted, rtol=2e-6, atol=1e-6)


def test_float64_is_computed_in_float64(double):
    arrays = make(SHAPES[1], "float64")
    got = run(*arrays, eps=EPS)
    assert all(each.dtype == jnp.float64 for each in got)
    assert max(errors(got, exact(*arrays))) < 1e-14


@over_impls
def test_a_row_stays_out_of_the_others(impl):
    arrays = make(SHAPES[3])
    before = run(*arrays, eps=EPS, impl=impl)
    arrays[1] = arrays[1].at[4, 1].set(jnp.nan)
    after = run(*arrays, eps=EPS, impl=impl)
    others = np.arange(SHAPES[3][0]) != 4
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[others], new[others])
        assert np.all(np.isnan(new[4]))


@over_impls
def test_epsilon_is_under_the_root_and_zero_stays_zero(impl):
    zero = [jnp.zeros(shape) for shape in ((2, 128), (2, 3, 128), (128,))]
    assert not any(np.any(x) for x in run(*zero, eps=EPS, impl=impl))
    zero[0] += 1e-3
    _, x = run(*zero, eps=1e-6, impl=impl)
    np.testing.assert_allclose(x, 2**-0.5, rtol=1e-5)


def loss(arrays, impl):
    new_h, x = op.residual_norm(*arrays, eps=EPS, impl=impl)
    return jnp.sum(new_h**3) + jnp.sum(jnp.sin(x))


gradient = jax.jit(jax.grad(loss), static_argnums=1)


@pytest.mark.parametrize("impl", KERNELS)
def test_gradients_are_those_of_the_reference(impl):
    arrays = make(SHAPES[1])
    expected, found = (gradient(arrays, name) for name in ("reference", impl))
    assert max(errors(found, [np.asarray(x) for x in expected])) < 1e-5


@pytest.mark.parametrize("fault", ["part", "gain", "order"])
@over_impls
def test_wrong_arguments_are_seen(fault, impl):
    arrays = make(SHAPES[2])
    got = run(*arrays, eps=EPS, impl=impl)
    if fault == "part":  # one is left out
        arrays[1] = arrays[1].at[:, -1].set(0)
    elif fault == "gain":  # without the one
        arrays[2] = arrays[2] - 1
    else:  # rows of one token given to the next
        arrays[1] = jnp.roll(arrays[1], 1, axis=0)
    assert max(errors(got, exact(*arrays))) > 1e-2


@pytest.mark.skipif("triton" not in KERNELS, reason="a kernel of GPUs")
def test_a_broken_kernel_is_seen(monkeypatch):
    """One that takes the columns beyond the end for zeros of the row."""
    arrays = make(SHAPES[2])
    monkeypatch.setattr(gpu, "load", lambda ref, mask=None: ref[...])
    again = jax.jit(lambda *arrays: op.residual_norm(*arrays, eps=EPS, impl="triton"))
    assert not max(errors(again(*arrays), exact(*arrays))) < 1e-6


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("h", (256,), r"h has shape \(256,\); \[.., H\]"),
        ("parts", (4, 256), r"parts has shape \(4, 256\); \(4, parts, 256\)"),
        ("parts", (4, 8, 128), "parts has shape"),
        ("parts", (3, 8, 256), "parts has shape"),
        ("parts", (4, 0, 256), "parts is 0; 1 or more"),
        ("weight", (1, 256), r"weight has shape .* \(256,\)"),
    ],
)
def test_wrong_shapes_are_named(name, shape, message):
    arrays = dict(zip(NAMES, make(SHAPES[1]), strict=True))
    with pytest.raises(ValueError, match=message):
        op.residual_norm(**arrays | {name: jnp.zeros(shape)}, eps=EPS)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: auto, triton"):
        op.residual_norm(*make(SHAPES[1]), eps=EPS, impl="cuda")


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("triton", {"tokens": 513}, "at most 512 tokens, not 513"),
        ("triton", {"hidden": 8193}, "at most 8192 hidden"),
        ("triton", {"parts": 33}, "at most 32 parts"),
        ("triton", {"rows_dtype": "float16"}, "rows dtype float16"),
        ("triton", {"accumulation_dtype": "float64"}, "not float64"),
        ("mosaic_tpu", {"hidden": 200}, "multiple of 128, not 200"),
        ("mosaic_tpu", {"parts": 1024}, "1024 x 256 of each"),
        ("mosaic_tpu", {"parts_dtype": "float16"}, "parts dtype float16"),
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


@pytest.mark.parametrize("hidden", [1024, 2048, 2560, 4096, 5120])
def test_kernels_take_the_published_sizes(hidden):
    for parts in (1, 8, 9, 11):
        spec = specs.make_spec(tokens=128, parts=parts, hidden=hidden)
        assert triton.supports(spec, "gpu") is None
        assert mosaic_tpu.supports(spec, "tpu") is None


def test_on_a_tpu_xla_fuses_it(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    assert op.IMPLEMENTATIONS.choose(spec_for(SHAPES[1])).name == "reference"


def test_products_are_cut_on_a_gpu_alone(monkeypatch):
    sizes = dict(tokens=4, terms=4096, hidden=2048, dtype="bfloat16")
    terms = dict(tokens=4, parts=9, hidden=2048, dtype="bfloat16")
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(device, "platform", lambda name=platform: name)
        assert op.parts_of_product(**sizes) == 1 and not op.adds_up(**terms)
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert op.adds_up(**terms) and not op.adds_up(**terms | {"tokens": 513})
    for change, parts in (
        ({}, 8),
        ({"tokens": 128}, 8),
        ({"tokens": 129}, 1),  # fills the device
        ({"tokens": 1}, 1),  # is no matrix product
        ({"terms": 1024}, 1),
        ({"terms": 4100}, 1),
        ({"dtype": "float16"}, 1),
    ):
        assert op.parts_of_product(**sizes | change) == parts, change


def test_bytes_of_a_call():
    spec = spec_for((4, 9, 256), "bfloat16", parts_dtype="float32")
    rows = 4 * 256 * (3 * 2 + 9 * 4)
    assert spec.bytes_moved == rows + 256 * 2
    assert spec.flops == 4 * 256 * (9 + 5)
