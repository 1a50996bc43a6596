"""One decoded token as a Pallas kernel for TPUs (Mosaic).

A program takes a few value heads of one row of the batch. Rows stay [1, D]: reading
the state and the rank-one update are then products of the matrix unit.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, refusals
from pallas_kernels.decode import config as configs
from pallas_kernels.decode import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
        or refusals.dtypes(spec, "input", "state", "output")
    )


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
    """Return the output and the new state, which takes the memory of `state`."""
    from jax.experimental.pallas import tpu as pallas_tpu

    del config  # whole heads
    heads = 8 if spec.value_heads % 8 == 0 else spec.value_heads
    # Single rows at an index known at run time want 32-bit elements.
    q, k, v, log_decay, beta = (
        x.astype(jnp.float32) for x in (q, k, v, log_decay, beta)
    )
    keys = pl.BlockSpec((None, *q.shape[1:]), lambda b, i: (b, 0, 0))
    values = pl.BlockSpec((None, heads, spec.value_dim), lambda b, i: (b, i, 0))
    gates = pl.BlockSpec(memory_space=pallas_tpu.SMEM)
    tiles = pl.BlockSpec((None, heads, *state.shape[2:]), lambda b, i: (b, i, 0, 0))
    output, new_state = pl.pallas_call(
        functools.partial(_kernel, heads=heads, group=spec.group),
        grid=(spec.batch, spec.value_heads // heads),
        in_specs=[keys, keys, values, gates, gates, tiles],
        out_specs=[values, tiles],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={5: 1},
        interpret=device.platform() == "cpu",
        name="decode",
    )(q, k, v, log_decay, beta, state)
    return output, new_state


def _kernel(
    q, k, v, log_decay, beta, state, output, new_state, *, heads: int, group: int
):
    row, first = pl.program_id(0), pl.program_id(1) * heads
    outputs = []
    for j in range(heads):
        head = first + j
        pick = pl.ds(head // group, 1)
        key, query = k[pick, :], q[pick, :]
        decay = jnp.exp(jnp.full((1, 1), log_decay[row, head], jnp.float32))
        tile = decay * state[j].astype(jnp.float32)
        value = v[j : j + 1, :]
        pseudo_value = beta[row, head] * (value - _dot(key, tile, 1, 1))
        tile = tile + _dot(pseudo_value, key, 0, 0)
        new_state[j] = tile.astype(new_state.dtype)
        outputs.append(_dot(query, tile, 1, 1))
    output[...] = jnp.concatenate(outputs, axis=0).astype(output.dtype)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
