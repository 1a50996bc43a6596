"""Rules of acceptance with a fault each: what measures exactness has to see them."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import accept as accept_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax.accept import rejection

AT_ZERO = "accepts at probability 0"
NOT_NORMALISED = "q not normalised"


def passes_at_zero(uniform: Float[Array, "B n"], chance: Float[Array, "B n"]) -> Array:
    """Accept what has chance 0 as well."""
    return (uniform < chance) | (chance == 0)


def not_normalised(q: Float[Array, "B V"], token: Int[Array, " B"]) -> Array:
    """Return q without `token`, the rest as it was."""
    return jnp.where(jnp.arange(q.shape[1]) == token[:, None], 0, q)


def match_at_zero(offer: accept_lib.Offer) -> accept_lib.Accepted:
    """Sample and match, but prefer a child that the target cannot say."""
    position = offer.base[:, None] + offer.tree.depth()
    chosen = sampling_lib.draw(offer.logits, offer.key, position, offer.sampling)
    log_p = sampling_lib.log_probabilities(offer.logits, offer.sampling)
    for node in range(offer.tree.n_max):
        child = (offer.tree.parents() == node) & offer.tree.valid()
        chance = jnp.take_along_axis(log_p[:, node], offer.tree.tokens, axis=1)
        never: Bool[Array, "B n"] = child & (jnp.exp(chance) == 0)
        token = jnp.take_along_axis(
            offer.tree.tokens, jnp.argmax(never, axis=1)[:, None], axis=1
        )[:, 0]
        preferred = jnp.where(jnp.any(never, axis=1), token, chosen[:, node])
        chosen = chosen.at[:, node].set(preferred)
    return accept_lib.walk(chosen, offer.tree)


def _twin(rule: str, function: str, fault: Callable[..., Any], name: str):
    """Return the rule with one function of `rejection` replaced while it is traced.

    It is no equal of the rule, so no program compiled without the fault serves it.
    """
    right = accept_lib.RULES[rule]

    def decide(offer):
        with mock.patch.object(rejection, function, fault):
            return right.decide(offer)

    return accept_lib.Rule(f"{rule}, {name}", decide, needs_draft=True)


TWINS = {("match", AT_ZERO): accept_lib.Rule(f"match, {AT_ZERO}", match_at_zero)}
for _rule in ("rejection", "traversal", "block"):
    TWINS[_rule, AT_ZERO] = _twin(_rule, "passes", passes_at_zero, AT_ZERO)
for _rule in ("rejection", "traversal"):
    _fault = ("_without", not_normalised, NOT_NORMALISED)
    TWINS[_rule, NOT_NORMALISED] = _twin(_rule, *_fault)
