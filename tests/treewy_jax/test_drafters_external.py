"""A draft model through the protocol: what it drafts, hands out, and keeps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.sampling_checks import toys as parts
from tests.treewy_jax import draft_heads, toys
from treewy_jax import accept, drafters, pytree
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

Sampling = sampling_lib.Sampling
TARGET, DRAFT = toys.tables(seed=1)
SHAPES = {
    "chain": tree_lib.DraftTree.chain(3),
    "leaves": tree_lib.DraftTree.chain_with_leaves(2),
    "uneven": tree_lib.DraftTree.from_parents([-1, 0, 1, 1, 3, 0], n_max=8),
}
over_shapes = pytest.mark.parametrize("shape", SHAPES)


def external(
    table,
    shape="chain",
    sampled=False,
    build=toys.Target,
    kind=drafters.ExternalDrafter,
):
    """Return the drafter whose model has this table."""
    tree = SHAPES[shape]
    params = (jnp.asarray(table),) * 2
    rank_max = 1 + int(tree.rank().max())
    return kind(params, tree, build, rank_max, sampled)


def started(drafter):
    prompts = jnp.asarray([[1, 5, 3, 0], [4, 2, 0, 0], [7, 7, 7, 1]], jnp.int32)
    lengths, root = jnp.asarray([3, 2, 4]), jnp.asarray([6, 0, 2], jnp.int32)
    hidden = parts.pair(jnp.roll(prompts, 1, axis=1), prompts)
    bound = drafter.bind(toys.Target((jnp.asarray(DRAFT),) * 2))
    return bound, bound.start(prompts, lengths, hidden, root, 16), root, lengths


@over_shapes
def test_it_drafts_the_models_best_tokens(shape):
    bound, state, root, base = started(external(DRAFT, shape))
    assert isinstance(bound, drafters.SampledDrafter) and not bound.sampled
    tree, after = jax.jit(bound.propose)(state, root, base)
    parents = tree.parents()[0].tolist()
    for row, (before, newest) in enumerate([(3, 6), (2, 0), (1, 2)]):
        tokens = [newest]
        for node in range(1, int(tree.size[row])):
            parent = parents[node]
            above = before if parent == 0 else tokens[parents[parent]]
            best = np.argsort(-DRAFT[above, tokens[parent]], kind="stable")
            tokens.append(int(best[parents[:node].count(parent)]))
        assert tree.tokens[row, : len(tokens)].tolist() == tokens
    assert np.array_equal(after.tokens, tree.tokens)
    assert tree.depth_max == SHAPES[shape].depth_max


@pytest.mark.parametrize(
    "shape, sampling",
    [
        ("chain", Sampling(0.7, top_p=0.9)),
        ("uneven", Sampling(1.5, presence_penalty=1.0)),
    ],
)
def test_drawn_trees_are_those_of_the_mtp_head(shape, sampling):
    """For the same draws and the same table: tokens, and what they were drawn from."""

    @functools.partial(jax.jit, static_argnums=1)
    def run(drafter, kind):
        bound, state, root, base = started(drafter)
        seen = jax.nn.one_hot(root, toys.VOCAB) > 0 if sampling.penalised else None
        draws = sampling_lib.Draws.at(jax.random.key(5), base, sampling, seen)
        return bound.propose_sampled(state, root, base, draws)[:2]

    mtp = drafters.MTPDrafter.from_tree(SHAPES[shape], sampled=True)
    tree, log_probs = run(external(DRAFT, shape, sampled=True), "external")
    wanted, wanted_log_probs = run(mtp, "mtp")
    parents, size = tree.parents()[0].tolist(), int(tree.size[0])
    assert np.array_equal(tree.tokens[:, :size], wanted.tokens[:, :size])
    inner = jnp.asarray(sorted(set(parents) - {-1}))
    found, right = log_probs[:, inner], wanted_log_probs[:, inner]
    np.testing.assert_allclose(found, right, rtol=1e-5)


class Forgetful(toys.Target):
    """A twin that does not keep up with what was accepted."""

    def commit(self, cache, records, accepted):
        return cache


@pytest.mark.parametrize("build", [toys.Target, Forgetful])
def test_the_target_drafting_for_itself_accepts_everything(build):
    sampling, tables = Sampling(), (TARGET, DRAFT)
    text, steps = draft_heads.text_of(external(TARGET, build=build), sampling, tables)
    plain, most = draft_heads.text_of(drafters.NoDrafter(), sampling, tables)
    assert text == plain and most == 16
    assert (steps == 4) == (build is toys.Target)


def test_another_models_drafts_change_no_token():
    """Draws of the target included, with which its own best tokens often agree."""
    sampling, tables = Sampling(1.0), (TARGET, DRAFT)
    drafter = external(TARGET, "uneven")
    text, steps = draft_heads.text_of(drafter, sampling, tables)
    plain, most = draft_heads.text_of(drafters.NoDrafter(), sampling, tables)
    assert text == plain and steps < most
    other = dataclasses.replace(drafter, params=(jnp.asarray(DRAFT),) * 2)
    assert draft_heads.text_of(other, sampling, tables)[0] == plain


ROWS = 4096


class Boastful(drafters.external.BoundExternalDrafter):
    """A twin that hands out another distribution than it draws from."""

    def propose_sampled(self, state, root, base, draws):
        tree, log_probs, state = super().propose_sampled(state, root, base, draws)
        return tree, jax.nn.log_softmax(log_probs / 4), state


@pytree.dataclass
class Boasting(drafters.ExternalDrafter):
    def bind(self, target):
        return Boastful(self, self.build(self.params))


@pytest.mark.parametrize("kind", [drafters.ExternalDrafter, Boasting])
def test_drawn_chains_keep_the_targets_distribution(kind):
    """Tested at three sigma of as many exact draws; a twin that lies fails."""
    tables, sampling = (TARGET, DRAFT), Sampling(1.0)
    drafter = external(DRAFT, sampled=True, kind=kind)
    state = toys.write(tables, drafter, sampling, "block", ROWS, said=2, steps=1)
    counted = np.bincount(np.asarray(state.tokens[:, 1]), minlength=toys.VOCAB)
    exact = toys.following(TARGET[toys.PROMPT[-1], toys.FIRST], set(), sampling)
    far = toys.distance(counted, exact) > toys.bound(exact, ROWS)
    assert far == (kind is Boasting)


def test_drawn_trees_need_sampled():
    with pytest.raises(ValueError, match="ExternalDrafter hands out no draft"):
        accept.by_name("block").check(external(DRAFT), Sampling())
    accept.by_name("block").check(external(DRAFT, sampled=True), Sampling())
