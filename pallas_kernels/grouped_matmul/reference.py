"""Routes and the expert layer through XLA's own operations, on any backend."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def scores(x: Float[Array, "T H"], weight: Float[Array, "E H"]) -> Float[Array, "T E"]:
    """Return weight x_t in float32: rounding would choose among experts."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )


def route_top_k(
    logits: Float[Array, "T E"], experts: int, per_token: int
) -> tuple[Float[Array, "T K"], Int[Array, "T k"]]:
    """Return weights and numbers of the best of the first `experts` columns.

    Weights are their softmax, then sigmoids of the other columns.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    best, chosen = lax.top_k(logits[:, :experts], per_token)
    gates = jax.nn.sigmoid(logits[:, experts:])
    return jnp.concatenate([jax.nn.softmax(best, axis=-1), gates], axis=-1), chosen


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its K experts and add them up by weight.

    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t), e = experts[t, k].
    `gate_up` holds the gate in its first half of columns and up in the second. Rows are
    sorted by expert, so that every expert's weights meet one contiguous group; choices
    of no expert, e >= E, come last and are in no group. All rows go through the shared
    expert, whose weights are the last column.
    """
    if shared is not None:
        routed = swiglu_experts(x, gate_up, down, experts, weights[:, :-1])
        return routed + swiglu(x, *shared) * weights[:, -1:].astype(x.dtype)
    by_choice = _by_choice(x, gate_up, down, experts)
    return jnp.einsum("tkh,tk->th", by_choice, weights.astype(x.dtype))


def swiglu_parts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
) -> Float[Array, "T K H"]:
    """Return what `swiglu_experts` adds up for each row, the shared expert's last."""
    parts = _by_choice(x, gate_up, down, experts)
    if shared is not None:
        parts = jnp.concatenate([parts, swiglu(x, *shared)[:, None]], axis=1)
    return parts * weights[..., None].astype(x.dtype)


def _by_choice(x, gate_up, down, experts) -> Float[Array, "T k H"]:
    """Run every row through each of its experts; what is of no expert is 0."""
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=gate_up.shape[0])
    rows = x[order // experts.shape[1]]
    product = _ragged(_gated(_ragged(rows, gate_up, sizes)), down, sizes)
    back = jnp.zeros_like(product).at[order].set(product)
    known = (experts < gate_up.shape[0])[..., None]
    return jnp.where(known, back.reshape(*experts.shape, -1), 0)


def swiglu(
    x: Float[Array, "T H"], gate_up: Float[Array, "H I2"], down: Float[Array, "I H"]
) -> Float[Array, "T H"]:
    """Run every row through one expert: down(silu(gate x) * up x)."""
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return product(_gated(product(x, gate_up)), down)


def _gated(product: Array) -> Array:
    gate, up = jnp.split(product, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _ragged(rows: Array, weights: Array, sizes: Array) -> Array:
    return lax.ragged_dot(
        rows, weights, sizes.astype(jnp.int32), precision=lax.Precision.HIGHEST
    )
