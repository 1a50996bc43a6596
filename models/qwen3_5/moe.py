"""Mixture of experts: the top k of a softmax, renormalised, plus a gated shared one.

p = softmax(x W_gate);  y = sum_{e in top k} p_e / sum(p_top) * expert_e(x)
                            + sigmoid(x w_shared) * shared_expert(x)
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import layers
from pallas_kernels.grouped_matmul import op as grouped_matmul


class Experts(nnx.Module):
    """The stacked expert weights; gate and up share one matrix, gate first."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        count, size = config.num_experts, config.hidden_size
        inner = config.moe_intermediate_size
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up_proj = nnx.Param(
            init(rngs.params(), (count, size, 2 * inner), dtype)
        )
        self.down_proj = nnx.Param(init(rngs.params(), (count, inner, size), dtype))


class MoE(nnx.Module):
    """The feed-forward of a mixture-of-experts layer."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        size, options = config.hidden_size, dict(dtype=dtype, rngs=rngs)
        self.gate = layers.linear(size, config.num_experts, **options)
        self.experts = Experts(config, **options)
        self.shared_expert = layers.MLP(
            size, config.shared_expert_intermediate_size, **options
        )
        self.shared_expert_gate = layers.linear(size, 1, **options)
        self.top_k = config.num_experts_per_tok

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        rows = x.reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        weights, experts = lax.top_k(scores, self.top_k)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        routed = grouped_matmul.swiglu_experts(
            rows,
            self.experts.gate_up_proj[...],
            self.experts.down_proj[...],
            experts,
            weights,
        )
        shared = jax.nn.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(
            rows
        )
        return (routed + shared).reshape(x.shape)
