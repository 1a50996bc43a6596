"""Shape contract of the front: what a call is, costs and must move."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtypes (by name) of one call; hashable.

    `width` counts the taps of the convolution; 0 is a call without it, which leaves
    the values alone (`value_dim` is 0 then).
    """

    batch: int
    nodes: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    rows_dtype: str
    window_dtype: str
    gate_dtype: str
    accumulation_dtype: str

    @property
    def channels(self) -> int:
        """Channels of a row: q, k and v of all heads."""
        keys = 2 * self.key_heads * self.key_dim
        return keys + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Columns that are read of a row with its gates: q, k, v, b and a."""
        return self.channels + 2 * self.value_heads

    @property
    def bytes_moved(self) -> int:
        """Least traffic: rows, window and gates read once, results written once."""
        rows, window, gate, wide = (
            jnp.dtype(getattr(self, f"{kind}_dtype")).itemsize
            for kind in ("rows", "window", "gate", "accumulation")
        )
        old = max(self.width - 1, 0) * self.channels * window
        new = 2 * self.nodes * self.channels * rows
        gates = 2 * self.nodes * self.value_heads * (gate + wide)
        row_numbers = 4 * self.nodes * self.width
        return self.batch * (old + new + gates + row_numbers)

    @property
    def flops(self) -> int:
        """Multiply-adds times two of the taps, and about ten more an element."""
        return self.batch * self.nodes * self.channels * (2 * self.width + 10)


def spec_of_rows(
    rows: Float[Array, "..."],
    window: Float[Array, "..."],
    taps: Float[Array, "..."],
    log_rate: Float[Array, "..."],
    dt_bias: Float[Array, "..."],
    windows: Int[Array, "..."],
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
) -> Spec:
    """Describe a call with the convolution; ValueError where shapes disagree."""
    if rows.ndim != 3:
        raise ValueError(f"rows has shape {rows.shape}; [B, n, columns] is allowed")
    spec = Spec(
        batch=rows.shape[0],
        nodes=rows.shape[1],
        key_heads=key_heads,
        value_heads=_check_decay(log_rate, dt_bias),
        key_dim=key_dim,
        value_dim=value_dim,
        width=taps.shape[-1] if taps.ndim else 0,
        rows_dtype=rows.dtype.name,
        window_dtype=window.dtype.name,
        gate_dtype=rows.dtype.name,
        accumulation_dtype=_wide(rows, taps, log_rate, dt_bias),
    )
    _check_heads(spec)
    channels, width = spec.channels, spec.width
    if taps.shape != (channels, width):
        raise ValueError(
            f"taps has shape {taps.shape}; [C, W] is allowed with C = "
            f"2 key_heads key_dim + Hv value_dim = {channels}"
        )
    if rows.shape[-1] < spec.columns:
        raise ValueError(
            f"rows has shape {rows.shape}; at least {spec.columns} columns are "
            "allowed, those of q, k, v, b and a"
        )
    _check("window", window, (spec.batch, width - 1, channels))
    _check("windows", windows, (spec.batch, spec.nodes, width))
    return spec


def spec_of_heads(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    log_rate: Float[Array, "..."],
    dt_bias: Float[Array, "..."],
) -> Spec:
    """Describe a call without the convolution; ValueError where shapes disagree."""
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; [B, n, Hk, Dk] is allowed")
    batch, nodes, key_heads, key_dim = q.shape
    _check("k", k, q.shape)
    value_heads = _check_decay(log_rate, dt_bias)
    _check("a", a, (batch, nodes, value_heads))
    _check("b", b, (batch, nodes, value_heads))
    spec = Spec(
        batch=batch,
        nodes=nodes,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=0,
        width=0,
        rows_dtype=q.dtype.name,
        window_dtype=k.dtype.name,
        gate_dtype=a.dtype.name,
        accumulation_dtype=_wide(q, k, a, b, log_rate, dt_bias),
    )
    _check_heads(spec)
    return spec


def dims(spec: Spec) -> tuple[str, ...]:
    """Return the fields that are head dimensions; without a conv there is no v."""
    return ("key_dim", "value_dim") if spec.width else ("key_dim",)


def unsupported_width(spec: Spec) -> str | None:
    """Return why kernels take no convolution of a single tap, or None."""
    return "needs a convolution of width 2 or more, not 1" if spec.width == 1 else None


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")


def _check_decay(log_rate, dt_bias) -> int:
    """Return the number of value heads, on which both must agree."""
    if log_rate.ndim != 1:
        raise ValueError(f"A_log has shape {log_rate.shape}; [Hv] is allowed")
    (heads,) = log_rate.shape
    _check("dt_bias", dt_bias, (heads,))
    return heads


def _check_heads(spec: Spec) -> None:
    if spec.key_heads < 1 or spec.value_heads % spec.key_heads:
        raise ValueError(
            f"key_heads is {spec.key_heads}; a divisor of Hv = {spec.value_heads} is "
            "allowed"
        )
    for name in dims(spec):
        if getattr(spec, name) < 1:
            raise ValueError(f"{name} is {getattr(spec, name)}; 1 or more is allowed")


def _wide(*arrays: Array) -> str:
    return jnp.result_type(jnp.float32, *arrays).name
