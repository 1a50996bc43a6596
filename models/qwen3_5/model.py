"""The Qwen3.5 text model, dense or mixture of experts.

Layers are run one by one, each with arrays of its own: a scan over stacked weights and
states would copy those of every layer before they are read. Layers of one kind are
traced and lowered once, as one function that all of them call. Every method is a pure
function of the parameters and its arguments: split the module once with `nnx.split`,
merge it inside `jit`.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import decoder, layers, mtp
from treewy_jax import commit, conv
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
        return layers.look_up(self.embed_tokens.embedding[...], tokens)

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
        return self._run("prefill", self.embed(tokens), None, (positions, lengths))

    def verify(
        self,
        tree: tree_lib.DraftTree,
        cache: tuple,
        length: Int[Array, " B"],
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n H"], tuple]:
        """Run every node of `tree` behind `length` tokens; `cache` is only read.

        `cache` is laid out as `prefill`'s second result, with lifecycle states, and so
        are the records returned: (raw rows, lifecycle records), (keys, values).
        """
        nodes = decoder.NodeView(
            tree=tree,
            windows=conv.tree_windows(tree, self.config.linear_conv_kernel_dim),
            positions=length[:, None] + tree.depth(),
            mask=tree.ancestors(include_self=True),
        )
        h = self.embed(tree.tokens)
        return self._run("verify", h, cache, (length, nodes), (lifecycle,))

    def decode(
        self, token: Int[Array, " B"], cache: tuple, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 H"], tuple]:
        """Run one token by the plain recurrence; returns its row and the new cache."""
        return self._run("decode", self.embed(token[:, None]), cache, (length,))

    def _run(self, verb, h, cache, arrays, static=()):
        """Run a verb of the layers, one after the other, each followed by a norm.

        A layer gets the rows, what it kept in `cache` unless that is None, and `arrays`
        and `static`, the same for all.
        """
        kept = [itertools.repeat(())] * 2 if cache is None else map(zip, cache)
        recurrent, attended = kept
        after: tuple[list, list] = [], []
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        x = norms[0](h)
        for layer, norm in zip(self.layers, norms[1:], strict=True):
            rows = decoder.Rows(h, x, norm.weight[...])
            own = next(attended if layer.attends else recurrent)
            graphdef, params = nnx.split(layer)
            inputs = rows, *own, *arrays
            (h, x), left = _run_layer(graphdef, verb, static, params, *inputs)
            after[layer.attends].append(left)
        return x, tuple(map(tuple, after))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_layer(graphdef: Any, verb: str, static: tuple, params: Any, *arrays: Any):
    """Run a verb of one layer; one trace serves all layers of its kind."""
    return getattr(nnx.merge(graphdef, params), verb)(*arrays, *static)
