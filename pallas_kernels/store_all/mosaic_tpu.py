"""The store-all verification as a Pallas kernel for TPUs (Mosaic).

A program takes one head of one tree. The states of all nodes are its output block in
vector memory, where a parent's is read again. Rows stay [1, D]: reading a state and
the rank-one update are products of the matrix unit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.store_all import config as configs
from pallas_kernels.store_all import spec as specs

# Bytes of the block of states, of which the pipeline holds two.
MOST_BYTES = 5 << 20


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
        or _too_large(spec)
        or refusals.dtypes(spec, "input", "state", "output")
    )


def _too_large(spec: specs.Spec) -> str | None:
    size = spec.nodes * spec.value_dim * spec.key_dim
    size *= jnp.dtype(spec.state_dtype).itemsize
    if size > MOST_BYTES:
        return f"takes at most {MOST_BYTES} bytes of states a head, not {size}"
    return None


def store_all(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    parent: Int[Array, "B n"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv Dk"]]:
    """Return output and state of every node (see `op.store_all`)."""
    from jax.experimental.pallas import tpu as pallas_tpu

    del config  # whole heads
    # A head's rows are together, and single rows want 32-bit elements.
    q, k, v = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (q, k, v))
    gates = (jnp.swapaxes(x, 1, 2)[:, :, None] for x in (log_decay, beta))
    gates = [x.astype(jnp.float32) for x in gates]
    nodes, group = spec.nodes, spec.group
    scalars: dict[str, Any] = dict(memory_space=pallas_tpu.SMEM)
    key = pl.BlockSpec(
        (None, None, nodes, spec.key_dim), lambda b, h: (b, h // group, 0, 0)
    )
    value = pl.BlockSpec((None, None, nodes, spec.value_dim), lambda b, h: (b, h, 0, 0))
    gate = pl.BlockSpec((None, None, 1, nodes), lambda b, h: (b, h, 0, 0), **scalars)
    tile = pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h: (b, h, 0, 0))
    output, states = pl.pallas_call(
        functools.partial(_kernel, nodes=nodes),
        grid=(spec.batch, spec.value_heads),
        in_specs=[
            pl.BlockSpec((None, 1, nodes), lambda b, h: (b, 0, 0), **scalars),
            *[key, key, value, gate, gate, tile],
        ],
        out_specs=[
            value,
            pl.BlockSpec(
                (None, nodes, None, *state.shape[2:]), lambda b, h: (b, 0, h, 0, 0)
            ),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct((spec.batch, nodes, *state.shape[1:]), state.dtype),
        ],
        interpret=device.platform() == "cpu",
        name="store_all",
    )(parent[:, None], q, k, v, *gates, state)
    return jnp.swapaxes(output, 1, 2).astype(spec.output_dtype), states


def _kernel(parent, q, k, v, log_decay, beta, state, output, states, *, nodes):
    def visit(node, last):
        number = parent[0, node]
        before = lax.cond(
            number == node - 1,
            lambda: last,
            lambda: lax.cond(
                number < 0,
                lambda: state[...].astype(jnp.float32),
                lambda: states[number].astype(jnp.float32),
            ),
        )
        pick = pl.ds(node, 1)
        key = k[pick, :]
        decay = jnp.exp(jnp.full((1, 1), log_decay[0, node], jnp.float32))
        decayed = decay * before
        pseudo_value = beta[0, node] * (v[pick, :] - _dot(key, decayed, 1, 1))
        after = decayed + _dot(pseudo_value, key, 0, 0)
        states[node] = after.astype(states.dtype)
        output[pick, :] = _dot(q[pick, :], after, 1, 1)
        return after

    lax.fori_loop(0, nodes, visit, state[...].astype(jnp.float32))


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
