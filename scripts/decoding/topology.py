"""A draft tree by what is said on a command line, and the files that hold planned ones.

`3,3,3`, `none` and the names of chains are `treewy_jax.tree.parse`'s; what ends in
.json is a file of scripts/plan_tree.py, of whose trees `plan.json:16` takes that of at
most 16 nodes, and `plan.json` the one it recommends:

    {"schema": "tree/1", "parents": [-1, 0, ...],
     "trees": {"16": {"parents": [-1, 0, ...], ...}, ...}, ...}

Parents are in preorder, the root is node 0 with parent -1, and siblings come in the
order of the drafter's ranks.
"""

import json
import pathlib
import re
from typing import Any

from treewy_jax import tree as tree_lib

SCHEMA = "tree/1"
FILE = re.compile(r"(.+\.json)(?::([0-9]+))?")


def read(text: str, n_max: int = 64) -> tree_lib.DraftTree:
    """Return the tree that `text` describes, of at most `n_max` nodes.

    Raises ValueError with one line: what is wrong, and what is allowed.
    """
    named = FILE.fullmatch(text.strip())
    if named is None:
        return tree_lib.parse(text, n_max)
    parents = _parents(named[1], named[2])
    try:
        tree_lib.DraftTree.from_parents(parents, n_max=n_max)
        return tree_lib.DraftTree.from_parents(parents)
    except ValueError as error:
        raise ValueError(f"tree {text}: {error}") from None


def parents(text: str, n_max: int = 64) -> list[int]:
    """Return the parents of the tree that `text` describes; raises as `read` does."""
    return parents_of(read(text, n_max))


def parents_of(tree: tree_lib.DraftTree) -> list[int]:
    """Return the parents of the real nodes of a tree's first row."""
    return tree.parents()[0, : int(tree.size[0])].tolist()


def is_file(text: str) -> bool:
    """Return whether `text` names a file rather than a shape."""
    return FILE.fullmatch(text.strip()) is not None


def _parents(path: str, nodes: str | None) -> list[Any]:
    """Return the parents in a file, not looked at yet but for being a list."""
    try:
        content = json.loads(pathlib.Path(path).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"tree {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"tree {path}: no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(
            f'tree {path}: no file of plan_tree.py; {{"schema": "{SCHEMA}", "parents": '
            "[-1, 0, ...]} is allowed"
        )
    if nodes is not None:
        trees = content.get("trees")
        trees = trees if isinstance(trees, dict) else {}
        if nodes not in trees:
            known = ", ".join(trees) or "none"
            raise ValueError(
                f"tree {path}:{nodes}: the file has trees of {known} nodes"
            )
        content = trees[nodes]
    parents = content.get("parents") if isinstance(content, dict) else None
    if not isinstance(parents, list):
        raise ValueError(f"tree {path}: parents is {parents!r}; a list is allowed")
    return parents
