"""A running decode state of any batch, tree and lifecycle, from one short prompt.

Compiling a prompt pass takes as long as compiling a step, so it is done once for a
model: one row, the plain state. `dressed` repeats it for all rows, repeats keys and
values up to the context, and wraps the states for the lifecycle; that compiles in
seconds. Rows begin alike and part with the first step, see `step_inject`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.qwen3_5 import target
from scripts.benching import step_inject, step_program
from treewy_jax import accept, drafters, generate, loop
from treewy_jax import cache as cache_lib
from treewy_jax import commit as commit_lib
from treewy_jax.drafters import mtp


def prompted(name: str, config: Any, graphdef: Any, params: Any) -> loop.LoopState:
    """Run `step_program.PROMPT` random tokens; one row, float32 states as they are."""
    return step_program.start(one_row(name, config, graphdef), params)


def one_row(name: str, config: Any, graphdef: Any) -> step_program.Subject:
    """Return what the prompt is run for: a row, the plain state, the draft head."""
    drafts = "1" if config.mtp_num_hidden_layers else "none"
    return step_program.Subject(
        name=name,
        config=config,
        build=target.Builder(graphdef, commit_lib.Reconstruct()),
        drafter=generate.default_drafter(drafts, config),
        weights=lambda: None,
        batch=1,
        context=step_program.PROMPT,
    )


def dressed(
    subject: step_program.Subject, weights: Any, start: loop.LoopState
) -> loop.LoopState:
    """Return a state of the subject's rows, context, drafter and lifecycle.

    `weights` may be shapes; only those are read.
    """
    state = _dress(subject.build.lifecycle, _Sizes.of(subject), start)
    draft = state.draft
    if isinstance(subject.drafter, drafters.NoDrafter):
        draft = ()
    state = dataclasses.replace(state, draft=draft)
    tree = _empty_tree(subject, weights, state)
    return dataclasses.replace(state, tree=tree, accepted=accept.nothing(tree))


def shapes(
    subject: step_program.Subject, weights: Any, start: loop.LoopState
) -> loop.LoopState:
    """Return the shapes of `dressed`; nothing is allocated."""
    make = lambda start: dressed(subject, step_inject.shapes(weights), start)  # noqa: E731
    return jax.eval_shape(make, start)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a state is made for; static."""

    batch: int
    context: int
    capacity: int
    nodes: int
    room: int
    key_heads: int
    vocabulary: int

    @classmethod
    def of(cls, subject: step_program.Subject) -> "_Sizes":
        return cls(
            batch=subject.batch,
            context=subject.context,
            capacity=subject.capacity,
            nodes=subject.drafter.n_max,
            room=1 + step_program.CALLS * subject.path,
            key_heads=subject.config.linear_num_key_heads,
            vocabulary=subject.config.vocab_size,
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _dress(lifecycle: commit_lib.Lifecycle, sizes: _Sizes, start: loop.LoopState):
    def rows(x):
        return jnp.broadcast_to(x, (sizes.batch, *x.shape[1:]))

    def slots(x):
        filled = jnp.arange(sizes.capacity) % step_program.PROMPT
        return rows(jnp.take(x, filled, axis=1))

    def full(value, dtype=jnp.int32):
        return jnp.full(sizes.batch, value, dtype)

    old, draft = start.cache, start.draft
    cache = cache_lib.HybridCache(
        recurrent=tuple(
            lifecycle.init(rows(state), sizes.key_heads, old.window[0].dtype)
            for state in old.recurrent
        ),
        window=tuple(map(rows, old.window)),
        key=tuple(map(slots, old.key)),
        value=tuple(map(slots, old.value)),
        length=full(sizes.context),
    )
    if isinstance(draft, mtp.MTPState):
        tokens = jnp.zeros((sizes.batch, sizes.nodes), jnp.int32)
        draft = mtp.MTPState(
            key=slots(draft.key),
            value=slots(draft.value),
            length=full(sizes.context),
            seed=rows(draft.seed),
            tokens=tokens,
        )
    root = jax.random.randint(
        step_program.key(1), (sizes.batch,), 0, sizes.vocabulary, jnp.int32
    )
    room = jnp.zeros((sizes.batch, sizes.room), jnp.int32)
    return loop.LoopState(
        cache=cache,
        draft=draft,
        root=root,
        base=full(sizes.context),
        done=full(False, bool),
        cut=full(False, bool),
        tokens=room.at[:, 0].set(root),
        emitted=full(1),
        accept_lengths=room,
        steps=jnp.int32(0),
        tree=None,
        accepted=None,
    )


def _empty_tree(subject, weights, state):
    """Return an empty tree of the shape that the drafter proposes."""

    def propose(weights, drafter, draft, root, base):
        bound = drafter.bind(subject.build(weights))
        return bound.propose(draft, root, base)[0]

    arguments = (weights, subject.drafter, state.draft, state.root, state.base)
    found = jax.eval_shape(propose, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found)
