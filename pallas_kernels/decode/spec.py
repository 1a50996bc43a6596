"""Shape contract of one decoded token: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable."""

    batch: int
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
        """Least traffic: the state read and written, the token's rows once."""
        size = {
            kind: jnp.dtype(getattr(self, f"{kind}_dtype")).itemsize
            for kind in ("input", "state", "output", "accumulation")
        }
        values = self.value_heads * self.value_dim
        row = (
            2 * values * self.key_dim * size["state"]
            + (2 * self.key_heads * self.key_dim + values) * size["input"]
            + values * size["output"]
            + 2 * self.value_heads * size["accumulation"]
        )
        return self.batch * row

    @property
    def flops(self) -> int:
        """Multiply-adds times two: S k, the update, S q, and the decay."""
        return 7 * self.batch * self.value_heads * self.value_dim * self.key_dim


def spec_of(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "..."],
    state: Float[Array, "..."],
    output_dtype: DTypeLike | None = None,
) -> Spec:
    """Describe a call; ValueError where a shape disagrees with the others."""
    if state.ndim != 4:
        raise ValueError(f"state has shape {state.shape}; [B, Hv, Dv, Dk] is allowed")
    batch, value_heads, value_dim, key_dim = state.shape
    if q.ndim != 3 or q.shape[::2] != (batch, key_dim) or value_heads % q.shape[1]:
        raise ValueError(
            f"q has shape {q.shape}; [{batch}, Hk, {key_dim}] is allowed, where Hk "
            f"divides Hv = {value_heads}"
        )
    for name, array, shape in (
        ("k", k, q.shape),
        ("v", v, (batch, value_heads, value_dim)),
        ("log_decay", log_decay, (batch, value_heads)),
        ("beta", beta, (batch, value_heads)),
    ):
        if array.shape != tuple(shape):
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    arrays = (q, k, v, log_decay, beta, state)
    output = jnp.dtype(v.dtype if output_dtype is None else output_dtype)
    if not jnp.issubdtype(output, jnp.floating):
        raise ValueError(f"output_dtype is {output}; a float dtype is allowed")
    return Spec(
        batch=batch,
        key_heads=q.shape[1],
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        input_dtype=jnp.promote_types(
            jnp.promote_types(q.dtype, k.dtype), v.dtype
        ).name,
        state_dtype=state.dtype.name,
        output_dtype=output.name,
        accumulation_dtype=jnp.result_type(jnp.float32, *arrays).name,
    )
