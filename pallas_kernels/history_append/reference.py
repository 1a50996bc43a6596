"""Appending to a history in plain JAX: gathers and scatters, on any backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.history_append import spec as specs


def history_append(
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: None = None,
) -> tuple[
    Float[Array, "B m Hk Dk"], Float[Array, "B m Hv Dv"], Float[Array, "B m Hv"]
]:
    """Return the history's arrays with the records of each path behind the others."""
    del config
    node = jnp.clip(path, 0, spec.nodes - 1)
    position = jnp.arange(spec.path, dtype=jnp.int32)
    slot = past_count[:, None] + position
    written = (position < count[:, None]) & (slot >= 0)
    # A slot past the end is dropped, which is how unused nodes are kept out.
    slot = jnp.where(written, slot, spec.horizon)

    @jax.vmap
    def append(past, rows, node, slot):
        return past.at[slot].set(rows[node].astype(past.dtype), mode="drop")

    return (
        append(past_k, k, node, slot),
        append(past_pseudo_values, pseudo_values, node, slot),
        append(past_log_decay, log_decay, node, slot),
    )
