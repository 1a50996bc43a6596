"""The store-all verification as a Pallas kernel for TPUs (Mosaic).

A program takes one head of one tree. The states of all nodes stay in vector memory,
where a parent's is read again; each is also sent to its slot of the ring as soon as it
is there. Rows stay [1, D]: reading a state and the rank-one update are products of the
matrix unit.
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

# Bytes of the states that a program holds.
MOST_BYTES = 10 << 20


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
    states: Float[Array, "B slots Hv Dv Dk"],
    index: Int[Array, " B"],
    parent: Int[Array, "B n"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B slots Hv Dv Dk"]]:
    """Return outputs and the ring, in the memory of `states` (see `op.store_all`)."""
    from jax.experimental.pallas import tpu as pallas_tpu

    del config  # whole heads
    # A head's rows are together, and single rows want 32-bit elements.
    q, k, v = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (q, k, v))
    gates = (jnp.swapaxes(x, 1, 2)[:, :, None] for x in (log_decay, beta))
    gates = [x.astype(jnp.float32) for x in gates]
    nodes, group, heads = spec.nodes, spec.group, spec.value_heads
    sizes = (spec.value_dim, spec.key_dim)
    scalars: dict[str, Any] = dict(memory_space=pallas_tpu.SMEM)
    key = pl.BlockSpec(
        (None, None, nodes, spec.key_dim), lambda b, h, _: (b, h // group, 0, 0)
    )
    value = pl.BlockSpec(
        (None, None, nodes, spec.value_dim), lambda b, h, _: (b, h, 0, 0)
    )
    gate = pl.BlockSpec((None, None, 1, nodes), lambda b, h, _: (b, h, 0, 0), **scalars)
    # Of the ring, only the committed state is fetched.
    committed = pl.BlockSpec(
        (None, None, None, *sizes), lambda b, h, index: (b, index[b], h, 0, 0)
    )
    output, states = pl.pallas_call(
        functools.partial(
            _kernel, slots=states.shape[1], copy=pallas_tpu.make_async_copy
        ),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(spec.batch, heads),
            in_specs=[
                pl.BlockSpec((None, 1, nodes), lambda b, h, _: (b, 0, 0), **scalars),
                *[key, key, value, gate, gate, committed],
            ],
            out_specs=[value, pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pallas_tpu.VMEM((nodes, *sizes), states.dtype),
                pallas_tpu.SemaphoreType.DMA((nodes,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={7: 1},
        interpret=device.platform() == "cpu",
        name="store_all",
    )(index, parent[:, None], q, k, v, *gates, states)
    return jnp.swapaxes(output, 1, 2).astype(spec.output_dtype), states


def _kernel(
    index, parent, q, k, v, log_decay, beta, committed, output, ring, states, sent,
    *, slots, copy,
):  # fmt: skip
    row, head, nodes = pl.program_id(0), pl.program_id(1), states.shape[0]

    def send(node):
        slot = index[row] + 1 + node
        slot = jnp.where(slot < slots, slot, slot - slots)
        return copy(states.at[node], ring.at[row, slot, head], sent.at[node])

    def visit(node, last):
        number = parent[0, node]
        before = lax.cond(
            number == node - 1,
            lambda: last,
            lambda: lax.cond(
                number < 0,
                lambda: committed[...].astype(jnp.float32),
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
        send(node).start()
        output[pick, :] = _dot(q[pick, :], after, 1, 1)
        return after

    lax.fori_loop(0, nodes, visit, committed[...].astype(jnp.float32))
    # The next program computes where these are read from.
    lax.fori_loop(0, nodes, lambda node, _: send(node).wait(), None)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
