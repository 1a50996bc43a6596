"""The decoded token in plain jnp: what every implementation must return."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.decode import config as configs
from pallas_kernels.decode import spec as specs


def decode(
    q: Float[Array, "B Hk Dk"],
    k: Float[Array, "B Hk Dk"],
    v: Float[Array, "B Hv Dv"],
    log_decay: Float[Array, "B Hv"],
    beta: Float[Array, "B Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Return S' q and S' = e^g S + u k^T with u = beta (v - e^g S k)."""
    wide = jnp.dtype(spec.accumulation_dtype)
    q, k, v, log_decay, beta, old = (
        x.astype(wide) for x in (q, k, v, log_decay, beta, state)
    )
    q, k = (jnp.repeat(x, spec.group, axis=1) for x in (q, k))
    decayed = jnp.exp(log_decay)[..., None, None] * old
    pseudo_value = beta[..., None] * (v - _read(decayed, k))
    new = decayed + pseudo_value[..., :, None] * k[..., None, :]
    return _read(new, q).astype(spec.output_dtype), new.astype(state.dtype)


def _read(
    state: Float[Array, "B Hv Dv Dk"], x: Float[Array, "B Hv Dk"]
) -> Float[Array, "B Hv Dv"]:
    return jnp.einsum("bhvd,bhd->bhv", state, x, precision=lax.Precision.HIGHEST)
