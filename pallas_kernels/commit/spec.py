"""Shape contract of the commit: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable. `path` bounds its length."""

    batch: int
    nodes: int
    path: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    state_dtype: str
    accumulation_dtype: str

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def bytes_moved(self) -> int:
        """Least traffic: the state read and written, the path's records read."""
        values = self.value_heads * self.value_dim
        size = jnp.dtype(self.accumulation_dtype).itemsize
        keys = self.key_heads * self.key_dim * jnp.dtype(self.key_dtype).itemsize
        records = self.path * (values * size + keys + self.value_heads * size)
        state = 2 * values * self.key_dim * jnp.dtype(self.state_dtype).itemsize
        return self.batch * (state + records)

    @property
    def flops(self) -> int:
        """Three a state element and path node: decay, product, sum."""
        state = self.value_heads * self.value_dim * self.key_dim
        return 3 * self.batch * self.path * state


def spec_of(
    state: Float[Array, "..."],
    k: Float[Array, "..."],
    pseudo_values: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
) -> Spec:
    """Describe a call; ValueError where a shape disagrees with the others."""
    for name, array, rank in (("state", state, 4), ("k", k, 4), ("path", path, 2)):
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}; {rank} axes are allowed")
    batch, value_heads, value_dim, key_dim = state.shape
    nodes, key_heads = k.shape[1:3]
    if k.shape != (batch, nodes, key_heads, key_dim) or value_heads % key_heads:
        raise ValueError(
            f"k has shape {k.shape}; ({batch}, n, Hk, {key_dim}) is allowed, where Hk "
            f"divides Hv = {value_heads}"
        )
    for name, array, shape in (
        ("pseudo_values", pseudo_values, (batch, nodes, value_heads, value_dim)),
        ("log_decay", log_decay, (batch, nodes, value_heads)),
        ("path", path, (batch, *path.shape[1:])),
        ("count", count, (batch,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    arrays = (state, k, pseudo_values, log_decay)
    return Spec(
        batch=batch,
        nodes=nodes,
        path=path.shape[1],
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        key_dtype=k.dtype.name,
        state_dtype=state.dtype.name,
        accumulation_dtype=jnp.result_type(jnp.float32, *arrays).name,
    )
