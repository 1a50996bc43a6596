"""The commit in plain JAX: a scan over the path, on any backend."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.commit import spec as specs


def commit(
    state: Float[Array, "B Hv Dv Dk"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: None = None,
) -> Float[Array, "B Hv Dv Dk"]:
    """Return S <- exp(g_i) S + u_i k_i^T over the first `count` nodes of each path.

    No dot, so no cancellation and no rounding of operands.
    """
    del config
    dtype = jnp.dtype(spec.accumulation_dtype)

    def write(carry, entry):
        node, position = entry
        k_t, u_t, g_t = (_take(x, node, dtype) for x in (k, pseudo_values, log_decay))
        k_t = jnp.repeat(k_t, spec.group, axis=1)
        decayed = jnp.exp(g_t)[..., None, None] * carry
        written = decayed + u_t[..., :, None] * k_t[..., None, :]
        return jnp.where((position < count)[:, None, None, None], written, carry), None

    entries = (path.T, jnp.arange(path.shape[1]))
    result, _ = lax.scan(write, state.astype(dtype), entries)
    return result.astype(state.dtype)


def _take(x, node, dtype):
    """Return row node[b] of x[b] for every b, in the computing dtype."""
    index = node.reshape(node.shape + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0].astype(dtype)
