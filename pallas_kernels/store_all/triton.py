"""The store-all verification as a Pallas Triton kernel for NVIDIA GPUs.

Bound by writing a state a node. A program takes block_v rows of one head's state
through all nodes of one tree, in preorder. Either only the last state stays in
registers and a parent that is not the previous node is read again, or the states of
the whole path do and nothing is read twice. A program owns its rows in all slots of the
ring, of which it never writes the committed one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.store_all import config as configs
from pallas_kernels.store_all import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 8, "key_dim", "value_dim")
        or refusals.dtypes(spec, "input", "state", "output")
    )


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
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    arrays = (q, k, v, log_decay, beta, states, index, parent)
    return _launch(*arrays, spec=spec, config=config, interpret=platform == "cpu")


# One trace and one lowering for all layers of a model.
@functools.partial(jax.jit, static_argnames=("spec", "config", "interpret"))
def _launch(
    q, k, v, log_decay, beta, states, index, parent, *, spec, config, interpret
):
    nodes, group, block_v = spec.nodes, spec.group, config.block_v
    # The first axis of the grid runs fastest: neighbours in time are so in memory.
    key = pl.BlockSpec(
        (None, nodes, None, spec.key_dim), lambda i, h, b: (b, 0, h // group, 0)
    )
    value = pl.BlockSpec((None, nodes, None, block_v), lambda i, h, b: (b, 0, h, i))
    gate = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    ring = pl.BlockSpec(
        (None, states.shape[1], None, block_v, spec.key_dim),
        lambda i, h, b: (b, 0, h, i, 0),
    )
    return pl.pallas_call(
        functools.partial(
            _resident_kernel if config.resident else _reload_kernel,
            nodes=nodes,
            depth=spec.depth,
            barrier=not interpret,
        ),
        grid=(spec.value_dim // block_v, spec.value_heads, spec.batch),
        in_specs=[
            pl.BlockSpec((None, nodes), lambda i, h, b: (b, 0)),
            pl.BlockSpec((None,), lambda i, h, b: (b,)),
            *[key, key, value, gate, gate, ring],
        ],
        out_specs=[value, ring],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={7: 1},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.batch * nodes * spec.value_heads,
        ),
        name="store_all",
    )(parent, index, q, k, v, log_decay, beta, states)


def _slot_of(index, slots: int) -> Callable[[Any], Array]:
    """Return the function from a node to its slot; -1 is the committed state."""
    # A number that is no slot would reach other rows' memory.
    committed = jnp.clip(index[...], 0, slots - 1)

    def slot(node):
        behind = committed + 1 + node
        return jnp.where(behind < slots, behind, behind - slots)

    return slot


def _reload_kernel(
    parent, index, q, k, v, log_decay, beta, states, output, new_states,
    *, nodes, depth, barrier,
):  # fmt: skip
    del depth  # any
    slot = _slot_of(index, states.shape[0])
    rows = (q, k, v, log_decay, beta)

    def read_again(number):
        if barrier:
            # The rows may have been written by other threads of this program.
            from jax.experimental.pallas import triton as pallas_triton

            pallas_triton.debug_barrier()
        return new_states[slot(number)].astype(jnp.float32)

    def visit(node, last):
        number = parent[node]
        before = lax.cond(number == node - 1, lambda: last, lambda: read_again(number))
        return _advance(*rows, output, new_states, slot, node, before)

    lax.fori_loop(0, nodes, visit, states[slot(-1)].astype(jnp.float32))


def _resident_kernel(
    parent, index, q, k, v, log_decay, beta, states, output, new_states,
    *, nodes, depth, barrier,
):  # fmt: skip
    del barrier  # nothing is read again
    slot = _slot_of(index, states.shape[0])
    advance = functools.partial(
        _advance, q, k, v, log_decay, beta, output, new_states, slot
    )

    def parent_of(node) -> Array:
        """Return a node's parent; -2 behind the last node."""
        inside = jnp.minimum(node, nodes - 1)
        return jnp.where(node < nodes, parent[inside], -2)

    def visit(level, node, before):
        """Visit a node and all below it; return the next node and its parent."""
        after = advance(node, before)
        following = (node + 1, parent_of(node + 1))
        if level == depth:
            return following
        return lax.while_loop(
            lambda carry: carry[1] == node,
            lambda carry: visit(level + 1, carry[0], after),
            following,
        )

    # Padding has no parent either: each of its rows starts from the state again.
    lax.while_loop(
        lambda carry: carry[0] < nodes,
        lambda carry: visit(0, carry[0], states[slot(-1)].astype(jnp.float32)),
        (jnp.int32(0), jnp.int32(-1)),
    )


def _advance(
    q, k, v, log_decay, beta, output, states, slot, node,
    before: Float[Array, "bv Dk"],
) -> Float[Array, "bv Dk"]:  # fmt: skip
    """Write output and state of a node, given its parent's state; return its state."""
    key = k[node].astype(jnp.float32)[None, :]
    query = q[node].astype(jnp.float32)[None, :]
    decay = jnp.exp(log_decay[node].astype(jnp.float32))
    # Both sums over the old state, S' q = e^g S q + u (k q): neither waits for the
    # other, and few programs fit on a multiprocessor to fill such waits.
    read = decay * jnp.sum(before * key, axis=1)
    carried = decay * jnp.sum(before * query, axis=1)
    strength = beta[node].astype(jnp.float32)
    pseudo_value = strength * (v[node].astype(jnp.float32) - read)
    after = decay * before + pseudo_value[:, None] * key
    states[slot(node)] = after.astype(states.dtype)
    out = carried + pseudo_value * jnp.sum(key * query)
    output[node] = out.astype(output.dtype)
    return after
