"""The front in plain jnp: what every implementation must return."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gdn_front import config as configs
from pallas_kernels.gdn_front import spec as specs

# Under the root of the squared norm.
EPSILON = 1e-6

Heads = tuple[Float[Array, "B n Hk Dk"], Float[Array, "B n Hk Dk"]]
Gates = tuple[Float[Array, "B n Hv"], Float[Array, "B n Hv"]]


def gdn_front(
    rows: Float[Array, "B n columns"],
    window: Float[Array, "B W1 C"],
    taps: Float[Array, "C W"],
    log_rate: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    windows: Int[Array, "B n W"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return q, k, v and the gates of every node (see `op.gdn_front`)."""
    wide = jnp.dtype(spec.accumulation_dtype)
    ends = [spec.channels, spec.channels + spec.value_heads, spec.columns]
    rows, b, a, _ = jnp.split(rows, ends, axis=-1)
    inputs = jnp.concatenate([window.astype(rows.dtype), rows], axis=1).astype(wide)
    windows = jnp.clip(windows, 0, inputs.shape[1] - 1)
    mixed = jnp.zeros(rows.shape, wide)
    for w in range(spec.width):
        picked = jax.vmap(lambda x, i: x[i])(inputs, windows[..., w])
        mixed += picked * taps[:, w].astype(wide)
    mixed = jax.nn.silu(mixed)
    size = spec.key_heads * spec.key_dim
    q, k, v = jnp.split(mixed, [size, 2 * size], axis=-1)
    keys = (spec.batch, spec.nodes, spec.key_heads, spec.key_dim)
    q, k = _normalize(q.reshape(keys), k.reshape(keys), rows.dtype)
    v = v.reshape(spec.batch, spec.nodes, spec.value_heads, spec.value_dim)
    return q, k, v.astype(rows.dtype), *_gates(a, b, log_rate, dt_bias, wide)


def normalize_and_gate(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    a: Float[Array, "B n Hv"],
    b: Float[Array, "B n Hv"],
    log_rate: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return normalised q and k and the gates (see `op.normalize_and_gate`)."""
    wide = jnp.dtype(spec.accumulation_dtype)
    heads = _normalize(q.astype(wide), k.astype(wide), q.dtype)
    return *heads, *_gates(a, b, log_rate, dt_bias, wide)


def _normalize(
    q: Float[Array, "B n Hk Dk"], k: Float[Array, "B n Hk Dk"], dtype
) -> Heads:
    q, k = (
        x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (q, k)
    )
    return (q * q.shape[-1] ** -0.5).astype(dtype), k.astype(dtype)


def _gates(a, b, log_rate, dt_bias, wide) -> Gates:
    a, b, log_rate, dt_bias = (x.astype(wide) for x in (a, b, log_rate, dt_bias))
    return -jnp.exp(log_rate) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)
