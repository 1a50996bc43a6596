"""The expert layer through XLA's ragged product, on any backend."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
) -> Float[Array, "T H"]:
    """Run every row through its K experts and add them up by weight.

    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t), e = experts[t, k].
    `gate_up` holds the gate in its first half of columns and up in the second. Rows are
    sorted by expert, so that every expert's weights meet one contiguous group; choices
    of no expert, e >= E, come last and are in no group.
    """
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=gate_up.shape[0])
    rows = x[order // experts.shape[1]]
    product = _ragged(rows, gate_up, sizes)
    gate, up = jnp.split(product, 2, axis=-1)
    product = _ragged(jax.nn.silu(gate) * up, down, sizes)
    back = jnp.zeros_like(product).at[order].set(product)
    known = (experts < gate_up.shape[0])[..., None]
    by_row = jnp.where(known, back.reshape(*experts.shape, -1), 0)
    return jnp.einsum("tkh,tk->th", by_row, weights.astype(x.dtype))


def _ragged(rows: Array, weights: Array, sizes: Array) -> Array:
    return lax.ragged_dot(
        rows, weights, sizes.astype(jnp.int32), precision=lax.Precision.HIGHEST
    )
