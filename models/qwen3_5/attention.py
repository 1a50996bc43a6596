"""Gated softmax attention with partial rotary embedding, every fourth layer.

q, gate = heads(x W_q);  k, v = heads(x W_k), heads(x W_v)
q, k = rope(rms(q)), rope(rms(k))
y = (softmax(q k^T D^-0.5) v * sigmoid(gate)) W_o
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import layers
from pallas_kernels.attention_front import op as attention_front
from treewy_jax import attention, sharding, slots

_attention_front = sharding.by_letters(
    attention_front.attention_front,
    letters={
        "q_and_gate": "B T heads",
        "k": "B T kv",
        "v": "B T kv",
        "q_weight": "D",
        "k_weight": "D",
        "positions": "B T",
    },
    sizes={"heads": "heads", "kv_heads": "kv"},
)


class GatedAttention(nnx.Module):
    """One attention mixer, run in three ways: prefill, decode, verify."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        size, dim = config.hidden_size, config.head_dim
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        options = dict(dtype=dtype, rngs=rngs)
        self.q_proj = layers.linear(size, heads * 2 * dim, **options)
        self.k_proj = layers.linear(size, kv * dim, **options)
        self.v_proj = layers.linear(size, kv * dim, **options)
        self.o_proj = layers.linear(heads * dim, size, **options)
        self.q_norm = layers.RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = layers.RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype)
        self.config = config

    def prefill(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T *parts H"], tuple[Array, Array]]:
        """Attend causally; returns the mixed rows, and keys and values of all rows."""
        q, gate, k, v = self.project(x, positions)
        return self.output(attention.causal(q, k, v), gate), (k, v)

    def verify(
        self,
        x: Float[Array, "B n H"],
        positions: Int[Array, "B n"],
        prefix: tuple[Array, Array],
        length: Int[Array, " B"],
        mask: Bool[Array, "B n m"],
        earlier: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B n *parts H"], tuple[Array, Array]]:
        """Attend each node to the prefix and, by `mask`, to its ancestors-or-self.

        `earlier` are keys and values of nodes run before (drafting goes level by
        level); they come first among the m columns of `mask`. Returns the mixed rows
        and the keys and values of all m nodes, which commit will move.
        """
        q, gate, k, v = self.project(x, positions)
        if earlier is not None:
            k = jnp.concatenate([earlier[0], k], axis=1)
            v = jnp.concatenate([earlier[1], v], axis=1)
        mixed = attention.over_tree(q, prefix, (k, v), length, mask)
        return self.output(mixed, gate), (k, v)

    def decode(
        self, x: Float[Array, "B H"], prefix: tuple[Array, Array], length: Array
    ) -> tuple[Float[Array, "B *parts H"], tuple[Array, Array]]:
        """Attend a token at position `length`; returns its row and the grown prefix."""
        alone = jnp.ones((x.shape[0], 1, 1), bool)
        y, (k, v) = self.verify(x[:, None], length[:, None], prefix, length, alone)
        one = jnp.ones_like(length)
        keys = slots.append(prefix[0], k, one, length)
        return y[:, 0], (keys, slots.append(prefix[1], v, one, length))

    def project(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Array, Array, Array, Array]:
        """Return rotated q, its gate, rotated k, and v, all by head."""
        q_and_gate, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # Heads are counted by the weights: a mesh may have some key heads twice.
        dim = self.config.head_dim
        heads, kv_heads = q_and_gate.shape[-1] // (2 * dim), k.shape[-1] // dim
        q, k, v = _attention_front(
            q_and_gate,
            k,
            v,
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            positions,
            heads=heads,
            kv_heads=kv_heads,
            rotary_dim=self.config.rotary_dim,
            theta=self.config.rope_theta,
            eps=self.config.rms_norm_eps,
        )
        gate = q_and_gate.reshape(*x.shape[:2], heads, 2 * dim)[..., dim:]
        return q, gate, k, v

    def output(
        self, mixed: Float[Array, "B T heads D"], gate: Float[Array, "B T heads D"]
    ) -> Float[Array, "B T *parts H"]:
        """Gate the attended values and project them back, perhaps in parts."""
        gated = mixed * jax.nn.sigmoid(gate)
        return layers.in_parts(self.o_proj, gated.reshape(*gated.shape[:2], -1))
