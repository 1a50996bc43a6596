"""Qwen3.5 as the decode loop sees it: a `Target`, and a `DraftHead` beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.qwen3_5 import gated_delta_net, sharding
from models.qwen3_5 import model as model_lib
from treewy_jax import accept, commit
from treewy_jax import cache as cache_lib
from treewy_jax import tree as tree_lib


@dataclasses.dataclass(frozen=True)
class Builder:
    """Rebuild the target from its parameters inside `jit`; hashable, hence static."""

    graphdef: Any
    lifecycle: commit.Lifecycle

    def __call__(self, params: Any) -> "Qwen3_5Target":
        return Qwen3_5Target(nnx.merge(self.graphdef, params), self.lifecycle)


@dataclasses.dataclass(frozen=True)
class Qwen3_5Target:
    """The four verbs of a target, bound to parameters and a lifecycle."""

    module: model_lib.Qwen3_5
    lifecycle: commit.Lifecycle

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int
    ) -> tuple[Float[Array, "B T H"], cache_lib.HybridCache]:
        """Run right-padded prompts; the KV cache gets `capacity` slots."""
        hidden, (recurrent, attended) = self.module.prefill(tokens, lengths)
        key_heads = self.module.config.linear_num_key_heads
        spare = ((0, 0), (0, capacity - tokens.shape[1]), (0, 0), (0, 0))
        windows, states = zip(*recurrent, strict=True)
        keys = key_heads, windows[0].dtype  # both are of the rows
        states = (self.lifecycle.init(state, *keys) for state in states)
        key, value = zip(
            *jax.tree.map(lambda x: jnp.pad(x, spare), attended), strict=True
        )
        cache = cache_lib.HybridCache(tuple(states), windows, key, value, lengths)
        return hidden, sharding.constrain_cache(cache, self.module.config)

    def verify(
        self, cache: cache_lib.HybridCache, tree: tree_lib.DraftTree
    ) -> tuple[Float[Array, "B n H"], cache_lib.Records]:
        """Run every node of the tree; the cache is only read."""
        kept = (
            zip(cache.window, cache.recurrent, strict=True),
            zip(cache.key, cache.value, strict=True),
        )
        hidden, (recurrent, attended) = self.module.verify(
            tree, kept, cache.length, self.lifecycle
        )
        rows, records = zip(*recurrent, strict=True)
        key, value = zip(*attended, strict=True)
        return hidden, cache_lib.Records(records, rows, key, value)

    def logits(self, hidden: Float[Array, "B n H"]) -> Float[Array, "B n V"]:
        """Project hidden states to the vocabulary."""
        return self.module.logits(hidden)

    def commit(
        self,
        cache: cache_lib.HybridCache,
        records: cache_lib.Records,
        accepted: accept.Accepted,
    ) -> cache_lib.HybridCache:
        """Advance the cache along the accepted path."""
        config = self.module.config
        rows = (gated_delta_net.split_columns(x, config).conv for x in records.rows)
        records = dataclasses.replace(records, rows=tuple(rows))
        cache = cache_lib.commit(cache, records, accepted, self.lifecycle)
        return sharding.constrain_cache(cache, config)

    @property
    def draft_head(self) -> "DraftHead":
        """The MTP head, for `treewy_jax.drafters.mtp`."""
        return DraftHead(self.module)


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """The MTP head with the embedding and output matrices it shares with the target."""

    module: model_lib.Qwen3_5

    def prefill(self, tokens, hidden, positions):
        """Run pairs (x_{t+1}, h_t) causally; returns m and KV rows."""
        return self.module.mtp.prefill(self.module.embed(tokens), hidden, positions)

    def extend(self, tokens, hidden, positions, prefix, length, mask, earlier=None):
        """Run more rows over a prefix and each other; returns m and all KV rows."""
        embedded = self.module.embed(tokens)
        return self.module.mtp.extend(
            embedded, hidden, positions, prefix, length, mask, earlier
        )

    def logits(self, hidden):
        """Project m to the vocabulary."""
        return self.module.logits(hidden)
