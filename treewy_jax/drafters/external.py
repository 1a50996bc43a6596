"""Draft with another model: any target of the same vocabulary, such as a small one.

The draft model keeps a cache of the text, as the target does. To draft, it verifies the
tree once for every level: the nodes of level d say which tokens stand at level d + 1,
and the cache is only read. After acceptance it verifies the whole tree once more and
commits the accepted path, which is how its cache keeps up whatever was accepted. So a
step takes depth + 1 passes over n rows and one commit of the draft model.

With `sampled`, the children of a node are drawn from the draft model's distribution at
the settings of the request, which is exactly what it hands out: chains and trees go
with every rule of acceptance.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from treewy_jax import accept, pytree, sharding
from treewy_jax import commit as commit_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib
from treewy_jax.drafters import gumbel


class ExternalState(NamedTuple):
    """The draft model's cache, and the tree proposed last."""

    cache: Any
    tokens: Int[Array, "B n"]


@pytree.dataclass
class ExternalDrafter:
    """A draft model and the topology that it fills; build it with `from_model`.

    Attributes:
        params: of the draft model.
        tree: the topology, one row.
        build: static; makes a target (`loop.Target`) of `params` inside `jit`.
        rank_max: static; children of a node at most.
        sampled: static; draw the children in place of taking the best.
    """

    params: Any
    tree: tree_lib.DraftTree
    build: Callable[[Any], Any] = pytree.static()
    rank_max: int = pytree.static()
    sampled: bool = pytree.static(default=False)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tree: tree_lib.DraftTree,
        *,
        commit: str | commit_lib.Lifecycle = "reconstruct",
        impl: str | None = None,
        sampled: bool = False,
    ) -> "ExternalDrafter":
        """Take a model (`generate.Model`) and the topology of `tree`, row 0.

        `commit` and `impl` are those of the draft model's own cache. Whoever calls sees
        to it that both models split text into the same tokens.

        Raises:
            ValueError: a node has more children than the vocabulary tokens.
        """
        if isinstance(commit, str):
            commit = commit_lib.by_name(
                commit,
                state_dtype=model.config.mamba_ssm_dtype,
                impl=impl,
                depth=tree.depth_max,
                nodes=tree.n_max,
            )
        commit.check(tree.depth_max, tree.n_max)
        parent = np.asarray(tree.parents())[0]
        counts = np.bincount(parent[parent >= 0], minlength=1)
        rank_max, vocab = max(1, int(counts.max())), model.config.vocab_size
        if rank_max > vocab:
            raise ValueError(
                f"tree: a node has {rank_max} children; allowed are at most the "
                f"{vocab} tokens of the draft model's vocabulary"
            )
        row = tree_lib.DraftTree(
            tokens=jnp.zeros((1, tree.n_max), jnp.int32),
            parent=jnp.asarray(parent, jnp.int32),
            size=tree.size[:1],
            depth_max=tree.depth_max,
        )
        return cls(model.params, row, model.builder(commit), rank_max, sampled)

    @property
    def depth_max(self) -> int:
        """Depth of the tree."""
        return self.tree.depth_max

    @property
    def n_max(self) -> int:
        """Nodes of the tree."""
        return self.tree.n_max

    def bind(self, target: Any) -> "BoundExternalDrafter":
        """Return the drafter with its own model made; the target is not used."""
        return BoundExternalDrafter(self, self.build(self.params))


@dataclasses.dataclass(frozen=True)
class BoundExternalDrafter:
    """An `ExternalDrafter` with its model; lives inside one traced function."""

    plan: ExternalDrafter
    model: Any

    def bind(self, target):
        return self

    @property
    def sampled(self) -> bool:
        """Are children drawn?"""
        return self.plan.sampled

    def start(self, tokens, lengths, hidden, next_token, capacity) -> ExternalState:
        """Run the draft model over the prompts."""
        _, cache = self.model.prefill(tokens, lengths, capacity)
        drafted = jnp.zeros((tokens.shape[0], self.plan.n_max), jnp.int32)
        return ExternalState(cache, drafted)

    def propose(self, state: ExternalState, root, base):
        """Fill the topology level by level with the draft model's best tokens."""
        tree, _, state = self._expand(state, root, None)
        return tree, state

    def propose_sampled(self, state, root, base, draws: sampling_lib.Draws):
        """The same with drawn children, and what they were drawn from."""
        return self._expand(state, root, draws)

    def update(self, state: ExternalState, accepted: accept.Accepted, hidden):
        """Commit the accepted path to the draft model's cache."""
        tree = self.plan.tree.with_tokens(state.tokens)
        _, records = self.model.verify(state.cache, tree)
        return state._replace(cache=self.model.commit(state.cache, records, accepted))

    def _expand(self, state, root, draws):
        plan = self.plan
        start = jnp.zeros((root.shape[0], plan.n_max), jnp.int32).at[:, 0].set(root)
        tree = plan.tree.with_tokens(start)
        depth, parent = tree.depth(), jnp.maximum(tree.parents(), 0)

        def scores(tokens):
            hidden, _ = self.model.verify(state.cache, tree.with_tokens(tokens))
            logits = self.model.logits(hidden)
            if draws is None:
                return logits, None
            nodes = jnp.arange(plan.n_max)
            return gumbel.perturb(logits, tokens, tree.ancestors(), nodes, draws)

        def grow(level, carry):
            tokens, log_probs = carry
            score, drawn_from = scores(tokens)
            best = sharding.top_k(score, plan.rank_max)[1].astype(jnp.int32)
            chosen = best[jnp.arange(best.shape[0])[:, None], parent, tree.rank()]
            below = tree.valid() & (depth == level + 1)
            tokens = jnp.where(below, chosen, tokens)
            if log_probs is not None:
                here = (depth == level)[..., None]
                log_probs = jnp.where(here, drawn_from, log_probs)
            return tokens, log_probs

        shape = jax.eval_shape(scores, start)[1]
        log_probs = None if draws is None else jnp.zeros(shape.shape, shape.dtype)
        carry = (start, log_probs)
        tokens, log_probs = lax.fori_loop(0, plan.depth_max, grow, carry)
        return tree.with_tokens(tokens), log_probs, state._replace(tokens=tokens)
