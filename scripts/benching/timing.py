"""Two clocks: the device's own time of each kernel (CUPTI), and the host's.

CUPTI counts the kernels of a program and nothing between them; copies that XLA makes
by memcpy are not in its list. The host's clock counts everything, launches included.
Of several devices CUPTI lists all kernels and does not say whose: means over devices
are told, and a kernel that exchanges counts while it waits for the others, too.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic.gpu import profiler

Kernel = tuple[str, float]


class Times(NamedTuple):
    """Microseconds of one run: the least and the median of `samples`."""

    least: float
    median: float
    samples: int


def times(samples: list[float]) -> Times:
    """Return the least and the median of some samples."""
    return Times(min(samples), statistics.median(samples), len(samples))


class Calls(jax.stages.Wrapped):
    """Some calls in a row, as one thing that the profiler accepts as compiled."""

    def __init__(self, call: Callable[[], Any], number: int):
        self._call, self._number = call, number

    def __call__(self) -> Any:
        """Call `number` times; returns what the last call returned."""
        for _ in range(self._number):
            last = self._call()
        return last


def kernels(call: Callable[[], Any], number: int) -> list[list[Kernel]]:
    """Return names and microseconds of the kernels of each of `number` calls.

    Raises RuntimeError where nothing was recorded, or not the same for each call.
    """
    recorded = _record(call, number)
    if len(recorded) % number:
        raise RuntimeError(f"CUPTI recorded {len(recorded)} kernels in {number} calls")
    size = len(recorded) // number
    return [recorded[first : first + size] for first in range(0, len(recorded), size)]


def _record(call: Callable[[], Any], number: int) -> list[Kernel]:
    """Return the kernels of `number` calls; RuntimeError where there are none."""
    _, recorded = profiler.measure(Calls(call, number), aggregate=False)()
    if not recorded:
        raise RuntimeError(f"CUPTI recorded 0 kernels in {number} calls")
    return [(name, 1e3 * ms) for name, ms in recorded]


class Mean(NamedTuple):
    """Kernels of a call on one of several devices, on average.

    Attributes:
        us: microseconds of all kernels.
        kernels: microseconds by name.
        launches: how many.
    """

    us: float
    kernels: dict[str, float]
    launches: float


def mean_kernels(call: Callable[[], Any], number: int, devices: int) -> Mean:
    """Return the mean over `number` calls and the devices that each runs on.

    Raises RuntimeError where nothing was recorded.
    """
    recorded, parts = _record(call, number), number * devices
    sums = dict.fromkeys((name for name, _ in recorded), 0.0)
    for name, us in recorded:
        sums[name] += us
    by_name = {name: round(us / parts, 3) for name, us in sums.items()}
    launches = round(len(recorded) / parts, 2)
    return Mean(sum(sums.values()) / parts, by_name, launches)


def by_name(calls: list[list[Kernel]], runs: int) -> dict[str, float]:
    """Return the median microseconds of each kernel name in one of `runs` runs a call.

    Names come in the order of the first call.
    """
    names = dict.fromkeys(name for name, _ in calls[0])
    sums = {
        name: [sum(us for other, us in call if other == name) for call in calls]
        for name in names
    }
    return {name: round(statistics.median(us) / runs, 3) for name, us in sums.items()}


def host_us(call: Callable[[], Any], number: int) -> float:
    """Return microseconds a call, of calls that are sent without waiting."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(Calls(call, number)())
    return 1e6 * (time.perf_counter() - begin) / number


def enough(call: Callable[[], Any], seconds: float = 0.05, most: int = 10) -> int:
    """Return how many calls fill `seconds`, from one call once it is compiled."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return min(most, max(1, int(seconds / (time.perf_counter() - begin))))
