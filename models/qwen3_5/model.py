"""The Qwen3.5 text model, dense or mixture of experts, scanned over super-blocks.

Every method is a pure function of the parameters and its arguments: split the module
once with `nnx.split`, merge it inside `jit`.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import decoder, layers, mtp
from treewy_jax import commit, conv
from treewy_jax import tree as tree_lib


class Qwen3_5(nnx.Module):
    """Embedding, blocks of three GDN layers and one of attention, norm, output head."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, rngs, dtype=jnp.float32):
        size, options = config.hidden_size, dict(dtype=dtype, rngs=rngs)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, size, param_dtype=dtype, rngs=rngs
        )
        self.blocks = _stacked_blocks(config, dtype, rngs)
        self.norm = layers.RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = layers.linear(size, config.vocab_size, **options)
        if config.mtp_num_hidden_layers:
            self.mtp = mtp.MTPHead(config, **options)
        self.config = config

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Look tokens up; nothing is scaled or added."""
        return self.embed_tokens.embedding[...][tokens]

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

        Returns hidden states after the final norm and, each leading with [blocks],
        ((windows, states), (keys, values)); padding leaves no trace in the first pair.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def body(block, h, _):
            return block.prefill(h, positions, lengths)

        h, kept = self._scan(body, self.embed(tokens), None)
        return self.norm(h), kept

    def verify(
        self,
        tree: tree_lib.DraftTree,
        cache: tuple,
        length: Int[Array, " B"],
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n H"], tuple]:
        """Run every node of `tree` behind `length` tokens; `cache` is only read.

        `cache` and the records returned are laid out as `prefill`'s second result, with
        lifecycle states and records for states.
        """
        nodes = decoder.NodeView(
            tree=tree,
            windows=conv.tree_windows(tree, self.config.linear_conv_kernel_dim),
            positions=length[:, None] + tree.depth(),
            mask=tree.ancestors(include_self=True),
        )

        def body(block, h, block_cache):
            return block.verify(h, block_cache, length, nodes, lifecycle)

        h, records = self._scan(body, self.embed(tree.tokens), cache)
        return self.norm(h), records

    def decode(
        self, token: Int[Array, " B"], cache: tuple, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 H"], tuple]:
        """Run one token by the plain recurrence; returns its row and the new cache."""

        def body(block, h, block_cache):
            return block.decode(h, block_cache, length)

        h, cache = self._scan(body, self.embed(token[:, None]), cache)
        return self.norm(h), cache

    def _scan(self, body, h, xs):
        """Scan `body(block, h, x) -> (h, y)` over the stacked blocks."""
        graphdef, params = nnx.split(self.blocks)

        def one(h, block_and_x):
            block_params, x = block_and_x
            return body(nnx.merge(graphdef, block_params), h, x)

        return lax.scan(one, h, (params, xs))


def _stacked_blocks(config, dtype, rngs) -> decoder.SuperBlock:
    """Create the super-blocks with every parameter stacked on a leading axis."""

    @nnx.split_rngs(splits=config.num_blocks)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return decoder.SuperBlock(config, dtype=dtype, rngs=rngs)

    return create(rngs)
