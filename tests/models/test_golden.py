"""The model against Hugging Face transformers in float32, dense and MoE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_5 import mtp as mtp_lib
from tests.models import golden
from treewy_jax import accept, commit, conv
from treewy_jax import tree as tree_lib

LIFECYCLES = tuple(commit.LIFECYCLES)
CAPACITY = 160

over_variants = pytest.mark.parametrize("variant", golden.VARIANTS)


def target(variant, lifecycle="reconstruct"):
    model = golden.model(variant)
    tree = golden.tree(variant)
    sizes = dict(depth=tree.depth_max, nodes=tree.n_max)
    return model.builder(commit.by_name(lifecycle, **sizes))(model.params)


@functools.cache
def prefilled(variant, length, lifecycle="reconstruct"):
    """Run the first `length` golden ids; returns hidden states and the cache."""
    bound = target(variant, lifecycle)
    run = jax.jit(bound.prefill, static_argnums=2)
    ids = golden.arrays(variant)["ids"][0, :length]
    return run(*golden.padded(ids), CAPACITY)


def assert_layers(layers, variant, prefix, convert, atol=golden.HIDDEN):
    """Compare the recurrent layers with the golden arrays `prefix`.0 to `prefix`.2."""
    assert len(layers) == 3
    for number, layer in enumerate(layers):
        expected = convert(golden.arrays(variant)[f"{prefix}.{number}"])
        np.testing.assert_allclose(layer, expected, rtol=0, atol=atol)


def layered(cache):
    """Return the cache as the module takes it: what each layer keeps, by kind."""
    recurrent = zip(cache.window, cache.recurrent, strict=True)
    return tuple(recurrent), tuple(zip(cache.key, cache.value, strict=True))


@over_variants
def test_prefill(variant):
    arrays, bound = golden.arrays(variant), target(variant)
    hidden, cache = prefilled(variant, golden.PROMPT)
    hidden = hidden[:, : golden.PROMPT]
    logits = bound.logits(hidden)
    expected = arrays["logits"][:, : golden.PROMPT]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=golden.LOGITS)
    assert_layers(cache.recurrent, variant, "pre.rec", golden.state)
    assert_layers(cache.window, variant, "pre.conv", golden.window)
    for name, kept in (("pre.k.3", cache.key), ("pre.v.3", cache.value)):
        rows = np.swapaxes(kept[0][:, : golden.PROMPT], 1, 2)
        np.testing.assert_allclose(rows, arrays[name], rtol=0, atol=golden.HIDDEN)


@over_variants
def test_hidden_states_layer_by_layer(variant):
    arrays, model = golden.arrays(variant), golden.model(variant)
    module = nnx.merge(model.graphdef, model.params)
    tokens = jnp.asarray(arrays["ids"], jnp.int32)
    h = module.embed(tokens)
    np.testing.assert_allclose(h, arrays["hidden.0"], rtol=0, atol=golden.HIDDEN)
    lengths = jnp.asarray([tokens.shape[1]])
    positions = jnp.arange(tokens.shape[1])[None]
    for number, layer in enumerate(module.layers, 1):
        h, _ = jax.jit(layer.prefill)(h, positions, lengths)
        if number < 4:
            expected = arrays[f"hidden.{number}"]
            np.testing.assert_allclose(h, expected, rtol=0, atol=golden.HIDDEN)
    hidden = module.norm(h)
    np.testing.assert_allclose(hidden, arrays["hidden.4"], rtol=0, atol=golden.HIDDEN)


@over_variants
def test_batch(variant):
    arrays, bound = golden.arrays(variant), target(variant)
    tokens = jnp.asarray(arrays["bids"], jnp.int32)
    hidden = jax.jit(bound.module.forward)(tokens)
    logits = bound.logits(hidden)
    np.testing.assert_allclose(logits, arrays["b.logits"], rtol=0, atol=golden.LOGITS)


@over_variants
def test_published_layout(variant):
    arrays = golden.arrays(variant, "published")
    model = golden.model(variant, "published")
    module = nnx.merge(model.graphdef, model.params)
    logits = module.logits(jax.jit(module.forward)(jnp.asarray(arrays["ids"])))
    np.testing.assert_allclose(
        logits, arrays["logits_fp32"], rtol=0, atol=golden.LOGITS
    )


@over_variants
def test_decode_token_by_token(variant):
    arrays, bound = golden.arrays(variant), target(variant)
    _, cache = prefilled(variant, golden.PROMPT)
    kept = layered(cache)
    decode = jax.jit(bound.module.decode)
    logits = []
    for place in range(golden.PROMPT, 80):
        token = jnp.asarray(arrays["ids"][:, place], jnp.int32)
        hidden, kept = decode(token, kept, jnp.asarray([place], jnp.int32))
        logits.append(bound.logits(hidden)[:, 0])
    logits = np.stack(logits, axis=1)
    np.testing.assert_allclose(logits, arrays["dec.logits"], rtol=0, atol=golden.LOGITS)
    windows, states = zip(*kept[0], strict=True)
    assert_layers(states, variant, "dec.rec", golden.state)
    assert_layers(windows, variant, "dec.conv", golden.window)


@over_variants
def test_prompts_shorter_than_the_conv_window(variant):
    """A ragged batch of 1 to 5 tokens is token-by-token decoding from nothing."""
    arrays, bound = golden.arrays(variant), target(variant)
    ids = arrays["ids"][0, :5]
    tokens = jnp.concatenate([golden.padded(ids[:n], 16)[0] for n in range(1, 6)])
    prefill = jax.jit(bound.prefill, static_argnums=2)
    hidden, cache = prefill(tokens, jnp.arange(1, 6, dtype=jnp.int32), 16)
    kept = jax.tree.map(jnp.zeros_like, layered(cache))
    decode = jax.jit(bound.module.decode)
    for place in range(5):
        token = jnp.full(5, ids[place], jnp.int32)
        row, kept = decode(token, kept, jnp.full(5, place, jnp.int32))
        pairs = [(hidden[place, place], row[place, 0])]
        for got, want in zip(layered(cache)[0], kept[0], strict=True):
            pairs += [(x[place], y[place]) for x, y in zip(got, want, strict=True)]
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=0, atol=golden.HIDDEN)


@over_variants
def test_chain_of_a_segment(variant):
    """37 tokens verified as one chain from a state after 33 are a prefill in two."""
    arrays, bound = golden.arrays(variant), target(variant)
    _, cache = prefilled(variant, 33)
    chain = tree_lib.DraftTree.chain(36)
    tokens = jnp.asarray(arrays["ids"][:, 33 : golden.PROMPT], jnp.int32)
    hidden, _ = jax.jit(bound.verify)(cache, chain.with_tokens(tokens))
    expected = arrays["seg.logits"][:, 33:]
    np.testing.assert_allclose(
        bound.logits(hidden), expected, rtol=0, atol=golden.LOGITS
    )


@pytest.mark.parametrize("lifecycle", LIFECYCLES)
@over_variants
def test_tree_and_the_state_after_every_node(variant, lifecycle):
    arrays, bound = golden.arrays(variant), target(variant, lifecycle)
    tree = golden.tree(variant)
    _, cache = prefilled(variant, golden.PROMPT - 1, lifecycle)
    hidden, records = jax.jit(bound.verify)(cache, tree)
    logits = bound.logits(hidden)[0]
    root = arrays["logits"][0, golden.PROMPT - 1]
    np.testing.assert_allclose(logits[0], root, rtol=0, atol=golden.LOGITS)
    expected = arrays["tree.logits"]
    np.testing.assert_allclose(logits[1:], expected, rtol=0, atol=golden.LOGITS)

    @jax.jit
    def committed(node):
        path, count = tree.path(node)
        after = bound.commit(cache, records, accept.Accepted(node, path, count, node))
        return tuple(map(bound.lifecycle.materialize, after.recurrent)), after.window

    rows = [committed(jnp.asarray([n], jnp.int32)) for n in range(1, tree.n_max)]
    for kept, prefix, convert in (
        ([recurrent for recurrent, _ in rows], "tree.rec", golden.state),
        ([window for _, window in rows], "tree.conv", golden.window),
    ):
        layers = [np.concatenate(x) for x in zip(*kept, strict=True)]
        assert_layers(layers, variant, prefix, convert)


def mtp_rows(variant):
    """Run the head over the golden pairs; returns outputs, KV rows and the head."""
    hidden, _ = prefilled(variant, golden.PROMPT)
    head = target(variant).draft_head
    tokens = jnp.asarray(golden.arrays(variant)["ids"][:, 1 : golden.PROMPT], jnp.int32)
    length = golden.PROMPT - 1
    run = jax.jit(head.prefill)
    m, kv = run(tokens, hidden[:, :length], jnp.arange(length)[None])
    return hidden, m, kv, head


@over_variants
def test_mtp_head(variant):
    arrays = golden.arrays(variant)
    hidden, m, kv, head = mtp_rows(variant)
    np.testing.assert_allclose(m, arrays["mtp.hidden"], rtol=0, atol=golden.HIDDEN)
    logits = head.logits(m)
    np.testing.assert_allclose(logits, arrays["mtp.logits"], rtol=0, atol=golden.LOGITS)
    row = hidden[:, golden.PROMPT - 1 : golden.PROMPT]
    spare = ((0, 0), (0, 11), (0, 0), (0, 0))
    prefix, length = [jnp.pad(rows, spare) for rows in kv], golden.PROMPT - 1
    earlier, extend = None, jax.jit(head.extend)
    for step in range(4):
        token = jnp.asarray(arrays["mtp.chain_ids"][:, step : step + 1], jnp.int32)
        row, earlier = extend(
            token,
            row,
            jnp.asarray([[length + step]]),
            tuple(prefix),
            jnp.asarray([length]),
            jnp.ones((1, 1, step + 1), bool),
            earlier,
        )
        logits, expected = head.logits(row)[:, 0], arrays["mtp.chain_logits"][:, step]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=golden.LOGITS)
        assert int(jnp.argmax(logits)) == arrays["mtp.chain_ids"][0, step + 1]


def tree_error(variant):
    bound = target(variant)
    _, cache = prefilled(variant, golden.PROMPT - 1)
    hidden, _ = jax.jit(bound.verify)(cache, golden.tree(variant))
    logits = bound.logits(hidden)[0, 1:]
    return float(np.max(np.abs(logits - golden.arrays(variant)["tree.logits"])))


def off_by_one_window(tree, width, right=conv.tree_windows):
    return jnp.maximum(right(tree, width) - 1, 0)


def index_for_depth(tree):
    return jnp.broadcast_to(jnp.arange(tree.n_max), tree.tokens.shape)


def sibling_in_mask(tree, include_self=True, right=tree_lib.DraftTree.ancestors):
    mask = right(tree, include_self)
    return mask.at[:, 4, 3].set(True)


TWINS = {
    "off-by-one conv window": (conv, "tree_windows", off_by_one_window),
    "index for depth in RoPE": (tree_lib.DraftTree, "depth", index_for_depth),
    "sibling in the mask": (tree_lib.DraftTree, "ancestors", sibling_in_mask),
}


@pytest.mark.parametrize("twin", TWINS)
def test_broken_twins_fail(twin, monkeypatch):
    """`test_tree_and_the_state_after_every_node` is the twin that passes."""
    monkeypatch.setattr(*TWINS[twin])
    assert tree_error("dense") > 10 * golden.LOGITS


def test_prenorm_hidden_to_the_mtp_head_fails():
    """The head wants the target's final norm: without it the logits are far off."""
    arrays, model = golden.arrays("dense"), golden.model("dense")
    module = nnx.merge(model.graphdef, model.params)
    tokens = jnp.asarray(arrays["ids"][:, : golden.PROMPT], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    lengths = jnp.full(tokens.shape[0], tokens.shape[1])
    hidden = module.embed(tokens)
    for layer in module.layers:  # each by itself: no norm behind the last
        hidden, _ = jax.jit(layer.prefill)(hidden, positions, lengths)
    hidden = hidden[:, :-1]
    assert isinstance(module.mtp, mtp_lib.MTPHead)
    head = target("dense").draft_head
    m, _ = head.prefill(tokens[:, 1:], hidden, jnp.arange(golden.PROMPT - 1)[None])
    error = np.max(np.abs(head.logits(m) - arrays["mtp.logits"]))
    assert error > 10 * golden.LOGITS
