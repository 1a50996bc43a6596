"""What a rule of acceptance is given, and what it asks of the draft."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.accept import path as path_lib


class Offer(NamedTuple):
    """A verified tree, to be decided on.

    Attributes:
        logits: the target's at every node, penalties applied.
        tree: the drafts.
        log_probs: the drafter's normalised log-probabilities at every node that has
            children; these were drawn from them one after the other, in the order of
            their index, without replacement. None for a tree that was not sampled.
        key: randomness of the request, or a key for each row.
        base: position of the root.
        sampling: the settings, static.
    """

    logits: Float[Array, "B n V"]
    tree: tree_lib.DraftTree
    log_probs: Float[Array, "B n V"] | None
    key: PRNGKeyArray | Key[Array, " B"]
    base: Int[Array, " B"]
    sampling: sampling_lib.Sampling

    @property
    def draws(self) -> sampling_lib.Draws:
        """Return where the rule's own draws come from."""
        return sampling_lib.Draws.at(self.key, self.base, self.sampling)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of acceptance: `decide` runs inside the compiled step.

    Attributes:
        needs_draft: it needs the drafter's log-probabilities.
        chains_only: it takes trees without siblings only.
        greedy_only: it takes temperature 0 only.
    """

    name: str
    decide: Callable[[Offer], path_lib.Accepted]
    needs_draft: bool = False
    chains_only: bool = False
    greedy_only: bool = False

    def check(self, drafter: Any, sampling: sampling_lib.Sampling) -> None:
        """Raise ValueError where the rule cannot take this drafter or these settings.

        The root alone, which is plain decoding, goes with every rule.
        """
        if self.greedy_only and not sampling.greedy:
            raise ValueError(
                f"accept {self.name!r}: temperature is {sampling.temperature}; only 0 "
                "is allowed, or another rule"
            )
        if drafter.depth_max == 0:
            return
        if self.needs_draft and not getattr(drafter, "sampled", False):
            raise ValueError(
                f"accept {self.name!r}: {type(drafter).__name__} hands out no draft "
                "distribution; allowed are match, greedy, or a sampled drafter such as "
                "MTPDrafter.from_tree(tree, sampled=True)"
            )
        if self.chains_only and drafter.n_max > drafter.depth_max + 1:
            raise ValueError(
                f"accept {self.name!r}: the tree has {drafter.n_max} nodes and depth "
                f"{drafter.depth_max}; only chains are allowed, such as tree 1,1,1"
            )
