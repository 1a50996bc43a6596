"""The decode loop: draft, verify, accept, commit, whole on the device.

`step` is the one step function of this project. `run` repeats it inside one compiled
`while_loop`; accepted counts, end-of-text and budgets never visit the host. `start`
runs the prompts and emits the first token.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from treewy_jax import accept, drafters, pytree, slots
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

    def commit(self, cache: Any, records: Any, accepted: accept.Accepted) -> Any:
        """Return the cache after the accepted path."""
        ...


class Rules(NamedTuple):
    """When a row ends, and the seed of its draws.

    Attributes:
        budget: tokens each row may emit, the first one included.
        eos: ids that end a row.
        key: randomness of the whole request.
    """

    budget: Int[Array, " B"]
    eos: Int[Array, " E"]
    key: PRNGKeyArray


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
    accepted: accept.Accepted


def step(
    target: Target,
    drafter: drafters.BoundDrafter,
    state: LoopState,
    rules: Rules,
    sampling: sampling_lib.Sampling,
) -> LoopState:
    """Draft a tree, verify it in one pass, accept a path, commit it."""
    tree, draft = drafter.propose(state.draft, state.root, state.base)
    hidden, records = target.verify(state.cache, tree)
    accepted = accept.sample_and_match(
        target.logits(hidden), tree, rules.key, state.base, sampling
    )
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
    )


@functools.partial(
    jax.jit, static_argnames=("build", "sampling"), donate_argnames="state"
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

    return lax.while_loop(
        unfinished, lambda state: step(target, bound, state, rules, sampling), state
    )


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
    root = sampling_lib.draw(target.logits(newest), rules.key, last, sampling)[:, 0]
    draft = bound.start(tokens, lengths, hidden, root, capacity)
    tree = _no_tree(bound, draft, root, lengths)
    zero = jnp.zeros_like(lengths)
    room = jnp.zeros((tokens.shape[0], max_new_tokens), jnp.int32)
    return LoopState(
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
        accepted=accept.nothing(tree),
    )


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
