"""Random weights: dtypes, scales, finite depth, loads of the experts, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.qwen3_5 import model as model_lib
from models.qwen3_5 import published, random_weights, stored, weights
from pallas_kernels.grouped_matmul import op as grouped_matmul
from scripts import decode

DENSE = dataclasses.replace(
    published.get("qwen3.5-0.8b"),
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    max_position_embeddings=1024,
    full_attention_interval=2,
    eos_token_ids=(),
)
EXPERTS = dataclasses.replace(
    DENSE,
    vocab_size=2048,
    intermediate_size=None,
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    tie_word_embeddings=False,
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setitem(published.CONFIGS, "dense", DENSE)
    monkeypatch.setitem(published.CONFIGS, "experts", EXPERTS)


def by_path(params):
    found = stored.slots(params), jax.tree.leaves(params)
    return {slot.path: leaf for slot, leaf in zip(*found, strict=True)}


def test_leaves_are_as_the_loader_keeps_them():
    model = models.random("experts", layers=4)
    kept = 0
    for path, leaf in by_path(model.params).items():
        exact = ".".join(map(str, path)).endswith(weights.KEEP_FLOAT32)
        assert leaf.dtype == (jnp.float32 if exact else jnp.bfloat16), path
        kept += exact
    assert kept == 3 * 2
    assert (model.tokenizer, model.name) == (None, "experts")
    assert model.config.num_hidden_layers == 4


def test_values_have_the_variance_of_their_fan_in():
    leaves = by_path(models.random("dense", dtype="float32", layers=4).params)
    layer = leaves["layers", 0, "linear_attn", "in_proj", "kernel"]
    down = leaves["layers", 0, "mlp", "down_proj", "kernel"]
    assert float(layer.std()) * 64**0.5 == pytest.approx(1, abs=0.03)
    assert float(down.std()) * 96**0.5 == pytest.approx(1, abs=0.03)
    assert abs(float(layer.mean())) < 0.01
    # Rows are of full rank, neighbours are strangers.
    assert float(jnp.linalg.svd(down, compute_uv=False)[-1]) > 0.1
    assert abs(float((layer[1:] * layer[:-1]).mean())) * 64 < 0.05
    rate = jnp.exp(leaves["layers", 0, "linear_attn", "A_log"])
    assert ((rate > 0.05) & (rate < 16)).all()
    step = jax.nn.softplus(leaves["layers", 0, "linear_attn", "dt_bias"])
    assert ((step > 0.9e-3) & (step < 1.1e-1)).all()
    assert (leaves["layers", 0, "linear_attn", "norm", "weight"] == 1).all()
    assert (leaves["norm", "weight"] == 0).all()


def test_a_cut_model_is_the_beginning_and_seeds_differ():
    whole, cut = (
        by_path(models.random("dense", layers=layers).params) for layers in (8, 4)
    )
    other = by_path(models.random("dense", layers=4, seed=1).params)
    for path, leaf in cut.items():
        np.testing.assert_array_equal(leaf, whole[path])
    path = ("layers", 1, "mlp", "gate_up_proj")
    assert (cut[path] != other[path]).mean() > 0.9
    assert (cut[path] != cut["layers", 2, "mlp", "gate_up_proj"]).mean() > 0.9


def test_a_product_of_places_beyond_32_bits_does_not_repeat():
    """2**17 x 2 x 2**16 places: rows 2**32 apart would be alike in a plain count."""
    rows = jnp.array([0, 2**16], jnp.uint32)
    found = random_weights.mix(
        random_weights.mix(rows)[:, None]
        ^ random_weights.mix(jnp.arange(2**8, dtype=jnp.uint32))
    )
    assert (found[0] != found[1]).all()
    shape = (2**17, 2)
    assert len(np.unique(random_weights._uniform(jnp.uint32(1), shape)[:, 0])) > 2**16


def test_sixty_layers_stay_finite():
    config = dataclasses.replace(EXPERTS, num_hidden_layers=60)
    graphdef, shapes = random_weights.graph(config, jnp.bfloat16)
    params = random_weights.make(config, shapes)
    module = nnx.merge(graphdef, params)
    h = module.embed(jnp.arange(24).reshape(2, 12))
    # Layers are alike but for their weights: two programs run all of them.
    programs = {}
    for layer in module.layers:
        graph, leaves = nnx.split(layer)
        run = programs.setdefault(layer.attends, jax.jit(_prefill, static_argnums=0))
        h = run(graph, leaves, h)
        assert jnp.isfinite(h).all() and float(jnp.abs(h).max()) < 1e3
    rms = float(jnp.sqrt(jnp.mean(jnp.square(h.astype(jnp.float32)))))
    assert 0.5 < rms < 100


def _prefill(graph, leaves, h):
    positions = jnp.broadcast_to(jnp.arange(h.shape[1]), h.shape[:2])
    lengths = jnp.full(h.shape[0], h.shape[1])
    return nnx.merge(graph, leaves).prefill(h, positions, lengths)[0]


# --- loads of the experts -----------------------------------------------------------


def routes(params, graphdef, monkeypatch):
    """Return the experts that every router of a model chooses for 2,048 tokens."""
    seen, real = [], grouped_matmul.swiglu_experts

    def noted(rows, gate_up, down, experts, *rest):
        seen.append(experts)
        return real(rows, gate_up, down, experts, *rest)

    monkeypatch.setattr(grouped_matmul, "swiglu_experts", noted)
    # What one layer leaves in `seen` is of the program around it, and of each layer.
    monkeypatch.setattr(model_lib, "_run_layer", model_lib._run_layer.__wrapped__)

    @jax.jit
    def run(params, tokens):
        seen.clear()
        module = nnx.merge(graphdef, params)
        hidden = module.forward(tokens)
        positions = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1])
        module.mtp.prefill(module.embed(tokens), hidden, positions)
        return list(seen)

    tokens = jax.random.permutation(jax.random.key(0), 2048).reshape(32, 64)
    return run(params, tokens)


def deviation(experts, loads):
    """Return how many sigmas the counts are from the loads (both from the busiest)."""
    tokens, count = len(experts), np.bincount(np.ravel(experts), minlength=len(loads))
    if np.ptp(loads):
        count = np.sort(count)[::-1]
    square = (count - tokens * loads) ** 2 / (tokens * loads * (1 - loads))
    return (square.sum() - len(loads)) / np.sqrt(2 * len(loads))


@pytest.mark.parametrize("router", random_weights.ROUTERS)
def test_experts_are_chosen_as_often_as_said(router, monkeypatch):
    model = models.random("experts", layers=2, router=router)
    loads = random_weights.expert_loads(EXPERTS, router)
    assert loads.sum() == pytest.approx(EXPERTS.num_experts_per_tok)
    found = routes(model.params, model.graphdef, monkeypatch)
    assert len(found) == 3  # two layers, and the draft head
    for experts in found:
        assert deviation(experts, loads) < 3
    # The same experts are not busy everywhere.
    busiest = {int(np.bincount(np.ravel(experts)).argmax()) for experts in found}
    assert len(busiest) > 1


def test_a_router_of_noise_fails(monkeypatch):
    """The broken twin: as a fresh model's, on the whole hidden state."""
    model = models.random("experts", layers=2)
    leaves, structure = jax.tree.flatten(model.params)
    for i, slot in enumerate(stored.slots(model.params)):
        if slot.path[-2:] == ("gate", "weight"):
            noise = jax.random.normal(jax.random.key(i), leaves[i].shape) / 8
            leaves[i] = noise.astype(leaves[i].dtype)
    params = jax.tree.unflatten(structure, leaves)
    loads = random_weights.expert_loads(EXPERTS)
    found = routes(params, model.graphdef, monkeypatch)
    assert all(deviation(experts, loads) > 10 for experts in found)


def test_zipf_falls_as_one_over_the_rank():
    loads = random_weights.expert_loads(published.get("qwen3.5-35b-a3b"), "zipf")
    assert loads[0] == random_weights.MOST_LOAD and loads.sum() == pytest.approx(8)
    assert loads[10] / loads[21] == pytest.approx(2)


# --- where, and refusals ------------------------------------------------------------


def test_parameters_lie_on_the_mesh():
    mesh = jax.make_mesh((1, 1, 1), ("data", "tensor", "expert"))
    model = models.random("dense", layers=4, mesh=mesh)
    assert model.mesh is not None
    for leaf in jax.tree.leaves(model.params):
        assert isinstance(leaf.sharding, jax.sharding.NamedSharding)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="qwen4"), "model 'qwen4': expected one of"),
        (dict(layers=5), "layers is 5; dense allows multiples of 2 up to 24"),
        (dict(layers=0), "layers is 0"),
        (dict(layers=28), "layers is 28"),
        (dict(router="zip"), "router 'zip': allowed are uniform, zipf"),
        (dict(seed=-1), "seed is -1"),
        (dict(dtype="int8"), "dtype 'int8'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.random(**({"name": "dense", "layers": 4} | arguments))


# --- decode.py ----------------------------------------------------------------------

ASKED = ["--model", "dense", "--random-weights", "--layers", "2", "--tree", "none"]


def test_decode_prints_token_ids(capsys):
    asked = [*ASKED, "--prompt-ids", "1,2,3", "--max-new-tokens", "3"]
    assert decode.main(asked) == 0
    ids = capsys.readouterr().out.splitlines()[0].split()
    assert len(ids) == 3 and all(0 <= int(token) < DENSE.vocab_size for token in ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ASKED, "--random-weights: a model without files has no tokenizer"),
        ([*ASKED, "--prompt", "Hi"], "only a prompt of --prompt-ids is allowed"),
        (["--layers", "2"], "--layers: only allowed with --random-weights"),
        ([*ASKED, "--prompt-ids", "1", "--layers", "3"], "layers is 3; dense allows"),
        (
            ["--model", "tiny", "--random-weights", "--prompt-ids", "1"],
            "model 'tiny': expected one of",
        ),
    ],
)
def test_decode_refuses_clearly(arguments, message, capsys):
    assert decode.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""
