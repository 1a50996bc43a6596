"""The static tree that accepts most, by dynamic programming over measured rates.

The child of rank r (r = 0 is the drafter's best token) of an accepted node at depth
d - 1 is accepted with probability p[d, c, r]. As in Sequoia (arXiv:2402.12374) this
depends on the place in the tree alone: the depth, the rank and, here, a context c, the
sum of the ranks on the path to the parent, capped. c = 0 is the path of best tokens.
Below a runner-up a drafter guesses worse, which rates without context (C = 1) miss.

At most one child of a node is accepted, so a tree emits on average

    1 + sum over drafts of  prod of p along the path  (`expected`)

and the best one comes from two functions of "at most m nodes":

    F[d, c, m] = G[d, c, 0, m]                        below an accepted node at depth d
    G[d, c, r, m] = max(0, max over s of              its children of rank r and more
        p[d + 1, c, r] (1 + F[d + 1, c + r, s - 1]) + G[d, c, r + 1, m - s])

Where the roots are matters as well: a deep tree steps over easy text, and its steps
begin more often where text is hard. So rates are measured at the roots of such steps,
for each depth of trees anew (`ByDepth`), and for trees of some sizes (`Rates.at`): a
chain fails on more of the hard text than a tree as deep, whose next step begins there.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured acceptance: how often a child is accepted once its parent is.

    Attributes:
        table: p[d - 1, c, r] for depths d = 1..D, contexts c < C (the last one stands
            for sums of C - 1 and more) and ranks r < R.
        sized: (nodes, rates) measured at the roots of trees of so many nodes.

    Raises:
        ValueError: another shape, or numbers that are no probabilities.
    """

    table: Float[np.ndarray, "..."]  # the shape is checked here, for files
    sized: tuple[tuple[int, "Rates"], ...] = ()

    def __post_init__(self):
        table = np.asarray(self.table, np.float64)
        if table.ndim != 3 or 0 in table.shape:
            raise ValueError(
                f"rates have shape {list(table.shape)}; [depths, contexts, ranks] with "
                "at least one of each is allowed"
            )
        sums = table.sum(axis=-1)
        if not (np.all(table >= 0) and np.all(sums <= 1 + 1e-6)):
            raise ValueError(
                f"rates lie in [{table.min():.4g}, {table.max():.4g}], those of the "
                f"children of a node add up to {sums.max():.4g} at most; allowed are "
                "probabilities whose sum is at most 1"
            )
        object.__setattr__(self, "table", table)

    @classmethod
    def from_ranks(
        cls,
        ranks: Sequence[Int[np.ndarray, "_ D"]],
        *,
        width: int,
        contexts: int = 1,
    ) -> "Rates":
        """Count rates from the ranks that a text's own tokens had.

        `ranks[i][t, d - 1]` is the rank of the token at t + d among what is drafted
        below the right tokens up to there; -1 where the text has ended.
        """
        counts = [count(found, width=width, contexts=contexts) for found in ranks]
        reached = np.sum([one[0] for one in counts], axis=0)
        hits = np.sum([one[1] for one in counts], axis=0)
        return cls(hits / np.maximum(reached, 1)[..., None])

    @property
    def depth(self) -> int:
        """Deepest level with rates."""
        return self.table.shape[0]

    @property
    def width(self) -> int:
        """Children of a node with rates."""
        return self.table.shape[2]

    def at(self, nodes: int) -> "Rates":
        """Return the rates for trees of about so many nodes, by ratio; else these."""
        if not self.sized:
            return self
        return min(self.sized, key=lambda one: abs(np.log(one[0] / nodes)))[1]

    def follow(self, context: int, rank: int) -> int:
        """Return the context below the child of this rank."""
        return min(context + rank, self.table.shape[1] - 1)


# Rates for trees of depth 1, 2, ..., by that depth.
ByDepth = Mapping[int, Rates]


def count(
    ranks: Int[np.ndarray, "t D"], *, width: int, contexts: int = 1
) -> tuple[Int[np.ndarray, "D C"], Int[np.ndarray, "D C R"]]:
    """Return how often a parent was reached, and each of its children accepted.

    A parent is reached while all ranks above it are below `width`.
    """
    depths = ranks.shape[1]
    reached = np.zeros((depths, contexts), np.int64)
    hits = np.zeros((depths, contexts, width), np.int64)
    alive = np.ones(len(ranks), bool)
    context = np.zeros(len(ranks), np.int64)
    for depth in range(depths):
        rank = ranks[:, depth]
        alive = alive & (rank >= 0)
        np.add.at(reached[depth], context[alive], 1)
        alive = alive & (rank < width)
        np.add.at(hits[depth], (context[alive], rank[alive]), 1)
        context = np.where(alive, np.minimum(context + rank, contexts - 1), 0)
    return reached, hits


def reach(parents: Sequence[int], rates: Rates) -> list[float]:
    """Return the probability that each node of a tree is accepted; the root's is 1.

    Raises:
        ValueError: no tree, or one deeper or wider than the rates.
    """
    depth, context, ranks, found = [0], [0], [0] * len(parents), [1.0]
    for node, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < node:
            raise ValueError(f"parents[{node}] is {parent}; an earlier node is allowed")
        level, rank = depth[parent], ranks[parent]
        if level >= rates.depth or rank >= rates.width:
            raise ValueError(
                f"tree of depth {level + 1} with {rank + 1} children of a node: rates "
                f"are known down to depth {rates.depth} and for {rates.width} children"
            )
        ranks[parent] += 1
        found.append(found[parent] * rates.table[level, context[parent], rank])
        depth.append(level + 1)
        context.append(rates.follow(context[parent], rank))
    return [float(p) for p in found]


def expected(parents: Sequence[int], rates: Rates) -> float:
    """Return the tokens that a step emits on average: accepted drafts + 1.

    >>> half = Rates(np.full((3, 1, 1), 0.5))
    >>> expected([-1, 0, 1, 2], half)
    1.875
    """
    return sum(reach(parents, rates))


def accept_length(parents: Sequence[int], by_depth: ByDepth) -> float:
    """Return `expected` with the rates for trees as deep, and about as large.

    Raises ValueError where there are none.
    """
    depth = depth_of(parents)
    if depth == 0:
        return 1.0
    if depth not in by_depth:
        raise ValueError(
            f"tree of depth {depth}: there are rates for depths {list(by_depth)}"
        )
    return expected(parents, by_depth[depth].at(len(parents)))


def depth_of(parents: Sequence[int]) -> int:
    """Return the edges between the root and the deepest node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def optimal(rates: Rates, nodes: int, depth: int | None = None) -> list[int]:
    """Return the parents of the tree that accepts most with at most `nodes` nodes.

    The root counts; `depth` limits the edges below it (default: as far as the rates
    reach). Ties go to the smaller tree.

    Raises:
        ValueError: nodes < 1, or a depth without rates.
    """
    return frontier(rates, nodes, depth)[-1]


def frontier(rates: Rates, nodes: int, depth: int | None = None) -> list[list[int]]:
    """Return the best trees with at most 1, 2, ..., `nodes` nodes."""
    depth = rates.depth if depth is None else depth
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}; 1 or more is allowed, the root counts")
    if not 0 <= depth <= rates.depth:
        raise ValueError(f"depth is {depth}; allowed are 0 to {rates.depth}")
    taken = _solve(rates, nodes - 1, depth)
    return [_grow(rates, taken, drafts) for drafts in range(nodes)]


def _solve(rates, drafts, depth) -> Int[np.ndarray, "D C R m"]:
    """Return how many nodes the subtree of each child takes of m; 0: no such child."""
    _, contexts, width = rates.table.shape
    taken = np.zeros((depth, contexts, width + 1, drafts + 1), np.int64)
    below = np.zeros((contexts, drafts + 1))  # F of the level below
    for level in reversed(range(depth)):
        here = np.zeros_like(below)
        for context in range(contexts):
            rest = np.zeros(drafts + 1)  # G of the ranks behind
            for rank in reversed(range(width)):
                rate = rates.table[level, context, rank]
                gains = rate * (1 + below[rates.follow(context, rank)])
                rest, taken[level, context, rank] = _combine(gains, rest)
            here[context] = rest
        below = here
    return taken


def _combine(gains, rest):
    """Split m nodes between a child, `gains[s - 1]` for s of them, and those behind."""
    best, taken = np.zeros_like(rest), np.zeros(len(rest), np.int64)
    for m in range(1, len(rest)):
        totals = gains[:m] + rest[m - 1 :: -1]
        most = int(np.argmax(totals))  # the first: the smallest of equal subtrees
        if totals[most] > 0:
            best[m], taken[m] = totals[most], most + 1
    return best, taken


def _grow(rates, taken, drafts) -> list[int]:
    """Build the tree that `_solve` chose for so many drafts, in preorder."""
    parents = [-1]

    def children(node, level, context, left):
        rank = 0
        while level < len(taken) and (size := taken[level, context, rank, left]):
            parents.append(node)
            below = rates.follow(context, rank)
            children(len(parents) - 1, level + 1, below, size - 1)
            left -= size
            rank += 1

    children(0, 0, 0, drafts)
    return parents
