"""A decoder layer and the super-block: three GDN layers, then one of attention.

Every published size repeats this block, so its parameters are stacked and the model
scans over blocks; the layers inside are unrolled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.qwen3_5 import attention, gated_delta_net, layers, moe
from models.qwen3_5 import config as config_lib
from treewy_jax import commit
from treewy_jax import tree as tree_lib


class DecoderLayer(nnx.Module):
    """Norm, mixer, residual; norm, feed-forward, residual.

    The mixer sits under the name the checkpoints use, which also tells its kind.
    """

    def __init__(self, config: config_lib.Qwen3_5Config, *, attends: bool, dtype, rngs):
        options = dict(dtype=dtype, rngs=rngs)
        norm = dict(eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = layers.RMSNorm(config.hidden_size, **norm)
        if attends:
            self.self_attn = attention.GatedAttention(config, **options)
        else:
            self.linear_attn = gated_delta_net.GatedDeltaNet(config, **options)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, **norm)
        if config.is_moe or config.intermediate_size is None:
            self.mlp = moe.MoE(config, **options)
        else:
            self.mlp = layers.MLP(
                config.hidden_size, config.intermediate_size, **options
            )

    def __call__(
        self, h: Float[Array, "B T H"], mix: Callable
    ) -> tuple[Float[Array, "B T H"], tuple]:
        """Run the layer around `mix(x) -> (y, kept)`; returns the rows and `kept`."""
        y, kept = mix(self.input_layernorm(h))
        h = h + y
        return h + self.mlp(self.post_attention_layernorm(h)), kept


class NodeView(NamedTuple):
    """What layers need to know of the tree, computed once a step.

    Attributes:
        tree: the nodes to verify.
        windows: conv inputs of each node (`conv.tree_windows`).
        positions: absolute position of each node, by depth.
        mask: ancestor-or-self.
    """

    tree: tree_lib.DraftTree
    windows: Int[Array, "B n W"]
    positions: Int[Array, "B n"]
    mask: Bool[Array, "B n n"]


class SuperBlock(nnx.Module):
    """`full_attention_interval` layers, the last of which attends.

    What GDN layers keep comes back stacked on a leading axis, attention's as it is.
    """

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        options = dict(dtype=dtype, rngs=rngs)
        gdn = range(config.gdn_per_block)
        self.layers = nnx.List(
            [DecoderLayer(config, attends=False, **options) for _ in gdn]
            + [DecoderLayer(config, attends=True, **options)]
        )

    def prefill(
        self,
        h: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T H"], tuple]:
        """Returns rows and ((windows, states), (keys, values))."""
        *recurrent, attending = self.layers
        kept = []
        for layer in recurrent:
            h, k = layer(h, lambda x, m=layer.linear_attn: m.prefill(x, lengths))
            kept.append(k)
        mixer = attending.self_attn
        h, kv = attending(h, lambda x: mixer.prefill(x, positions))
        return h, (_stack(kept), kv)

    def verify(
        self,
        h: Float[Array, "B n H"],
        cache: tuple,
        length: Int[Array, " B"],
        nodes: NodeView,
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n H"], tuple]:
        """Returns rows and ((conv rows, lifecycle records), (keys, values))."""
        (windows, states), prefix = cache
        *recurrent, attending = self.layers
        kept = []
        for i, layer in enumerate(recurrent):
            window, state = jax.tree.map(lambda leaf, i=i: leaf[i], (windows, states))
            mixer = layer.linear_attn
            h, k = layer(
                h,
                lambda x, m=mixer, w=window, s=state: m.verify(
                    x, w, s, nodes.tree, nodes.windows, lifecycle
                ),
            )
            kept.append(k)
        mixer = attending.self_attn
        h, kv = attending(
            h,
            lambda x: mixer.verify(x, nodes.positions, prefix, length, nodes.mask),
        )
        return h, (_stack(kept), kv)

    def decode(
        self, h: Float[Array, "B 1 H"], cache: tuple, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 H"], tuple]:
        """Run one token by the plain recurrence; returns its row and the new cache."""
        (windows, states), prefix = cache
        *recurrent, attending = self.layers
        kept = []
        for i, layer in enumerate(recurrent):
            mix = _one_token(layer.linear_attn.decode, windows[i], states[i])
            h, k = layer(h, mix)
            kept.append(k)
        h, kv = attending(h, _one_token(attending.self_attn.decode, prefix, length))
        return h, (_stack(kept), kv)


def _one_token(decode: Callable, *state) -> Callable:
    def mix(x):
        y, kept = decode(x[:, 0], *state)
        return y[:, None], kept

    return mix


def _stack(kept: list) -> tuple:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *kept)
