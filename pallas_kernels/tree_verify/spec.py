"""Shape contract of the tree verification: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import refusals

PRECISIONS = ("high", "fast")

# exp(-1000) is 0 in float32 and in float64, so a stronger decay need not be told
# apart; clamped there, sums of multiples of 1/16 are exact in float32 up to n = 1024.
STRONGEST_LOG_DECAY = -1000.0


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes of one call; hashable, so it may be a static argument.

    `depth` bounds the edges from the root to any node; dtypes are names.
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
    precision: str

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def bytes_moved(self) -> int:
        """Least traffic: state and inputs read once, outputs and records written."""
        size = {name: jnp.dtype(name).itemsize for name in self._dtypes()}
        state = self.value_heads * self.value_dim * self.key_dim
        keys = 2 * self.nodes * self.key_heads * self.key_dim
        values = self.nodes * self.value_heads * self.value_dim
        gates = 2 * self.nodes * self.value_heads
        row = (
            state * size[self.state_dtype]
            + (keys + values) * size[self.input_dtype]
            + values * (size[self.output_dtype] + size[self.accumulation_dtype])
            + gates * size[self.accumulation_dtype]
        )
        return self.batch * row

    @property
    def flops(self) -> int:
        """Multiply-adds times two: Grams, S k and S q, sweeps, outputs."""
        n, depth = self.nodes, self.depth
        grams = 4 * n * n * self.key_dim * self.key_heads
        reads = 4 * n * self.key_dim * self.value_dim * self.value_heads
        sweeps = 2 * (depth + 1) * n * n * self.value_dim * self.value_heads
        return self.batch * (grams + reads + sweeps)

    def _dtypes(self) -> tuple[str, ...]:
        return (
            self.input_dtype,
            self.state_dtype,
            self.output_dtype,
            self.accumulation_dtype,
        )


def make_spec(
    *,
    nodes: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    batch: int = 1,
    depth: int = 3,
    input_dtype: DTypeLike = "float32",
    state_dtype: DTypeLike = "float32",
    output_dtype: DTypeLike | None = None,
    accumulation_dtype: DTypeLike = "float32",
    precision: str | None = None,
) -> Spec:
    """Describe a call; precision None follows the output dtype.

    Raises ValueError for a precision or output dtype that is not allowed.
    """
    output = jnp.dtype(input_dtype if output_dtype is None else output_dtype)
    if not jnp.issubdtype(output, jnp.floating):
        raise ValueError(f"output_dtype is {output}; a float dtype is allowed")
    if precision is None:
        precision = "fast" if output == jnp.bfloat16 else "high"
    if precision not in PRECISIONS:
        allowed = ", ".join(PRECISIONS)
        raise ValueError(f"precision is {precision!r}; allowed: {allowed}, or None")
    return Spec(
        batch=batch,
        nodes=nodes,
        depth=depth,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        input_dtype=jnp.dtype(input_dtype).name,
        state_dtype=jnp.dtype(state_dtype).name,
        output_dtype=output.name,
        accumulation_dtype=jnp.dtype(accumulation_dtype).name,
        precision=precision,
    )


def unsupported_dtype(spec: Spec) -> str | None:
    """Return why a kernel that accumulates in float32 cannot take these dtypes."""
    return refusals.dtypes(spec, "input", "state", "output")


def cost_estimate(spec: Spec) -> pl.CostEstimate:
    """Return what XLA's scheduler should assume; it cannot see into a kernel."""
    return pl.CostEstimate(
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
        transcendentals=spec.batch * spec.value_heads * spec.nodes * (spec.nodes + 1),
    )
