"""What the kernels of all devices share: the triangular system of one value head.

The equations are those of treewy_jax.wy in the same order. Values stay two-dimensional
and are never sliced, which is what both Triton and Mosaic accept; each kernel orders
the products with the state as its matrix units like them.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels import dots
from pallas_kernels.tree_verify import spec as specs

Split = Callable[[Array], Sequence[Array]]


def path_decay(
    log_decay: Float[Array, "1 n"], ancestors: Bool[Array, "n n"]
) -> tuple[Float[Array, "n n"], Float[Array, "n 1"]]:
    """Return exp(c_t - c_i) for ancestors or self i of t, else 0, and exp(c_t).

    c is the log decay summed from the root. Multiples of 1/16 and the rest are summed
    apart, the former without rounding, so that a difference keeps its digits behind a
    decay of -300.
    """
    log_decay = jnp.maximum(log_decay, specs.STRONGEST_LOG_DECAY)
    coarse = jnp.floor(log_decay * 16 + 0.5) / 16
    sums = [_sum_over_path(part, ancestors) for part in (coarse, log_decay - coarse)]
    high, low = (part - jnp.swapaxes(part, 0, 1) for part in sums)
    # Between unrelated nodes the difference may be large and positive.
    between = jnp.exp(jnp.minimum(high + low, 0.0))
    return jnp.where(ancestors, between, 0.0), jnp.exp(sums[0] + sums[1])


def _sum_over_path(part, ancestors):
    return jnp.sum(jnp.where(ancestors, part, 0.0), axis=1, keepdims=True)


def system(
    key_gram: Float[Array, "n n"],
    query_gram: Float[Array, "n n"],
    decay: Float[Array, "n n"],
    beta: Float[Array, "n 1"],
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """Return A of (I + A) U = R, and the weights of U in the outputs.

    Selected rather than multiplied: where the decay is 0, so is the result.
    """
    node = lax.broadcasted_iota(jnp.int32, decay.shape, 0)
    other = lax.broadcasted_iota(jnp.int32, decay.shape, 1)
    matrix = jnp.where((decay > 0) & (node != other), beta * (decay * key_gram), 0.0)
    return matrix, jnp.where(decay > 0, decay * query_gram, 0.0)


def splitter(spec: specs.Spec) -> Split:
    """Return how an operand is written for the tensor cores: see pallas_kernels.dots.

    `fast` rounds to bfloat16. `high` keeps two parts of float32 operands, an error of
    about 2e-6 in the output, and all three where the inputs are float32 as well.
    """
    parts = 1
    if spec.precision == "high":
        parts = 3 if spec.input_dtype == "float32" else 2
    return lambda x: dots.split(x, parts)
