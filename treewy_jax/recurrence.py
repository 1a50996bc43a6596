"""The oracle: the gated delta rule, one token at a time, over sequences and trees.

    S_t = exp(g_t) S_{t-1} + u_t k_t^T
    u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)         (the pseudo-value)
    o_t = S_t q_t

S is `[Hv, Dv, Dk]`, g the log decay (natural log, <= 0) and beta the write strength
in [0, 1]. Everything is computed in float32, or in float64 where an input is; results
keep that dtype and callers cast. Nothing here is fast: other modules are compared
with it. Reference: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from treewy_jax import tree as tree_lib
from treewy_jax import typing


def repeat_key_heads(x: Float[Array, "*b Hk Dk"], value_heads: int):
    """Give each value head j the row of its key head j // (Hv // Hk)."""
    return jnp.repeat(x, value_heads // x.shape[-2], axis=-2)


def step(
    state: Float[Array, "*b Hv Dv Dk"],
    k: Float[Array, "*b Hk Dk"],
    v: Float[Array, "*b Hv Dv"],
    log_decay: Float[Array, "*b Hv"],
    beta: Float[Array, "*b Hv"],
) -> Float[Array, "*b Hv Dv Dk"]:
    """Absorb one token: decay the state, then write what it did not know yet."""
    state, k, v, log_decay, beta = _accumulate(state, k, v, log_decay, beta)
    k = repeat_key_heads(k, v.shape[-2])
    state = jnp.exp(log_decay)[..., None, None] * state
    pseudo_value = beta[..., None] * (v - read(state, k))
    return state + pseudo_value[..., :, None] * k[..., None, :]


def read(
    state: Float[Array, "*b Hv Dv Dk"], x: Float[Array, "*b Hv Dk"]
) -> Float[Array, "*b Hv Dv"]:
    """Return S x for every value head."""
    return jnp.einsum("...vd,...d->...v", state, x, precision=lax.Precision.HIGHEST)


def sequence(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dv Dk"],
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Run the recurrence over T tokens; return the outputs and the last state.

    A token with beta = log_decay = 0 leaves the state as it is.
    """
    q, k, v, log_decay, beta, state = _accumulate(q, k, v, log_decay, beta, state)

    def advance(state, token):
        q_t, k_t, v_t, log_decay_t, beta_t = token
        state = step(state, k_t, v_t, log_decay_t, beta_t)
        return state, read(state, repeat_key_heads(q_t, v.shape[-2]))

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta))
    state, output = lax.scan(advance, state, tokens)
    return jnp.moveaxis(output, 0, 1), state


def recurrent_tree(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    tree: tree_lib.DraftTree,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv Dk"]]:
    """Run the recurrence from each node's parent; return outputs and a state a node.

    The root continues from `state`. A padding row yields a zero output and a copy of
    `state`. The n states are what the rest of the library avoids to hold.
    """
    *rows, state = _accumulate(q, k, v, log_decay, beta, state)
    valid = tree.valid()
    rows = [jnp.where(_like(valid, x), x, 0) for x in rows]
    batch, n = valid.shape
    every_row = jnp.arange(batch)
    # Slot 0 holds the state before the root, slot i + 1 the state after node i, so
    # that parent -1 needs no special case.
    slots = jnp.zeros((batch, n + 1, *state.shape[1:]), state.dtype)
    slots = slots.at[:, 0].set(state)

    def visit(slots, node: tuple[Int[Array, ""], Int[Array, " B"], tuple]):
        index, parent, (q_t, k_t, v_t, log_decay_t, beta_t) = node
        after = step(slots[every_row, parent + 1], k_t, v_t, log_decay_t, beta_t)
        output = read(after, repeat_key_heads(q_t, v.shape[-2]))
        return slots.at[:, index + 1].set(after), output

    nodes = tuple(jnp.moveaxis(x, 1, 0) for x in rows)
    parents = jnp.moveaxis(tree.parents(), 1, 0)
    slots, output = lax.scan(visit, slots, (jnp.arange(n), parents, nodes))
    return jnp.moveaxis(output, 0, 1), slots[:, 1:]


def _accumulate(*arrays):
    dtype = typing.accumulation_dtype(*(x.dtype for x in arrays))
    return tuple(x.astype(dtype) for x in arrays)


def _like(valid, x):
    """Append axes to a [B, n] mask until it broadcasts against x."""
    return valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim))
