"""The multi-token-prediction head: one attention layer that guesses a token further on.

    m_t = norm(layer(W_fc [rms(embed(x_{t+1})); rms(h_t)]));  logits of x_{t+2} from m_t

h_t is the target's hidden state after its final norm (what its output head sees). When
chained, the head's own m takes that place. Its positions are those of h, one less than
the token's own (qwen35.md 2 of the design).
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import decoder, layers


class MTPHead(nnx.Module):
    """Embeddings and hidden states in, hidden states out; the vocabulary is shared."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        size, norm = config.hidden_size, dict(eps=config.rms_norm_eps, dtype=dtype)
        options = dict(dtype=dtype, rngs=rngs)
        self.pre_fc_norm_embedding = layers.RMSNorm(size, **norm)
        self.pre_fc_norm_hidden = layers.RMSNorm(size, **norm)
        self.fc = layers.linear(2 * size, size, **options)
        self.layers = nnx.List([decoder.DecoderLayer(config, attends=True, **options)])
        self.norm = layers.RMSNorm(size, **norm)

    def prefill(
        self,
        embedded: Float[Array, "B T H"],
        hidden: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T H"], tuple[Array, Array]]:
        """Run pairs (embedding of x_{t+1}, h_t) causally; returns m and the KV rows."""
        mixer = self.layers[0].self_attn
        h = self.join(embedded, hidden)
        return self._run(h, lambda x: mixer.prefill(x, positions))

    def extend(
        self,
        embedded: Float[Array, "B m H"],
        hidden: Float[Array, "B m H"],
        positions: Int[Array, "B m"],
        prefix: tuple[Array, Array],
        length: Int[Array, " B"],
        mask: Bool[Array, "B m n"],
        earlier: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B m H"], tuple[Array, Array]]:
        """Run m more rows over a prefix and each other (`GatedAttention.verify`)."""
        mixer = self.layers[0].self_attn
        h = self.join(embedded, hidden)
        return self._run(
            h, lambda x: mixer.verify(x, positions, prefix, length, mask, earlier)
        )

    def join(
        self, embedded: Float[Array, "B T H"], hidden: Float[Array, "B T H"]
    ) -> Float[Array, "B T H"]:
        """Return the layer's input: both parts normed, the embedding first."""
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return self.fc(jnp.concatenate(parts, axis=-1))

    def _run(
        self, h: Float[Array, "B T H"], mix: Callable
    ) -> tuple[Float[Array, "B T H"], tuple[Array, Array]]:
        """Run the layer around `mix(x) -> (y, kv)`, then the norm."""
        (layer,) = self.layers
        rows = decoder.Rows(h, layer.input_layernorm(h), self.norm.weight[...])
        (_, m), kv = layer(rows, mix)
        return m, kv
