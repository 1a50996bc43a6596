"""Shape contract of the store-all verification: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    `depth` bounds the edges from the root to any node. How many slots there are costs
    nothing.
    """

    batch: int
    nodes: int
    depth: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    input_dtype: str
    state_dtype: str
    output_dtype: str
    accumulation_dtype: str

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def bytes_moved(self) -> int:
        """Least traffic: one state read, one written a node, rows and outputs once.

        Parents that have to be read again come on top.
        """
        size = {
            kind: jnp.dtype(getattr(self, f"{kind}_dtype")).itemsize
            for kind in ("input", "state", "output", "accumulation")
        }
        values = self.value_heads * self.value_dim
        rows = (
            (2 * self.key_heads * self.key_dim + values) * size["input"]
            + values * size["output"]
            + 2 * self.value_heads * size["accumulation"]
            + 4
        )
        states = (1 + self.nodes) * values * self.key_dim * size["state"]
        return self.batch * (states + self.nodes * rows)

    @property
    def flops(self) -> int:
        """Multiply-adds times two a node: S k, the update, S q, and the decay."""
        states = self.batch * self.value_heads * self.value_dim * self.key_dim
        return 7 * self.nodes * states


def spec_of(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "..."],
    states: Float[Array, "..."],
    index: Int[Array, "..."],
    parent: Int[Array, "..."],
    *,
    depth_max: int | None = None,
    output_dtype: DTypeLike | None = None,
) -> Spec:
    """Describe a call; ValueError where a shape disagrees with the others."""
    if states.ndim != 5:
        raise ValueError(
            f"states has shape {states.shape}; [B, slots, Hv, Dv, Dk] is allowed"
        )
    batch, slots, value_heads, value_dim, key_dim = states.shape
    if q.ndim != 4 or q.shape[::3] != (batch, key_dim) or value_heads % q.shape[2]:
        raise ValueError(
            f"q has shape {q.shape}; [{batch}, n, Hk, {key_dim}] is allowed, where Hk "
            f"divides Hv = {value_heads}"
        )
    nodes = q.shape[1]
    if slots <= nodes:
        raise ValueError(
            f"states has {slots} slots; {nodes + 1} or more are allowed: the state "
            f"before the root and those of {nodes} nodes"
        )
    for name, array, shape in (
        ("k", k, q.shape),
        ("v", v, (batch, nodes, value_heads, value_dim)),
        ("log_decay", log_decay, (batch, nodes, value_heads)),
        ("beta", beta, (batch, nodes, value_heads)),
        ("index", index, (batch,)),
        ("parent", parent, (batch, nodes)),
    ):
        if array.shape != tuple(shape):
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    depth = nodes - 1 if depth_max is None else depth_max
    if not 0 <= depth < nodes:
        raise ValueError(f"depth_max is {depth_max}; 0 to {nodes - 1} is allowed")
    output = jnp.dtype(v.dtype if output_dtype is None else output_dtype)
    if not jnp.issubdtype(output, jnp.floating):
        raise ValueError(f"output_dtype is {output}; a float dtype is allowed")
    rows = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), v.dtype)
    wide = jnp.result_type(jnp.float32, rows, log_decay, beta, states)
    return Spec(
        batch=batch,
        nodes=nodes,
        depth=depth,
        key_heads=q.shape[2],
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        input_dtype=rows.name,
        state_dtype=states.dtype.name,
        output_dtype=output.name,
        accumulation_dtype=wide.name,
    )
