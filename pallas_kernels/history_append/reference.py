"""Appending to a history in plain JAX: gathers and scatters, on any backend."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.history_append import spec as specs


def append_layers(
    pasts: Sequence[specs.Past],
    nodes: Sequence[specs.Nodes],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: None = None,
) -> list[specs.Past]:
    """Return the histories with the records of each path behind the others."""
    del config
    pairs = zip(pasts, nodes, strict=True)
    return [_append(past, tree, path, count, spec) for past, tree in pairs]


def _append(past, nodes, path, count, spec):
    base = specs.base(past.count, spec)
    node = jnp.clip(path, 0, spec.nodes - 1)
    position = jnp.arange(spec.path, dtype=jnp.int32)
    slot = base[:, None] + position
    written = position < count[:, None]
    # A slot past the end is dropped, which is how unused nodes are kept out.
    slot = jnp.where(written, slot, spec.horizon)

    @jax.vmap
    def append(old, rows, node, slot):
        return old.at[slot].set(rows[node].astype(old.dtype), mode="drop")

    pairs = zip(past[:3], nodes, strict=True)
    records = [append(old, rows, node, slot) for old, rows in pairs]
    return specs.Past(*records, specs.behind(base, count, spec))
