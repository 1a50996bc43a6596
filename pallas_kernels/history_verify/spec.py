"""Shape contract of the verification behind a history: what a call is and must move."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from pallas_kernels import refusals
from pallas_kernels.tree_verify import spec as verify_specs


@dataclasses.dataclass(frozen=True)
class Spec(verify_specs.Spec):
    """A call of tree_verify, and the history before its tree.

    `horizon` bounds the records of a row, `record_dtype` is that of their pseudo-values
    and `record_key_dtype` that of their keys. A row of more than `fold_above` records,
    0 or more, folds them into its state. Bytes and flops are those of rows that fold
    nothing.
    """

    horizon: int
    record_dtype: str
    record_key_dtype: str
    fold_above: int

    @property
    def bytes_moved(self) -> int:
        """Least traffic: tree_verify's, and a full history read."""
        key, value = (
            jnp.dtype(dtype).itemsize
            for dtype in (self.record_key_dtype, self.record_dtype)
        )
        keys = self.key_heads * self.key_dim * key
        values = self.value_heads * (self.value_dim * value + 4)
        return super().bytes_moved + self.batch * self.horizon * (keys + values)

    @property
    def fold_bytes(self) -> int:
        """Bytes that a row which folds its history writes beside them: its state."""
        state = self.value_heads * self.value_dim * self.key_dim
        return state * jnp.dtype(self.state_dtype).itemsize

    @property
    def flops(self) -> int:
        """Those of tree_verify, and the products with the history."""
        past = 4 * self.nodes * self.horizon
        grams = past * self.key_dim * self.key_heads
        reads = past * self.value_dim * self.value_heads
        return super().flops + self.batch * (grams + reads)


def extend(
    spec: verify_specs.Spec,
    *,
    horizon: int,
    record_dtype: str,
    record_key_dtype: str | None = None,
    fold_above: int = 0,
) -> Spec:
    """Return the call `spec` of tree_verify with a history before it.

    Keys of records have the dtype that `key_dtype` says, unless another is named.

    Raises ValueError for a negative `fold_above`.
    """
    if fold_above < 0:  # a row without records would fold nothing
        raise ValueError(f"fold_above is {fold_above}; 0 or more is allowed")
    fields = {x.name: getattr(spec, x.name) for x in dataclasses.fields(spec)}
    return Spec(
        **fields,
        horizon=horizon,
        record_dtype=record_dtype,
        record_key_dtype=record_key_dtype or key_dtype(spec.input_dtype, record_dtype),
        fold_above=fold_above,
    )


def key_dtype(rows: DTypeLike, records: DTypeLike) -> str:
    """Return in what the keys of records are stored: the narrower of two dtypes.

    Keys in the dtype of the `rows` that they come from lose nothing; `records` is what
    pseudo-values are stored in.
    """
    dtypes = jnp.dtype(rows), jnp.dtype(records)
    return min(dtypes, key=lambda dtype: dtype.itemsize).name


def records(past_count: Int[Array, "..."], spec: Spec) -> Int[Array, "..."]:
    """Return how many records rows have; others would be read from elsewhere."""
    return jnp.clip(past_count, 0, spec.horizon)


def unsupported(spec: Spec) -> str | None:
    """Return which dtype no kernel takes, or None."""
    return verify_specs.unsupported_dtype(spec) or refusals.dtypes(
        spec, "record", "record_key"
    )
