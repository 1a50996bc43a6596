"""Mixture of experts: the softmax of the top k scores, plus a gated shared expert.

s = W_gate x;  y = sum_{e in top k} exp(s_e) / sum(exp(s_top)) * expert_e(x)
                   + sigmoid(w_shared x) * shared_expert(x)
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
from pallas_kernels.grouped_matmul import router
from pallas_kernels.residual_norm import op as residual_norm
from treewy_jax import sharding


class Gate(nnx.Module):
    """Which experts a row goes to, and the gate of the shared one: rows of a matrix.

    `weight` [E + 1, H] is as checkpoints store it, the shared expert's row the last.
    """

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        shape = (config.num_experts + 1, config.hidden_size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype))
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "T H"]
    ) -> tuple[Float[Array, "T K1"], Int[Array, "T K"]]:
        """Return weights, the shared expert's in the last column, and experts."""
        weight = self.weight[...].astype(x.dtype)
        return router.route(x, weight, self.top_k, shared=True)


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
        options = dict(dtype=dtype, rngs=rngs)
        self.gate = Gate(config, **options)
        self.experts = Experts(config, **options)
        self.shared_expert = layers.MLP(
            config.hidden_size, config.shared_expert_intermediate_size, **options
        )

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

    def parts(self, x: Float[Array, "B T H"]) -> Float[Array, "B T *parts H"]:
        """Return the rows of `self(x)`, or what `layers.add_and_norm` adds up to them.

        The latter where one device runs all experts, by a kernel.
        """
        size = x.shape[-1]
        rows, slots = x.reshape(-1, size), self.gate.top_k + 1
        kernel = residual_norm.adds_up(len(rows), slots, size, x.dtype)
        if sharding.active() is not None or not kernel:
            return self(x)
        weights, experts = self.gate(rows)
        matrices = self.experts.gate_up_proj[...], self.experts.down_proj[...]
        shared = self._shared()
        parts = grouped_matmul.swiglu_parts(rows, *matrices, experts, weights, shared)
        return parts.reshape(*x.shape[:2], -1, size)

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
        weights, experts = self.gate(rows)
        if over:
            experts = self._own(experts, over)
        if over == inner_over:
            mixed = self._run(rows, experts, weights, self._shared())
            return sharding.total(mixed, over).reshape(x.shape)
        routed = self._run(rows, experts, weights[:, :-1])
        shared = weights[:, -1:].astype(x.dtype) * self.shared_expert(rows)
        mixed = sharding.total(routed, over) + sharding.total(shared, inner_over)
        return mixed.reshape(x.shape)

    def _run(self, rows, experts, weights, shared=None):
        """Run rows through their experts, and all through the shared one if given."""
        matrices = self.experts.gate_up_proj[...], self.experts.down_proj[...]
        return grouped_matmul.swiglu_experts(rows, *matrices, experts, weights, shared)

    def _shared(self) -> tuple[Float[Array, "H S2"], Float[Array, "S H"]]:
        """Return the shared expert's matrices: the columns of it that are here."""
        gate_up = self.shared_expert.gate_up_proj[...]
        down = self.shared_expert.down_proj.kernel[...]
        return gate_up.reshape(len(gate_up), -1), down

    def _own(
        self, experts: Int[Array, "T K"], over: tuple[str, ...]
    ) -> Int[Array, "T K"]:
        """Number the experts of this device from 0; those elsewhere are none here."""
        count = self.experts.down_proj.shape[0]
        local = experts - count * lax.axis_index(over)
        return jnp.where((local >= 0) & (local < count), local, count)
