"""Verification behind a history with the tensor cores of Hopper: Pallas Mosaic GPU.

The kernel of tree_verify, with a history joined to what keys and queries read from the
state. Rows that fold write S_0 over their state; the others write no state at all.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, refusals
from pallas_kernels.history_verify import mosaic_gpu_plan as plans
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import mosaic_gpu as tree_verify
from pallas_kernels.tree_verify import mosaic_gpu_plan as tree_plans

MOST_RECORDS = 64  # their decays are made in one tile
Config = tree_plans.Config


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        tree_verify.supports(spec, platform, interpret=interpret)
        or refusals.not_multiple(spec, 64, "key_dim")
        or refusals.above(spec, MOST_RECORDS, "horizon")
        or specs.unsupported(spec)
        or tree_verify.too_large(plans.Plan(spec, Config(tree_plans.LINES)))
    )


# One trace and one lowering for all layers of a model.
@functools.partial(jax.jit, static_argnames=("spec", "config"))
def history_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    past_k: Float[Array, "B m Hk Dk"],
    past_pseudo_values: Float[Array, "B m Hv Dv"],
    past_log_decay: Float[Array, "B m Hv"],
    past_count: Int[Array, " B"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: Config | None = None,
) -> tuple[
    Float[Array, "B n Hv Dv"],
    Float[Array, "B n Hv Dv"],
    Float[Array, "B Hv Dv Dk"],
]:
    """Return outputs, float32 pseudo-values, and the state, in the memory of `state`.

    As tree_verify behind the first `past_count` records of each row; the state of rows
    with more than `spec.fold_above` takes them in, that of others keeps its bits. Other
    records are not used.
    Interpreted where the target is a CPU.
    """
    from pallas_kernels.history_verify import mosaic_gpu_kernel

    interpret = device.platform() == "cpu"
    chosen = tree_plans.choose(spec, config, interpret=interpret, plan=plans.Plan)
    plan = plans.Plan(spec, chosen)
    call = tree_verify.launcher(
        plan,
        mosaic_gpu_kernel.Warpgroup,
        _scratch(plan, interpret),
        interpret=interpret,
        name="history_verify",
    )
    # A kernel of Mosaic GPU takes no pairs of input and output that share memory, but
    # it may write to a reference; XLA copies the state first unless it is donated.
    stored = jax.new_ref(state)
    output, pseudo_values = call(
        q, k, v, log_decay, beta, stored, past_k, past_pseudo_values,
        past_log_decay.astype(jnp.float32), past_count, ancestors, sizes, sweeps,
    )  # fmt: skip
    return output, pseudo_values, jax.freeze(stored)


def _scratch(plan: plans.Plan, interpret: bool) -> dict[str, Any]:
    """Return the buffers in shared memory and the barriers, by name."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    heads, teams = plan.config.heads, plan.config.teams
    own = (teams, plan.key_buffers)
    seen = (*own, plan.parts, plan.seen_rows, plan.records)
    folds = (*own, plan.fold_parts, plan.chunks, plan.chunk, plan.records)
    return tree_verify.scratch(plan, interpret) | {
        "seen": tree_verify.operand(seen, jnp.bfloat16),
        "folds": tree_verify.operand(folds, jnp.bfloat16),
        "since": plgpu.SMEM((teams, heads, 2, 64), jnp.float32),
    }
