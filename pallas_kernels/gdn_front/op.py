"""The front op: raw rows of the projections to what the recurrence takes.

    c_t = silu(sum_w taps[:, w] x_{windows[t, w]}),  split into q, k, v of each head
    q <- q / sqrt(|q|^2 + 1e-6) Dk^-0.5,   k <- k / sqrt(|k|^2 + 1e-6)
    log_decay = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)

Reference: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.gdn_front import config as configs
from pallas_kernels.gdn_front import spec as specs

IMPLEMENTATIONS = implementations.Implementations(
    "gdn_front",
    {
        "triton": "pallas_kernels.gdn_front.triton",
        "mosaic_tpu": "pallas_kernels.gdn_front.mosaic_tpu",
        "reference": "pallas_kernels.gdn_front.reference",
    },
)


def gdn_front(
    rows: Float[Array, "..."],
    window: Float[Array, "..."],
    taps: Float[Array, "..."],
    A_log: Float[Array, "..."],
    dt_bias: Float[Array, "..."],
    windows: Int[Array, "..."],
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B n Hk Dk"],
    Float[Array, "B n Hk Dk"],
    Float[Array, "B n Hv Dv"],
    Float[Array, "B n Hv"],
    Float[Array, "B n Hv"],
]:
    """Return q, k, v in the dtype of `rows`, log_decay and beta in float32.

    Args:
      rows: [B, n, C + 2 Hv or more], raw rows of the nodes with their raw gates:
        columns q | k | v | b | a, of which C = 2 Hk Dk + Hv Dv are the conv's. Columns
        behind them are not read.
      window: [B, W-1, C], the last raw rows before the first node, oldest first.
      taps: [C, W], of the depthwise convolution; the last meets the node itself.
      A_log, dt_bias: [Hv], parameters of the decay.
      windows: int32 [B, n, W], the rows of [window; rows] that each node's taps meet,
        oldest first. A number beyond the ends is taken as the nearest row.
      key_heads, key_dim, value_dim: Hk, Dk and Dv.
      impl: name in `IMPLEMENTATIONS`, or None for the best that runs here.
      config: how the kernel is cut; None takes the tuned cut.

    Raises ValueError for shapes that disagree or an unknown `impl`,
    NotImplementedError for a named one that does not run here.
    """
    arrays = (rows, window, taps, A_log, dt_bias, windows)
    heads = dict(key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
    spec = specs.spec_of_rows(*arrays, **heads)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.gdn_front(*arrays, spec=spec, config=config)


def normalize_and_gate(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    A_log: Float[Array, "..."],
    dt_bias: Float[Array, "..."],
    *,
    impl: str | None = None,
    config: configs.Config | None = None,
) -> tuple[
    Float[Array, "B n Hk Dk"],
    Float[Array, "B n Hk Dk"],
    Float[Array, "B n Hv"],
    Float[Array, "B n Hv"],
]:
    """Return normalised q (also scaled) and k, log_decay and beta: no convolution.

    For rows that are convolved and activated already: q, k [B, n, Hk, Dk], and raw
    gates a, b [B, n, Hv]. The other arguments and what is raised are those of
    `gdn_front`.
    """
    arrays = (q, k, a, b, A_log, dt_bias)
    spec = specs.spec_of_heads(*arrays)
    module = IMPLEMENTATIONS.module(IMPLEMENTATIONS.choose(spec, impl).name)
    return module.normalize_and_gate(*arrays, spec=spec, config=config)
