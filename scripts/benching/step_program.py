"""One decode step as a program: model, running state, and the step that is compiled.

The step is `treewy_jax.loop.step` with its state donated, nothing else. A published
size is cut to a few super-blocks, whose random weights are made on the device.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import models
from models import checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import published, random_weights, target
from treewy_jax import commit as commit_lib
from treewy_jax import drafters, generate, loop
from treewy_jax import sampling as sampling_lib
from treewy_jax.drafters import mtp

# A state serves this many steps: slots for all that they may accept are allocated.
CALLS = 64
# Tokens that the prompt pass runs; longer contexts repeat their keys and values.
PROMPT = 64
SAMPLING = sampling_lib.Sampling()
key = random_weights.key


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is timed.

    Attributes:
        name: of the model.
        config: its sizes, cut to some super-blocks.
        build, drafter: as `loop.run` takes them.
        weights: makes the parameters, on the device.
        batch, context: rows, and tokens that the state covers.
    """

    name: str
    config: config_lib.Qwen3_5Config
    build: target.Builder
    drafter: drafters.Drafter
    weights: Callable[[], Any]
    batch: int
    context: int

    @property
    def path(self) -> int:
        """Nodes of the longest path, the root included: tokens a step at most."""
        return len(getattr(self.drafter, "levels", ())) + 1

    @property
    def capacity(self) -> int:
        """Slots of the KV cache."""
        return self.context + CALLS * self.path


def subject(
    name: str,
    *,
    batch: int,
    context: int,
    tree: str,
    state_dtype: str,
    blocks: int = 1,
    dtype: str = "bfloat16",
) -> Subject:
    """Return the model `name`: "tiny" or a folder whole, a published size cut.

    Raises ValueError for an unknown name, tree or dtype, and for sizes out of range.
    """
    for word, size in (("batch", batch), ("context", context), ("blocks", blocks)):
        if size < 1:
            raise ValueError(f"{word} is {size}; 1 or more is allowed")
    lifecycle = commit_lib.Reconstruct(state_dtype=state_dtype)
    dtype = checkpoints.memory_dtype(dtype)
    config, graphdef, weights = _model(name, blocks, dtype)
    found = Subject(
        name=name,
        config=config,
        build=target.Builder(graphdef, lifecycle),
        drafter=generate.default_drafter(tree, config),
        weights=weights,
        batch=batch,
        context=context,
    )
    if found.capacity > config.max_position_embeddings:
        most = config.max_position_embeddings - CALLS * found.path
        raise ValueError(f"context is {context}; {name} allows {most} at most here")
    return found


def _model(name: str, blocks: int, dtype: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Return configuration, graph, and the function that makes the parameters."""
    if name.lower() not in published.CONFIGS:
        if name != "tiny" and not pathlib.Path(name).is_dir():
            known = ", ".join(["tiny", *published.CONFIGS])
            raise ValueError(f"model {name!r}: a folder or one of {known} is allowed")
        model = models.load(name, dtype=dtype)
        return model.config, model.graphdef, lambda: model.params
    whole = published.get(name)
    if blocks > whole.num_blocks:
        raise ValueError(f"blocks is {blocks}; {name} has {whole.num_blocks}")
    config = random_weights.cut(name, blocks * whole.full_attention_interval)
    graphdef, shapes = random_weights.graph(config, dtype)
    return config, graphdef, lambda: random_weights.make(config, shapes)


@functools.partial(jax.jit, static_argnames="build", donate_argnames="state")
def step(
    build: Callable[[Any], loop.Target],
    params: Any,
    drafter: drafters.Drafter,
    state: loop.LoopState,
    rules: loop.Rules,
) -> loop.LoopState:
    """Take one step: what `loop.run` repeats."""
    bound = build(params)
    return loop.step(bound, drafter.bind(bound), state, rules, SAMPLING)


def rules(batch: int) -> loop.Rules:
    """Return rules by which no row ever ends."""
    budget = jnp.full(batch, jnp.iinfo(jnp.int32).max, jnp.int32)
    return loop.Rules(budget, jnp.zeros(0, jnp.int32), jax.random.key(0))


def start(subject: Subject, params: Any) -> loop.LoopState:
    """Return a running state that covers `context` tokens of every row.

    A short random prompt is run by `loop.start`; where the context is longer, the keys
    and values of the prompt stand for those of the tokens behind it.
    """
    length = min(subject.context, PROMPT)
    shape = (subject.batch, length)
    tokens = jax.random.randint(key(1), shape, 0, subject.config.vocab_size, jnp.int32)
    state = loop.start(
        subject.build,
        params,
        subject.drafter,
        tokens,
        jnp.full(subject.batch, length, jnp.int32),
        rules(subject.batch),
        capacity=subject.capacity,
        max_new_tokens=1 + CALLS * subject.path,
        sampling=SAMPLING,
    )
    if length == subject.context:
        return state
    return _lengthen(state, length, subject.context)


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _lengthen(state: loop.LoopState, length: int, context: int) -> loop.LoopState:
    """Repeat the first `length` KV slots and say that `context` tokens are covered."""

    def repeat(slots):  # [..., B, S, kv, D]
        return jnp.take(slots, jnp.arange(slots.shape[-3]) % length, axis=-3)

    covered = jnp.full_like(state.base, context)
    cache, draft = state.cache, state.draft
    key, value = jax.tree.map(repeat, (cache.key, cache.value))
    cache = dataclasses.replace(cache, key=key, value=value, length=covered)
    if isinstance(draft, mtp.MTPState):
        key, value = repeat(draft.key), repeat(draft.value)
        draft = draft._replace(key=key, value=value, length=covered)
    return dataclasses.replace(state, cache=cache, draft=draft, base=covered)


class Fed:
    """A compiled program that replaces its first argument by its result at each call.

    `arguments[place]` is the one that is donated; `limit` calls are allowed.
    """

    def __init__(
        self, program: Any, arguments: list, place: int, limit: int | None = None
    ):
        self._program, self.arguments, self._place = program, list(arguments), place
        self._limit = limit

    def __call__(self) -> Any:
        """Run once; returns the new value."""
        if self._limit is not None:
            if not self._limit:
                raise RuntimeError("no slots are left for another step")
            self._limit -= 1
        found = self._program(*self.arguments)
        self.arguments[self._place] = found
        return found
