"""The drafter that the options name, and the trees that it proposes."""

from typing import Any

import jax.numpy as jnp

import models
from scripts.decoding import options as options_lib
from treewy_jax import accept, drafters
from treewy_jax import generate as generation_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import tree as tree_lib


def make(
    tree: tree_lib.DraftTree,
    options: options_lib.Options,
    model: Any,
    prompts: list[list[int]],
) -> tuple[tree_lib.DraftTree, drafters.Drafter]:
    """Return a drafter of the depth of `tree`, and the trees that it proposes.

    Those have the topology of `tree` or, of all drafters but mtp and external, their
    own; parents are -1 where they change from step to step.

    Raises:
        ValueError: the model or the draft model cannot draft such trees.
    """
    if tree.depth_max == 0:
        return tree, drafters.NoDrafter()
    sampled = accept.by_name(options.accept).needs_draft
    if options.drafter == "external":
        draft = _draft_model(options, model, prompts)
        return tree, drafters.ExternalDrafter.from_model(
            draft, tree, impl=options.impl.replace("-", "_"), sampled=sampled
        )
    if options.drafter == "ngram":
        return _ngram(tree)
    if options.drafter == "mtp":
        config = model.config
        return tree, generation_lib.default_drafter(tree, config, sampled=sampled)
    drafter = _growing(tree, options, model.config)
    return _any_tree(drafter), drafter


def _growing(tree, options, config) -> drafters.Drafter:
    """Return the drafter whose trees change, of so many nodes and this depth."""
    nodes = options.nodes or tree.n_max
    depth = min(tree.depth_max, nodes - 1)
    if options.drafter == "suffix":
        places = max(16, -(-(nodes - 1) // depth))
        return drafters.SuffixDrafter(nodes=nodes, depth=depth, occurrences=places)
    if not config.mtp_num_hidden_layers:
        raise ValueError(
            "drafter 'dynamic': the model has no MTP head; allowed are another "
            "drafter, such as suffix, or tree none"
        )
    drafter = drafters.DynamicDrafter.of_size(nodes, depth)
    if drafter.children > config.vocab_size:
        raise ValueError(
            f"nodes: {nodes} in {depth} levels take the best {drafter.children} tokens "
            f"at a time; the vocabulary has {config.vocab_size}"
        )
    return drafter


def _ngram(tree) -> tuple[tree_lib.DraftTree, drafters.Drafter]:
    """Return a chain for each child of the root, and their drafter."""
    branches = int(jnp.sum(tree.parents()[0] == 0))
    depth, parents = tree.depth_max, [-1]
    for first in range(1, 1 + branches * depth, depth):
        parents += [0, *range(first, first + depth - 1)]
    drafter = drafters.NgramDrafter(branches=branches, depth=depth)
    return tree_lib.DraftTree.from_parents(parents), drafter


def _any_tree(drafter) -> tree_lib.DraftTree:
    """Return a tree of the drafter's envelope without parents."""
    nodes = drafter.n_max
    return tree_lib.DraftTree(
        tokens=jnp.zeros((1, nodes), jnp.int32),
        parent=jnp.full(nodes, -1, jnp.int32),
        size=jnp.full(1, nodes, jnp.int32),
        depth_max=drafter.depth_max,
    )


def _draft_model(options, model, prompts) -> Any:
    """Load the draft model, which has to have the tokens of the model."""
    name = options.draft_model
    draft = models.load(name, dtype=options.dtype, mesh=model.mesh)
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"draft_model {name!r}: a vocabulary of {theirs} tokens; that of the "
            f"model, {ours}, is allowed"
        )
    known = (model.tokenizer, draft.tokenizer)
    if None not in known and known[0].get_vocab() != known[1].get_vocab():
        raise ValueError(
            f"draft_model {name!r}: its tokenizer has other tokens than the model's; "
            "only the same are allowed"
        )
    try:
        most = draft.config.max_position_embeddings
        prompts_lib.check_budget(prompts, options.max_new_tokens, most)
    except ValueError as error:
        raise ValueError(f"draft_model {name!r}: {error}") from None
    return draft
