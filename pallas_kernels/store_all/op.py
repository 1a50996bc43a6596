"""The store-all op: verify a tree the way every engine does, a state a node.

    S_t = exp(g_t) S_p + u_t k_t^T,   u_t = beta_t (v_t - exp(g_t) S_p k_t),
    o_t = S_t q_t,   p the parent of t

The states of a row lie in a ring of slots. The committed one stays where it is and node
j goes to the slot 1 + j behind it, so that committing is a change of the index alone.

It is the baseline of the tree verification, whose memory it does not save. Reference:
Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.store_all import config as configs
from pallas_kernels.store_all import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "store_all",
    {
        "triton": "pallas_kernels.store_all.triton",
        "mosaic_tpu": "pallas_kernels.store_all.mosaic_tpu",
        "reference": "pallas_kernels.store_all.reference",
    },
)


def store_all(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "..."],
    states: Float[Array, "..."],
    index: Int[Array, "..."],
    parent: Int[Array, "..."],
    *,
    depth_max: int | None = None,
    impl: str | None = None,
    output_dtype: DTypeLike | None = None,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B slots Hv Dv Dk"]]:
    """Return the outputs and the ring with every node's state, in its memory.

    The state of node j is in slot (index + 1 + j) mod slots; no other slot changes.

    Args:
      q, k: [B, n, Hk, Dk], normalised, q also scaled; value head j reads
        j // (Hv // Hk).
      v: [B, n, Hv, Dv].
      log_decay, beta: [B, n, Hv]; natural log of the decay, <= 0, and write strength.
      states: the ring, [B, slots, Hv, Dv, Dk] with slots > n.
      index: int32 [B], the slot of the state before the root; 0 to slots - 1.
      parent: int32 [B, n] in preorder, -1 for the root. Padding behind the nodes has
        parent -1 too; its outputs and states mean nothing.
      depth_max: no node is deeper; None stands for n - 1. Short paths stay on chip.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      output_dtype: dtype of the output; None takes that of v.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    arrays = (q, k, v, log_decay, beta, states, index, parent)
    spec = specs.spec_of(*arrays, depth_max=depth_max, output_dtype=output_dtype)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.store_all(*arrays, spec=spec, config=config)
