"""The rules of acceptance without chance: every tree and every outcome of the tests.

The chance of each drawn tree is known, and so is that of each pattern of tests that
pass. Summed over all of them, the text has to have the target's distribution, to
rounding.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import toys
from treewy_jax import accept
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import rejection

Sampling = sampling_lib.Sampling
TEXT = (0, 1)  # the two newest tokens; the last is the root
TOLERANCE = 2e-6
CUT = Sampling(1.5, top_k=2)  # fewer tokens than a node has children
CASES = [
    ("rejection", (4,), 5, Sampling(0.5)),
    ("rejection", (3, 1), 4, Sampling(0.5)),
    ("rejection", (2, 2), 4, Sampling(1.0)),
    ("rejection", (3, 1), 4, CUT),
    ("traversal", (4,), 5, Sampling(0.5)),
    ("traversal", (3, 1), 4, CUT),
    ("traversal", (2, 2), 4, Sampling(1.0)),
    ("traversal", (1, 1, 1), 5, Sampling(0.5)),
    ("block", (1, 1, 1), 5, Sampling(0.5)),
    ("block", (1, 1, 1), 5, Sampling(1.5, top_p=0.8, min_p=0.1)),
]


def drawn_in_turn(logits, count, sampling):
    """Return every sequence of distinct draws and its chance."""
    q = toys.following(logits, set(), sampling)
    found = []
    for tokens in itertools.permutations(range(len(q)), count):
        chance, left = 1.0, set(range(len(q)))
        for token in tokens:
            total = sum(q[y] for y in left)
            best = max(left, key=lambda y: logits[y])
            chance *= q[token] / total if total > 0 else float(token == best)
            left.remove(token)
        if chance > 0:
            found.append((tokens, chance))
    return found


def drawn_trees(table, text, widths, sampling):
    """Return the tokens below the newest one in preorder, and the chance, of each."""
    if not widths:
        return [((), 1.0)]
    trees = []
    for children, chance in drawn_in_turn(table[text], widths[0], sampling):
        below = [
            drawn_trees(table, (text[1], child), widths[1:], sampling)
            for child in children
        ]
        for parts in itertools.product(*below):
            tokens = [
                (child, *rest) for child, (rest, _) in zip(children, parts, strict=True)
            ]
            parted = math.prod(part[1] for part in parts)
            trees.append((sum(tokens, ()), chance * parted))
    return trees


def go_on(joint, follow, length):
    """Extend a distribution of texts to `length` tokens by the target's own."""
    while joint.ndim < length:
        after = follow[TEXT[1]] if joint.ndim == 1 else follow
        joint = joint[..., None] * after
    return joint


def target_texts(table, sampling, length):
    """Return what follows each pair of tokens, and the distribution of texts."""
    vocab = table.shape[0]
    follow = np.array(
        [[toys.following(table[a, b], set(), sampling) for b in range(vocab)]
         for a in range(vocab)]
    )  # fmt: skip
    return follow, go_on(follow[TEXT], follow, length)


def outcomes(rule, offer, hits, monkeypatch):
    """Return the node where each pattern of `hits` ends, what is left, the chances."""
    seen = {}

    def passes(uniform, chance):
        seen["chance"] = chance
        return hits

    def finish(offer, node, left):
        seen["left"] = left
        return accept.Accepted(node, *offer.tree.path(node), node)

    monkeypatch.setattr(rejection, "passes", passes)
    monkeypatch.setattr(rejection, "finish", finish)
    arrays = (offer.logits, offer.tree, offer.log_probs, offer.key, offer.base)

    @jax.jit
    def call(*arrays):
        decided = accept.RULES[rule].decide(accept.Offer(*arrays, offer.sampling))
        return decided.node, seen["left"], seen["chance"]

    return [np.asarray(one, np.float64) for one in call(*arrays)]


@functools.cache
def all_trees(widths, vocab, sampling):
    """Return an offer and tests for every tree and pattern, and each tree's chance."""
    target, draft = (table[:vocab, :vocab, :vocab] for table in toys.tables())
    trees = drawn_trees(draft, TEXT, widths, sampling)
    n = len(trees[0][0]) + 1
    patterns = np.array([*itertools.product((False, True), repeat=n - 1)])
    tokens = np.array([(TEXT[1], *tree) for tree, _ in trees], np.int32)
    tokens = np.repeat(tokens, len(patterns), axis=0)
    chance = np.repeat([chance for _, chance in trees], len(patterns))
    hits = np.tile(np.pad(patterns, ((0, 0), (1, 0)), constant_values=True),
                   (len(trees), 1))  # fmt: skip
    tree = tree_lib.DraftTree.from_widths(widths, batch=len(tokens))
    before = tokens[:, np.maximum(np.asarray(tree.parents())[0], 0)]
    before[:, 0] = TEXT[0]
    offer = accept.Offer(
        jnp.asarray(target[before, tokens]),
        tree.with_tokens(jnp.asarray(tokens)),
        sampling_lib.log_probabilities(jnp.asarray(draft[before, tokens]), sampling),
        jax.random.key(0),
        jnp.zeros(len(tokens), jnp.int32),
        sampling,
    )
    return offer, hits, chance, target


def expected(rule, widths, vocab, sampling, monkeypatch):
    """Return the text's distribution, the target's, and the mean of drafts accepted."""
    offer, hits, chance, target = all_trees(widths, vocab, sampling)
    node, left, tested = outcomes(rule, offer, jnp.asarray(hits), monkeypatch)
    passed = np.where(hits, tested, 1 - tested)[:, 1:]
    chance = chance * np.prod(passed, axis=1)
    rows, node = np.arange(len(node)), node.astype(int)
    path, count = map(np.asarray, offer.tree.path(jnp.asarray(node, jnp.int32)))
    said = np.take_along_axis(np.asarray(offer.tree.tokens), path, axis=1)[:, 1:]
    follow, wanted = target_texts(target, sampling, len(widths) + 1)
    total = np.zeros_like(wanted)
    for accepted in range(len(widths) + 1):
        at = count == accepted + 1
        joint = np.zeros((vocab**accepted, vocab))
        code = said[at, :accepted] @ vocab ** np.arange(accepted)[::-1]
        new = chance[at, None] * left[rows, node][at]
        np.add.at(joint, code.astype(int), new)
        joint = joint.reshape((vocab,) * (accepted + 1))
        total += go_on(joint, follow, len(widths) + 1)
    return total, wanted, np.sum(chance * (count - 1))


def deviation(*case):
    """Return the total variation distance of the rule's text from the target's."""
    total, wanted, _ = expected(*case)
    return np.abs(total - wanted).sum() / 2


@pytest.mark.parametrize(("rule", "widths", "vocab", "sampling"), CASES, ids=str)
def test_the_text_has_the_targets_distribution(
    rule, widths, vocab, sampling, monkeypatch
):
    assert deviation(rule, widths, vocab, sampling, monkeypatch) < TOLERANCE


def test_traversal_accepts_more_than_rejection(monkeypatch):
    for widths, vocab in (((1, 1, 1), 5), ((3, 1), 4)):
        case = (widths, vocab, Sampling(0.5), monkeypatch)
        means = [expected(rule, *case)[2] for rule in ("traversal", "rejection")]
        assert means[0] > 1.02 * means[1] > 0


def _not_normalised(q, token):
    return jnp.where(jnp.arange(q.shape[1]) == token[:, None], 0, q)


def _target_itself(p, q, weight):
    return p, weight


FAULTS = {
    "_without": (_not_normalised, (3, 1), Sampling(0.5)),
    "residual": (_target_itself, (3, 1), Sampling(0.5)),
    "drawn_from": (lambda q, token: q + 1e-30, (3, 1), CUT),
}


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, rule, monkeypatch):
    twin, widths, sampling = FAULTS[name]
    monkeypatch.setattr(rejection, name, twin)
    assert deviation(rule, widths, 4, sampling, monkeypatch) > 1000 * TOLERANCE
