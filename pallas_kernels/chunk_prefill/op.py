"""The chunked prefill: checks a call, picks an implementation, runs it.

Every implementation has the gradients of the reference: after a kernel's forward pass
the backward pass recomputes the reference's.
"""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.chunk_prefill import config as configs
from pallas_kernels.chunk_prefill import reference
from pallas_kernels.chunk_prefill import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "chunk_prefill",
    {
        "triton": "pallas_kernels.chunk_prefill.triton",
        "mosaic_tpu": "pallas_kernels.chunk_prefill.mosaic_tpu",
        "reference": "pallas_kernels.chunk_prefill.reference",
    },
)


def chunk_prefill(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Advance the gated delta rule over T tokens; differentiable in every array.

    Value head j reads key head j // (Hv // Hk). A token with beta = 0 and
    log_decay = 0 leaves the state as it is: such rows, if finite, pad ragged batches.
    Products have bfloat16 operands for bfloat16 inputs, else float32-like ones.

    Args:
      q: queries, normalised and scaled.
      k: keys, normalised.
      v: values.
      log_decay: log of the decay before each token, base e, <= 0.
      beta: write strength of each token.
      state: state before the first token.
      impl: "triton", "mosaic_tpu" or "reference"; None or "auto" picks the best.
      config: how to cut the call; None looks it up.

    Returns:
      The outputs in v's dtype and the last state in `state`'s dtype.

    Raises:
      ValueError: where arrays, `impl` or `config` do not fit together.
      NotImplementedError: where a named implementation does not support the call.
    """
    spec = specs.make_spec(q, k, v, log_decay, beta, state)
    name = IMPLEMENTATIONS.choose(spec, impl).name
    arrays = (q, k, v, log_decay, beta, state)
    if name == implementations.REFERENCE:
        return reference.chunk_prefill(*arrays)
    return _kernel(name, spec, config, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(
    name: str, spec: specs.Spec, config: configs.Config | None, *arrays: Array
) -> tuple[Array, Array]:
    q, k, v, log_decay, beta, state = arrays
    rows = (x.astype(spec.input_dtype) for x in (q, k, v))
    gates = (x.astype(spec.accumulator_dtype) for x in (log_decay, beta))
    module = IMPLEMENTATIONS.module(name)
    return module.chunk_prefill(*rows, *gates, state, spec=spec, config=config)


def _kernel_forward(
    name: str, spec: specs.Spec, config: configs.Config | None, *arrays: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _kernel(name, spec, config, *arrays), arrays


def _kernel_backward(
    name: str,
    spec: specs.Spec,
    config: configs.Config | None,
    arrays: tuple[Array, ...],
    gradient: tuple[Array, Array],
) -> tuple[Array, ...]:
    del name, spec, config
    return jax.vjp(reference.chunk_prefill, *arrays)[1](gradient)


_kernel.defvjp(_kernel_forward, _kernel_backward)
