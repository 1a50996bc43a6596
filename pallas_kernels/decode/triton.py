"""One decoded token as a Pallas Triton kernel for NVIDIA GPUs.

Bound by the traffic of the state: a program reads block_v rows of one head's state,
updates them in registers and writes them back, with plain float32 arithmetic.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, gpu, refusals
from pallas_kernels.decode import config as configs
from pallas_kernels.decode import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 8, "key_dim", "value_dim")
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
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    group, block_v = spec.group, config.block_v
    # The first axis of the grid runs fastest: neighbours in time are so in memory.
    key = pl.BlockSpec((None, None, spec.key_dim), lambda i, h, b: (b, h // group, 0))
    value = pl.BlockSpec((None, None, block_v), lambda i, h, b: (b, h, i))
    gate = pl.BlockSpec((None, None), lambda i, h, b: (b, h))
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda i, h, b: (b, h, i, 0)
    )
    output, new_state = pl.pallas_call(
        _kernel,
        grid=(spec.value_dim // block_v, spec.value_heads, spec.batch),
        in_specs=[key, key, value, gate, gate, tile],
        out_specs=[value, tile],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={5: 1},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.batch * spec.value_heads,
        ),
        name="decode",
    )(q, k, v, log_decay, beta, state)
    return output, new_state


def _kernel(q, k, v, log_decay, beta, state, output, new_state):
    key = k[...].astype(jnp.float32)[None, :]
    query = q[...].astype(jnp.float32)[None, :]
    value = v[...].astype(jnp.float32)
    decay = jnp.exp(log_decay[...].astype(jnp.float32))
    tile = decay * state[...].astype(jnp.float32)
    read = jnp.sum(tile * key, axis=1)
    pseudo_value = beta[...].astype(jnp.float32) * (value - read)
    tile = tile + pseudo_value[:, None] * key
    new_state[...] = tile.astype(new_state.dtype)
    output[...] = jnp.sum(tile * query, axis=1).astype(output.dtype)
