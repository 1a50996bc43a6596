"""Accept sampled chains as a block: Sun et al. (2024), arXiv:2403.10444, algorithm 2.

With p_i the target's and q_i the draft's distribution after i drafts x_1 ... x_i,

    w_0 = 1,  w_i = min(w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i), 1),
    S_i = sum_y max(w_i p_i(y) - q_i(y), 0),  h_i = S_i / (S_i + 1 - w_i),

and h_i = w_i at the last draft. Every draft is tested, u_i < h_i; the last one that
passes ends the path. The next token is drawn from max(w_i p_i - q_i, 0) / S_i there, or
from p_i after the last draft. It is what `rejection.traversal` does on a chain, without
the pass over the nodes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treewy_jax import sampling as sampling_lib
from treewy_jax.accept import path as path_lib
from treewy_jax.accept import rejection, rule


def block(offer: rule.Offer) -> path_lib.Accepted:
    """Accept a prefix of the chain; siblings of its drafts are passed over."""
    tree, index = offer.tree, jnp.arange(offer.tree.n_max)
    # Nodes that hang below the one before them, all the way from the root.
    linked = tree.valid() & (tree.parents() == index - 1)
    on_chain = jnp.cumprod(linked, axis=1) > 0
    p = jnp.exp(sampling_lib.log_probabilities(offer.logits, offer.sampling))
    follow = jnp.roll(tree.tokens, -1, axis=1)
    q = jax.vmap(rejection.drawn_from)(jnp.exp(offer.log_probs), follow)

    def advance(weight, chances):
        target, draft = chances
        return jnp.minimum(weight * target / draft, 1), weight

    chances = _at(p, follow).T, _at(q, follow).T
    _, weight = lax.scan(advance, jnp.ones(tree.batch), chances)
    weight = jnp.where(on_chain, weight.T, 1)
    left, kept = jax.vmap(rejection.residual)(p, q, weight)
    more = jnp.roll(on_chain, -1, axis=1).at[:, -1].set(False)
    left = jnp.where(more[..., None], left, p)
    uniform = offer.draws.uniform(sampling_lib.TEST, index)
    hits = rejection.passes(uniform, jnp.where(more, kept, weight)) & on_chain
    node = jnp.max(jnp.where(hits, index, 0), axis=1).astype(jnp.int32)
    return rejection.finish(offer, node, left)


def _at(values, tokens):
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
