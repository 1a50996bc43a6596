"""The attention front: rows of the projections to what attention takes.

    q <- rope(rms(q)),   k <- rope(rms(k)),   rms(x) = x / sqrt(mean x^2 + eps) (1 + w)
    rope turns pairs (i, i + R/2) of the first R channels by position theta^(-2i / R)

Norms are computed in float32 and rounded to the dtype of the rows, as are cos and sin;
so are the products and sums of the rotation.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.attention_front import config as configs
from pallas_kernels.attention_front import reference
from pallas_kernels.attention_front import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "attention_front",
    {
        "triton": "pallas_kernels.attention_front.triton",
        "mosaic_tpu": "pallas_kernels.attention_front.mosaic_tpu",
        "reference": "pallas_kernels.attention_front.reference",
    },
)


def attention_front(
    q_and_gate: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    q_weight: Float[Array, "..."],
    k_weight: Float[Array, "..."],
    positions: Int[Array, "..."],
    *,
    heads: int,
    kv_heads: int,
    rotary_dim: int,
    theta: float,
    eps: float,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B T heads D"],
    Float[Array, "B T kv D"],
    Float[Array, "B T kv D"],
]:
    """Return q and k, normalised and rotated, and v as it is, all by head.

    Its gradient is that of the reference, whatever implementation runs.

    Args:
      q_and_gate: [B, T, heads 2 D]; of each head q comes first. Gates are not read.
      k, v: [B, T, kv D], of the dtype of `q_and_gate`.
      q_weight, k_weight: [D], the gains of the norms less one.
      positions: int32 [B, T], below 2^24: angles are float32.
      heads, kv_heads: query heads and key heads; D follows from the weights.
      rotary_dim: R, how many channels of a head are rotated, the first ones.
      theta, eps: see above.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    arrays = (q_and_gate, k, v, q_weight, k_weight, positions)
    spec = specs.spec_of(
        *arrays,
        heads=heads,
        kv_heads=kv_heads,
        rotary_dim=rotary_dim,
        theta=theta,
        eps=eps,
    )
    name = IMPLEMENTATIONS.choose(spec, impl).name
    if name == implementations.REFERENCE:
        return reference.attention_front(*arrays, spec=spec)
    return _kernel(name, spec, config, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(name, spec, config, *arrays):
    run = IMPLEMENTATIONS.module(name).attention_front
    return run(*arrays, spec=spec, config=config)


def _forward(name, spec, config, *arrays):
    return _kernel(name, spec, config, *arrays), arrays


def _backward(name, spec, config, arrays, cotangents):
    *floats, positions = arrays

    def outputs(*floats):
        return reference.attention_front(*floats, positions, spec=spec)

    _, pull = jax.vjp(outputs, *floats)
    return (*pull(cotangents), None)


_kernel.defvjp(_forward, _backward)
