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
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    log_rate: Float[Array, "..."],
    dt_bias: Float[Array, "..."],
    windows: Int[Array, "..."],
    *,
    key_heads: int,
    key_dim: int,
) -> Spec:
    """Describe a call with the convolution; ValueError where shapes disagree."""
    if rows.ndim != 3:
        raise ValueError(f"rows has shape {rows.shape}; [B, n, C] is allowed")
    batch, nodes, channels = rows.shape
    if taps.ndim != 2 or taps.shape[0] != channels:
        raise ValueError(f"taps has shape {taps.shape}; [{channels}, W] is allowed")
    width = taps.shape[1]
    value_heads = _check_gates(a, b, log_rate, dt_bias, (batch, nodes))
    _check("window", window, (batch, width - 1, channels))
    _check("windows", windows, (batch, nodes, width))
    _check_key_heads(key_heads, value_heads)
    value_dim, rest = divmod(channels - 2 * key_heads * key_dim, value_heads)
    if rest or value_dim < 1 or key_dim < 1:
        raise ValueError(
            f"key_dim is {key_dim}; 2 key_heads key_dim + {value_heads} Dv = "
            f"{channels} channels must hold for some Dv >= 1"
        )
    return Spec(
        batch=batch,
        nodes=nodes,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=width,
        rows_dtype=rows.dtype.name,
        window_dtype=window.dtype.name,
        gate_dtype=a.dtype.name,
        accumulation_dtype=_wide(rows, taps, a, b, log_rate, dt_bias),
    )


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
    value_heads = _check_gates(a, b, log_rate, dt_bias, (batch, nodes))
    _check_key_heads(key_heads, value_heads)
    return Spec(
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


def dims(spec: Spec) -> tuple[str, ...]:
    """Return the fields that are head dimensions; without a conv there is no v."""
    return ("key_dim", "value_dim") if spec.width else ("key_dim",)


def unsupported_width(spec: Spec) -> str | None:
    """Return why kernels take no convolution of a single tap, or None."""
    return "needs a convolution of width 2 or more, not 1" if spec.width == 1 else None


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is allowed")


def _check_gates(a, b, log_rate, dt_bias, rows: tuple[int, int]) -> int:
    """Return the number of value heads, on which all four must agree."""
    if log_rate.ndim != 1:
        raise ValueError(f"A_log has shape {log_rate.shape}; [Hv] is allowed")
    (heads,) = log_rate.shape
    _check("dt_bias", dt_bias, (heads,))
    _check("a", a, (*rows, heads))
    _check("b", b, (*rows, heads))
    return heads


def _check_key_heads(key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"key_heads is {key_heads}; a divisor of Hv = {value_heads} is allowed"
        )


def _wide(*arrays: Array) -> str:
    return jnp.result_type(jnp.float32, *arrays).name
