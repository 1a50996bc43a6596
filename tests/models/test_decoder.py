"""A decoder layer alone, and one that norms its rows for whoever comes next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_5 import decoder, layers
from pallas_kernels import device
from pallas_kernels.residual_norm import op as residual_norm
from tests.models import golden
from treewy_jax import commit, conv
from treewy_jax import tree as tree_lib

VERBS = ("prefill", "verify", "decode")
KINDS = {"GDN": 0, "attention": 3}  # layers of the golden models
LENGTH = 5


def layer_of(variant, kind):
    model = golden.model(variant)
    layer = nnx.merge(model.graphdef, model.params).layers[KINDS[kind]]
    assert layer.attends == (kind == "attention")
    return layer


def rows(layer, tokens, seed=1):
    """Return rows of the stream, and some weight of the norm behind the layer."""
    size = layer.input_layernorm.weight.shape[0]
    h, weight = jax.random.normal(jax.random.key(seed), (2, 2, tokens, size))
    return h, 0.3 * weight[0, 0]


def call(layer, verb, h):
    """Run a verb of a layer behind LENGTH tokens."""
    lengths = jnp.full(2, LENGTH)
    before = rows(layer, LENGTH, seed=2)[0]
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    if verb == "prefill":
        return layer.prefill(h, positions, lengths)
    _, kept = layer.prefill(before, positions, lengths)
    if layer.attends:
        kept = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0))), kept
        )
    if verb == "decode":
        return layer.decode(h, kept, lengths)
    tree = tree_lib.DraftTree.from_widths((2, 1), batch=2)
    nodes = decoder.NodeView(
        tree=tree,
        windows=conv.tree_windows(tree, 4),
        positions=lengths[:, None] + tree.depth(),
        mask=tree.ancestors(include_self=True),
    )
    lifecycle = commit.by_name("reconstruct")
    if not layer.attends:
        kept = (kept[0], lifecycle.init(kept[1]))
    return layer.verify(h, kept, lengths, nodes, lifecycle)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", golden.VARIANTS)
def test_rows_are_normed_for_the_next_layer(variant, kind, verb):
    layer = layer_of(variant, kind)
    tokens = {"prefill": LENGTH, "verify": 5, "decode": 1}[verb]
    h, weight = rows(layer, tokens)
    x = layer.input_layernorm(h)
    alone, kept = call(layer, verb, h)
    (new_h, new_x), kept_too = call(layer, verb, decoder.Rows(h, x, weight))
    np.testing.assert_allclose(new_h, alone, atol=1e-5)
    root = np.sqrt(np.mean(np.square(alone), -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(new_x, alone / root * (1 + weight), atol=1e-4)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5), kept, kept_too
    )


# --- parts, as on a GPU -------------------------------------------------------------


@pytest.fixture
def in_parts(monkeypatch):
    """Leave products of few rows and the terms of the experts to be added up."""
    monkeypatch.setattr(residual_norm, "parts_of_product", lambda *sizes: 4)
    monkeypatch.setattr(residual_norm, "adds_up", lambda *sizes: True)


def relative(got, wanted):
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", golden.VARIANTS)
def test_a_layer_adds_up_parts(variant, kind, in_parts):
    """Those of the mixer and of the feed-forward."""
    layer = layer_of(variant, kind)
    h, weight = rows(layer, 3)
    linear = layers.linear(h.shape[-1], h.shape[-1], dtype=h.dtype, rngs=nnx.Rngs(0))
    seen = []

    def mix(x):
        seen.append(layers.in_parts(linear, x).shape[2])
        return layers.in_parts(linear, x), ()

    found = decoder.Rows(h, layer.input_layernorm(h), weight)
    (new_h, _), _ = layer(found, mix)
    alone, _ = layer(h, lambda x: (linear(x), ()))
    parts = layer.mlp.parts(layer.input_layernorm(h))
    terms = 4 if variant == "dense" else layer.mlp.gate.top_k + 1
    assert seen == [4] and parts.shape[2:-1] == (terms,)
    assert relative(new_h, alone) < 1e-6


@pytest.mark.parametrize("parts", [1, 8])
def test_a_product_is_cut_along_its_sum(parts, monkeypatch):
    seen = []
    monkeypatch.setattr(
        residual_norm, "parts_of_product", lambda *sizes: seen.append(sizes) or parts
    )
    linear = layers.linear(48, 40, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 48), jnp.bfloat16)
    found = layers.in_parts(linear, x)
    assert seen == [(6, 48, 40, jnp.bfloat16)]
    if parts == 1:
        assert np.array_equal(found, linear(x))
        return
    assert (found.shape, found.dtype) == ((2, 3, 8, 40), jnp.float32)
    kernel, x = (np.asarray(each, np.float64) for each in (linear.kernel[...], x))
    for p in range(8):
        some = slice(6 * p, 6 * p + 6)
        wanted = x[..., some] @ kernel[some]
        assert relative(np.asarray(found[:, :, p], np.float64), wanted) < 1e-6


def test_nothing_is_in_parts_on_a_cpu():
    if device.platform() == "gpu":
        pytest.skip("it is on a GPU")
    for variant in golden.VARIANTS:
        layer = layer_of(variant, "GDN")
        h, _ = rows(layer, 3)
        assert layer.mlp.parts(h).shape == h.shape
    linear = layers.linear(4096, 8, dtype=h.dtype, rngs=nnx.Rngs(0))
    assert layers.in_parts(linear, jnp.ones((1, 4, 4096))).shape == (1, 4, 8)
