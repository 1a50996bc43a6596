"""Rules of acceptance, by name: which path of the verified tree joins the text.

| name        | drafts that it takes            | module      |
|-------------|---------------------------------|-------------|
| `match`     | any tree (the default)          | `match`     |
| `greedy`    | any tree, at temperature 0      | `match`     |
| `rejection` | sampled trees, from the root    | `rejection` |
| `traversal` | sampled trees, from the leaves  | `rejection` |
| `block`     | sampled chains                  | `block`     |

`path.Accepted` is what every rule returns.

All are lossless: the text has the target's distribution at the request's settings. For
a tree fixed by its context none accepts more than `match`; a tree that is sampled from
a distribution that the drafter hands out may be accepted further by the last three.
"""

from treewy_jax.accept import block, rejection
from treewy_jax.accept.match import greedy as greedy
from treewy_jax.accept.match import sample_and_match as sample_and_match
from treewy_jax.accept.match import walk as walk
from treewy_jax.accept.path import Accepted as Accepted
from treewy_jax.accept.path import nothing as nothing
from treewy_jax.accept.rule import Offer as Offer
from treewy_jax.accept.rule import Rule as Rule


def _match(offer: Offer) -> Accepted:
    return sample_and_match(
        offer.logits, offer.tree, offer.key, offer.base, offer.sampling
    )


RULES = {
    rule.name: rule
    for rule in (
        Rule("match", _match),
        Rule(
            "greedy",
            lambda offer: greedy(offer.logits, offer.tree),
            greedy_only=True,
        ),
        Rule("rejection", rejection.rejection, needs_draft=True),
        Rule("block", block.block, needs_draft=True, chains_only=True),
        Rule("traversal", rejection.traversal, needs_draft=True),
    )
}


def by_name(name: str | Rule) -> Rule:
    """Return the rule of this name; a rule itself passes through.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(name, Rule):
        return name
    if name not in RULES:
        raise ValueError(f"accept {name!r}: allowed are {', '.join(RULES)}")
    return RULES[name]
