"""Draw the children of drafted nodes without replacement, by Gumbel top-k.

Kool et al. (2019), arXiv:1903.06059: the tokens of the k highest values of
log q + Gumbel noise are k draws from q without replacement, in this order.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import sampling as sampling_lib


def perturb(
    logits: Float[Array, "B m V"],
    tokens: Int[Array, "B n"],
    ancestors: Bool[Array, "#B m n"],
    nodes: Int[Array, " m"],
    draws: sampling_lib.Draws,
) -> tuple[Float[Array, "B m V"], Float[Array, "B m V"]]:
    """Return scores whose best are drawn in turn, and the log-probabilities log q.

    q has the settings of the request, penalties of the node's path included. Tokens
    that cannot be drawn follow all others, the better ones first.

    Args:
        logits: of `nodes`.
        tokens: of the whole tree.
        ancestors: ancestor-or-self of `nodes` in it.
    """
    if draws.seen is not None:
        seen = sampling_lib.seen_on_paths(draws.seen, tokens, ancestors)
        logits = sampling_lib.penalise(logits, seen, draws.sampling)
    log_probs = sampling_lib.log_probabilities(logits, draws.sampling)
    noise = draws.gumbel(sampling_lib.DRAFT, nodes, logits.shape[-1])
    logits = logits.astype(jnp.float32)
    below_best = logits - jnp.max(logits, axis=-1, keepdims=True)
    others = jnp.clip(below_best, -1e3) - 1e3
    possible = jnp.exp(log_probs) > 0
    return jnp.where(possible, log_probs + noise, others), log_probs
