"""Drafters by the names that decode.py gives them, in the size of a tree."""

import typing
from collections.abc import Sequence
from typing import Any

from scripts.decoding import drafting
from scripts.decoding import options as options_lib
from treewy_jax import drafters
from treewy_jax import tree as tree_lib

NAMES = typing.get_args(typing.get_type_hints(options_lib.Options)["drafter"])


def make(
    name: str,
    tree: tree_lib.DraftTree,
    model: Any,
    prompts: Sequence[Sequence[int]],
    draft_model: str | None = None,
) -> drafters.Drafter:
    """Return a drafter of the depth of `tree`; dynamic and suffix have its nodes, too.

    Raises:
        ValueError: an unknown name, or a tree that the drafter cannot take.
    """
    if name not in NAMES:
        raise ValueError(f"drafters: {name!r} came; allowed are {', '.join(NAMES)}")
    if name == "external" and draft_model is None:
        raise ValueError("drafters: external needs --draft-model, tiny or a folder")
    options = options_lib.Options(drafter=name, draft_model=draft_model)
    return drafting.make(tree, options, model, [list(row) for row in prompts])[1]
