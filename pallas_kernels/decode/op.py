"""The decode op: one token of the gated delta rule for every row of a batch.

    S' = exp(g) S + u k^T,   u = beta (v - exp(g) S k),   o = S' q

Reference: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.decode import config as configs
from pallas_kernels.decode import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "decode",
    {
        "triton": "pallas_kernels.decode.triton",
        "mosaic_tpu": "pallas_kernels.decode.mosaic_tpu",
        "reference": "pallas_kernels.decode.reference",
    },
)


def decode(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "..."],
    state: Float[Array, "..."],
    *,
    impl: str | None = None,
    output_dtype: DTypeLike | None = None,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Return the token's output and the state after it.

    Args:
      q, k: [B, Hk, Dk], normalised, q also scaled; value head j reads j // (Hv // Hk).
      v: [B, Hv, Dv].
      log_decay, beta: [B, Hv]; natural log of the decay, <= 0, and write strength.
      state: [B, Hv, Dv, Dk]; a kernel may write the result over it.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      output_dtype: dtype of the output; None takes that of v.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    spec = specs.spec_of(q, k, v, log_decay, beta, state, output_dtype)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.decode(q, k, v, log_decay, beta, state, spec=spec, config=config)
