"""The drafters that are checked, by name, each over a table of the toy."""

import numpy as np

from scripts.sampling_checks import row_trees, toys
from treewy_jax import drafters
from treewy_jax import tree as tree_lib

make = tree_lib.DraftTree
# The head's trees; "runner-up" is a chain of three with a second child of the root.
TREES = {
    "1,1,1": (-1, 0, 1, 2),
    "2,2,1": (-1, 0, 1, 2, 1, 4, 0, 6, 7, 6, 9),
    "3,3": (-1, 0, 1, 1, 1, 0, 5, 5, 5, 0, 9, 9, 9),
    "runner-up": (-1, 0, 1, 2, 0),
}
# Parts of the tree 3,3. A node keeps the children that were drawn first, whatever they
# are, so that it can be said what they were drawn from.
PARTS = (
    (0, 1, 2, 5, 6, 9),
    (0, 1, 2, 3, 4, 5),
    (0, 1, 5, 9, 10, 11, 12),
    (0, 1, 2),
    (0, 1, 2, 3, 5, 6, 7),
)
EXTERNAL = (-1, 0, 1, 1, 0, 4, 4)
FIXED = {
    "dynamic": drafters.DynamicDrafter(nodes=8, depth=3, width=3, children=3),
    "ngram": drafters.NgramDrafter(branches=2, depth=2, match=2),
    "suffix": drafters.SuffixDrafter(nodes=6, depth=3, match=3, occurrences=3),
}
DRAWN = (*TREES, "by row", "external")
NAMES = (*DRAWN, *FIXED)
FROM_TEXT = ("ngram", "suffix")


def drafter(name: str, table: np.ndarray, *, sampled: bool) -> drafters.Drafter:
    """Return the drafter of this name; those of FIXED are not sampled.

    `table` is the draft's: the external model has it as its own, the head reads it from
    the target. "by row" gives every row parents of its own, others at each step.
    """
    if name in FIXED:
        return FIXED[name]
    if name == "external":
        tree = make.from_parents(list(EXTERNAL))
        plan = (toys.Target, 2, sampled)
        return drafters.ExternalDrafter((table, table), tree, *plan)
    tree = make.from_parents(list(TREES.get(name, TREES["3,3"])))
    plan = drafters.MTPDrafter.from_tree(tree, sampled=sampled)
    return row_trees.RowTrees.of(plan, PARTS) if name == "by row" else plan
