"""Models on a mesh of eight devices (run by test_sharding.py) write what one does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import layers, weights
from models.qwen3_5 import model as model_lib
from pallas_kernels.grouped_matmul import op as grouped_matmul
from tests.models import golden
from treewy_jax import commit, generate, loop, mesh

TOKENS = 10
LENGTHS = (70, 50, 33, 41, 20, 12, 62, 64)
# With the MTP head; sharded_lifecycles.py has every lifecycle on every mesh without it.
CASES = (
    ("dense", "data=2,tensor=4", "reconstruct"),
    ("moe", "expert=4,tensor=2", "fused"),
    ("wide", "tensor=8", "deferred"),
    ("wide", "data=2,expert=2,tensor=2", "store-all"),
)
WIDE = config_lib.Qwen3_5Config(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,  # of 8 devices, 4 hold the same one
    head_dim=32,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    max_position_embeddings=256,
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    dtype="float32",
)


def save(config, folder, **options):
    """Save a model of random weights."""
    params = nnx.state(model_lib.Qwen3_5(config, rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        x + 0.1 * jax.random.normal(key, x.shape)
        for x, key in zip(leaves, keys, strict=True)
    ]
    weights.save_checkpoint(
        structure.unflatten(noisy), config, folder, dtype=None, **options
    )
    return folder


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """A model whose heads fill eight devices."""
    return save(WIDE, tmp_path_factory.mktemp("wide"))


@pytest.fixture
def folder(variant, wide_folder):
    return wide_folder if variant == "wide" else golden.FOLDER / variant


def rows():
    ids = golden.prompt("dense")[0]
    return [ids[:length] for length in LENGTHS]


def write(model, scheme):
    """Return tokens and the states after them, as `generate` makes them."""
    kept = []
    run = generate._finish

    def finish(*arguments):
        kept.append(run(*arguments))
        return kept[0]

    options = dict(tree="2", max_new_tokens=TOKENS, eos_token_ids=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "_finish", finish)
        found = generate.generate(model, rows(), commit=scheme, **options)
    states = [scheme.materialize(state) for state in kept[0].cache.recurrent]
    return found.token_ids, jax.device_get(states), kept[0].cache


@functools.cache
def alone(folder):
    """Return what one device writes; it depends on no lifecycle."""
    model = models.load(folder, dtype="float32")
    return write(model, commit.by_name("reconstruct"))[:2]


@pytest.mark.parametrize(("variant", "text", "name"), CASES)
def test_tokens_and_states_equal_those_of_one_device(folder, text, name):
    tokens, states = alone(folder)
    scheme = commit.by_name(name, depth=1, nodes=3)
    model = models.load(folder, dtype="float32", mesh=mesh.make(text))
    before = loop.run._cache_size()
    ours, found, cache = write(model, scheme)
    assert loop.run._cache_size() == before + 1
    assert ours == tokens
    for state, other in zip(found, states, strict=True):
        np.testing.assert_allclose(state, other, atol=golden.HIDDEN)
    sizes = mesh.parse(text)
    rows_here = len(LENGTHS) // sizes.get("data", 1)
    heads = model.config.linear_num_value_heads
    split = model.config.linear_num_key_heads % sizes.get("tensor", 1) == 0
    here = jax.tree.leaves(cache.recurrent[0])[0].addressable_shards[0].data.shape
    assert here[0] == rows_here
    assert here[-3] == (heads // sizes.get("tensor", 1) if split else heads)


@pytest.mark.parametrize("variant", ["wide"])
def test_two_key_heads_on_eight_devices(folder):
    """Every device holds one key head, that of its query head."""
    model = models.load(folder, mesh=mesh.make("tensor=8"))
    plain = models.load(folder)
    ours, whole = (
        nnx.merge(m.graphdef, m.params).layers[3].self_attn.k_proj.kernel[...]
        for m in (model, plain)
    )
    assert ours.shape == (64, 8 * 32)
    for device, part in enumerate(ours.addressable_shards):
        first = 32 * (device // 4)
        np.testing.assert_array_equal(part.data, whole[:, first : first + 32])


@pytest.mark.parametrize("variant", ["wide"])
def test_a_layer_joins_its_parts_once_for_each_half(folder):
    """One sum for the mixer, one for the experts; and one for the embedding."""
    model = models.load(folder, mesh=mesh.make("tensor=8"))
    build = model.builder(commit.by_name("reconstruct"))
    tokens = jnp.ones((2, 16), jnp.int32)
    with mesh.use(model.mesh):
        run = jax.jit(lambda params: build(params).prefill(tokens, tokens[:, 0], 32))
        text = run.lower(model.params).compile().as_text()
    kinds = re.findall(r" (all-[\w-]*|collective-permute|reduce-scatter)\(", text)
    embedding = 1
    assert kinds == ["all-reduce"] * (embedding + 2 * WIDE.num_hidden_layers)


def counted(sizes):
    """Return an expert layer that notes the rows of each of its devices' experts."""
    real = grouped_matmul.swiglu_experts

    def swiglu_experts(x, gate_up, down, experts, *rest):
        rows = jnp.bincount(experts.reshape(-1), length=len(down))
        jax.debug.callback(lambda found: sizes.append(found.tolist()), rows)
        return real(x, gate_up, down, experts, *rest)

    return swiglu_experts


@pytest.mark.parametrize("variant", ["wide"])
def test_a_device_computes_rows_of_its_own_experts_only(folder, monkeypatch):
    """All devices together run as many rows as one does, not eight times as many."""
    x, sizes = jax.random.normal(jax.random.key(2), (2, 9, 64)), []
    found = {}
    monkeypatch.setattr(grouped_matmul, "swiglu_experts", counted(sizes))
    for text in ("tensor=1", "expert=4,tensor=2", "data=2,expert=2,tensor=2"):
        model = models.load(folder, mesh=mesh.make(text))
        layer = nnx.merge(model.graphdef, model.params).layers[0].mlp
        with mesh.use(model.mesh):
            output = jax.jit(layer)(x)
        jax.effects_barrier()
        found[text] = np.asarray(output), sum(map(sum, sizes)), len(sizes)
        sizes.clear()
    rows = x.shape[0] * x.shape[1] * WIDE.num_experts_per_tok
    assert [(total, calls) for _, total, calls in found.values()] == [
        (rows, 1),
        (rows, 8),
        (rows, 8),
    ]
    for output, *_ in found.values():
        np.testing.assert_allclose(output, found["tensor=1"][0], atol=1e-5)


@pytest.mark.parametrize(("width", "of_it"), [(24, 3), (20, None)])
def test_the_shared_expert_of_a_device(width, of_it, tmp_path, monkeypatch):
    """A part of it runs with the experts of its device; the whole of it runs apart."""
    other = dataclasses.replace(WIDE, shared_expert_intermediate_size=width)
    folder, seen, outputs = save(other, tmp_path), [], []
    x = jax.random.normal(jax.random.key(3), (2, 9, 64))
    real = grouped_matmul.swiglu_experts

    def noted(*arrays):
        seen.append(None if arrays[-1] is None else len(arrays[-1][1]))
        return real(*arrays)

    monkeypatch.setattr(grouped_matmul, "swiglu_experts", noted)
    for text in ("tensor=1", "tensor=8"):
        model = models.load(folder, mesh=mesh.make(text))
        layer = nnx.merge(model.graphdef, model.params).layers[0].mlp
        with mesh.use(model.mesh):
            outputs.append(np.asarray(jax.jit(layer)(x)))
    assert seen == [width, of_it]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)


@pytest.mark.parametrize("variant", ["dense"])
def test_text_is_streamed_by_one_program(folder):
    model = models.load(folder, dtype="float32", mesh=mesh.make("data=2,tensor=4"))
    drafter = {"tree": "none", "max_new_tokens": 20, "eos_token_ids": ()}
    before, seen = loop.run._cache_size(), []
    generate.generate(
        model, rows(), on_tokens=lambda row, new: seen.append(row), **drafter
    )
    assert loop.run._cache_size() == before + 1
    assert len(seen) > 2 * len(LENGTHS)  # several blocks of steps


@pytest.mark.parametrize("variant", ["wide"])
def test_a_spread_model_is_not_saved(folder, tmp_path):
    model = models.load(folder, mesh=mesh.make("tensor=8"))
    with pytest.raises(ValueError, match="spread over 8 devices"):
        weights.save_checkpoint(model.params, model.config, tmp_path)
    assert not list(tmp_path.iterdir())


def looked_up(text, tokens):
    """Look tokens up in a table that is spread; returns rows, and what they are."""
    table = jax.random.normal(jax.random.key(0), (64, 8), jnp.bfloat16)
    where = mesh.make(text)
    spread = jax.device_put(table, jax.NamedSharding(where, jax.P("tensor")))
    with mesh.use(where):
        rows = jax.jit(lambda *both: layers.look_up(*both))(spread, tokens)  # anew
    return np.asarray(rows), np.asarray(table[tokens])


@pytest.mark.parametrize("text", ["tensor=8", "data=2,tensor=4"])
def test_tokens_are_looked_up_where_they_lie(text, monkeypatch):
    """To the bit; the twin that does not add the devices' rows up is seen."""
    tokens = jnp.asarray([[0, 63, 7, 8], [31, 32, 5, 5]])
    for few in (tokens, tokens[:, 1:2]):
        np.testing.assert_array_equal(*looked_up(text, few))
    monkeypatch.setattr(layers.sharding, "total", lambda x, axes: x)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(*looked_up(text, tokens))


@pytest.mark.parametrize("variant", ["dense"])
def test_a_batch_that_does_not_fit_is_refused(folder):
    model = models.load(folder, mesh=mesh.make("data=8"))
    with pytest.raises(ValueError, match="the batch has 1 rows; a multiple of 8"):
        generate.generate(model, [1, 2, 3], tree="none", max_new_tokens=2)
