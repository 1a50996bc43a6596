"""The commit as a Pallas Triton kernel for NVIDIA GPUs.

Bound by the traffic of the state: a program reads block_v rows of one head's state,
adds the path's outer products in registers and writes them back to where they were.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.commit import config as configs
from pallas_kernels.commit import spec as specs

# Rows held in registers at once; longer paths are read one by one.
SHORT_PATH = 8


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 8, "key_dim", "value_dim")
        or refusals.dtypes(spec, "key", "state")
    )


def commit(
    state: Float[Array, "B Hv Dv Dk"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> Float[Array, "B Hv Dv Dk"]:
    """Return the new state, which takes the memory of `state`."""
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    arrays = (state, k, pseudo_values, log_decay, path, count)
    return _launch(*arrays, spec=spec, config=config, interpret=platform == "cpu")


# One trace and one lowering for all layers of a model.
@functools.partial(jax.jit, static_argnames=("spec", "config", "interpret"))
def _launch(
    state, k, pseudo_values, log_decay, path, count, *, spec, config, interpret
):
    # Only rows on the path are read; the blocks just say where a sequence begins.
    group, block_v, nodes = spec.group, config.block_v, spec.nodes
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda i, h, b: (b, h, i, 0)
    )
    key = pl.BlockSpec(
        (None, nodes, None, spec.key_dim), lambda i, h, b: (b, 0, h // group, 0)
    )
    value = pl.BlockSpec((None, nodes, None, block_v), lambda i, h, b: (b, 0, h, i))
    gate = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    row = pl.BlockSpec((None, spec.path), lambda i, h, b: (b, 0))
    scalar = pl.BlockSpec((None,), lambda i, h, b: (b,))
    return pl.pallas_call(
        functools.partial(_kernel, longest=spec.path, nodes=nodes),
        grid=(spec.value_dim // block_v, spec.value_heads, spec.batch),
        in_specs=[tile, key, value, gate, row, scalar],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={0: 0},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.batch * spec.path * spec.value_heads,
        ),
        name="commit",
    )(state, k, pseudo_values, log_decay, path, count)


def _kernel(
    state, k, pseudo_values, log_decay, path, count, new_state, *, longest, nodes
):
    def read(position):
        node = jnp.clip(gpu.load(path.at[position]), 0, nodes - 1)
        u = gpu.load(pseudo_values.at[node, :]).astype(jnp.float32)
        key = gpu.load(k.at[node, :]).astype(jnp.float32)
        decay = jnp.exp(gpu.load(log_decay.at[node]).astype(jnp.float32))
        return decay, u[:, None], key[None, :]

    def write(tile, record):
        decay, u, key = record
        return decay * tile + u * key

    # A path longer than its own array would read what is not there.
    steps = jnp.minimum(count[...], longest)
    tile = gpu.load(state.at[...]).astype(jnp.float32)
    if longest <= SHORT_PATH:
        # All rows are asked for before the first is needed: one latency, not `steps`.
        records = [read(jnp.int32(position)) for position in range(longest)]
        for position, record in enumerate(records):
            tile = jnp.where(position < steps, write(tile, record), tile)
    else:
        tile = lax.fori_loop(0, steps, lambda i, tile: write(tile, read(i)), tile)
    gpu.store(new_state.at[...], tile)
