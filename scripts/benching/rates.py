"""What the device does at best: bytes of a large copy, flops of a large product."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from scripts.benching import timing


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes and flops a second, and where they come from."""

    bytes_per_s: float
    flops_per_s: float
    origin: str

    def floors_us(self, spec: Any) -> dict[str, float]:
        """Return the least microseconds of a call, by its bytes and by its flops."""
        return {
            "bytes_us": 1e6 * spec.bytes_moved / self.bytes_per_s,
            "flops_us": 1e6 * spec.flops / self.flops_per_s,
        }


def get(bytes_per_s: float | None = None, flops_per_s: float | None = None) -> Rates:
    """Return the rates given, and measure those that are None."""
    on_gpu = jax.default_backend() == "gpu"
    origin = [
        f"{name} {'measured in this run' if rate is None else 'given'}"
        for name, rate in (("copy", bytes_per_s), ("product", flops_per_s))
    ]
    return Rates(
        bytes_per_s or copy(),
        flops_per_s or product_rate(8192 if on_gpu else 256),
        ", ".join(origin),
    )


def copy(tb_s: float | None = None) -> float:
    """Return bytes a second of a large copy: those given, else measured."""
    if tb_s is not None:
        return 1e12 * tb_s
    return copy_rate(2**28 if jax.default_backend() == "gpu" else 2**20)


def describe_copy(bytes_per_s: float, given: bool) -> str:
    """Return the rate in words, and where it comes from."""
    origin = "given" if given else "measured in this run"
    return f"Copy {bytes_per_s / 1e12:.3g} TB/s ({origin})."


def copy_rate(size: int) -> float:
    """Return bytes a second, read and written, of a copy of `size` float32 numbers."""
    x = jnp.ones(size, jnp.float32)
    # A kernel and no memcpy, which CUPTI would not list.
    return 2 * x.nbytes / _seconds(jax.jit(jnp.negative), x)


def product_rate(size: int) -> float:
    """Return flops a second of a product of two square bfloat16 matrices."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / _seconds(jax.jit(jnp.matmul), x, x)


def _seconds(function: Any, *arguments: jax.Array) -> float:
    def call() -> Any:
        return function(*arguments)

    number = timing.enough(call)
    if jax.default_backend() != "gpu":
        return 1e-6 * min(timing.host_us(call, number) for _ in range(3))
    calls = timing.kernels(call, number)
    return 1e-6 * min(sum(us for _, us in kernels) for kernels in calls)
