"""Rows of every batch entry by number: take some, or append some behind the filled."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def take(
    slots: Shaped[Array, "B S *D"], index: Int[Array, "B P"]
) -> Shaped[Array, "B P *D"]:
    """Return rows `index[b]` of `slots[b]` for every b."""
    return jax.vmap(lambda row, i: row[i])(slots, index)


def append(
    slots: Shaped[Array, "B S *D"],
    rows: Shaped[Array, "B P *D"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
) -> Shaped[Array, "B S *D"]:
    """Write the first `count` of `rows` to slots `length` on; no other slot changes."""
    step = jnp.arange(rows.shape[1])
    # A slot past the end is dropped, which is how unused rows are kept out.
    slot = jnp.where(step < count[:, None], length[:, None] + step, slots.shape[1])

    def write(old, i, new):
        return old.at[i].set(new.astype(old.dtype), mode="drop")

    return jax.vmap(write)(slots, slot, rows)
