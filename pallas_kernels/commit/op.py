"""The commit op: write an accepted path into the state it was verified from.

    S <- exp(g_i) S + u_i k_i^T   for i along the path, root first

with the pseudo-values u and the log decays g that `verify` left (TreeWY's
reconstruction of the accepted state). The state is overwritten in place on a device.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.commit import config as configs
from pallas_kernels.commit import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "commit",
    {
        "triton": "pallas_kernels.commit.triton",
        "mosaic_tpu": "pallas_kernels.commit.mosaic_tpu",
        "reference": "pallas_kernels.commit.reference",
    },
)


def commit(
    state: Float[Array, "..."],
    k: Float[Array, "..."],
    pseudo_values: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Float[Array, "B Hv Dv Dk"]:
    """Return the state after the first `count` nodes of each path, in its own dtype.

    A row with count 0 keeps its state bit for bit. Rows that are on no path are not
    read.

    Args:
      state: [B, Hv, Dv, Dk]; a kernel writes the result over it.
      k: [B, n, Hk, Dk], the nodes' keys.
      pseudo_values: [B, n, Hv, Dv].
      log_decay: [B, n, Hv], natural log, <= 0.
      path: int32 [B, P], node numbers from the root down.
      count: int32 [B], nodes of the path that count, 0 to P.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    spec = specs.spec_of(state, k, pseudo_values, log_decay, path, count)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.commit(
        state, k, pseudo_values, log_decay, path, count, spec=spec, config=config
    )
