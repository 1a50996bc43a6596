"""The append op: the records of an accepted path, behind those a history has.

    past[past_count + i] <- node[path[i]]   for i < count

for keys, pseudo-values and log decays at once, in the memory of the history on a
device. No other slot is touched, and no node that is not on the path is used.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.history_append import config as configs
from pallas_kernels.history_append import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "history_append",
    {
        "triton": "pallas_kernels.history_append.triton",
        "mosaic_tpu": "pallas_kernels.history_append.mosaic_tpu",
        "reference": "pallas_kernels.history_append.reference",
    },
)


def history_append(
    past_k: Float[Array, "..."],
    past_pseudo_values: Float[Array, "..."],
    past_log_decay: Float[Array, "..."],
    past_count: Int[Array, "..."],
    k: Float[Array, "..."],
    pseudo_values: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B m Hk Dk"], Float[Array, "B m Hv Dv"], Float[Array, "B m Hv"]
]:
    """Return the history's three arrays with the first `count` nodes of each path.

    A kernel writes them over the arguments. Slots that get no record keep their bits;
    records for which a row has no room are dropped. jax.vmap over layers is one launch.

    Args:
      past_k: [B, m, Hk, Dk], keys of the records of each row, in any float dtype.
      past_pseudo_values: [B, m, Hv, Dv].
      past_log_decay: [B, m, Hv].
      past_count: int32 [B], records that a row has.
      k: [B, n, Hk, Dk], the nodes' keys, cast to the history's dtype.
      pseudo_values: [B, n, Hv, Dv].
      log_decay: [B, n, Hv].
      path: int32 [B, P], node numbers from the root down; clipped to 0 to n - 1.
      count: int32 [B], nodes of the path that count, 0 to P.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    past = (past_k, past_pseudo_values, past_log_decay, past_count)
    tree = (k, pseudo_values, log_decay, path, count)
    spec = specs.spec_of(*past, *tree)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.history_append(*past, *tree, spec=spec, config=config)
