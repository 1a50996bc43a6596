"""The expert layer of a mixture of experts: which implementation runs a call."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "grouped_matmul",
    {
        "triton": "pallas_kernels.grouped_matmul.triton",
        "mosaic_tpu": "pallas_kernels.grouped_matmul.mosaic_tpu",
        "reference": "pallas_kernels.grouped_matmul.reference",
    },
)


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its K experts and add them up by weight.

    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t), e = experts[t, k].
    Its gradient is that of the reference, whatever implementation runs.

    Args:
      x: one row a token.
      gate_up: gate in the first half of the columns, up in the second.
      down: the second product of each expert.
      experts: 0 <= e; a token may name an expert twice. E or more names none: the
        choice adds nothing and no row is computed for it.
      weights: of each choice.
      impl: name of an implementation; None or "auto" takes the best that runs here.
      config: how a kernel is cut; None takes the tuned or guessed one.

    Raises ValueError where shapes do not belong together or `impl` is unknown,
    NotImplementedError where the implementation named does not support the call.
    """
    spec = specs.spec_of(x, gate_up, down, experts, weights)
    name = IMPLEMENTATIONS.choose(spec, impl).name
    if name == implementations.REFERENCE:
        return reference.swiglu_experts(x, gate_up, down, experts, weights)
    return _kernel(name, spec, config, x, gate_up, down, experts, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(name, spec, config, *arrays):
    run = IMPLEMENTATIONS.module(name).swiglu_experts
    return run(*arrays, spec=spec, config=config)


def _forward(name, spec, config, *arrays):
    return _kernel(name, spec, config, *arrays), arrays


def _backward(name, spec, config, arrays, cotangent):
    x, gate_up, down, experts, weights = arrays

    def output(x, gate_up, down, weights):
        return reference.swiglu_experts(x, gate_up, down, experts, weights)

    _, pull = jax.vjp(output, x, gate_up, down, weights)
    *matrices, by_weight = pull(cotangent)
    return (*matrices, None, by_weight)


_kernel.defvjp(_forward, _backward)
