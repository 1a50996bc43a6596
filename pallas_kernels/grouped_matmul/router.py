"""Which experts a token goes to, and with what weight: the op and its contract."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.grouped_matmul import reference

# On a TPU XLA fuses what there is to do.
IMPLEMENTATIONS = implementations.Implementations(
    "route_top_k",
    {
        "triton": "pallas_kernels.grouped_matmul.router_triton",
        "reference": "pallas_kernels.grouped_matmul.reference",
    },
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes of one call; hashable, so it may be a static argument.

    Attributes:
      tokens: rows of logits.
      experts, per_token: columns of logits, and how many of them a token goes to.
      shared: whether one more column is the gate of a shared expert.
      hidden: columns of the rows that logits are computed of; 0 where they are given.
      input_dtype: name of the dtype of the logits, or of the rows.
    """

    tokens: int
    experts: int
    per_token: int
    shared: bool = False
    hidden: int = 0
    input_dtype: str = "float32"

    @property
    def columns(self) -> int:
        """Columns of the logits."""
        return self.experts + self.shared

    @property
    def weights(self) -> int:
        """Columns of the weights."""
        return self.per_token + self.shared

    @property
    def bytes_moved(self) -> int:
        """Least traffic: inputs are read, weights and experts are written."""
        read = self.tokens * self.columns
        if self.hidden:
            read = (self.tokens + self.columns) * self.hidden
        written = 4 * self.tokens * (self.weights + self.per_token)
        return read * jnp.dtype(self.input_dtype).itemsize + written

    @property
    def flops(self) -> int:
        """Comparisons of each choice with all experts, and those of the product."""
        product = 2 * self.hidden * self.columns
        return self.tokens * (self.per_token * self.experts + product)


def make_spec(
    *,
    tokens: int,
    experts: int,
    per_token: int,
    shared: bool = False,
    hidden: int = 0,
    input_dtype: DTypeLike = "float32",
) -> Spec:
    """Describe a call.

    Raises ValueError for a size below one and for more experts a token than there are.
    """
    for name, size in (("tokens", tokens), ("experts", experts)):
        if size < 1:
            raise ValueError(f"{name} is {size}; 1 or more is allowed")
    if not 1 <= per_token <= experts:
        raise ValueError(f"k is {per_token}; 1 to {experts} is allowed")
    dtype = jnp.dtype(input_dtype).name
    return Spec(tokens, experts, per_token, shared, hidden, dtype)


def spec_of(logits: jax.Array, k: int, shared: bool) -> Spec:
    """Describe the call of these logits.

    Raises ValueError for other logits than a matrix of floating-point numbers.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; rank 2 is allowed")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits has dtype {logits.dtype}; a floating-point one is allowed"
        )
    return make_spec(
        tokens=logits.shape[0],
        experts=logits.shape[1] - shared,
        per_token=k,
        shared=shared,
        input_dtype=logits.dtype,
    )


def spec_of_rows(x: jax.Array, weight: jax.Array, k: int, shared: bool) -> Spec:
    """Describe the call of these rows.

    Raises ValueError for shapes and dtypes that do not belong together.
    """
    for name, array in (("x", x), ("weight", weight)):
        if array.ndim != 2 or array.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {array.shape}; (rows, {x.shape[-1]}) is allowed"
            )
    if weight.dtype != x.dtype:
        raise ValueError(
            f"weight has dtype {weight.dtype}; that of x, {x.dtype}, is allowed"
        )
    return make_spec(
        tokens=x.shape[0],
        experts=weight.shape[0] - shared,
        per_token=k,
        shared=shared,
        hidden=x.shape[1],
        input_dtype=x.dtype,
    )


def route(
    x: Float[Array, "T H"],
    weight: Float[Array, "E H"],
    k: int,
    *,
    shared: bool = False,
    impl: str | None = None,
) -> tuple[Float[Array, "T K"], Int[Array, "T k"]]:
    """Return `route_top_k` of the logits `weight x_t`, which are not rounded.

    Args:
      weight: a row an expert, of the dtype of x.

    The other arguments and what is raised are those of `route_top_k`.
    """
    spec = spec_of_rows(x, weight, k, shared)
    return _run(spec, impl, x, weight)


def route_top_k(
    logits: Float[Array, "T E"],
    k: int,
    *,
    shared: bool = False,
    impl: str | None = None,
) -> tuple[Float[Array, "T K"], Int[Array, "T k"]]:
    """Return weights (float32) and numbers (int32) of the k best experts of each row.

    experts = top_k(logits_t, k);  weights = softmax of those k logits alone, which is
    the softmax of all of them, cut to the k best and divided by its sum. Equal logits
    come in the order of their experts, as in `lax.top_k`.

    Args:
      logits: float32 or bfloat16; float64 gives float64 weights.
      shared: the last column is the gate of an expert that all tokens go to; its
        sigmoid is one more column of the weights.
      impl: name of an implementation; None or "auto" takes the best that runs here.

    The gradient is that of the reference, whatever implementation runs. Raises
    ValueError for wrong shapes, dtypes or k, NotImplementedError where the
    implementation named does not support the call.
    """
    return _run(spec_of(logits, k, shared), impl, logits)


def _run(spec, impl, *arrays):
    name = IMPLEMENTATIONS.choose(spec, impl).name
    if name == implementations.REFERENCE:
        return _reference(spec, *arrays)
    return _kernel(name, spec, *arrays)


def _reference(spec, *arrays):
    logits = reference.scores(*arrays) if spec.hidden else arrays[0]
    return reference.route_top_k(logits, spec.experts, spec.per_token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel(name, spec, *arrays):
    module = IMPLEMENTATIONS.module(name)
    run = module.route if spec.hidden else module.route_top_k
    return run(*arrays, spec=spec)


def _forward(name, spec, *arrays):
    return _kernel(name, spec, *arrays), arrays


def _backward(name, spec, arrays, cotangents):
    by_weight, _ = cotangents
    (_, experts), pull = jax.vjp(functools.partial(_reference, spec), *arrays)
    return pull((by_weight, np.zeros(experts.shape, jax.dtypes.float0)))


_kernel.defvjp(_forward, _backward)
