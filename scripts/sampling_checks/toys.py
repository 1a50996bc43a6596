"""A target and a draft head of eight tokens, whose texts have known probabilities.

Logits depend on the two newest tokens, by a table: `hidden` is the one-hot pair. The
head reads the same pair, so that with the target's table it is the target.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from treewy_jax import accept as accept_lib
from treewy_jax import drafters, loop
from treewy_jax import sampling as sampling_lib

VOCAB = 8
PROMPT = (7, 7)
FIRST = 2  # what PROMPT says for certain
SAID = 3  # tokens whose joint distribution is measured, after FIRST


def tables(seed: int = 0, far: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's table and a draft's, [8, 8, 8], float32.

    The larger `far`, the less likely is for the draft what the target likes; below 0
    it likes the same.
    """
    random = np.random.default_rng(seed)
    target = random.normal(scale=1.5, size=(VOCAB, VOCAB, VOCAB))
    draft = random.normal(scale=0.7, size=target.shape) - far * target / 2
    target[PROMPT] = np.where(np.arange(VOCAB) == FIRST, 500.0, 0.0)
    return target.astype(np.float32), draft.astype(np.float32)


def pair(before: Int[Array, "*B"], token: Int[Array, "*B"]) -> Float[Array, "*B H"]:
    """Return the hidden state after two tokens."""
    return jax.nn.one_hot(before * VOCAB + token, VOCAB**2)


@dataclasses.dataclass(frozen=True)
class Head:
    """A draft head; its KV is empty rows."""

    table: Float[Array, "V V V"]

    def prefill(self, tokens, hidden, positions):
        return self._run(tokens, hidden, tokens.shape[1])

    def extend(self, tokens, hidden, positions, prefix, length, mask, earlier=None):
        return self._run(tokens, hidden, mask.shape[-1])

    def _run(self, tokens, hidden, rows):
        kv = jnp.zeros((tokens.shape[0], rows, 1, 1))
        before = jnp.argmax(hidden, axis=-1) % VOCAB
        return pair(before, tokens), (kv, kv)

    def logits(self, hidden):
        return look_up(self.table, hidden)


@dataclasses.dataclass(frozen=True)
class Target:
    """The cache is the token before the root."""

    tables: tuple[Float[Array, "V V V"], Float[Array, "V V V"]]

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
        return look_up(self.tables[0], hidden)

    def commit(self, cache, records, accepted):
        last = jnp.take_along_axis(records, accepted.node[:, None], axis=1)[:, 0]
        return jnp.where(accepted.count > 0, last, cache)


def look_up(
    table: Float[Array, "V V V"], hidden: Float[Array, "B n H"]
) -> Float[Array, "B n V"]:
    """Return the table's own numbers; a product on a GPU would round them."""
    return table.reshape(-1, VOCAB)[jnp.argmax(hidden, axis=-1)]


def write(
    tables: tuple[Float[Array, "V V V"], Float[Array, "V V V"]],
    drafter: drafters.Drafter,
    keys: Key[Array, " B"],
    steps: int | Int[Array, ""] = SAID,
    *,
    sampling: sampling_lib.Sampling,
    accept: str | accept_lib.Rule,
    said: int = SAID,
) -> loop.LoopState:
    """Take steps until every row has emitted `said` tokens after the first.

    To be jitted: `sampling`, `accept` and `said` are static. A key is a row.
    """
    rows = keys.shape[0]
    rules = loop.Rules(jnp.full(rows, said + 1), jnp.full(1, -1), keys)
    state = loop.start(
        Target,
        tables,
        drafter,
        jnp.tile(jnp.asarray(PROMPT, jnp.int32), (rows, 1)),
        jnp.full(rows, len(PROMPT), jnp.int32),
        rules,
        capacity=len(PROMPT) + said + 1,
        max_new_tokens=said + 1,
        sampling=sampling,
    )
    options = dict(sampling=sampling, accept=accept)
    return loop.run(Target, tables, drafter, state, rules, jnp.int32(steps), **options)


STATIC = ("sampling", "accept", "said")
