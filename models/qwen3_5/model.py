"""The Qwen3.5 text model, dense or mixture of experts.

Layers are run one by one, each with arrays of its own: a scan over stacked weights and
states would copy those of every layer before they are read. Every method is a pure
function of the parameters and its arguments: split the module once with `nnx.split`,
merge it inside `jit`.
"""

import itertools

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import decoder, layers, mtp
from treewy_jax import commit, conv, sharding
from treewy_jax import tree as tree_lib


class Qwen3_5(nnx.Module):
    """Embedding, GDN layers with one of attention behind every three, norm, head."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, rngs, dtype=jnp.float32):
        size, options = config.hidden_size, dict(dtype=dtype, rngs=rngs)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, size, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            decoder.DecoderLayer(config, attends=kind == "full_attention", **options)
            for kind in config.layer_types
        )
        self.norm = layers.RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = layers.linear(size, config.vocab_size, **options)
        if config.mtp_num_hidden_layers:
            self.mtp = mtp.MTPHead(config, **options)
        self.config = config

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Look tokens up; nothing is scaled or added."""
        rows = self.embed_tokens.embedding[...][tokens]
        return sharding.constrain(rows, "B T H")

    def logits(self, hidden: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Project normed hidden states (target's or MTP head's) to float32 logits."""
        tied = self.config.tie_word_embeddings
        kernel = (
            self.embed_tokens.embedding[...].T if tied else self.lm_head.kernel[...]
        )
        return jnp.matmul(
            hidden,
            kernel,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def forward(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Return hidden states after the final norm, every row T tokens long."""
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        return self.prefill(tokens, lengths)[0]

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T H"], tuple]:
        """Run right-padded prompts from an empty state.

        Returns hidden states after the final norm, and what the layers keep: one
        (window, state) for each GDN layer, one (keys, values) for each of attention.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def prefill(layer, h, _):
            return layer.prefill(h, positions, lengths)

        return self._run(prefill, self.embed(tokens))

    def verify(
        self,
        tree: tree_lib.DraftTree,
        cache: tuple,
        length: Int[Array, " B"],
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n H"], tuple]:
        """Run every node of `tree` behind `length` tokens; `cache` is only read.

        `cache` is laid out as `prefill`'s second result, with lifecycle states, and so
        are the records returned: (conv rows, lifecycle records), (keys, values).
        """
        nodes = decoder.NodeView(
            tree=tree,
            windows=conv.tree_windows(tree, self.config.linear_conv_kernel_dim),
            positions=length[:, None] + tree.depth(),
            mask=tree.ancestors(include_self=True),
        )

        def verify(layer, h, kept):
            return layer.verify(h, kept, length, nodes, lifecycle)

        return self._run(verify, self.embed(tree.tokens), cache)

    def decode(
        self, token: Int[Array, " B"], cache: tuple, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 H"], tuple]:
        """Run one token by the plain recurrence; returns its row and the new cache."""

        def decode(layer, h, kept):
            return layer.decode(h, kept, length)

        return self._run(decode, self.embed(token[:, None]), cache)

    def _run(self, run, h, cache=None):
        """Run `run(layer, h, kept) -> (h, kept)` over the layers, then the norm."""
        before = [itertools.repeat(None)] * 2 if cache is None else map(iter, cache)
        recurrent, attended = before
        after: tuple[list, list] = [], []
        for layer in self.layers:
            h, kept = run(layer, h, next(attended if layer.attends else recurrent))
            after[layer.attends].append(kept)
        return self.norm(h), tuple(map(tuple, after))
