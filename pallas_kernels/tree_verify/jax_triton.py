"""Tree verification as a Triton kernel that jax-triton calls."""

import importlib.metadata
import importlib.util
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, gpu
from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

MOST_NODES = 128
CAPABILITIES = {"NVIDIA H100": 90, "NVIDIA H200": 90, "NVIDIA B200": 100}


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None; there is no interpreter."""
    del interpret
    if platform != "gpu":
        return f"needs a GPU; the device is a {platform}"
    for name in ("key_dim", "value_dim"):
        size = getattr(spec, name)
        if size < 16 or size & (size - 1):
            return f"needs {name} to be a power of two >= 16, not {size}"
    if spec.nodes > MOST_NODES:
        return f"takes at most {MOST_NODES} nodes, not {spec.nodes}"
    return specs.unsupported_dtype(spec) or _missing()


def _missing() -> str | None:
    """Return which package is missing or too old for the other."""
    for name in ("jax_triton", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"needs the package {name.replace('_', '-')}"
    least = (3, 7) if _version("jax-triton") >= (0, 4) else (3, 6)
    if _version("triton") < least:
        return f"needs triton >= {least[0]}.{least[1]} for this jax-triton"
    return None


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(x) for x in importlib.metadata.version(package).split(".")[:2])


def tree_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and float32 pseudo-values, 0 in rows from `sizes` on.

    Those rows are not read. `ancestors` is true at [t, i] for i = t and for the
    ancestors i of t, `sweeps` the depth of each row's tree.
    """
    import jax_triton

    from pallas_kernels.tree_verify import jax_triton_kernel

    config = configs.choose(spec, *device.target(), config)
    parts = _parts(spec)
    outputs = (
        jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
        jax.ShapeDtypeStruct(v.shape, jnp.float32),
    )
    return tuple(
        jax_triton.triton_call(
            q,
            k,
            v,
            log_decay,
            beta,
            state,
            ancestors,
            sizes,
            sweeps,
            kernel=jax_triton_kernel.tree_verify_kernel,
            grid=(
                spec.value_dim // (config.block_v * config.blocks),
                spec.value_heads // config.heads,
                spec.batch,
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            NODES=spec.nodes,
            KEY_HEADS=spec.key_heads,
            VALUE_HEADS=spec.value_heads,
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            PADDED=gpu.power_of_two(spec.nodes),
            BLOCK_V=config.block_v,
            BLOCKS=config.blocks,
            HEADS=config.heads,
            KEY_PARTS=1 if spec.input_dtype == "bfloat16" else parts,
            STATE_PARTS=1 if spec.state_dtype == "bfloat16" else parts,
            PARTS=parts,
            STRONGEST=specs.STRONGEST_LOG_DECAY,
            STAGES=config.num_stages,
            **options(jax_triton.triton_call, outputs),
        )
    )


def _parts(spec: specs.Spec) -> int:
    """As pallas_kernels.dots counts them: two of float32, three if all is."""
    if spec.precision == "fast":
        return 1
    return 3 if spec.input_dtype == "float32" else 2


def options(call: Any, outputs: Any) -> dict[str, Any]:
    """Return what is named differently from one jax-triton to the next."""
    parameters = inspect.signature(call).parameters
    name = "out_type" if "out_type" in parameters else "out_shape"
    options = {name: outputs}
    capability = _capability()
    if capability is not None:
        options["compute_capability"] = capability
    return options


def _capability() -> int | None:
    """Return the compute capability of an abstract device; None asks the device."""
    if jax.sharding.get_abstract_mesh().abstract_device is None:
        return None
    kind = device.target()[1]
    return CAPABILITIES.get(kind)
