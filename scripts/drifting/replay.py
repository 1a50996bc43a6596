"""Runs streams through a lifecycle, a random path at a time, and through the oracle."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treewy_jax import accept, commit, recurrence, slots
from treewy_jax import tree as tree_lib


class Plan(NamedTuple):
    """What every step does; NumPy arrays that lead with [checkpoints, steps].

    Attributes:
        node: the node accepted in each row; -1 where a row waits for the others.
        token: the token of the stream that each node reads.
        reached: tokens committed at each checkpoint; leads with [checkpoints].
    """

    node: np.ndarray
    token: np.ndarray
    reached: np.ndarray


def plan(
    tree: tree_lib.DraftTree, tokens: int, checkpoints: int, rows: int, seed: int
) -> Plan:
    """Draw accept lengths 1 to depth + 1 for each step and row.

    Nodes on the accepted path read the next tokens of the stream, all others tokens
    from anywhere. A row accepts less where a checkpoint is near, so that all rows are
    compared after the same tokens.
    """
    rng = np.random.default_rng(seed)
    depth = np.asarray(tree.depth())[0]
    above = np.asarray(tree.ancestors())[0]
    reached = np.linspace(0, tokens, checkpoints + 1).astype(int)
    spans = []
    for first, last in zip(reached[:-1], reached[1:], strict=True):
        done = np.full(rows, first)
        steps = []
        while (done < last).any():
            drawn = rng.integers(1, tree.depth_max + 2, rows)
            count = np.minimum(drawn, last - done)
            steps.append(_step(rng, depth, above, done, count, tokens))
            done = done + count
        spans.append(steps)
    longest = max(map(len, spans))
    wait = (np.full(rows, -1), np.zeros((rows, len(depth)), int))
    padded = [steps + [wait] * (longest - len(steps)) for steps in spans]
    node, token = (
        np.array([[step[i] for step in steps] for steps in padded], np.int32)
        for i in range(2)
    )
    return Plan(node, token, reached[1:])


def _step(rng, depth, above, done, count, tokens):
    """Return the node each row accepts and the tokens its nodes read."""
    node = np.array([_any_at(rng, depth, length - 1) for length in count])
    token = rng.integers(0, tokens, (len(node), len(depth)))
    ahead = np.minimum(done[:, None] + depth, tokens - 1)
    return node, np.where(above[node] & (node >= 0)[:, None], ahead, token)


def _any_at(rng, depth, level) -> int:
    return rng.choice(np.flatnonzero(depth == level)) if level >= 0 else -1


def states(
    owner: commit.Lifecycle,
    inputs: commit.Inputs,
    steps: Plan,
    tree: tree_lib.DraftTree,
) -> np.ndarray:
    """Return S at every checkpoint, [checkpoints, B, Hv, Dv, Dk]."""
    rows = len(inputs.q)
    tree = tree.with_tokens(jnp.zeros((rows, tree.n_max), jnp.int32))
    keys = inputs.k.shape[2], inputs.k.dtype
    start = owner.init(jnp.zeros(state_shape(inputs)), *keys)

    def advance(inputs, state, step):
        node, token = step
        nodes = commit.Inputs(*(slots.take(x, token) for x in inputs))
        path, count = tree.path(node)
        chosen = accept.Accepted(jnp.maximum(node, 0), path, count, count)
        _, records = owner.verify(state, nodes, tree)
        return owner.commit(state, records, chosen), None

    @jax.jit
    def span(inputs, state, node, token):
        body = lambda state, step: advance(inputs, state, step)  # noqa: E731
        state, _ = lax.scan(body, state, (node, token))
        return state, owner.materialize(state).astype(jnp.float32)

    inputs, state, found = jax.device_put(inputs), start, []
    for node, token in zip(steps.node, steps.token, strict=True):
        state, plain = span(inputs, state, node, token)
        found.append(np.asarray(plain))
    return np.array(found)


def sequential(inputs: commit.Inputs, reached: np.ndarray, dtype: str) -> np.ndarray:
    """Return S at every checkpoint by the recurrence, a token at a time, in `dtype`."""

    @jax.jit
    def span(state, *tokens):
        body = lambda state, token: (recurrence.step(state, *token), None)  # noqa: E731
        return lax.scan(body, state, tokens)[0]

    with jax.enable_x64(dtype == "float64"):
        state = jnp.zeros(state_shape(inputs), dtype)
        found, first = [], 0
        for last in reached:
            part = (np.moveaxis(x[:, first:last], 1, 0) for x in inputs[1:])
            state = span(state, *(jnp.asarray(x, dtype) for x in part))
            found.append(np.asarray(state))
            first = last
    return np.array(found)


def state_shape(inputs: commit.Inputs) -> tuple[int, int, int, int]:
    """Return [B, Hv, Dv, Dk]."""
    return (len(inputs.v), *inputs.v.shape[2:], inputs.k.shape[-1])
