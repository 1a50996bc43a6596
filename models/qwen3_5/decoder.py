"""A decoder layer: the recurrence of Gated DeltaNet or attention, then a feed-forward.

What a layer keeps between steps is (conv window, lifecycle state) or (keys, values).
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.qwen3_5 import attention, gated_delta_net, layers, moe
from models.qwen3_5 import config as config_lib
from treewy_jax import commit
from treewy_jax import tree as tree_lib


class Rows(NamedTuple):
    """Rows on their way through layers that follow each other.

    A layer adds what it made to the residual stream and norms the sum for whoever comes
    next, which is one launch on a GPU: so it gets them normed, and the next norm.

    Attributes:
        h: the residual stream.
        x: h as the layer's own input norm leaves it.
        next_norm: weight of the norm behind the layer.
    """

    h: Float[Array, "B T H"]
    x: Float[Array, "B T H"]
    next_norm: Float[Array, " H"]


class DecoderLayer(nnx.Module):
    """Norm, mixer, residual; norm, feed-forward, residual.

    Given rows h of the residual stream alone, a layer returns them with its own added;
    given `Rows`, it returns (h, x), x by the norm behind it. The mixer sits under the
    name the checkpoints use, which also tells its kind.
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
        self.attends = attends

    def prefill(
        self,
        h: Float[Array, "B T H"] | Rows,
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T H"] | tuple, tuple]:
        """Run right-padded prompts from an empty state; returns rows and what is kept.

        Padding leaves no trace in windows and states, but has keys and values.
        """
        if self.attends:
            return self(h, lambda x: self.self_attn.prefill(x, positions))
        return self(h, lambda x: self.linear_attn.prefill(x, lengths))

    def verify(
        self,
        h: Float[Array, "B n H"] | Rows,
        kept: tuple,
        length: Int[Array, " B"],
        nodes: "NodeView",
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n H"] | tuple, tuple]:
        """Run all nodes; returns rows and (raw rows, lifecycle records) or (k, v)."""
        if self.attends:
            mixer = self.self_attn
            return self(
                h, lambda x: mixer.verify(x, nodes.positions, kept, length, nodes.mask)
            )
        mix = self.linear_attn.verify
        return self(h, lambda x: mix(x, *kept, nodes.tree, nodes.windows, lifecycle))

    def decode(
        self, h: Float[Array, "B 1 H"] | Rows, kept: tuple, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B 1 H"] | tuple, tuple]:
        """Run one token by the plain recurrence; returns its row and what is kept."""

        def mix(x):
            if self.attends:
                y, after = self.self_attn.decode(x[:, 0], kept, length)
            else:
                y, after = self.linear_attn.decode(x[:, 0], *kept)
            return y[:, None], after

        return self(h, mix)

    def __call__(
        self, h: Float[Array, "B T H"] | Rows, mix: Callable
    ) -> tuple[Float[Array, "B T H"] | tuple, tuple]:
        """Run the layer around `mix(x) -> (y, kept)`; returns the rows and `kept`."""
        alone = not isinstance(h, Rows)
        h, x, next_norm = (h, self.input_layernorm(h), None) if alone else h
        norm = self.post_attention_layernorm
        y, kept = mix(x)
        h, x = layers.add_and_norm(h, y, norm.weight[...], norm.eps)
        if alone:
            return h + self.mlp(x), kept
        return layers.add_and_norm(h, self.mlp.parts(x), next_norm, norm.eps), kept


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
