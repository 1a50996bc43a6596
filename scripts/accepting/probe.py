"""Which rank would the MTP head give to each token of a text, drafted how deep?

`Probe` is a drafter that proposes nothing: the loop decodes plainly. Beside it the
head drafts along a known text, from every position t as root, as `MTPDrafter` does on
a path that is accepted:

    depth 1: the head's output for the newest pair;  depth d + 1: the head run on
    (x_{t+d}, its output at depth d), over the prefix and the chain so far

and the rank of x_{t+d} in the logits at depth d - 1 is kept (0 is the best token). A
tree accepts x_{t+d} just where the path of these ranks is in it, so one run tells what
every static tree accepts (`simulate`): with greedy acceptance, and with
sample-and-match, whose text does not depend on the tree.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from treewy_jax import commit as commit_lib
from treewy_jax import loop, pytree
from treewy_jax import mesh as mesh_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.drafters import mtp_head


class ProbeState(NamedTuple):
    """The head's state, the place in the text, and the ranks so far."""

    head: mtp_head.MTPState
    told: Int[Array, " B"]
    ranks: Int[Array, "B M D"]


@pytree.dataclass
class Probe:
    """Ranks `text` (each row's tokens after the prompt, M + depth of them)."""

    text: Int[Array, "B S"]
    depth: int = pytree.static()

    depth_max = 0
    n_max = 1

    def bind(self, target: Any) -> "BoundProbe":
        """Return the probe joined to the target's head."""
        return BoundProbe(self, mtp_head.BoundHead(self, target.draft_head))


@dataclasses.dataclass(frozen=True)
class BoundProbe:
    """A `Probe` with a head to run; lives inside one traced function."""

    probe: Probe
    inner: mtp_head.BoundHead

    def bind(self, target):
        return self

    def start(self, tokens, lengths, hidden, next_token, capacity) -> ProbeState:
        """Run the head over the prompt."""
        head = self.inner.start(tokens, lengths, hidden, next_token, capacity)
        batch, written = self.probe.text.shape
        room = (batch, written - self.probe.depth, self.probe.depth)
        return ProbeState(head, jnp.zeros_like(lengths), jnp.full(room, -1, jnp.int32))

    def propose(self, state: ProbeState, root, base):
        """Rank the tokens that follow; returns the root alone."""
        rows = jnp.arange(root.shape[0])[:, None]
        follow = self.probe.text[
            rows, state.told[:, None] + 1 + jnp.arange(self.probe.depth)
        ]
        ranks = self._ranks(state.head, follow, base)
        kept = state.ranks.at[rows[:, 0], state.told].set(ranks)
        tree = tree_lib.DraftTree.from_widths((), batch=root.shape[0])
        return tree.with_tokens(root[:, None]), state._replace(ranks=kept)

    def update(self, state: ProbeState, accepted, hidden) -> ProbeState:
        """Take in the root, as after a step that accepted no draft."""
        head = self.inner.update(state.head, accepted, hidden)
        return ProbeState(head, state.told + accepted.count, state.ranks)

    def _ranks(self, head, follow, base) -> Int[Array, "B D"]:
        output, kv, found = head.seed[:, None], None, []
        for depth in range(self.probe.depth):
            if depth:
                mask = jnp.ones((follow.shape[0], 1, depth), bool)
                last = follow[:, depth - 1 : depth]
                output, kv = self.inner.run_level(
                    head, last, output, depth, base, mask, kv
                )
            logits = self.inner.head.logits(output)[:, 0]
            found.append(rank(logits, follow[:, depth]))
        return jnp.stack(found, axis=1)


def rank(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return how many tokens come before this one; of equals the lower id first."""
    own = jnp.take_along_axis(logits, token[:, None], axis=1)
    before = jnp.arange(logits.shape[1]) < token[:, None]
    ahead = (logits > own) | ((logits == own) & before)
    return jnp.sum(ahead, axis=1, dtype=jnp.int32)


def ranks(
    model: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    depth: int,
    sampling: sampling_lib.Sampling | None = None,
    seed: int = 0,
    tolerated: int = 0,
) -> list[Int[np.ndarray, "t D"]]:
    """Return each text's ranks: [t, d - 1] is that of token t + d, -1 behind its end.

    `texts` are what the model itself writes after these prompts with these settings.
    Another program may round a near tie the other way: so many texts as are `tolerated`
    may differ, and end for the ranks with the first token that does.

    Raises:
        RuntimeError: more of them differ (other settings, say).
    """
    longest = max(map(len, texts))
    padded = np.zeros((len(texts), longest + depth), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    state = _run(
        model, prompts, texts, Probe(jnp.asarray(padded), depth), sampling, seed
    )
    texts = _agreed(state, texts, tolerated)
    found = np.asarray(mesh_lib.fetch(state.draft.ranks))
    return [
        _cut(rows[: len(text) - 1]) for rows, text in zip(found, texts, strict=True)
    ]


def simulate(
    ranks: Sequence[Int[np.ndarray, "_ D"]], parents: Sequence[int]
) -> list[list[int]]:
    """Return the accept lengths of each text's steps with this tree.

    As in `Generation`, they are accepted drafts + 1; a step that the end of the text
    cuts short is left out.

    Raises ValueError for a tree deeper than the ranks.
    """
    texts = _steps(ranks, parents)
    return [[drafts + 1 for _, drafts in steps] for steps in texts]


def at_roots(
    ranks: Sequence[Int[np.ndarray, "_ D"]], parents: Sequence[int]
) -> list[Int[np.ndarray, "_ D"]]:
    """Return the ranks at the positions at which these steps begin."""
    texts = zip(ranks, _steps(ranks, parents), strict=True)
    return [one[[at for at, _ in steps]] for one, steps in texts]


def _steps(ranks, parents) -> list[list[tuple[int, int]]]:
    """Return, text by text, where steps begin and how many drafts they accept."""
    children = _children(tuple(parents))
    depth = len(children.levels) - 1
    if depth > ranks[0].shape[1]:
        raise ValueError(
            f"tree of depth {depth}: ranks are known to depth {ranks[0].shape[1]}"
        )
    accepted = _accepted(np.concatenate(ranks), children).tolist()
    found, first = [], 0
    for one in ranks:
        found.append(_walk(accepted[first : first + len(one)]))
        first += len(one)
    return found


def _walk(accepted: list[int]) -> list[tuple[int, int]]:
    steps, at, end = [], 0, len(accepted)
    while at < end:
        drafts = accepted[at]
        if at + drafts < end:
            steps.append((at, drafts))
        at += drafts + 1
    return steps


class _Children(NamedTuple):
    """child[node, rank], -1 for none; the nodes of each level."""

    child: Int[np.ndarray, "n R"]
    levels: list[list[int]]


@functools.lru_cache(maxsize=4096)
def _children(parents: tuple[int, ...]) -> _Children:
    tree_lib.DraftTree.from_parents(parents)
    most = max([parents.count(node) for node in range(len(parents))])
    child = np.full((len(parents), max(most, 1)), -1)
    depth, filled = [0], [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        child[parent, filled[parent]] = node
        filled[parent] += 1
        depth.append(depth[parent] + 1)
    levels = [
        [n for n, d in enumerate(depth) if d == level]
        for level in range(max(depth) + 1)
    ]
    return _Children(child, levels)


def _accepted(ranks, children) -> Int[np.ndarray, " t"]:
    """Return how many drafts are accepted from each position as root."""
    node = np.zeros(len(ranks), np.int64)
    total = np.zeros(len(ranks), np.int64)
    width = children.child.shape[1]
    alive = np.ones(len(ranks), bool)
    for depth in range(len(children.levels) - 1):
        rank = ranks[:, depth]
        alive &= (rank >= 0) & (rank < width)
        below = children.child[node, np.where(alive, rank, 0)]
        alive &= below >= 0
        node = np.where(alive, below, node)
        total += alive
    return total


def _cut(rows: Int[np.ndarray, "t D"]) -> Int[np.ndarray, "t D"]:
    """Put -1 where the text has ended."""
    steps, depth = rows.shape
    ahead = np.arange(steps)[:, None] + 1 + np.arange(depth)
    return np.where(ahead <= steps, rows, -1)


def _run(model, prompts, texts, drafter, sampling, seed) -> loop.LoopState:
    config, most = model.config, max(map(len, texts))
    lifecycle = commit_lib.Reconstruct(state_dtype=config.mamba_ssm_dtype)
    build = model.builder(lifecycle)
    rules = loop.Rules(
        budget=jnp.asarray([len(text) for text in texts], jnp.int32),
        eos=jnp.asarray(tuple(config.eos_token_ids), jnp.int32),
        key=jax.random.key(seed),
    )
    tokens, lengths = prompts_lib.pad(
        [list(prompt) for prompt in prompts], config.max_position_embeddings
    )
    options = dict(sampling=sampling or sampling_lib.Sampling())
    capacity = min(tokens.shape[1] + most, config.max_position_embeddings)
    with mesh_lib.use(getattr(model, "mesh", None)):
        state = loop.start(
            build,
            model.params,
            drafter,
            tokens,
            lengths,
            rules,
            capacity=capacity,
            max_new_tokens=most,
            **options,
        )
        steps = jnp.int32(most)
        return loop.run(build, model.params, drafter, state, rules, steps, **options)


def _agreed(state, texts, tolerated) -> list[list[int]]:
    """Return the texts, each up to the first token that the model did not write."""
    tokens = np.asarray(mesh_lib.fetch(state.tokens))
    agreed, told = [], []
    for row, text in enumerate(texts):
        off = np.flatnonzero(tokens[row, : len(text)] != np.asarray(text))
        if off.size:
            place = int(off[0])
            told.append(
                f"prompt {row}: the model wrote token {tokens[row, place]} at {place}, "
                f"not {text[place]} as the text says"
            )
            text = text[: place + 1]
        agreed.append(list(text))
    if len(told) > tolerated:
        raise RuntimeError(told[0])
    return agreed
