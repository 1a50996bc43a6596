"""Shape contract of the attention front: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    Attributes:
      batch, tokens: rows are batch x tokens.
      heads, kv_heads: query heads and key heads of a row.
      head_dim, rotary_dim: channels of a head, and how many of them are rotated.
      theta, eps: base of the rotary frequencies; what is under the norms' root.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    eps: float
    rows_dtype: str
    weight_dtype: str
    accumulation_dtype: str

    @property
    def rows(self) -> int:
        """Rows of all sequences."""
        return self.batch * self.tokens

    @property
    def bytes_moved(self) -> int:
        """Least traffic: q and k read and written once; gate and v stay where they are.

        In bfloat16 4 (heads + kv_heads) D + 4 bytes a row, and the two weights.
        """
        row, weight = (
            jnp.dtype(name).itemsize for name in (self.rows_dtype, self.weight_dtype)
        )
        channels = (self.heads + self.kv_heads) * self.head_dim
        return self.rows * (2 * channels * row + 4) + 2 * self.head_dim * weight

    @property
    def flops(self) -> int:
        """About four an element for the norms, three more where it is rotated."""
        heads = self.rows * (self.heads + self.kv_heads)
        return heads * (4 * self.head_dim + 3 * self.rotary_dim)


def spec_of(
    q_and_gate: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    q_weight: Float[Array, "..."],
    k_weight: Float[Array, "..."],
    positions: Int[Array, "..."],
    *,
    heads: int,
    kv_heads: int,
    rotary_dim: int,
    theta: float,
    eps: float,
) -> Spec:
    """Describe a call; ValueError where shapes, dtypes or sizes disagree."""
    if q_weight.ndim != 1:
        raise ValueError(f"q_weight has shape {q_weight.shape}; [D] is allowed")
    if q_and_gate.ndim != 3:
        raise ValueError(
            f"q_and_gate has shape {q_and_gate.shape}; [B, T, heads 2 D] is allowed"
        )
    dim, rows = q_weight.shape[0], q_and_gate.shape[:2]
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count < 1:
            raise ValueError(f"{name} is {count}; 1 or more is allowed")
    if rotary_dim % 2 or not 2 <= rotary_dim <= dim:
        raise ValueError(
            f"rotary_dim is {rotary_dim}; an even number from 2 to D = {dim} is allowed"
        )
    _check("k_weight", k_weight, (dim,))
    _check("q_and_gate", q_and_gate, (*rows, heads * 2 * dim))
    _check("k", k, (*rows, kv_heads * dim))
    _check("v", v, (*rows, kv_heads * dim))
    _check("positions", positions, rows)
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q_and_gate.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype}; that of q_and_gate, "
                f"{q_and_gate.dtype}, is allowed"
            )
    return Spec(
        batch=rows[0],
        tokens=rows[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary_dim,
        theta=float(theta),
        eps=float(eps),
        rows_dtype=q_and_gate.dtype.name,
        weight_dtype=jnp.result_type(q_weight, k_weight).name,
        accumulation_dtype=jnp.promote_types(q_and_gate.dtype, jnp.float32).name,
    )


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
