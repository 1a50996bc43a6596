"""A target and a draft head of eight tokens, whose texts have known probabilities.

Logits depend on the two newest tokens, by a table: `hidden` is the one-hot pair. The
head reads the same pair, so that with the target's table it is the target.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from treewy_jax import drafters, loop
from treewy_jax import tree as tree_lib

VOCAB = 8
PROMPT = (7, 7)
FIRST = 2  # what PROMPT says for certain
SAID = 3  # tokens whose joint distribution is measured, after FIRST


def tables(seed=0, far=1.5):
    """Return the target's table and an adversarial one: it likes what the other not."""
    random = np.random.default_rng(seed)
    target = random.normal(scale=1.5, size=(VOCAB, VOCAB, VOCAB))
    draft = random.normal(scale=0.7, size=target.shape) - far * target / 2
    target[PROMPT] = np.where(np.arange(VOCAB) == FIRST, 500.0, 0.0)
    return target.astype(np.float32), draft.astype(np.float32)


def pair(before, token):
    return jax.nn.one_hot(before * VOCAB + token, VOCAB**2)


@dataclasses.dataclass(frozen=True)
class Head:
    table: jax.Array

    def prefill(self, tokens, hidden, positions):
        return self._run(tokens, hidden, tokens.shape[1])

    def extend(self, tokens, hidden, positions, prefix, length, mask, earlier=None):
        return self._run(tokens, hidden, mask.shape[-1])

    def _run(self, tokens, hidden, rows):
        kv = jnp.zeros((tokens.shape[0], rows, 1, 1))
        before = jnp.argmax(hidden, axis=-1) % VOCAB
        return pair(before, tokens), (kv, kv)

    def logits(self, hidden):
        return hidden @ self.table.reshape(-1, VOCAB)


@dataclasses.dataclass(frozen=True)
class Target:
    """The cache is the token before the root."""

    tables: tuple[jax.Array, jax.Array]

    @property
    def draft_head(self):
        return Head(self.tables[1])

    def prefill(self, tokens, lengths, capacity):
        hidden = pair(jnp.roll(tokens, 1, axis=1), tokens)
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
        return hidden, last

    def verify(self, cache, tree):
        parent = jnp.maximum(tree.parents(), 0)
        before = jnp.take_along_axis(tree.tokens, parent, axis=1)
        return pair(before.at[:, 0].set(cache), tree.tokens), tree.tokens

    def logits(self, hidden):
        return hidden @ self.tables[0].reshape(-1, VOCAB)

    def commit(self, cache, records, accepted):
        last = jnp.take_along_axis(records, accepted.node[:, None], axis=1)[:, 0]
        return jnp.where(accepted.count > 0, last, cache)


def write(
    tables,
    drafter,
    sampling,
    accept,
    rows,
    key=0,
    said=SAID,
    steps=None,
    compiled=False,
):
    """Take steps until every row has emitted `said` tokens after the first.

    Op by op, one compiled generator of random numbers serves all calls; `compiled`
    runs the same through `loop.run`.
    """
    key = jax.random.key(key) if isinstance(key, int) else key
    params = tuple(map(jnp.asarray, tables))
    rules = loop.Rules(jnp.full(rows, said + 1), jnp.full(1, -1), key)
    state = loop.start.__wrapped__(
        Target,
        params,
        drafter,
        jnp.tile(jnp.asarray(PROMPT, jnp.int32), (rows, 1)),
        jnp.full(rows, len(PROMPT), jnp.int32),
        rules,
        capacity=len(PROMPT) + said + 1,
        max_new_tokens=said + 1,
        sampling=sampling,
    )
    steps = said if steps is None else steps
    if compiled:
        options = dict(sampling=sampling, accept=accept)
        steps = jnp.int32(steps)
        # Started op by op, the state shares buffers, which `run` could not take over.
        state = jax.tree.map(jnp.copy, state)
        return loop.run(Target, params, drafter, state, rules, steps, **options)
    target = Target(params)
    for _ in range(steps):
        if bool(jnp.all(state.done)):
            break
        bound = drafter.bind(target)
        state = loop.step(target, bound, state, rules, sampling, accept)
    return state


@functools.cache
def sampled(widths, n_max=None):
    """Return the MTP drafter that draws a tree of these widths."""
    tree = tree_lib.DraftTree.from_widths(widths, n_max=n_max)
    return drafters.MTPDrafter.from_tree(tree, sampled=True)


def following(logits, seen, sampling):
    """Return the target's probabilities after these tokens, in float64."""
    logits = logits.astype(np.float64)
    if seen:
        at, factor = list(seen), sampling.repetition_penalty
        low = np.where(logits[at] > 0, logits[at] / factor, logits[at] * factor)
        logits[at] = low - sampling.presence_penalty
    scaled = (logits - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or logits.size]
    weights = np.exp(scaled[order])
    enough = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    order = order[(enough < sampling.top_p) & (weights >= sampling.min_p)]
    exact = np.zeros(logits.size)
    exact[order] = np.exp(scaled[order])
    return exact / exact.sum()


def joint(table, sampling):
    """Return the probability of every text of three tokens after PROMPT, FIRST."""
    exact = np.zeros((VOCAB,) * SAID)
    for text in itertools.product(range(VOCAB), repeat=SAID):
        tokens, chance = [*PROMPT, FIRST], 1.0
        for token in text:
            logits = table[tokens[-2], tokens[-1]]
            chance *= following(logits, set(tokens), sampling)[token]
            tokens.append(token)
        exact[text] = chance
    return exact.reshape(-1)


def counts(state):
    """Count the texts of three tokens that were written."""
    said = np.asarray(state.tokens)[:, 1 : SAID + 1]
    code = said @ VOCAB ** np.arange(SAID)[::-1]
    return np.bincount(code, minlength=VOCAB**SAID)


def distance(counted, exact):
    """Return the total variation distance of frequencies from `exact`."""
    return np.abs(counted / counted.sum() - exact).sum() / 2


def bound(exact, total):
    """Return what `total` exact draws score at three sigma."""
    drawn = np.random.default_rng(1).multinomial(total, exact, size=100)
    distances = [distance(one, exact) for one in drawn]
    return np.mean(distances) + 3 * np.std(distances)


def chance(counted, exact):
    """Return how often exact draws lie further off, by Pearson's chi-square.

    Texts expected fewer than five times are counted together.
    """
    wanted, often = exact * counted.sum(), exact * counted.sum() >= 5
    pool = lambda one: np.append(one[often], one[~often].sum())  # noqa: E731
    if counted[exact == 0].any():
        return 0.0
    wanted, counted = pool(wanted), pool(counted)
    used = wanted > 0
    square = np.sum((counted[used] - wanted[used]) ** 2 / wanted[used])
    free = np.sum(used) - 1
    return float(jax.scipy.special.gammaincc(free / 2, square / 2))
