"""Tree verification as a Pallas Triton kernel for NVIDIA GPUs."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_verify import body
from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

# A node pair takes registers in every program; beyond this they spill.
MOST_NODES = 128


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    if platform != "gpu" and not (interpret and platform == "cpu"):
        return f"needs a GPU; the device is a {platform}"
    for name in ("key_dim", "value_dim"):
        size = getattr(spec, name)
        if size < 16 or size & (size - 1):
            return f"needs {name} to be a power of two >= 16, not {size}"
    if spec.nodes > MOST_NODES:
        return f"takes at most {MOST_NODES} nodes, not {spec.nodes}"
    return specs.unsupported_dtype(spec)


def padded_nodes(nodes: int) -> int:
    """Return the next power of two, at least 16: Triton's tile sizes."""
    return max(16, 1 << (nodes - 1).bit_length())


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
    platform, device_kind = specs.target_device()
    interpret = platform == "cpu"
    config = configs.choose(spec, platform, device_kind, config)
    return body.call(
        q, k, v, high, low, beta, state, ancestors, sweeps,
        spec=spec,
        config=config,
        nodes=padded_nodes(spec.nodes),
        head_major=False,
        ancestors_dtype=jnp.int8,
        sweeps_spec=pl.BlockSpec((None,), lambda b, h, i: (b,)),
        read_sweeps=lambda ref: ref[...],
        precision=_precision(interpret),
        interpret=interpret,
        compiler_params=None if interpret else _compiler_params(config),
    )  # fmt: skip


def _precision(interpret: bool) -> Any:
    # Three bfloat16 products give float32-like accuracy on the tensor cores; HIGHEST
    # would be scalar arithmetic there and takes minutes to compile.
    if interpret:
        return lax.Precision.HIGHEST
    return lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def _compiler_params(config: configs.Config) -> Any:
    from jax.experimental.pallas import triton as pallas_triton

    return pallas_triton.CompilerParams(
        num_warps=config.num_warps, num_stages=config.num_stages
    )
