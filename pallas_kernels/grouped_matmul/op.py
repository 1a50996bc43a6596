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

# Of so many pairs callers get the terms of the sum; those of more are added up here.
MOST_PAIRS = 512


def swiglu_experts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Float[Array, "T H"]:
    """Run every row through its k experts and add them up by weight.

    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t), e = experts[t, k].
    With a shared expert, all rows go through that as well.
    Its gradient is that of the reference, whatever implementation runs.

    Args:
      x: one row a token.
      gate_up: gate in the first half of the columns, up in the second.
      down: the second product of each expert.
      experts: 0 <= e; a token may name an expert twice. E or more names none: the
        choice adds nothing and no row is computed for it.
      weights: of each choice; of the shared expert in one more column.
      shared: gate_up and down of one more expert, narrower or wider than the others,
        that all tokens go to.
      impl: name of an implementation; None or "auto" takes the best that runs here.
      config: how a kernel is cut; None takes the tuned or guessed one.

    Raises ValueError where shapes do not belong together or `impl` is unknown,
    NotImplementedError where the implementation named does not support the call.
    """
    arrays = (x, gate_up, down, experts, weights, shared)
    return _run("swiglu_experts", impl, config, arrays)


def swiglu_parts(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E H I2"],
    down: Float[Array, "E I H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T K"],
    shared: tuple[Float[Array, "H S2"], Float[Array, "S H"]] | None = None,
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Float[Array, "T parts H"]:
    """Return the terms of the sum in `swiglu_experts`, for a kernel that adds them up.

    A term a choice, and the shared expert's behind them; of more than `MOST_PAIRS`
    pairs the sum alone, one part. Each is rounded to the dtype of x.

    Args:
      experts: 0 <= e < E; the term of another one is anything.

    The other arguments, the gradient and what is raised are those of `swiglu_experts`.
    """
    arrays = (x, gate_up, down, experts, weights, shared)
    if experts.size > MOST_PAIRS:
        return _run("swiglu_experts", impl, config, arrays)[:, None]
    return _run("swiglu_parts", impl, config, arrays)


def _run(function, impl, config, arrays):
    spec = specs.spec_of(*arrays)
    name = IMPLEMENTATIONS.choose(spec, impl).name
    if name == implementations.REFERENCE:
        return getattr(reference, function)(*arrays)
    return _kernel(function, name, spec, config, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(function, name, spec, config, *arrays):
    run = getattr(IMPLEMENTATIONS.module(name), function)
    return run(*arrays, spec=spec, config=config)


def _forward(function, name, spec, config, *arrays):
    return _kernel(function, name, spec, config, *arrays), arrays


def _backward(function, name, spec, config, arrays, cotangent):
    x, gate_up, down, experts, weights, shared = arrays

    def output(x, gate_up, down, weights, shared):
        run = getattr(reference, function)
        return run(x, gate_up, down, experts, weights, shared)

    _, pull = jax.vjp(output, x, gate_up, down, weights, shared)
    *matrices, by_weight, by_shared = pull(cotangent)
    return (*matrices, None, by_weight, by_shared)


_kernel.defvjp(_forward, _backward)
