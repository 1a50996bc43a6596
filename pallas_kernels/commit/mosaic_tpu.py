"""The commit as a Pallas kernel for TPUs (Mosaic): one program a value head.

XLA gathers the few rows of the path and sums its decays, so that the kernel is one
product: S <- exp(g_1 + .. + g_c) S + sum_i exp(g_{i+1} + .. + g_c) u_i k_i^T.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.commit import config as configs
from pallas_kernels.commit import spec as specs


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("tpu", platform, interpret=interpret)
        or refusals.not_multiple(spec, 8, "key_dim", "value_dim")
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
    rows, keys, total = path_rows(k, pseudo_values, log_decay, path, count)
    group, block_v = spec.group, config.block_v
    tile = pl.BlockSpec(
        (None, None, block_v, spec.key_dim), lambda b, h, i: (b, h, i, 0)
    )
    value = pl.BlockSpec(
        (None, None, rows.shape[2], block_v), lambda b, h, i: (b, h, 0, i)
    )
    key = pl.BlockSpec(
        (None, None, keys.shape[2], spec.key_dim), lambda b, h, i: (b, h // group, 0, 0)
    )
    one = pl.BlockSpec((None, None, 1, 1), lambda b, h, i: (b, h, 0, 0))
    return pl.pallas_call(
        _kernel,
        grid=(spec.batch, spec.value_heads, spec.value_dim // block_v),
        in_specs=[tile, value, key, one],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={0: 0},
        interpret=platform == "cpu",
        name="commit",
    )(state, rows, keys, total)


def path_rows(k, pseudo_values, log_decay, path, count, multiple=8):
    """Return weighted pseudo-values and keys [B, H, P', D] and the total decay.

    P' is a multiple of 8, the rows of a float32 tile, or of another number; rows
    beyond the path are 0.
    """
    short = -path.shape[1] % multiple
    on_path = jnp.arange(path.shape[1] + short) < count[:, None]
    path = jnp.pad(path, ((0, 0), (0, short)))

    def take(x):
        index = path.reshape(path.shape + (1,) * (x.ndim - 2))
        rows = jnp.take_along_axis(x.astype(jnp.float32), index, axis=1)
        there = on_path.reshape(path.shape + (1,) * (x.ndim - 2))
        return jnp.swapaxes(jnp.where(there, rows, 0), 1, 2)

    decays = take(log_decay)
    total = jnp.sum(decays, axis=-1, keepdims=True)
    # Sums of what follows each node; a difference of two sums would lose digits.
    after = jnp.pad(decays[..., 1:], ((0, 0), (0, 0), (0, 1)))
    later = jnp.flip(jnp.cumsum(jnp.flip(after, -1), -1), -1)
    rows = jnp.exp(later)[..., None] * take(pseudo_values)
    return rows, take(k), jnp.exp(total)[..., None]


def _kernel(state, rows, keys, total, new_state):
    written = lax.dot_general(
        rows[...],
        keys[...],
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    tile = total[...] * state[...].astype(jnp.float32)
    new_state[...] = (tile + written).astype(new_state.dtype)
