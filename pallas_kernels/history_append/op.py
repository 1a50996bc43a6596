"""The append op: the records of an accepted path, behind those a history has.

    past[base + i] <- node[path[i]]   for i < count
    past_count     <- base + count

for keys, pseudo-values and log decays at once, in the memory of the history on a
device. base is past_count, or 0 in a row whose history was folded into the state. No
other slot is touched, and no node that is not on the path is used.
"""

from collections.abc import Sequence

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
Past, Nodes = specs.Past, specs.Nodes


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
    fold_above: int | None = None,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Past:
    """Return the history's four arrays with the first `count` nodes of each path.

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
      fold_above: a row of more records begins anew in slot 0, as its history is in the
        state; None: no row does. The number that history_verify was called with.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    past = Past(past_k, past_pseudo_values, past_log_decay, past_count)
    nodes = Nodes(k, pseudo_values, log_decay)
    options = dict(fold_above=fold_above, impl=impl, config=config)
    return append_layers([past], [nodes], path, count, **options)[0]


def append_layers(
    pasts: Sequence[Sequence[Array]],
    nodes: Sequence[Sequence[Array]],
    path: Int[Array, "..."],
    count: Int[Array, "..."],
    *,
    fold_above: int | None = None,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> list[Past]:
    """Append the same paths in many layers, as `history_append` does in one.

    A GPU does it in one launch for up to 32 layers, a TPU in a call a layer.

    Args:
      pasts: past_k, past_pseudo_values, past_log_decay and past_count of each layer;
        shapes and dtypes are those of the first one.
      nodes: k, pseudo_values and log_decay of each layer.
      path, count, fold_above, impl, config, Raises: see `history_append`.
    """
    pasts, nodes = [Past(*x) for x in pasts], [Nodes(*x) for x in nodes]
    spec = specs.spec_of(pasts, nodes, path, count, fold_above)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.append_layers(pasts, nodes, path, count, spec=spec, config=config)
