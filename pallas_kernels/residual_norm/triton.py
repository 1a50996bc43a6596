"""Sum, residual and norm as one Pallas Triton kernel for NVIDIA GPUs.

A program takes a row, which stays in its registers from the first part to the norm.
XLA would take a launch for the sum and another for the norm.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import device, gpu, refusals
from pallas_kernels.residual_norm import spec as specs

# XLA adds up the products of more rows where it makes them.
MOST_TOKENS = 512
# The program holds a row, and repeats itself a part.
MOST_COLUMNS = 8192
MOST_PARTS = 32
# Columns that a warp takes: eight a thread, loads of 16 bytes.
COLUMNS, MOST_WARPS = 256, 16


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.above(spec, MOST_TOKENS, "tokens")
        or refusals.above(spec, MOST_COLUMNS, "hidden")
        or refusals.above(spec, MOST_PARTS, "parts")
        or refusals.dtypes(spec, "rows", "parts", "weight")
    )


def residual_norm(
    h: Float[Array, "T H"],
    parts: Float[Array, "T parts H"],
    weight: Float[Array, " H"],
    *,
    spec: specs.Spec,
    eps: float,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """Return h' and x; interpreted where the target is a CPU."""
    interpret = device.platform() == "cpu"
    warps = min(MOST_WARPS, pl.cdiv(gpu.power_of_two(spec.hidden), COLUMNS))
    rows = jax.ShapeDtypeStruct(h.shape, h.dtype)
    new_h, x = pl.pallas_call(
        functools.partial(_kernel, spec=spec, eps=eps),
        grid=(spec.tokens,),
        out_shape=[rows, rows],
        interpret=interpret,
        compiler_params=None if interpret else gpu.compiler_params(warps, 1),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops,
            bytes_accessed=spec.bytes_moved,
            transcendentals=spec.tokens,
        ),
        name="residual_norm",
    )(h, parts, weight)
    return new_h, x


def _kernel(h, parts, weight, new_h, x, *, spec, eps):
    token = pl.program_id(0)
    column = lax.iota(jnp.int32, gpu.power_of_two(spec.hidden))
    known = column < spec.hidden

    def part(p):
        return gpu.load(parts.at[token, p, column], known).astype(jnp.float32)

    # All parts are asked for before the first is added; so ordered, nothing is spilled.
    added = functools.reduce(jnp.add, [part(p) for p in range(spec.parts)])
    row, gain = gpu.load(h.at[token, column], known), gpu.load(weight.at[column], known)
    row = row + added.astype(h.dtype)
    gpu.store(new_h.at[token, column], row, known)
    row = row.astype(jnp.float32)  # 0 beyond the end
    scale = lax.rsqrt(jnp.sum(row * row) / spec.hidden + eps)
    gain = 1 + gain.astype(jnp.float32)
    gpu.store(x.at[token, column], row * scale * gain, known)
