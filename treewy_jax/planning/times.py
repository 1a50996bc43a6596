"""The tree with most tokens a second: acceptance against the time of a step."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from treewy_jax.planning import trees


class Choice(NamedTuple):
    """A tree for a batch.

    Attributes:
        parents: its topology, preorder.
        accept_length: tokens a step and row, expected.
        milliseconds: of a step.
        tokens_per_second: of the whole batch.
    """

    parents: list[int]
    accept_length: float
    milliseconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step of one batch, as a function of nodes and depth.

    A level of depth costs the same everywhere (one more pass of the draft head);
    without it, times are straight lines between the node counts that were measured.
    Build it with `fit`.

    Attributes:
        nodes: node counts that were measured, rising.
        milliseconds: of a tree of so many nodes, drafting left out.
        level: milliseconds of drafting a level.
    """

    nodes: tuple[int, ...]
    milliseconds: tuple[float, ...]
    level: float

    @classmethod
    def fit(cls, points: Sequence[tuple[int, int, float]]) -> "StepTimes":
        """Fit measured (nodes, depth, milliseconds).

        The cost of a level is that of the least-squares fit a + b nodes + c depth with
        no negative coefficient.

        Raises:
            ValueError: no point, or one with nodes < 1, depth < 0 or no time above 0.
        """
        if not points:
            raise ValueError("points is empty; one measured time or more is allowed")
        for nodes, depth, ms in points:
            if nodes < 1 or depth < 0 or not ms > 0:
                raise ValueError(
                    f"points has nodes {nodes}, depth {depth}, {ms} ms; allowed are "
                    "nodes >= 1, depth >= 0 and a time above 0"
                )
        level = _non_negative(np.array(points, float))[2]
        groups: dict[int, list[float]] = {}
        for nodes, depth, ms in sorted(points):
            groups.setdefault(nodes, []).append(ms - level * depth)
        means = tuple(float(np.mean(group)) for group in groups.values())
        return cls(tuple(groups), means, float(level))

    def __call__(self, nodes: int, depth: int) -> float:
        """Return the milliseconds of a step; beyond what was measured, on a line."""
        return self.level * depth + _line(nodes, self.nodes, self.milliseconds)

    def covers(self, nodes: int) -> bool:
        """Return whether as few and as many nodes were measured."""
        return self.nodes[0] <= nodes <= self.nodes[-1]


def choice(
    parents: Sequence[int],
    by_depth: trees.ByDepth,
    step_ms: Callable[[int, int], float],
    batch: int,
) -> Choice:
    """Return what a given tree is expected to do.

    `step_ms(nodes, depth)` is the time of a step of this batch, such as `StepTimes`.
    """
    parents = list(parents)
    accepted = trees.accept_length(parents, by_depth)
    ms = step_ms(len(parents), trees.depth_of(parents))
    return Choice(parents, accepted, ms, 1e3 * batch * accepted / ms)


def candidates(by_depth: trees.ByDepth, nodes: int) -> list[list[int]]:
    """Return the trees that accept most, of every depth and of up to so many nodes."""
    levels = [trees.frontier(rates, nodes, d) for d, rates in by_depth.items()]
    distinct = dict.fromkeys(tuple(tree) for level in levels for tree in level)
    return [[-1], *(list(parents) for parents in distinct if len(parents) > 1)]


def fastest(
    tried: Sequence[Sequence[int]],
    by_depth: trees.ByDepth,
    step_ms: Callable[[int, int], float],
    batch: int,
) -> Choice:
    """Return the tree with most tokens a second among those tried (`candidates`).

    Ties go to the smaller tree.
    """
    found = [choice(parents, by_depth, step_ms, batch) for parents in tried]
    return max(found, key=lambda one: (one.tokens_per_second, -len(one.parents)))


def _non_negative(points) -> np.ndarray:
    """Return the least-squares a, b, c >= 0 of ms = a + b nodes + c depth.

    The solution is the best of those of all subsets of the three that come out without
    a negative coefficient.
    """
    features = np.stack([np.ones(len(points)), points[:, 0], points[:, 1]], axis=1)
    ms, best, error = points[:, 2], np.zeros(3), np.inf
    for size in (1, 2, 3):
        for kept in itertools.combinations(range(3), size):
            chosen = list(kept)
            found = np.linalg.lstsq(features[:, chosen], ms, rcond=None)[0]
            off = float(np.sum((features[:, chosen] @ found - ms) ** 2))
            if np.all(found >= 0) and off < error - 1e-12 * float(ms @ ms):
                best, error = np.zeros(3), off
                best[chosen] = found
    return best


def _line(at, xs, ys) -> float:
    """Interpolate linearly; beyond the last point go on with the last slope.

    Before the first one its time is taken, and more nodes never take less.
    """
    if len(xs) == 1 or at <= xs[-1]:
        return float(np.interp(at, xs, ys))
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return ys[-1] + slope * (at - xs[-1])
