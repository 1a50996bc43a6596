"""Every lifecycle on every mesh of eight devices (run by test_sharding.py).

A mesh runs the prompts once, and each lifecycle continues from there, so that a case
compiles the loop alone. Drafts are scripted: paths of all lengths are accepted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.qwen3_5 import sharding as places
from tests.models import golden
from treewy_jax import commit, drafters, generate, loop, mesh, prompts, sampling
from treewy_jax import tree as tree_lib

TOKENS = 10
LENGTHS = (70, 50, 33, 41, 20, 12, 62, 64)
TREE = tree_lib.DraftTree.from_widths((2, 2), batch=len(LENGTHS))
MESHES = ("tensor=8", "data=2,tensor=4", "data=8")
LIFECYCLES = ("store-all", "reconstruct", "fused", "deferred")


def rows(variant):
    ids = golden.prompt(variant)[0]
    return [ids[:length] for length in LENGTHS]


def load(variant, spread=None):
    folder = golden.FOLDER / variant
    return models.load(folder, dtype="float32", mesh=spread and mesh.make(spread))


def scheme(name):
    return commit.by_name(name, depth=TREE.depth_max, nodes=TREE.n_max)


def rules(budget):
    full = jnp.full(len(LENGTHS), budget, jnp.int32)
    return loop.Rules(full, jnp.zeros(0, jnp.int32), jax.random.key(0))


@functools.cache
def alone(variant):
    """Return the tokens of one device that drafts nothing, and its last states."""
    model, kept = load(variant), []
    finish = generate._finish

    def noted(*arguments):
        kept.append(finish(*arguments))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "_finish", noted)
        found = generate.generate(
            model, rows(variant), tree="none", max_new_tokens=TOKENS, eos_token_ids=()
        )
    return found.token_ids, jax.device_get(kept[0].cache.recurrent)


@functools.cache
def drafter(variant):
    """Draft what one device wrote, every node of the tree being a goal in turn."""
    goals = np.arange(len(LENGTHS))[:, None] + 3 * np.arange(TREE.n_max)
    return drafters.ScriptedDrafter(
        script=jnp.asarray(alone(variant)[0], jnp.int32),
        tree=TREE,
        goals=jnp.asarray(goals % TREE.n_max, jnp.int32),
        vocab_size=256,
    )


@functools.cache
def started(variant, spread):
    """Return a model on a mesh, and the loop's state after the prompts."""
    model = load(variant, spread)
    tokens, lengths = prompts.pad(rows(variant), 512)
    with mesh.use(model.mesh):
        state = loop.start(
            model.builder(commit.by_name("reconstruct")),
            model.params,
            drafter(variant),
            tokens,
            lengths,
            rules(TOKENS),
            capacity=tokens.shape[1] + TOKENS,
            max_new_tokens=TOKENS,
            sampling=sampling.Sampling(),
        )
    return model, state


def adopted(model, state, lifecycle):
    """Return a copy of the state, kept as the lifecycle keeps it."""
    heads = model.config.linear_num_key_heads

    def adopt(cache):
        states = tuple(lifecycle.init(one, heads) for one in cache.recurrent)
        cache = dataclasses.replace(cache, recurrent=states)
        return places.constrain_cache(cache, model.config)

    copied = jax.tree.map(jnp.copy, dataclasses.replace(state, cache=None))
    return dataclasses.replace(copied, cache=jax.jit(adopt)(state.cache))


def run(variant, spread, lifecycle, budget=TOKENS):
    model, state = started(variant, spread)
    with mesh.use(model.mesh):
        return loop.run(
            model.builder(lifecycle),
            model.params,
            drafter(variant),
            adopted(model, state, lifecycle),
            rules(budget),
            jnp.int32(budget),
            sampling=sampling.Sampling(),
        )


def difference(state, lifecycle, variant):
    """Return the largest difference of a state from that of one device."""
    found = [lifecycle.materialize(one) for one in state.cache.recurrent]
    pairs = zip(jax.device_get(found), alone(variant)[1], strict=True)
    return max(np.max(np.abs(one - other)) for one, other in pairs)


@pytest.mark.parametrize("name", LIFECYCLES)
@pytest.mark.parametrize("spread", MESHES)
@pytest.mark.parametrize("variant", golden.VARIANTS)
def test_tokens_and_states_equal_those_of_one_device(variant, spread, name):
    lifecycle = scheme(name)
    state = run(variant, spread, lifecycle)
    assert state.tokens.tolist() == alone(variant)[0]
    assert difference(state, lifecycle, variant) < golden.HIDDEN
    seen = set(np.unique(state.accept_lengths[:, : int(state.steps)]))
    assert seen >= set(range(1, TREE.depth_max + 2))
    here = jax.tree.leaves(state.cache.recurrent[0])[0].addressable_shards[0].data
    assert here.shape[0] == len(LENGTHS) // mesh.parse(spread).get("data", 1)


@pytest.mark.parametrize("variant", golden.VARIANTS)
def test_a_state_of_fewer_tokens_is_another(variant):
    """What the states are compared by would show a token left out."""
    lifecycle = scheme("reconstruct")
    state = run(variant, "data=2,tensor=4", lifecycle, budget=TOKENS - 1)
    assert difference(state, lifecycle, variant) > 100 * golden.HIDDEN
