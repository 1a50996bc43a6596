"""The algebra of TreeWY: all nodes of a tree at once, from one state.

With c_t the log decay summed from the root to node t, the pseudo-values solve

    (I + A) U = R      A_ti = beta_t exp(c_t - c_i) (k_t . k_i)   i strict ancestor of t
                       R_t  = beta_t (v_t - exp(c_t) S k_t)

and the outputs are

    o_t = exp(c_t) S q_t + sum_i exp(c_t - c_i) (q_t . k_i) u_i   i ancestor or t itself

One function an equation; arrays only, head-major inside: [B, Hv, n, ...]. `ancestors`
is [B, n, n], true at [t, i] where i is an ancestor of t or t itself; padding rows have
none. This is the reference implementation of `treewy_jax.verify.verify`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_verify import spec as specs
from treewy_jax import typing


def split_path_decay(
    log_decay: Float[Array, "B n Hv"], ancestors: Bool[Array, "B n n"]
) -> tuple[Float[Array, "B Hv n"], Float[Array, "B Hv n"]]:
    """Sum the log decay from the root to each node, as a high and a low part.

    The high part holds multiples of 1/16 and is summed without rounding, the low part
    lies within 1/32 a node. So c_t - c_i = (hi_t - hi_i) + (lo_t - lo_i) keeps its
    digits behind a decay of -300, where the difference of two sums loses them.
    """
    log_decay = jnp.maximum(log_decay, specs.STRONGEST_LOG_DECAY)
    high = jnp.round(log_decay * 16) / 16
    return _sum_over_path(high, ancestors), _sum_over_path(log_decay - high, ancestors)


def _sum_over_path(x, ancestors):
    return jnp.einsum(
        "bti,bih->bht", ancestors.astype(x.dtype), x, precision=lax.Precision.HIGHEST
    )


def path_decay(
    high: Float[Array, "B Hv n"],
    low: Float[Array, "B Hv n"],
    ancestors: Bool[Array, "B n n"],
) -> Float[Array, "B Hv n n"]:
    """Return exp(c_t - c_i) where i is an ancestor of t or t itself, else 0."""
    difference = (high[..., :, None] - high[..., None, :]) + (
        low[..., :, None] - low[..., None, :]
    )
    # Between unrelated nodes the difference may be large and positive.
    difference = jnp.minimum(difference, 0)
    return jnp.where(ancestors[:, None], jnp.exp(difference), 0)


def gram(
    left: Float[Array, "B n Hk Dk"], right: Float[Array, "B n Hk Dk"]
) -> Float[Array, "B Hk n n"]:
    """Return left_t . right_i for every pair of nodes, once per key head."""
    return jnp.einsum("bthd,bihd->bhti", left, right, precision=lax.Precision.HIGHEST)


def weigh(
    decay: Float[Array, "B Hv n n"], products: Float[Array, "B Hk n n"]
) -> Float[Array, "B Hv n n"]:
    """Multiply the Gram of each key head by the decay of its value heads.

    Selected rather than multiplied: where the decay is 0, so is the result.
    """
    products = jnp.repeat(products, decay.shape[1] // products.shape[1], axis=1)
    return jnp.where(decay > 0, decay * products, 0)


def system_matrix(
    k: Float[Array, "B n Hk Dk"],
    beta: Float[Array, "B Hv n"],
    decay: Float[Array, "B Hv n n"],
) -> Float[Array, "B Hv n n"]:
    """Return A, nilpotent of index depth + 1: node t sees its strict ancestors."""
    matrix = beta[..., None] * weigh(decay, gram(k, k))
    return jnp.where(jnp.eye(k.shape[1], dtype=bool), 0, matrix)


def read_state(
    state: Float[Array, "B Hv Dv Dk"], rows: Float[Array, "B n Hk Dk"]
) -> Float[Array, "B Hv n Dv"]:
    """Return S x for each row x of the key head that a value head uses."""
    batch, value_heads, value_dim, key_dim = state.shape
    key_heads, n = rows.shape[2], rows.shape[1]
    grouped = state.reshape(batch, key_heads, -1, value_dim, key_dim)
    product = jnp.einsum(
        "bhgvd,bthd->bhgtv", grouped, rows, precision=lax.Precision.HIGHEST
    )
    return product.reshape(batch, value_heads, n, value_dim)


def right_hand_side(
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B Hv n Dv"],
    beta: Float[Array, "B Hv n"],
    from_state: Float[Array, "B Hv n"],
    state: Float[Array, "B Hv Dv Dk"],
) -> Float[Array, "B Hv n Dv"]:
    """Return R: what each node would write if the tree above it wrote nothing."""
    known = from_state[..., None] * read_state(state, k)
    return beta[..., None] * (v - known)


def solve_by_sweeps(
    matrix: Float[Array, "B Hv n n"],
    right: Float[Array, "B Hv n Dv"],
    sweeps: int | Int[Array, ""],
) -> Float[Array, "B Hv n Dv"]:
    """Solve (I + A) U = R by U <- R - A U.

    After m sweeps the nodes down to depth m are final, and a further sweep repeats
    their bits; so any count from the depth of the tree on gives the same result. The
    doubling product (I - A)(I + A^2)... would cancel on long, correlated chains.
    """

    def sweep(_, pseudo_values):
        return right - jnp.matmul(
            matrix, pseudo_values, precision=lax.Precision.HIGHEST
        )

    return lax.fori_loop(0, sweeps, sweep, right)


def outputs(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B Hv n Dv"],
    from_state: Float[Array, "B Hv n"],
    decay: Float[Array, "B Hv n n"],
    state: Float[Array, "B Hv Dv Dk"],
) -> Float[Array, "B Hv n Dv"]:
    """Return o: what each node reads from the state and from its path."""
    from_path = jnp.matmul(
        weigh(decay, gram(q, k)), pseudo_values, precision=lax.Precision.HIGHEST
    )
    return from_state[..., None] * read_state(state, q) + from_path


def verify_reference(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sweeps: int | Int[Array, ""],
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and pseudo-values of every node.

    Padding rows must be zero already. `sweeps` is at least the depth of the deepest
    node. Computed and returned in float32, or in float64 where an input is.
    """
    arrays = (q, k, v, log_decay, beta, state)
    dtype = typing.accumulation_dtype(*(x.dtype for x in arrays))
    q, k, v, log_decay, beta, state = (x.astype(dtype) for x in arrays)
    v, beta = jnp.swapaxes(v, 1, 2), jnp.swapaxes(beta, 1, 2)
    high, low = split_path_decay(log_decay, ancestors)
    from_state = jnp.exp(high + low)
    decay = path_decay(high, low, ancestors)
    matrix = system_matrix(k, beta, decay)
    right = right_hand_side(k, v, beta, from_state, state)
    pseudo_values = solve_by_sweeps(matrix, right, sweeps)
    output = outputs(q, k, pseudo_values, from_state, decay, state)
    return jnp.swapaxes(output, 1, 2), jnp.swapaxes(pseudo_values, 1, 2)
