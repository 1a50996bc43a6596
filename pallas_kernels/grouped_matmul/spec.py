"""Shape contract of the expert layer: what a call is, costs and must move."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes of one call; hashable, so it may be a static argument.

    Attributes:
      tokens, per_token: rows of x, and experts that each of them goes to.
      experts: matrices in the stack.
      hidden, inner: columns of x, and of an expert's intermediate.
      input_dtype, expert_dtype: names of the dtypes of x and of the matrices.
      shared: columns of the intermediate of one more expert, which takes all tokens;
        0: there is none.
    """

    tokens: int
    per_token: int
    experts: int
    hidden: int
    inner: int
    input_dtype: str
    expert_dtype: str
    shared: int = 0

    @property
    def pairs(self) -> int:
        """Rows of the routed experts: a token and one of its choices."""
        return self.tokens * self.per_token

    @property
    def slots(self) -> int:
        """Experts that each token goes to, the shared one among them."""
        return self.per_token + (self.shared > 0)

    @property
    def touched(self) -> float:
        """Experts with at least one token, on average over uniform routes."""
        missed = (1 - self.per_token / self.experts) ** self.tokens
        return self.experts * (1 - missed)

    @property
    def bytes_moved(self) -> int:
        """Least traffic for uniform routes; see `bytes_for`."""
        return self.bytes_for(self.touched)

    def bytes_for(self, touched: float) -> int:
        """Return the least traffic with that many experts touched.

        Their matrices and the shared expert's are read once, x and the routes are read,
        the output is written.
        """
        column = 3 * self.hidden * jnp.dtype(self.expert_dtype).itemsize
        matrices = round((touched * self.inner + self.shared) * column)
        rows = 2 * self.tokens * self.hidden * jnp.dtype(self.input_dtype).itemsize
        routes = 4 * self.tokens * (self.per_token + self.slots)
        return matrices + rows + routes

    @property
    def flops(self) -> int:
        """Multiply-adds times two of the three products."""
        columns = self.per_token * self.inner + self.shared
        return 6 * self.tokens * self.hidden * columns


def make_spec(
    *,
    tokens: int,
    per_token: int,
    experts: int,
    hidden: int,
    inner: int,
    input_dtype: DTypeLike = "bfloat16",
    expert_dtype: DTypeLike | None = None,
    shared: int = 0,
) -> Spec:
    """Describe a call; `expert_dtype` None is that of the input.

    Raises ValueError for a size below one; `shared` may be 0.
    """
    sizes = {
        "tokens": tokens,
        "per_token": per_token,
        "experts": experts,
        "hidden": hidden,
        "inner": inner,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; 1 or more is allowed")
    if shared < 0:
        raise ValueError(f"shared is {shared}; 0 or more is allowed")
    return Spec(
        **sizes,
        input_dtype=jnp.dtype(input_dtype).name,
        expert_dtype=jnp.dtype(
            input_dtype if expert_dtype is None else expert_dtype
        ).name,
        shared=shared,
    )


def spec_of(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
) -> Spec:
    """Describe the call of these arrays.

    Raises ValueError where shapes or dtypes do not belong together.
    """
    for name, array, rank in (
        ("x", x, 2),
        ("gate_up", gate_up, 3),
        ("down", down, 3),
        ("experts", experts, 2),
    ):
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}; rank {rank} is allowed")
    (tokens, hidden), (count, inner) = x.shape, down.shape[:2]
    columns = 0 if shared is None else shared[1].shape[0]
    matrices = [
        ("gate_up", gate_up, (count, hidden, 2 * inner)),
        ("down", down, (count, inner, hidden)),
    ]
    if shared is not None:
        matrices += [
            ("shared gate_up", shared[0], (hidden, 2 * columns)),
            ("shared down", shared[1], (columns, hidden)),
        ]
    slots = experts.shape[1] + (shared is not None)
    routes = [
        ("experts", experts, (tokens, experts.shape[1])),
        ("weights", weights, (tokens, slots)),
    ]
    for name, array, shape in matrices + routes:
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts has dtype {experts.dtype}; an integer is allowed")
    for name, array, _ in matrices[1:]:
        if array.dtype != gate_up.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype}; that of gate_up, {gate_up.dtype}, "
                "is allowed"
            )
    return make_spec(
        tokens=tokens,
        per_token=experts.shape[1],
        experts=count,
        hidden=hidden,
        inner=inner,
        input_dtype=x.dtype,
        expert_dtype=gate_up.dtype,
        shared=columns,
    )


def unsupported_dtype(spec: Spec) -> str | None:
    """Return why a kernel cannot take these dtypes, or None."""
    if spec.input_dtype != spec.expert_dtype:
        return f"needs one dtype, not {spec.input_dtype} and {spec.expert_dtype}"
    if spec.input_dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {spec.input_dtype}"
    return None
