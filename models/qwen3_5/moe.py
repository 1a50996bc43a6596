"""Mixture of experts: the top k of a softmax, renormalised, plus a gated shared one.

p = softmax(x W_gate);  y = sum_{e in top k} p_e / sum(p_top) * expert_e(x)
                            + sigmoid(x w_shared) * shared_expert(x)
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import layers
from models.qwen3_5 import sharding as table
from pallas_kernels.grouped_matmul import op as grouped_matmul
from treewy_jax import sharding


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
        if sharding.active() is None:
            return self._mix(x)
        graphdef, params = nnx.split(self)
        leaves, structure = jax.tree.flatten(params)
        letters = (table.letters(params), "B T H")
        axes = sharding.split(sharding.sizes_of((leaves, x), letters))

        def on_part(leaves, x):
            part = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
            return part._mix(x, axes["E"], axes["I"])

        return sharding.run(on_part, (leaves, x), letters, "B T H", axes)

    def _mix(
        self,
        x: Float[Array, "B T H"],
        over: tuple[str, ...] = (),
        inner_over: tuple[str, ...] = (),
    ) -> Float[Array, "B T H"]:
        """Run all rows through the experts that are here, and join the parts.

        Experts are spread over the mesh axes `over`, and the intermediate of the shared
        one over `inner_over`.
        """
        rows = x.reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        weights, experts = lax.top_k(scores, self.top_k)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if over:
            experts = self._own(experts, over)
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
        if over == inner_over:
            mixed = sharding.total(routed + shared, over)
        else:
            mixed = sharding.total(routed, over) + sharding.total(shared, inner_over)
        return mixed.reshape(x.shape)

    def _own(
        self, experts: Int[Array, "T K"], over: tuple[str, ...]
    ) -> Int[Array, "T K"]:
        """Number the experts of this device from 0; those elsewhere are none here."""
        count = self.experts.down_proj.shape[0]
        local = experts - count * lax.axis_index(over)
        return jnp.where((local >= 0) & (local < count), local, count)
