"""Residual and norm: what lies between two halves of a decoder layer.

    h'_t = h_t + sum_p parts[t, p]
    x_t  = h'_t / sqrt(mean(h'_t^2) + eps) * (1 + weight)

Reference: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import functools

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.residual_norm import reference
from pallas_kernels.residual_norm import spec as specs

# On a TPU XLA fuses what there is to do; the kernel runs where it is named.
IMPLEMENTATIONS = implementations.Implementations(
    "residual_norm",
    {
        "triton": "pallas_kernels.residual_norm.triton",
        "mosaic_tpu": "pallas_kernels.residual_norm.mosaic_tpu",
        "reference": "pallas_kernels.residual_norm.reference",
    },
    optional=("mosaic_tpu",),
)

# A product's sum is cut in so many parts, of this many terms at least, where its result
# has at most so many elements: those of more fill a GPU. XLA cuts it likewise, and adds
# the parts up in a launch. A single row is left to its caller.
PARTS, LEAST_TERMS, MOST_ELEMENTS = 8, 256, 1 << 18


def residual_norm(
    h: Float[Array, "..."],
    parts: Float[Array, "..."],
    weight: Float[Array, "..."],
    *,
    eps: float,
    impl: str | None = None,
) -> tuple[Float[Array, "*T H"], Float[Array, "*T H"]]:
    """Return h' and x, both in the dtype of h.

    The parts are added in float32, and their sum is rounded to the dtype of h before it
    is added to h, as if they had come added up. The norm, also in float32, is that of
    the rounded h'. The gradient is that of the reference, whatever implementation runs.

    Args:
      h: [.., H], rows of the residual stream.
      parts: [.., parts, H], what is added to each row.
      weight: [H], of the norm; the gain is 1 + weight.
      eps: under the root.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    spec = specs.spec_of(h, parts, weight)
    name = IMPLEMENTATIONS.choose(spec, impl).name
    if name == implementations.REFERENCE:
        return reference.residual_norm(h, parts, weight, eps=eps)
    rows, each = (x.reshape(spec.tokens, *x.shape[h.ndim - 1 :]) for x in (h, parts))
    found = _kernel(name, spec, eps, rows, each, weight)
    return tuple(x.reshape(h.shape) for x in found)


def parts_of_product(tokens: int, terms: int, hidden: int, dtype: DTypeLike) -> int:
    """Return in how many parts to leave a product's sum to `residual_norm`; often 1.

    Args:
      tokens, hidden: rows and columns of the product.
      terms: what is summed over.
      dtype: of the rows of the stream.
    """
    few = 1 < tokens and tokens * hidden <= MOST_ELEMENTS
    if not few or terms % PARTS or terms < PARTS * LEAST_TERMS:
        return 1
    return PARTS if adds_up(tokens, PARTS, hidden, dtype) else 1


def adds_up(tokens: int, parts: int, hidden: int, dtype: DTypeLike) -> bool:
    """Tell whether a kernel runs here that adds so many parts up.

    Without one, whoever makes the parts had better add them.
    """
    spec = specs.make_spec(tokens=tokens, parts=parts, hidden=hidden, rows_dtype=dtype)
    return IMPLEMENTATIONS.choose(spec).name != implementations.REFERENCE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(name, spec, eps, *arrays):
    run = IMPLEMENTATIONS.module(name).residual_norm
    return run(*arrays, spec=spec, eps=eps)


def _forward(name, spec, eps, *arrays):
    return _kernel(name, spec, eps, *arrays), arrays


def _backward(name, spec, eps, arrays, cotangents):
    run = functools.partial(reference.residual_norm, eps=eps)
    return jax.vjp(run, *arrays)[1](cotangents)


_kernel.defvjp(_forward, _backward)
