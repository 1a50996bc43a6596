"""Tree verification as a Pallas kernel for TPUs (Mosaic)."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_verify import body
from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

# Bounded by the vector memory: a program holds a few n x n matrices.
MOST_NODES = 256


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    if platform != "tpu" and not (interpret and platform == "cpu"):
        return f"needs a TPU; the device is a {platform}"
    for name in ("key_dim", "value_dim"):
        if getattr(spec, name) % 8:
            return f"needs {name} to be a multiple of 8, not {getattr(spec, name)}"
    if spec.nodes > MOST_NODES:
        return f"takes at most {MOST_NODES} nodes, not {spec.nodes}"
    return specs.unsupported_dtype(spec)


def padded_nodes(nodes: int) -> int:
    """Return the next multiple of 16, the rows of a bfloat16 tile."""
    return -(-nodes // 16) * 16


def tree_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    high: Float[Array, "B Hv n"],
    low: Float[Array, "B Hv n"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and float32 pseudo-values; rows without ancestors are padding.

    `high` + `low` is the log decay from the root to each node (see treewy_jax.wy),
    `sweeps` the depth of each row's tree. Interpreted where the target is a CPU.
    """
    from jax.experimental.pallas import tpu as pallas_tpu

    platform, device_kind = specs.target_device()
    return body.call(
        q, k, v, high, low, beta, state, ancestors, sweeps,
        spec=spec,
        config=configs.choose(spec, platform, device_kind, config),
        nodes=padded_nodes(spec.nodes),
        head_major=True,
        ancestors_dtype=jnp.int32,
        # A loop bound is a scalar, and scalars live in SMEM.
        sweeps_spec=pl.BlockSpec(memory_space=pallas_tpu.SMEM),
        read_sweeps=lambda ref: ref[pl.program_id(0)],
        precision=lax.Precision.HIGHEST,
        interpret=platform == "cpu",
        compiler_params=None,
    )  # fmt: skip
