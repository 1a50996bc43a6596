"""Shape contract of tree attention: what a call is, costs and must move."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes of one call; hashable, so it may be a static argument.

    `queries` of the `nodes` ask (all of them when a tree is verified, one level when
    it is drafted). `filled` is the mean length of a row's prefix: lengths are data, so
    it counts for the floors alone. dtypes are names; the output has that of q.
    """

    batch: int
    queries: int
    nodes: int
    slots: int
    filled: int
    heads: int
    kv_heads: int
    head_dim: int
    input_dtype: str
    prefix_dtype: str
    node_dtype: str

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of one key head: every query in every head of its group."""
        return self.queries * self.group

    @property
    def bytes_moved(self) -> int:
        """Least traffic: filled slots and nodes read once, q read, the output written.

        Both the mask (a byte an entry) and the lengths (4 bytes) are counted.
        """
        a_slot = 2 * self.kv_heads * self.head_dim
        row = (
            self.filled * a_slot * jnp.dtype(self.prefix_dtype).itemsize
            + self.nodes * a_slot * jnp.dtype(self.node_dtype).itemsize
            + 2
            * self.queries
            * self.heads
            * self.head_dim
            * jnp.dtype(self.input_dtype).itemsize
            + self.queries * self.nodes
            + 4
        )
        return self.batch * row

    @property
    def flops(self) -> int:
        """Multiply-adds times two of q.k and of weights times values, not padded."""
        seen = self.filled + self.nodes
        return 4 * self.batch * self.queries * self.heads * seen * self.head_dim


def make_spec(
    *,
    queries: int,
    nodes: int,
    slots: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int = 1,
    filled: int | None = None,
    input_dtype: Any = "float32",
    prefix_dtype: Any = None,
    node_dtype: Any = None,
) -> Spec:
    """Describe a call; `filled` None means all slots, a dtype None that of q.

    Raises ValueError where heads do not divide or a size is not positive.
    """
    sizes = dict(queries=queries, nodes=nodes, slots=slots, head_dim=head_dim)
    for name, size in (sizes | dict(batch=batch, kv_heads=kv_heads)).items():
        if size < 1:
            raise ValueError(f"{name} is {size}; 1 or more is allowed")
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"heads is {heads}; a multiple of kv = {kv_heads} is allowed")
    names = [
        jnp.dtype(input_dtype if given is None else given).name
        for given in (input_dtype, prefix_dtype, node_dtype)
    ]
    return Spec(
        batch=batch,
        filled=slots if filled is None else filled,
        heads=heads,
        kv_heads=kv_heads,
        **sizes,
        **dict(zip(("input_dtype", "prefix_dtype", "node_dtype"), names, strict=True)),
    )


def spec_of(q, prefix, nodes, length, mask) -> Spec:
    """Describe the call with these arrays (see `op.tree_attention`).

    Raises ValueError for a shape or dtype that does not fit the others.
    """
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; [B, m, heads, D] is allowed")
    batch, queries, heads, dim = q.shape
    slots, kv = _sizes("prefix", prefix, batch, dim)
    count, node_kv = _sizes("nodes", nodes, batch, dim)
    if node_kv != kv:
        raise ValueError(f"nodes have {node_kv} heads; kv = {kv} of prefix is allowed")
    for name, array, shape in (
        ("length", length, (batch,)),
        ("mask", mask, (batch, queries, count)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}; bool is allowed")
    if not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(f"length has dtype {length.dtype}; an integer is allowed")
    return make_spec(
        batch=batch,
        queries=queries,
        nodes=count,
        slots=slots,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        input_dtype=q.dtype,
        prefix_dtype=prefix[0].dtype,
        node_dtype=nodes[0].dtype,
    )


def _sizes(name, pair, batch, dim) -> tuple[int, int]:
    """Return the tokens and heads of a pair of keys and values."""
    k, v = pair
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"{name} holds k {k.dtype}{k.shape} and v {v.dtype}{v.shape}; equal shapes "
            "and dtypes are allowed"
        )
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (batch, dim):
        raise ValueError(
            f"{name} has shape {k.shape}; [{batch}, tokens, kv, {dim}] is allowed"
        )
    return k.shape[1:3]
