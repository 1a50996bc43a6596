"""Shape contract of the verification behind a history: what a call is and must move."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels import refusals
from pallas_kernels.tree_verify import spec as verify_specs


@dataclasses.dataclass(frozen=True)
class Spec(verify_specs.Spec):
    """A call of tree_verify, and the history before its tree.

    `horizon` bounds the records of a row, `record_dtype` is that of their keys and
    pseudo-values. Bytes and flops are those of rows that fold nothing.
    """

    horizon: int
    record_dtype: str

    @property
    def bytes_moved(self) -> int:
        """Least traffic: tree_verify's, and a full history read."""
        size = jnp.dtype(self.record_dtype).itemsize
        keys = self.key_heads * self.key_dim * size
        values = self.value_heads * (self.value_dim * size + 4)
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


def extend(spec: verify_specs.Spec, *, horizon: int, record_dtype: str) -> Spec:
    """Return the call `spec` of tree_verify with a history before it."""
    fields = {x.name: getattr(spec, x.name) for x in dataclasses.fields(spec)}
    return Spec(**fields, horizon=horizon, record_dtype=record_dtype)


def unsupported(spec: Spec) -> str | None:
    """Return which dtype no kernel takes, or None."""
    return verify_specs.unsupported_dtype(spec) or refusals.dtypes(spec, "record")
