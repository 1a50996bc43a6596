"""An MTP head small enough to run by hand, in JAX and again in NumPy; toy texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.treewy_jax import strategies, toys
from treewy_jax import loop

HIDDEN, VOCAB, CAPACITY = 6, 23, 16
RANDOM = np.random.default_rng(0)
EMBED = RANDOM.normal(size=(VOCAB, HIDDEN))
FROM_TOKEN, FROM_HIDDEN, FROM_OTHERS, PLACE = RANDOM.normal(size=(4, HIDDEN, HIDDEN))
TO_LOGITS = RANDOM.normal(size=(HIDDEN, VOCAB))


def by_hand(token, hidden, position):
    """x = tanh(A e + B h + C sin(position))."""
    place = PLACE[:, 0] * np.sin(position)
    return np.tanh(EMBED[token] @ FROM_TOKEN + hidden @ FROM_HIDDEN + place)


@dataclasses.dataclass(frozen=True)
class Head:
    """m = x, or tanh(x + D mean x') over all rows x' that a row sees, its own too.

    Keys are x and values are x; what is not seen may be NaN.
    """

    attends: bool

    def rows(self, tokens, hidden, positions):
        mixed = jnp.asarray(EMBED)[tokens] @ FROM_TOKEN + hidden @ FROM_HIDDEN
        return jnp.tanh(mixed + PLACE[:, 0] * jnp.sin(positions)[..., None])

    def mix(self, x, seen, mask):
        if not self.attends:
            return x
        seen = jnp.where(mask[..., None], seen[:, None], 0)
        mean = jnp.sum(seen, axis=2) / jnp.sum(mask, axis=2)[..., None]
        return jnp.tanh(x + mean @ FROM_OTHERS)

    def prefill(self, tokens, hidden, positions):
        x = self.rows(tokens, hidden, positions)
        length = x.shape[1]
        mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(x), length, length))
        return self.mix(x, x, mask), (x[:, :, None], x[:, :, None])

    def extend(self, tokens, hidden, positions, prefix, length, mask, earlier=None):
        x = self.rows(tokens, hidden, positions)
        rows = x[:, :, None]
        if earlier is not None:
            rows = jnp.concatenate([earlier[0], rows], axis=1)
        assert mask.shape == (*x.shape[:2], rows.shape[1])
        filled = jnp.arange(prefix[0].shape[1]) < length[:, None]
        filled = jnp.broadcast_to(filled[:, None], (*x.shape[:2], filled.shape[1]))
        seen = jnp.concatenate([prefix[1], rows], axis=1)[:, :, 0]
        m = self.mix(x, seen, jnp.concatenate([filled, mask], axis=-1))
        return m, (rows, rows)

    def logits(self, hidden):
        return hidden @ TO_LOGITS


@dataclasses.dataclass
class Text:
    """One row in NumPy: the rows x of its pairs so far, and the newest output m."""

    attends: bool
    rows: list
    seed: np.ndarray | None = None

    def output(self, x, others):
        if not self.attends:
            return x
        return np.tanh(x + np.mean([*self.rows, *others, x], axis=0) @ FROM_OTHERS)

    def take(self, tokens, hidden):
        """Run one pair after the other at the next positions."""
        for token, h in zip(tokens, hidden, strict=True):
            x = by_hand(token, h, len(self.rows))
            self.seed = self.output(x, [])
            self.rows.append(x)

    def draft(self, parents, root):
        """Expand the tree node by node, one full pass over the path for each."""
        tokens, outputs, rows = [root], [self.seed], [None]
        for node, parent in enumerate(parents[1:], 1):
            rank = parents[:node].count(parent)
            best = np.argsort(-(outputs[parent] @ TO_LOGITS), kind="stable")
            path = strategies.root_path(parents, parent)
            position = len(self.rows) + len(path) - 1
            x = by_hand(best[rank], outputs[parent], position)
            tokens.append(int(best[rank]))
            rows.append(x)
            outputs.append(self.output(x, [rows[i] for i in path[1:]]))
        return tokens


PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
LENGTHS = [5, 2]
FIRST = [6, 5]
PROMPT_HIDDEN = RANDOM.normal(size=(2, 8, HIDDEN))


def started(drafter, attends):
    """Start two ragged rows; returns the drafter's state and the same in NumPy."""
    tokens, hidden = np.full((2, 8), 7), PROMPT_HIDDEN.copy()
    texts = []
    for b, prompt in enumerate(PROMPTS):
        tokens[b, : len(prompt)] = prompt
        hidden[b, len(prompt) :] = np.nan
        text = Text(attends, [])
        text.take(prompt[1:] + [FIRST[b]], PROMPT_HIDDEN[b, : len(prompt)])
        texts.append(text)
    lengths, first = jnp.asarray(LENGTHS), jnp.asarray(FIRST)
    hidden = jnp.asarray(hidden, jnp.float32)
    state = drafter.start(jnp.asarray(tokens), lengths, hidden, first, CAPACITY)
    return state, texts


def poisoned(state):
    """Fill every KV slot from `length` on with NaN."""
    unused = jnp.arange(CAPACITY) >= state.length[:, None]
    key, value = (
        jnp.where(unused[..., None, None], jnp.nan, x) for x in (state.key, state.value)
    )
    return state._replace(key=key, value=value)


def written(drafter, sampling, tables, said=17, target=toys.Target):
    """Let the toy target write, whole on the device; yields the state of every step."""
    rows = 6
    prompts = np.random.default_rng(9).integers(0, toys.VOCAB, size=(rows, 6))
    number = lambda value: jnp.full(rows, value, jnp.int32)  # noqa: E731
    rules = loop.Rules(number(said), jnp.full(1, -1, jnp.int32), jax.random.key(2))
    params, options = tuple(map(jnp.asarray, tables)), dict(sampling=sampling)
    state = loop.start(
        target,
        params,
        drafter,
        jnp.asarray(prompts, jnp.int32),
        number(prompts.shape[1]),
        rules,
        capacity=prompts.shape[1] + said,
        max_new_tokens=said,
        **options,
    )
    while not bool(jnp.all(state.done)):
        one = jnp.int32(1)
        state = loop.run(target, params, drafter, state, rules, one, **options)
        yield jax.tree.map(np.asarray, state)


def text_of(*args, **options):
    """Return what `written` says in the end, and in how many steps."""
    *_, last = written(*args, **options)
    return last.tokens.tolist(), int(last.steps)
