"""The planner: brute force over all small trees, counts by hand, step times."""

import dataclasses

import numpy as np
import pytest

from treewy_jax import planning
from treewy_jax.planning import trees

MOST = 7


def random_rates(seed, depth=4, contexts=2, width=3):
    """Rates that neither fall with the rank nor with the depth."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(width + 1), size=(depth, contexts))[..., :width]
    return planning.Rates(table)


def all_trees(nodes):
    """Every preorder parent list of exactly so many nodes."""
    found = [[-1]]
    for _ in range(nodes - 1):
        grown = []
        for parents in found:
            node = len(parents) - 1
            while node != -1:  # the last node, or one of its ancestors
                grown.append([*parents, node])
                node = parents[node]
        found = grown
    return found


def best_by_force(rates, nodes, depth):
    """The most that any tree of at most so many nodes accepts."""
    fits = [
        parents
        for size in range(1, nodes + 1)
        for parents in all_trees(size)
        if planning.depth_of(parents) <= depth
        and max(map(parents.count, parents[1:]), default=0) <= rates.width
    ]
    return max(planning.expected(parents, rates) for parents in fits)


def test_there_are_as_many_trees_as_catalan_says():
    assert [len(all_trees(n)) for n in range(1, MOST + 1)] == [1, 1, 2, 5, 14, 42, 132]


def differences(rates, depth):
    """How far the planned trees are from the best ones, for 1 to MOST nodes."""
    found = planning.frontier(rates, MOST, depth)
    for nodes, parents in enumerate(found, 1):
        assert len(parents) <= nodes and planning.depth_of(parents) <= depth
    planned = [planning.expected(parents, rates) for parents in found]
    forced = [best_by_force(rates, n, depth) for n in range(1, MOST + 1)]
    return np.abs(np.subtract(planned, forced))


@pytest.mark.parametrize(("seed", "depth"), [(0, 4), (1, 4), (2, 2), (3, 3), (4, 1)])
def test_the_plan_is_the_best_of_all_trees(seed, depth):
    assert differences(random_rates(seed), depth).max() < 1e-12


def test_a_plan_without_context_is_not(monkeypatch):
    """The broken twin: below a runner-up the same rates as on the spine."""
    rates = random_rates(5)
    blind = lambda self, context, rank: 0  # noqa: E731
    solve = trees._solve

    def solve_blind(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(planning.Rates, "follow", blind)
            return solve(*arguments)

    monkeypatch.setattr(trees, "_solve", solve_blind)
    assert differences(rates, 4).max() > 1e-3


def test_known_trees():
    sure = planning.Rates(np.array([[[0.9, 0.05]]] * 3))
    assert planning.optimal(sure, 4) == [-1, 0, 1, 2]
    flat = planning.Rates(np.array([[[0.3, 0.3, 0.3]]] * 3))
    assert planning.optimal(flat, 4) == [-1, 0, 0, 0]
    assert planning.optimal(sure, 1) == planning.optimal(sure, 9, 0) == [-1]


def test_nothing_is_drafted_in_vain():
    rates = planning.Rates(np.array([[[0.5, 0.0]], [[0.0, 0.0]]]))
    assert planning.optimal(rates, 6) == [-1, 0]


def test_ranks_are_counted_by_depth_and_context():
    ranks = np.array([[0, 1], [1, 0], [7, 0], [0, -1], [0, 0]])
    reached, hits = trees.count(ranks, width=2, contexts=2)
    assert reached.tolist() == [[5, 0], [2, 1]]
    assert hits.tolist() == [[[3, 1], [0, 0]], [[1, 1], [1, 0]]]
    rates = planning.Rates.from_ranks([ranks[:3], ranks[3:]], width=2, contexts=2)
    expected = [[[0.6, 0.2], [0, 0]], [[0.5, 0.5], [1, 0]]]
    np.testing.assert_allclose(rates.table, expected)


def test_reach_multiplies_along_the_path():
    rates = planning.Rates.from_ranks(
        [np.array([[0, 1], [1, 0], [7, 0], [0, -1], [0, 0]])], width=2, contexts=2
    )
    found = planning.reach([-1, 0, 1, 1, 0, 4], rates)
    np.testing.assert_allclose(found, [1, 0.6, 0.3, 0.3, 0.2, 0.2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: planning.optimal(r, 0), "nodes is 0; 1 or more"),
        (lambda r: planning.optimal(r, 3, 9), "depth is 9; allowed are 0 to 4"),
        (lambda r: planning.expected([-1, 0, 0, 0, 0], r), "4 children of a node"),
        (lambda r: planning.expected([-1, 0, 1, 2, 3, 4], r), "tree of depth 5"),
        (lambda r: planning.expected([-1, 2], r), "an earlier node"),
        (lambda r: planning.Rates(np.zeros((2, 2))), r"shape \[2, 2\]"),
        (lambda r: planning.Rates(np.full((1, 1, 2), 0.6)), "add up to 1.2"),
        (lambda r: planning.Rates(np.full((1, 1, 1), -0.1)), "probabilities"),
        (lambda r: planning.StepTimes.fit([]), "points is empty"),
        (lambda r: planning.StepTimes.fit([(1, 0, 0.0)]), "0.0 ms"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_rates(0))


# --- step times ---------------------------------------------------------------------


def test_step_times_pass_through_what_was_measured():
    law = lambda nodes, depth: 5 + 0.1 * nodes + 0.7 * depth  # noqa: E731
    shapes = [(1, 0), (4, 3), (15, 3), (40, 3), (8, 7)]
    found = planning.StepTimes.fit([(*shape, law(*shape)) for shape in shapes])
    assert found.level == pytest.approx(0.7)
    for shape in [*shapes, (20, 5), (60, 4)]:  # in between, and beyond
        assert found(*shape) == pytest.approx(law(*shape))
    assert found.covers(20) and not found.covers(60)


def test_one_time_serves_all_sizes():
    assert planning.StepTimes.fit([(4, 3, 2.0)])(40, 3) == pytest.approx(2.0)


def test_more_nodes_never_take_less_beyond_the_last():
    found = planning.StepTimes((1, 4), (3.0, 2.0), 0.0)
    assert found(9, 0) == 2.0


def every_depth(rates):
    """The same rates, whatever the depth of the tree."""
    return dict.fromkeys(range(1, rates.depth + 1), rates)


def test_the_fastest_tree_depends_on_what_a_node_costs():
    measured = every_depth(planning.Rates(np.array([[[0.6, 0.2, 0.1]]] * 5)))
    tried = planning.candidates(measured, 16)
    cheap = planning.fastest(tried, measured, lambda n, d: 10 + 0.01 * n, 4)
    dear = planning.fastest(tried, measured, lambda n, d: 10 + 30.0 * n, 4)
    assert len(cheap.parents) == 16 and dear.parents == [-1]
    assert dear.tokens_per_second == pytest.approx(4 * 1e3 / 40)
    deep = planning.fastest(tried, measured, lambda n, d: 10 + 100.0 * d, 4)
    assert planning.depth_of(deep.parents) <= 1


def test_the_fastest_is_the_best_of_all_small_trees():
    rates = random_rates(7)
    step = lambda n, d: 3 + 0.2 * n + 0.4 * d  # noqa: E731
    rate = lambda p: planning.expected(p, rates) / step(len(p), planning.depth_of(p))  # noqa: E731
    every = [p for n in range(1, 7) for p in all_trees(n)]
    fits = [p for p in every if max(map(p.count, p[1:]), default=0) <= rates.width]
    fits = [p for p in fits if planning.depth_of(p) <= rates.depth]
    measured = every_depth(rates)
    tried = planning.candidates(measured, 6)
    found = planning.fastest(tried, measured, step, 1)
    assert found.tokens_per_second == pytest.approx(1e3 * max(map(rate, fits)))


def test_a_tree_is_judged_by_the_rates_for_its_own_depth():
    rates = {d: planning.Rates(np.full((d, 1, 1), 0.5 / d)) for d in (1, 2)}
    assert planning.accept_length([-1], rates) == 1
    assert planning.accept_length([-1, 0], rates) == 1.5
    assert planning.accept_length([-1, 0, 1], rates) == 1 + 0.25 + 0.0625
    with pytest.raises(ValueError, match=r"tree of depth 3.*\[1, 2\]"):
        planning.accept_length([-1, 0, 1, 2], rates)


def test_rates_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_rates(0).table = None


def test_rates_for_trees_of_about_that_size():
    """The nearest by ratio; searches go by the rates of all sizes together."""
    small, middle, large = (
        planning.Rates(np.full((1, 1, 40), share)) for share in (0.01, 0.015, 0.02)
    )
    sized = ((4, small), (16, middle), (40, large))
    known = dataclasses.replace(middle, sized=sized)
    assert [known.at(nodes) for nodes in (2, 5, 9, 39, 400)] == [
        small, small, middle, large, large,
    ]  # fmt: skip
    assert small.at(40) is small
    for nodes, rates in ((3, small), (12, middle), (41, large)):
        star = [-1] + [0] * (nodes - 1)
        wanted = planning.expected(star, rates)
        assert planning.accept_length(star, {1: known}) == pytest.approx(wanted)
