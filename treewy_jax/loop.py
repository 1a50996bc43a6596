"""The decode loop: draft, verify, accept, commit, whole on the device.

`step` is the one step function of this project. `run` repeats it inside one compiled
`while_loop`; accepted counts, end-of-text and budgets never visit the host. `start`
runs the prompts and emits the first token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from treewy_jax import accept as accept_lib
from treewy_jax import drafters, pytree, sharding, slots
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib


@runtime_checkable
class Target(Protocol):
    """A model as the loop sees it, bound to its parameters and a lifecycle."""

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int
    ) -> tuple[Float[Array, "B T H"], Any]:
        """Run right-padded prompts; returns final-normed hidden states and a cache."""
        ...

    def verify(
        self, cache: Any, tree: tree_lib.DraftTree
    ) -> tuple[Float[Array, "B n H"], Any]:
        """Run every node of the tree over a cache that is only read."""
        ...

    def logits(self, hidden: Float[Array, "B n H"]) -> Float[Array, "B n V"]:
        """Project hidden states to the vocabulary."""
        ...

    def commit(self, cache: Any, records: Any, accepted: accept_lib.Accepted) -> Any:
        """Return the cache after the accepted path."""
        ...


class Rules(NamedTuple):
    """When a row ends, and the seed of its draws.

    Attributes:
        budget: tokens each row may emit, the first one included.
        eos: ids that end a row.
        key: randomness of the whole batch, or a key for each row.
    """

    budget: Int[Array, " B"]
    eos: Int[Array, " E"]
    key: PRNGKeyArray | Key[Array, " B"]


@pytree.dataclass
class LoopState:
    """Everything that changes from step to step.

    Attributes:
        cache: the target's state, covering the `base` tokens before the root.
        draft: the drafter's state.
        root: the newest emitted token, not yet in any state.
        base: position of the root.
        done: the row takes no more steps.
        cut: the row's last step was cut short by end-of-text or budget.
        tokens: what was emitted; `emitted` of them are valid.
        emitted: tokens emitted.
        accept_lengths: tokens emitted at each step (accepted drafts + 1), 0 for none.
        steps: steps taken, the same for all rows.
        tree: the tree verified last.
        accepted: what was accepted of it.
        seen: tokens of prompt and text, kept with a penalty only.
    """

    cache: Any
    draft: Any
    root: Int[Array, " B"]
    base: Int[Array, " B"]
    done: Bool[Array, " B"]
    cut: Bool[Array, " B"]
    tokens: Int[Array, "B M"]
    emitted: Int[Array, " B"]
    accept_lengths: Int[Array, "B M"]
    steps: Int[Array, ""]
    tree: tree_lib.DraftTree
    accepted: accept_lib.Accepted
    seen: Bool[Array, "B V"] | None = None


def step(
    target: Target,
    drafter: drafters.BoundDrafter,
    state: LoopState,
    rules: Rules,
    sampling: sampling_lib.Sampling,
    accept: str | accept_lib.Rule = "match",
) -> LoopState:
    """Draft a tree, verify it in one pass, accept a path, commit it."""
    tree, log_probs, draft = _propose(drafter, state, rules, sampling)
    hidden, records = target.verify(state.cache, tree)
    logits = target.logits(hidden)
    if state.seen is not None:
        seen = sampling_lib.seen_on_paths(state.seen, tree.tokens, tree.ancestors())
        logits = sampling_lib.penalise(logits, seen, sampling)
    offer = accept_lib.Offer(logits, tree, log_probs, rules.key, state.base, sampling)
    accepted = _decide(offer, accept_lib.by_name(accept))
    accepted, ends, cut = _stop(accepted, tree, state, rules)
    new, count = accepted.emitted(tree.tokens), accepted.count
    return LoopState(
        cache=target.commit(state.cache, records, accepted),
        draft=drafter.update(draft, accepted, hidden),
        root=jnp.where(state.done, state.root, accepted.next_token),
        base=state.base + count,
        done=state.done | ends,
        cut=state.cut | cut,
        tokens=slots.append(state.tokens, new, count, state.emitted),
        emitted=state.emitted + count,
        accept_lengths=state.accept_lengths.at[:, state.steps].set(count),
        steps=state.steps + 1,
        tree=tree,
        accepted=accepted,
        seen=_see(state.seen, new, count),
    )


@functools.partial(
    jax.jit, static_argnames=("build", "sampling", "accept"), donate_argnames="state"
)
def run(
    build: Callable[[Any], Target],
    params: Any,
    drafter: drafters.Drafter,
    state: LoopState,
    rules: Rules,
    steps: Int[Array, ""],
    *,
    sampling: sampling_lib.Sampling,
    accept: str | accept_lib.Rule = "match",
) -> LoopState:
    """Take up to `steps` steps, fewer when every row is done.

    `state` is donated. Calling again with the result continues where it stopped, which
    is how text is streamed without a second program.
    """
    target = build(params)
    bound = drafter.bind(target)
    last = state.steps + steps

    def unfinished(state):
        return (state.steps < last) & ~jnp.all(state.done)

    def advance(state):
        return step(target, bound, state, rules, sampling, accept)

    return _settle(lax.while_loop(unfinished, advance, state))


@functools.partial(
    jax.jit, static_argnames=("build", "capacity", "max_new_tokens", "sampling")
)
def start(
    build: Callable[[Any], Target],
    params: Any,
    drafter: drafters.Drafter,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: Rules,
    *,
    capacity: int,
    max_new_tokens: int,
    sampling: sampling_lib.Sampling,
) -> LoopState:
    """Run right-padded prompts and emit the first token of each row.

    `capacity` is the number of KV slots, `max_new_tokens` the room for emitted tokens.
    """
    target = build(params)
    bound = drafter.bind(target)
    hidden, cache = target.prefill(tokens, lengths, capacity)
    last = lengths[:, None] - 1
    newest = jnp.take_along_axis(hidden, last[..., None], axis=1)
    logits, seen = target.logits(newest), None
    if sampling.penalised:
        seen = jnp.zeros((tokens.shape[0], logits.shape[-1]), bool)
        seen = _see(seen, tokens, lengths)
        logits = sampling_lib.penalise(logits, seen[:, None], sampling)
    root = sampling_lib.draw(logits, rules.key, last, sampling)[:, 0]
    draft = bound.start(tokens, lengths, hidden, root, capacity)
    tree = _no_tree(bound, draft, root, lengths)
    zero = jnp.zeros_like(lengths)
    room = jnp.zeros((tokens.shape[0], max_new_tokens), jnp.int32)
    state = LoopState(
        cache=cache,
        draft=draft,
        root=root,
        base=lengths,
        done=_ends(root, rules.eos) | (rules.budget <= 1),
        cut=zero > 0,
        tokens=room.at[:, 0].set(root),
        emitted=zero + 1,
        accept_lengths=room,
        steps=jnp.int32(0),
        tree=tree,
        accepted=accept_lib.nothing(tree),
        seen=_see(seen, root[:, None], zero + 1),
    )
    return _settle(state)


def _settle(state: LoopState) -> LoopState:
    """Leave the state where it always lies on a mesh, so that `run` compiles once.

    The cache is the target's, which sees to it.
    """
    rest = sharding.constrain(dataclasses.replace(state, cache=None))
    return dataclasses.replace(rest, cache=state.cache)


def _propose(drafter, state, rules, sampling):
    """Return a tree, the log-probabilities it was drawn from, and the new state."""
    given = state.draft, state.root, state.base
    if not getattr(drafter, "sampled", False):
        tree, draft = drafter.propose(*given)
        return tree, None, draft
    draws = sampling_lib.Draws.at(rules.key, state.base, sampling, state.seen)
    return drafter.propose_sampled(*given, draws)


def _decide(offer: accept_lib.Offer, rule: accept_lib.Rule) -> accept_lib.Accepted:
    """Apply the rule; below the root alone there is nothing to reject."""
    if offer.tree.depth_max == 0:
        rule = accept_lib.RULES["match"]
    if rule.needs_draft and offer.log_probs is None:
        raise ValueError(
            f"accept {rule.name!r}: the drafter hands out no log-probabilities; "
            "allowed are match and greedy"
        )
    return rule.decide(offer)


def _see(seen, tokens, count):
    """Add the first `count` tokens of each row to `seen`, where that is kept."""
    if seen is None:
        return None
    return sampling_lib.see(seen, tokens, jnp.arange(tokens.shape[1]) < count[:, None])


def _stop(accepted, tree, state, rules):
    """Cut the path after end-of-text or budget; rows that are done take no step.

    Returns what is left, which rows end, and which of them lost accepted tokens. The
    state then covers the emitted tokens but the last, as always.
    """
    emitted = accepted.emitted(tree.tokens)
    place = jnp.arange(emitted.shape[1])
    ending = _ends(emitted, rules.eos) & (place < accepted.count[:, None])
    has_eos, upto_eos = jnp.any(ending, axis=1), jnp.argmax(ending, axis=1) + 1
    left = rules.budget - state.emitted
    count = jnp.minimum(accepted.count, left)
    count = jnp.where(has_eos, jnp.minimum(count, upto_eos), count)
    ends = (count == left) | (has_eos & (count == upto_eos))
    cut = count < accepted.count
    count = jnp.where(state.done, 0, count)
    return accepted.shorten(count, emitted), ends & ~state.done, cut & ~state.done


def _ends(tokens, eos):
    return jnp.any(tokens[..., None] == eos, axis=-1)


def _no_tree(drafter, draft, root, base):
    """Return an empty tree of the shape that the drafter proposes."""
    propose = lambda *args: drafter.propose(*args)[0]  # noqa: E731
    shapes = jax.eval_shape(propose, draft, root, base)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
