"""What decode.py found out, and the figures that follow from it."""

import collections
import dataclasses
from typing import NamedTuple

from scripts.decoding import request
from treewy_jax import generate as generation_lib
from treewy_jax import memory


class Difference(NamedTuple):
    """The first place where a row differs from plain decoding.

    Attributes:
        row: number of the prompt, from 0.
        index: place among the new tokens.
        token: what was written with drafts, None where the text has ended.
        plain_token: what was written without.
        logit_gap: the target's best logit there less its second best.
    """

    row: int
    index: int
    token: int | None
    plain_token: int | None
    logit_gap: float


@dataclasses.dataclass(frozen=True)
class Plain:
    """Decoding without drafts, and where the drafted text differs from it."""

    generation: generation_lib.Generation
    seconds: float
    differences: list[Difference]


@dataclasses.dataclass(frozen=True)
class Result:
    """What was written, the seconds it took with compilation, and the comparison."""

    generation: generation_lib.Generation
    seconds: float
    plain: Plain | None = None

    @property
    def tokens(self) -> int:
        """Tokens written, all rows together."""
        return sum(map(len, self.generation.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Tokens written in a second; compilation and prompts count, too."""
        return self.tokens / self.seconds


def histogram(
    generation: generation_lib.Generation, asked: request.Request
) -> dict[int, int]:
    """Return how many steps had each accept length; steps cut short are left out."""
    counts = collections.Counter(generation.whole_accept_lengths)
    return {length: counts[length] for length in range(1, asked.tree.depth_max + 2)}


def state_bytes(
    generation: generation_lib.Generation, asked: request.Request, commit: str
) -> dict[str, dict[str, int]]:
    """Return the bytes of each part of the decode state, scheme by scheme.

    Those of the scheme in use are as allocated; another one's differ in the states and
    the records, which are computed.
    """
    shape = memory.Shape.from_config(asked.model.config)
    used, parts = commit.replace("_", "-"), generation.state_bytes
    schemes = {used: parts}
    for scheme in memory.SCHEMES:
        if scheme == used:
            continue
        computed = memory.per_sequence(
            shape,
            scheme,
            asked.tree,
            asked.state_dtype,
            activation_dtype=asked.dtype,
            horizon=max(asked.horizon, asked.tree.depth_max + 1),
            record_dtype=asked.record_dtype,
        )
        differing = ("recurrent", "records")
        sizes = {name: len(asked.prompts) * computed[name] for name in differing}
        schemes[scheme] = parts | sizes
    return schemes
