"""Two clocks: the device's own time of each kernel (CUPTI), and the host's.

CUPTI counts the kernels of a program and nothing between them; copies that XLA makes
by memcpy are not in its list. The host's clock counts everything, launches included.
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
    _, recorded = profiler.measure(Calls(call, number), aggregate=False)()
    if not recorded or len(recorded) % number:
        found = len(recorded or ())
        raise RuntimeError(f"CUPTI recorded {found} kernels in {number} calls")
    size = len(recorded) // number
    return [
        [(name, 1e3 * ms) for name, ms in recorded[first : first + size]]
        for first in range(0, len(recorded), size)
    ]


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
