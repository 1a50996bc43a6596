"""The Gated DeltaNet mixer: projections, conv, gates, and the recurrence between.

For token t with input x (qwen35.md 1.1 of the design; Yang et al., arXiv 2412.06464):

    q, k, v = heads(silu(conv(x W_qkv)));  q, k l2-normalised, q scaled by Dk^-0.5
    beta = sigmoid(x W_b);  log_decay = -exp(A_log) softplus(x W_a + dt_bias)
    output = (norm_weight * rms(o)) * silu(x W_z), projected back

One matrix `in_proj` holds the columns of all projections, q | k | v | b | a | z, so
that they are one product, of which later kernels read their columns where they lie.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import layers
from pallas_kernels.chunk_prefill import op as chunk_prefill
from pallas_kernels.decode import op as decode
from pallas_kernels.gdn_front import op as gdn_front
from treewy_jax import commit, conv, sharding
from treewy_jax import tree as tree_lib

L2_EPS = 1e-6

_chunk_prefill = sharding.by_letters(chunk_prefill.chunk_prefill)
_decode = sharding.by_letters(
    decode.decode,
    letters={
        "q": "B Hk Dk",
        "k": "B Hk Dk",
        "v": "B Hv Dv",
        "log_decay": "B Hv",
        "beta": "B Hv",
        "state": "B Hv Dv Dk",
    },
)
_gdn_front = sharding.by_letters(
    gdn_front.gdn_front,
    letters={
        "rows": "B n joint",
        "window": "B W1 C",
        "taps": "C W",
        "A_log": "Hv",
        "dt_bias": "Hv",
        "windows": "B n W",
    },
    sizes={"key_heads": "Hk"},
)


class Columns(NamedTuple):
    """What lies side by side in the rows of `in_proj`."""

    conv: Float[Array, "B T C"]
    b: Float[Array, "B T Hv"]
    a: Float[Array, "B T Hv"]
    z: Float[Array, "B T Hv Dv"]


class ConvWeight(nnx.Module):
    """Depthwise taps [C, W]; tap W-1 meets the newest token."""

    def __init__(self, channels: int, width: int, *, dtype, rngs):
        scale = width**-0.5
        taps = jax.random.uniform(
            rngs.params(), (channels, width), minval=-scale, maxval=scale
        )
        self.weight = nnx.Param(taps.astype(dtype))


class GatedNorm(nnx.Module):
    """`weight * rms(o) * silu(z)` per head: norm first, then gate, plain weight."""

    def __init__(self, size: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(
        self, o: Float[Array, "B T Hv Dv"], z: Float[Array, "B T Hv Dv"]
    ) -> Float[Array, "B T Hv Dv"]:
        normed = layers.rms_normalize(o, self.eps) * self.weight[...]
        return (normed * jax.nn.silu(z.astype(normed.dtype))).astype(z.dtype)


class GatedDeltaNet(nnx.Module):
    """One GDN mixer with the three ways of running it: prefill, decode, verify."""

    def __init__(self, config: config_lib.Qwen3_5Config, *, dtype, rngs):
        size, heads = config.hidden_size, config.linear_num_value_heads
        options = dict(dtype=dtype, rngs=rngs)
        joint = config.conv_dim + 2 * heads + config.value_dim
        self.in_proj = layers.linear(size, joint, **options)
        self.out_proj = layers.linear(config.value_dim, size, **options)
        self.conv1d = ConvWeight(
            config.conv_dim, config.linear_conv_kernel_dim, **options
        )
        self.A_log = nnx.Param(_initial_log_rate(rngs, heads))
        self.dt_bias = nnx.Param(_initial_dt_bias(rngs, heads))
        self.norm = GatedNorm(config.linear_value_head_dim, eps=config.rms_norm_eps)
        self.config = config

    def prefill(
        self, x: Float[Array, "B T H"], lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T *parts H"], tuple[Array, Array]]:
        """Run whole prompts from an empty state.

        Rows at or beyond `lengths` leave the state alone: their beta and log decay
        are zeroed, since a zero key alone would still let the state decay.

        Returns the mixed rows and (conv window [B, W-1, C], state [B, Hv, Dv, Dk]).
        """
        columns = split_columns(self.in_proj(x), self.config)
        window = conv.empty_window(columns.conv, self.conv1d.weight.shape[-1])
        q, k, v = _split_heads(
            conv.causal(columns.conv, window, self.conv1d.weight[...]),
            key_heads=self.config.linear_num_key_heads,
            key_dim=self.config.linear_key_head_dim,
            value_dim=self.config.linear_value_head_dim,
            dtype=self.in_proj.kernel.dtype,
        )
        valid = jnp.arange(x.shape[1])[None] < lengths[:, None]
        log_decay, beta = self._gates(columns, valid)
        state = jnp.zeros(self._state_shape(x.shape[0]), log_decay.dtype)
        output, state = _chunk_prefill(q, k, v, log_decay, beta, state)
        window = conv.window_at(columns.conv, window, lengths)
        return self._output(output, columns.z), (window, state)

    def decode(
        self,
        x: Float[Array, "B H"],
        window: Float[Array, "B W1 C"],
        state: Float[Array, "B Hv Dv Dk"],
    ) -> tuple[Float[Array, "B *parts H"], tuple[Array, Array]]:
        """Run one token by the recurrence; returns its row, new window and state."""
        rows = self.in_proj(x[:, None])
        columns = split_columns(rows, self.config)
        width = self.conv1d.weight.shape[-1]
        newest = jnp.broadcast_to(jnp.arange(width), (x.shape[0], 1, width))
        inputs = self._front(rows, window, newest)
        q, k, v, log_decay, beta = (row[:, 0] for row in inputs)
        output, after = _decode(q, k, v, log_decay, beta, state)
        one = jnp.ones(x.shape[0], jnp.int32)
        window = conv.window_at(columns.conv, window, one)
        return self._output(output[:, None], columns.z)[:, 0], (window, after)

    def verify(
        self,
        x: Float[Array, "B n H"],
        window: Float[Array, "B W1 C"],
        state,
        tree: tree_lib.DraftTree,
        windows: Int[Array, "B n W"],
        lifecycle: commit.Lifecycle,
    ) -> tuple[Float[Array, "B n *parts H"], tuple]:
        """Run every node of `tree` below the committed state, which is only read.

        `windows` are the row numbers from `conv.tree_windows`. Returns the mixed rows
        and the records to commit from: (raw rows [B, n, joint], lifecycle records).
        """
        rows = self.in_proj(x)
        inputs = self._front(rows, window, windows)
        output, records = lifecycle.verify(state, inputs, tree)
        z = split_columns(rows, self.config).z
        return self._output(output, z), (rows, records)

    def _front(
        self,
        rows: Float[Array, "B n joint"],
        window: Float[Array, "B W1 C"],
        windows: Int[Array, "B n W"],
    ) -> commit.Inputs:
        """Conv along `windows`, heads and gates of every node, in one launch."""
        return commit.Inputs(
            *_gdn_front(
                rows,
                window,
                self.conv1d.weight[...],
                self.A_log[...],
                self.dt_bias[...],
                windows,
                key_heads=self.config.linear_num_key_heads,
                key_dim=self.config.linear_key_head_dim,
                value_dim=self.config.linear_value_head_dim,
            )
        )

    def _gates(
        self, columns: Columns, valid: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T Hv"], Float[Array, "B T Hv"]]:
        """Return log_decay <= 0 and beta in (0, 1), float32; both 0 where not valid."""
        a = columns.a.astype(jnp.float32)
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))
        log_decay = -rate * jax.nn.softplus(a + self.dt_bias[...].astype(jnp.float32))
        beta = jax.nn.sigmoid(columns.b.astype(jnp.float32))
        keep = valid[..., None]
        return jnp.where(keep, log_decay, 0.0), jnp.where(keep, beta, 0.0)

    def _output(
        self, output: Float[Array, "B T Hv Dv"], z: Float[Array, "B T Hv Dv"]
    ) -> Float[Array, "B T *parts H"]:
        gated = self.norm(output, z)
        return layers.in_parts(self.out_proj, gated.reshape(*gated.shape[:2], -1))

    def _state_shape(self, batch: int) -> tuple[int, int, int, int]:
        cfg = self.config
        return (
            batch,
            cfg.linear_num_value_heads,
            cfg.linear_value_head_dim,
            cfg.linear_key_head_dim,
        )


def split_columns(
    rows: Float[Array, "B T joint"], config: config_lib.Qwen3_5Config
) -> Columns:
    """Split rows that `in_proj` made; on a mesh, each device those of its heads."""
    return _split_columns(
        rows,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        value_dim=config.linear_value_head_dim,
    )


@functools.partial(sharding.by_letters, sizes={"key_heads": "Hk", "value_heads": "Hv"})
def _split_columns(
    rows: Float[Array, "B T joint"],
    *,
    key_heads: int,
    value_heads: int,
    value_dim: int,
) -> Columns:
    values = value_heads * value_dim
    ends = [-values - 2 * value_heads, -values - value_heads, -values]
    conv_rows, b, a, z = jnp.split(rows, [rows.shape[-1] + end for end in ends], -1)
    z = z.reshape(*z.shape[:2], value_heads, value_dim)
    return Columns(conv_rows, b, a, z)


@functools.partial(sharding.by_letters, sizes={"key_heads": "Hk"})
def _split_heads(
    mixed: Float[Array, "B T C"],
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: DTypeLike,
) -> tuple[
    Float[Array, "B T Hk Dk"], Float[Array, "B T Hk Dk"], Float[Array, "B T Hv Dv"]
]:
    """Split conv outputs into q, k (normalised, q scaled) and v, after silu."""
    columns = key_heads * key_dim
    parts = jnp.split(jax.nn.silu(mixed), [columns, 2 * columns], axis=-1)
    widths = (key_dim, key_dim, value_dim)
    q, k, v = (
        part.reshape(*part.shape[:2], -1, width)
        for part, width in zip(parts, widths, strict=True)
    )
    q, k = l2_normalize(q) * key_dim**-0.5, l2_normalize(k)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def l2_normalize(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Divide by `sqrt(sum x^2 + 1e-6)`: the epsilon is on the sum, not the mean."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _initial_log_rate(rngs, heads: int) -> Float[Array, " heads"]:
    """Decay rates spread over (0.05, 16): memories both long and short."""
    return jnp.log(
        jax.random.uniform(rngs.params(), (heads,), minval=0.05, maxval=16.0)
    )


def _initial_dt_bias(rngs, heads: int) -> Float[Array, " heads"]:
    """Inverse softplus of steps spread log-uniformly over (1e-3, 1e-1)."""
    log_step = jax.random.uniform(
        rngs.params(), (heads,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1)
    )
    step = jnp.exp(log_step)
    return step + jnp.log(-jnp.expm1(-step))
