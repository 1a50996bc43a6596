"""Accept sampled trees: recursive rejection and traversal verification.

Both rest on one step. A node is held with weight w; p is the target's distribution
there and q the draft's, from which its children x are drawn without replacement. A
child has the weight w_x = min(w p(x) / q(x), 1). If all below it is rejected, the node
goes on with

    w' = S / (S + 1 - w),  p' = max(w p - q, 0) / S,  S = sum_y max(w p(y) - q(y), 0),
    q' = q without x, normalised,

and when no child is left, stops there with weight w' and emits a token of p'.

- Recursive rejection tests a child on the way down, u < w_x, and holds an accepted
  node with weight 1. Children without replacement: Chen et al. (2024), Sequoia,
  arXiv:2402.12374, algorithm 2; Jeon et al. (2024), arXiv:2402.14160; with independent
  children: Miao et al. (2023), SpecInfer, arXiv:2305.09781.
- Traversal keeps the weight of the whole path and tests on the way up, leaves first,
  each node when all its children are rejected: Weng et al. (2025), arXiv:2505.12398.

Neither depends on a random number before it is tested, so all weights are computed in
one pass in preorder, in float32. A child that q cannot have drawn (it has too few
tokens) counts as drawn with certainty, which keeps both exact. Memory: two arrays
[B, n, V] in float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import path as path_lib
from treewy_jax.accept import rule


def rejection(offer: rule.Offer) -> path_lib.Accepted:
    """Accept children from the root on, each with chance min(p(x) / q(x), 1)."""
    chance, _, left = weigh(offer, from_root=True)
    return finish(offer, _lowest(_hits(offer, chance), offer.tree), left)


def traversal(offer: rule.Offer) -> path_lib.Accepted:
    """Accept the first node, in postorder, that passes the test of its whole path."""
    _, weight, left = weigh(offer, from_root=False)
    hits = _hits(offer, weight).at[:, 0].set(True)
    ancestors = offer.tree.ancestors()
    below = jnp.sum(ancestors, axis=1)
    index = jnp.arange(offer.tree.n_max)
    postorder = index + below - 1 - offer.tree.depth()
    node = jnp.argmin(jnp.where(hits, postorder, offer.tree.n_max), axis=1)
    return finish(offer, node.astype(jnp.int32), left)


def weigh(
    offer: rule.Offer, *, from_root: bool
) -> tuple[Float[Array, "B n"], Float[Array, "B n"], Float[Array, "B n V"]]:
    """Return w_x of every node, then w' and p' after all its children are rejected.

    `from_root` holds every node with weight 1, however improbable its path.
    """
    tree, valid = offer.tree, offer.tree.valid()
    parents = jnp.maximum(tree.parents(), 0)
    rows = jnp.arange(tree.batch)

    def visit(carry, node):
        p, q, weight = carry
        parent, token = parents[:, node], tree.tokens[:, node]
        old = p[rows, parent], q[rows, parent], weight[rows, parent]
        chance, *new = reject(*old, token)
        real = valid[:, node]
        new = [
            jnp.where(real.reshape(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip(new, old, strict=True)
        ]
        chance = jnp.where(real, chance, 0)
        p, q, weight = (
            array.at[rows, parent].set(value)
            for array, value in zip(carry, new, strict=True)
        )
        if not from_root:
            weight = weight.at[:, node].set(chance)
        return (p, q, weight), chance

    p = jnp.exp(sampling_lib.log_probabilities(offer.logits, offer.sampling))
    carry = (p, jnp.exp(offer.log_probs), jnp.ones(tree.tokens.shape, jnp.float32))
    nodes = jnp.arange(1, tree.n_max)
    (p, _, weight), chance = lax.scan(visit, carry, nodes)
    chance = jnp.concatenate([jnp.ones((1, tree.batch)), chance]).T
    return chance, weight, p


def reject(
    p: Float[Array, "B V"],
    q: Float[Array, "B V"],
    weight: Float[Array, " B"],
    token: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array]:
    """Return w_x of a child, and p', q', w' of its parent once it is rejected."""
    drawn, at = drawn_from(q, token), token[:, None]
    mass = weight * jnp.take_along_axis(p, at, axis=1)[:, 0]
    chance = jnp.minimum(mass / jnp.take_along_axis(drawn, at, axis=1)[:, 0], 1)
    left, total = residual(p, drawn, weight)
    return chance, left, _without(q, token), total


def drawn_from(q: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Return q, or certainty of `token` where q cannot have drawn it."""
    certain = (jnp.arange(q.shape[1]) == token[:, None]).astype(q.dtype)
    possible = jnp.take_along_axis(q, token[:, None], axis=1) > 0
    return jnp.where(possible, q, certain)


def residual(
    p: Float[Array, "B V"], q: Float[Array, "B V"], weight: Float[Array, " B"]
) -> tuple[Float[Array, "B V"], Float[Array, " B"]]:
    """Return p' and w'; where nothing is left, rejection has chance 0 and p stays."""
    left = jnp.maximum(weight[:, None] * p - q, 0)
    total = jnp.sum(left, axis=1)
    some = total > 0
    left = jnp.where(some[:, None], left / jnp.where(some, total, 1)[:, None], p)
    kept = total / jnp.where(some, total + 1 - weight, 1)
    return left, jnp.where(weight >= 1, 1, kept)


def finish(
    offer: rule.Offer, node: Int[Array, " B"], left: Float[Array, "B n V"]
) -> path_lib.Accepted:
    """Accept down to `node` and draw the next token from what is left there."""
    path, count = offer.tree.path(node)
    last = jnp.take_along_axis(left, node[:, None, None], axis=1)
    noise = offer.draws.gumbel(sampling_lib.NEXT, jnp.zeros(1, int), left.shape[-1])
    token = jnp.argmax(jnp.log(last) + noise, axis=-1)[:, 0]
    return path_lib.Accepted(node, path, count, token.astype(jnp.int32))


def _without(q: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Return q without `token`, normalised; all zero where nothing is left."""
    q = jnp.where(jnp.arange(q.shape[1]) == token[:, None], 0, q)
    total = jnp.sum(q, axis=1, keepdims=True)
    return q / jnp.where(total > 0, total, 1)


def _hits(offer: rule.Offer, chance: Float[Array, "B n"]) -> Bool[Array, "B n"]:
    """Test every node; strictly, so that chance 0 never hits."""
    nodes = jnp.arange(offer.tree.n_max)
    tested = passes(offer.draws.uniform(sampling_lib.TEST, nodes), chance)
    return tested & offer.tree.valid()


def passes(uniform: Float[Array, "B n"], chance: Float[Array, "B n"]) -> Array:
    """Return u < chance, for u in [0, 1)."""
    return uniform < chance


def _lowest(hits: Bool[Array, "B n"], tree: tree_lib.DraftTree) -> Int[Array, " B"]:
    """Return where the walk from the root to the first child that hits ends."""
    parents, n = tree.parents(), tree.n_max
    siblings = parents[:, :, None] == parents[:, None]
    earlier = jnp.tri(n, k=-1, dtype=bool) & siblings & hits[:, None]
    chosen = (hits & ~jnp.any(earlier, axis=-1)).at[:, 0].set(True)
    reached = ~jnp.any(tree.ancestors() & ~chosen[:, None], axis=-1) & tree.valid()
    return jnp.argmax(jnp.where(reached, tree.depth(), -1), axis=1).astype(jnp.int32)
