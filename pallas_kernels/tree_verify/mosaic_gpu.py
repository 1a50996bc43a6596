"""Tree verification with the tensor cores of Hopper: Pallas Mosaic GPU.

A team of warpgroups takes one tile after another: the value heads of a key head in
turn, 64 rows of their state to a warpgroup. While it solves, the copy engine fills the
buffers with the next head's state and values, and one more warpgroup of the team may
prepare the next tile (mosaic_gpu_schedule).
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import spec as specs

MOST_NODES = 64  # a product of nodes with nodes is one wgmma
Config = plans.Config


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    if platform != "gpu" and not (interpret and platform == "cpu"):
        return f"needs a GPU; the device is a {platform}"
    if platform == "gpu" and not _is_hopper():
        return f"needs Hopper (H100, H200); the device is {device.target()[1]}"
    if spec.key_dim not in (16, 32) and spec.key_dim % 64:
        return f"needs key_dim to be 16, 32 or a multiple of 64, not {spec.key_dim}"
    if spec.value_dim % (8 if spec.value_dim < 64 else 64):
        return (
            "needs value_dim to be a multiple of 64, or of 8 below 64, "
            f"not {spec.value_dim}"
        )
    if spec.nodes > MOST_NODES:
        return f"takes at most {MOST_NODES} nodes, not {spec.nodes}"
    reason = specs.unsupported_dtype(spec)
    if reason is not None:
        return reason
    return too_large(plans.Plan(spec, plans.Config(plans.LINES)))


def too_large(plan: plans.Plan) -> str | None:
    """Return that a block has too little shared memory, or None."""
    needed, most = plan.shared_memory, plans.SHARED_MEMORY
    if needed <= most:
        return None
    return f"needs {needed} bytes of shared memory; there are {most}"


def _is_hopper() -> bool:
    platform, kind = device.target()
    return platform != "gpu" or bool(re.search(r"\bG?H\d+", kind))


# One trace and one lowering for all layers of a model.
@functools.partial(jax.jit, static_argnames=("spec", "config"))
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
    config: plans.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and float32 pseudo-values, 0 in rows from `sizes` on.

    `ancestors` is true at [t, i] for i = t and for the ancestors i of t, `sweeps` the
    depth of each row's tree. Interpreted where the target is a CPU.
    """
    from pallas_kernels.tree_verify import mosaic_gpu_kernel

    interpret = device.platform() == "cpu"
    plan = plans.Plan(spec, plans.choose(spec, config, interpret=interpret))
    call = launcher(
        plan, mosaic_gpu_kernel.Warpgroup, scratch(plan, interpret), interpret=interpret
    )
    arrays = (q, k, v, log_decay, beta, state, ancestors, sizes, sweeps)
    return tuple(call(*arrays))


def launcher(
    plan: plans.Plan,
    warpgroup: Any,
    buffers: Mapping[str, Any],
    *,
    interpret: bool,
    name: str = "tree_verify",
) -> Callable[..., Any]:
    """Return what runs the kernel with a class of warpgroups, on arrays and references.

    It returns the outputs and the pseudo-values.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.tree_verify import mosaic_gpu_schedule

    spec = plan.spec
    shape = (spec.batch, spec.nodes, spec.value_heads, spec.value_dim)
    body = functools.partial(
        mosaic_gpu_schedule.kernel, plan=plan, interpret=interpret, warpgroup=warpgroup
    )
    call = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(shape, spec.output_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        scratch_types=buffers,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="group",
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=spec.precision == "fast",
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )

    def run(*arrays):
        with jax.enable_x64(False):
            return call(*arrays)

    return run


def operand(shape: Sequence[int], dtype: DTypeLike, tiled: bool = True) -> Any:
    """Return a buffer in shared memory, permuted for wgmma and the copy engine."""
    from pallas_kernels.tree_verify.mosaic_gpu_steps import plgpu

    row = math.gcd(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tile = (8, row // jnp.dtype(dtype).itemsize)
    tiles = (plgpu.TilingTransform(tile),) if tiled else ()
    return plgpu.SMEM(shape, dtype, transforms=(*tiles, plgpu.SwizzleTransform(row)))


def scratch(plan: plans.Plan, interpret: bool) -> dict[str, Any]:
    """Return the buffers in shared memory and the barriers, by name.

    wgmma wants keys in tiles of 8 rows; a copy from an array whose n is no multiple of
    8 cannot make tiles. As a buffer holds one chunk of columns after the other, both
    are the same memory: it has a second name, for the copy.
    """
    from pallas_kernels.tree_verify.mosaic_gpu_steps import plgpu

    def copied(shape, dtype):
        if interpret:
            return operand(shape, dtype)
        return plgpu.RefUnion(operand(shape, dtype), operand(shape, dtype, tiled=False))

    heads, teams, solvers = plan.config.heads, plan.config.teams, plan.solvers
    parts = (plan.key_parts, plan.chunks)
    keys = (teams, plan.key_buffers, *parts, plan.key_rows, plan.chunk)
    matrix = (teams, heads, plan.parts, plan.wide + 64, plan.deep)
    state = (solvers, plan.stages, plans.LINES, plan.chunk)
    tile = (solvers, plan.wide, plans.LINES)
    buffers = {
        "rows": operand(state, plan.spec.state_dtype),
        "matrix": operand(matrix, jnp.bfloat16),
        "shared": plgpu.SMEM((teams, heads, 2, 64), jnp.float32),
        "vectors": plgpu.SMEM((plan.warpgroups, plan.vectors, 2, 64), jnp.float32),
        "keys": copied(keys, jnp.bfloat16),
    }
    if plan.copied:
        buffers["values"] = copied(tile, jnp.bfloat16)
    for name, dtype in plan.staged.items():
        halves = operand((solvers, 2, plan.wide, 32), jnp.float32, tiled=False)
        buffers[name] = halves if dtype == "float32" else copied(tile, dtype)
    for name, (of_team, count, arrivals) in plan.barriers.items():
        number = count * (teams if of_team else solvers)
        buffers[name] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)
    return buffers
