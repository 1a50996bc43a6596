"""Tree attention: attend to a prefix cache and a tree of new nodes in one softmax."""

import typing

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import implementations
from pallas_kernels.tree_attention import config as configs
from pallas_kernels.tree_attention import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "tree_attention",
    {
        "triton": "pallas_kernels.tree_attention.triton",
        "mosaic_tpu": "pallas_kernels.tree_attention.mosaic_tpu",
        "reference": "pallas_kernels.tree_attention.reference",
    },
)


# Wrong shapes are reported here as ValueError, before a run-time type checker would.
@typing.no_type_check
def tree_attention(
    q: Float[Array, "B m heads D"],
    prefix: tuple[Float[Array, "B S kv D"], Float[Array, "B S kv D"]],
    nodes: tuple[Float[Array, "B n kv D"], Float[Array, "B n kv D"]],
    length: Int[Array, " B"],
    mask: Bool[Array, "B m n"],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> Float[Array, "B m heads D"]:
    """Attend m queries to the first `length` prefix slots and to the nodes in `mask`.

    Args:
      q: queries [B, m, heads, D]; head j uses key head j // (heads // kv).
      prefix: keys and values [B, S, kv, D] of the cache.
      nodes: keys and values [B, n, kv, D] of the tree.
      length: filled slots of each row [B].
      mask: the nodes that each query sees [B, m, n].
      impl: None or "auto" takes the best implementation that supports the call; a
        name of `IMPLEMENTATIONS` that one.
      config: block sizes; None takes the tuned ones.

    One softmax over both parts in float32, or float64 for float64 inputs. What no
    query sees may hold anything, NaN included, and what lies beyond the length is not
    read. A query that sees nothing has no defined result.

    Raises:
      ValueError: unknown `impl`, or a shape or dtype that does not fit.
      NotImplementedError: the named implementation does not support the call.
    """
    spec = specs.spec_of(q, prefix, nodes, length, mask)
    name = IMPLEMENTATIONS.choose(spec, impl).name
    run = IMPLEMENTATIONS.module(name).tree_attention
    if name == implementations.REFERENCE:
        return run(q, prefix, nodes, length, mask)
    return run(q, prefix, nodes, length, mask, spec=spec, config=config)
