"""The recurrence over a tree in plain jnp, node by node: what all must return."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.store_all import config as configs
from pallas_kernels.store_all import spec as specs


def store_all(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    states: Float[Array, "B slots Hv Dv Dk"],
    index: Int[Array, " B"],
    parent: Int[Array, "B n"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B slots Hv Dv Dk"]]:
    """Return S_t q_t of every node and the ring with S_t in slot index + 1 + t.

    S_t = e^{g_t} S + u_t k_t^T with u_t = beta_t (v_t - e^{g_t} S k_t), S that of the
    parent. States are kept in the accumulation dtype and rounded at the end.
    """
    del config
    wide = jnp.dtype(spec.accumulation_dtype)
    rows = [x.astype(wide) for x in (q, k, v, log_decay, beta)]
    batch = jnp.arange(spec.batch)
    # The state before the root comes first, so that parent -1 is no special case.
    known = jnp.zeros((spec.batch, spec.nodes + 1, *states.shape[2:]), wide)
    known = known.at[:, 0].set(states[batch, index].astype(wide))

    def visit(known, node):
        number, parent, (q, k, v, log_decay, beta) = node
        q, k = (jnp.repeat(x, spec.group, axis=1) for x in (q, k))
        decayed = jnp.exp(log_decay)[..., None, None] * known[batch, parent + 1]
        pseudo_value = beta[..., None] * (v - _read(decayed, k))
        after = decayed + pseudo_value[..., :, None] * k[..., None, :]
        return known.at[:, number + 1].set(after), _read(after, q)

    nodes = tuple(jnp.moveaxis(x, 1, 0) for x in rows)
    numbers = jnp.arange(spec.nodes)
    known, output = lax.scan(visit, known, (numbers, parent.T, nodes))
    output = jnp.moveaxis(output, 0, 1).astype(spec.output_dtype)
    slots = (index[:, None] + 1 + numbers) % states.shape[1]
    written = known[:, 1:].astype(states.dtype)
    return output, states.at[batch[:, None], slots].set(written)


def _read(
    state: Float[Array, "B Hv Dv Dk"], x: Float[Array, "B Hv Dk"]
) -> Float[Array, "B Hv Dv"]:
    return jnp.einsum("bhvd,bhd->bhv", state, x, precision=lax.Precision.HIGHEST)
