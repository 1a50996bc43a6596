"""Shape contract of appending to a history: what a call is and must move."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import refusals


class Past(NamedTuple):
    """The records that a layer has: keys, pseudo-values, log decays, and how many."""

    k: Float[Array, "B m Hk Dk"]
    pseudo_values: Float[Array, "B m Hv Dv"]
    log_decay: Float[Array, "B m Hv"]
    count: Int[Array, " B"]


class Nodes(NamedTuple):
    """What the nodes of a tree leave in a layer."""

    k: Float[Array, "B n Hk Dk"]
    pseudo_values: Float[Array, "B n Hv Dv"]
    log_decay: Float[Array, "B n Hv"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    `horizon` is the room of a row, `path` bounds the records that it gets; a row of
    more than `fold_above` records begins anew. The dtypes are those of the nodes' three
    arrays, then of the history's.
    """

    layers: int
    batch: int
    horizon: int
    nodes: int
    path: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str
    decay_dtype: str
    past_key_dtype: str
    past_value_dtype: str
    past_decay_dtype: str
    fold_above: int

    @property
    def bytes_moved(self) -> int:
        """Least traffic: the nodes of whole paths read, as many records written."""
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
        record = sum(
            size * (jnp.dtype(node).itemsize + jnp.dtype(past).itemsize)
            for size, node, past in (
                (keys, self.key_dtype, self.past_key_dtype),
                (values, self.value_dtype, self.past_value_dtype),
                (self.value_heads, self.decay_dtype, self.past_decay_dtype),
            )
        )
        return self.layers * self.batch * self.path * record

    @property
    def flops(self) -> int:
        """One an element: its cast."""
        values = self.value_heads * (self.value_dim + 1)
        record = self.key_heads * self.key_dim + values
        return self.layers * self.batch * self.path * record


def unsupported(spec: Spec) -> str | None:
    """Return which dtype no kernel takes, or None."""
    kinds = ("key", "value", "decay")
    return refusals.dtypes(spec, *kinds, *(f"past_{kind}" for kind in kinds))


def base(past_count: Int[Array, "..."], spec: Spec) -> Int[Array, "..."]:
    """Return the slot behind the records of a row: 0 where they were folded."""
    count = jnp.clip(past_count, 0, spec.horizon)
    return jnp.where(count > spec.fold_above, jnp.zeros_like(count), count)


def clipped(count: Int[Array, "..."], spec: Spec) -> Int[Array, "..."]:
    """Return how many nodes of a path count."""
    return jnp.clip(count, 0, spec.path)


def behind(
    base: Int[Array, "..."], count: Int[Array, "..."], spec: Spec
) -> Int[Array, "..."]:
    """Return how many records a row has once those of a path stand behind `base`."""
    return jnp.minimum(base + clipped(count, spec), spec.horizon)


def spec_of(
    pasts: Sequence[Past],
    nodes: Sequence[Nodes],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
    fold_above: int | None = None,
) -> Spec:
    """Describe a call; `fold_above` None stands for rows that never fold.

    Raises ValueError where a shape, a dtype or a number of layers disagrees.
    """
    if not pasts or len(pasts) != len(nodes):
        raise ValueError(
            f"pasts has {len(pasts)} layers and nodes {len(nodes)}; as many, and 1 or "
            "more, are allowed"
        )
    found = [_layer(*layer, path, count) for layer in zip(pasts, nodes, strict=True)]
    for number, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"layer {number} has {other}; as in layer 0, {found[0]} is allowed"
            )
    if fold_above is None:
        fold_above = found[0]["horizon"]
    if fold_above < 0:
        raise ValueError(f"fold_above is {fold_above}; 0 or more is allowed")
    return Spec(layers=len(found), fold_above=fold_above, **found[0])


def _layer(past, tree, path, count):
    """Return the sizes and dtypes of one layer."""
    for name, array, rank in (
        ("past_k", past.k, 4),
        ("past_pseudo_values", past.pseudo_values, 4),
        ("k", tree.k, 4),
        ("path", path, 2),
    ):
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}; {rank} axes are allowed")
    batch, horizon, *keys = past.k.shape
    values = past.pseudo_values.shape[2:]
    nodes = tree.k.shape[1]
    for name, array, shape in (
        ("past_pseudo_values", past.pseudo_values, (batch, horizon, *values)),
        ("past_log_decay", past.log_decay, (batch, horizon, values[0])),
        ("past_count", past.count, (batch,)),
        ("k", tree.k, (batch, nodes, *keys)),
        ("pseudo_values", tree.pseudo_values, (batch, nodes, *values)),
        ("log_decay", tree.log_decay, (batch, nodes, values[0])),
        ("path", path, (batch, path.shape[1])),
        ("count", count, (batch,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    return dict(
        batch=batch,
        horizon=horizon,
        nodes=nodes,
        path=path.shape[1],
        key_heads=keys[0],
        value_heads=values[0],
        key_dim=keys[1],
        value_dim=values[1],
        key_dtype=tree.k.dtype.name,
        value_dtype=tree.pseudo_values.dtype.name,
        decay_dtype=tree.log_decay.dtype.name,
        past_key_dtype=past.k.dtype.name,
        past_value_dtype=past.pseudo_values.dtype.name,
        past_decay_dtype=past.log_decay.dtype.name,
    )
