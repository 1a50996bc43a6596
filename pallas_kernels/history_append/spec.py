"""Shape contract of appending to a history: what a call is and must move."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import refusals


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    `horizon` is the room of a row, `path` bounds the records that it gets. The dtypes
    are those of the nodes' three arrays, then of the history's.
    """

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
        return self.batch * self.path * record

    @property
    def flops(self) -> int:
        """One an element: its cast."""
        values = self.value_heads * (self.value_dim + 1)
        return self.batch * self.path * (self.key_heads * self.key_dim + values)


def unsupported(spec: Spec) -> str | None:
    """Return which dtype no kernel takes, or None."""
    kinds = ("key", "value", "decay")
    return refusals.dtypes(spec, *kinds, *(f"past_{kind}" for kind in kinds))


def spec_of(
    past_k: Float[Array, "..."],
    past_pseudo_values: Float[Array, "..."],
    past_log_decay: Float[Array, "..."],
    past_count: Int[Array, "..."],
    k: Float[Array, "..."],
    pseudo_values: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
) -> Spec:
    """Describe a call; ValueError where a shape disagrees with the others."""
    for name, array, rank in (
        ("past_k", past_k, 4),
        ("past_pseudo_values", past_pseudo_values, 4),
        ("k", k, 4),
        ("path", path, 2),
    ):
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}; {rank} axes are allowed")
    batch, horizon, *keys = past_k.shape
    values = past_pseudo_values.shape[2:]
    nodes = k.shape[1]
    for name, array, shape in (
        ("past_pseudo_values", past_pseudo_values, (batch, horizon, *values)),
        ("past_log_decay", past_log_decay, (batch, horizon, values[0])),
        ("past_count", past_count, (batch,)),
        ("k", k, (batch, nodes, *keys)),
        ("pseudo_values", pseudo_values, (batch, nodes, *values)),
        ("log_decay", log_decay, (batch, nodes, values[0])),
        ("path", path, (batch, path.shape[1])),
        ("count", count, (batch,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    return Spec(
        batch=batch,
        horizon=horizon,
        nodes=nodes,
        path=path.shape[1],
        key_heads=keys[0],
        value_heads=values[0],
        key_dim=keys[1],
        value_dim=values[1],
        key_dtype=k.dtype.name,
        value_dtype=pseudo_values.dtype.name,
        decay_dtype=log_decay.dtype.name,
        past_key_dtype=past_k.dtype.name,
        past_value_dtype=past_pseudo_values.dtype.name,
        past_decay_dtype=past_log_decay.dtype.name,
    )
