"""Write millions of short texts of a case, and count them."""

import collections
import concurrent.futures
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.sampling_checks import cases, drafts, exact, toys

LIMIT = 0.01  # of the distance
SIGMAS = 5.0  # that a distance may lie above that of exact draws
TWIN_SAMPLES = 2**18
WORKERS = 16


class Found(NamedTuple):
    """What a case has come to.

    Attributes:
        samples: texts written.
        distance: total variation, of the three tokens after the first from the exact.
        yardstick: what as many exact draws have.
        accepted: drafts accepted at the first step, of those within the budget.
        seconds: without compilation.
    """

    case: cases.Case
    samples: int
    distance: float
    yardstick: exact.Yardstick
    accepted: float
    seconds: float

    @property
    def lossless(self) -> bool:
        """Is the distance that of an exact sampler, and below the limit?

        The limit is asked for where an exact sampler of as many draws meets it.
        """
        sigmas = self.yardstick.sigmas(self.distance)
        met = self.distance < LIMIT or self.yardstick.bound(SIGMAS) >= LIMIT
        return met and sigmas < SIGMAS

    @property
    def passed(self) -> bool:
        """Is a rule lossless, and a twin not?"""
        return self.lossless == (self.case.fault is None)


@functools.partial(jax.jit, static_argnames=("rows", *toys.STATIC))
def chunk(tables, drafter, key, first, *, rows, **options):
    """Return how often each text was written, [512], and drafts accepted at first.

    Row b of all chunks has the key folded with `first` + b, a seed of its own.
    """
    rows = first + jnp.arange(rows)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    state = toys.write(tables, drafter, keys, **options)
    return counts(state.tokens), jnp.sum(state.accept_lengths[:, 0] - 1)


def counts(tokens: jax.Array) -> jax.Array:
    """Count the texts of three tokens after the first."""
    digits = toys.VOCAB ** np.arange(toys.SAID)[::-1]
    code = jnp.sum(tokens[:, 1 : toys.SAID + 1] * digits, axis=1)
    return jnp.zeros(toys.VOCAB**toys.SAID, jnp.int32).at[code].add(1)


def measure(
    chosen: Sequence[cases.Case], samples: int, rows: int, seed: int
) -> Iterator[Found]:
    """Yield what each case comes to, in their order; programs compile in threads.

    `samples` are rounded up to whole chunks of `rows`. One case runs at a time: chunks
    are as large as the device likes them, and times are of a device for itself.
    """
    key, alone = jax.random.key(seed), threading.Lock()
    workers = min(WORKERS, os.cpu_count() or 1)
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for _, group in itertools.groupby(chosen, key=lambda case: case.program):
            some = list(group)
            # Tracing is the main thread's, for twins replace functions meanwhile.
            lowered = lower(some[0], key, rows)
            waiting.append(
                pool.submit(_finish, lowered, some, key, samples, rows, alone)
            )
            while waiting and (waiting[0].done() or len(waiting) > 2 * workers):
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _finish(lowered, some, key, samples, rows, alone) -> list[Found]:
    """Compile a program and run its cases, alone on the device."""
    program = lowered.compile()
    with alone:
        return [
            run(case, program, key, texts(case, samples, rows), rows) for case in some
        ]


def texts(case: cases.Case, samples: int, rows: int) -> int:
    """Return how many to write: a greedy text is certain, a fault is seen early."""
    if case.sampling.greedy:
        return rows
    return samples if case.fault is None else min(samples, TWIN_SAMPLES)


def arguments(case: cases.Case) -> tuple[Any, Any]:
    """Return the toy's tables and the drafter."""
    tables = tuple(map(jnp.asarray, cases.TABLES[case.draft]))
    make = drafts.drafter(case.drafter, tables[1], sampled=case.sampled)
    return tables, make


def lower(case: cases.Case, key: jax.Array, rows: int):
    """Trace the program of a case."""
    options = dict(sampling=case.sampling, accept=case.accept, said=toys.SAID)
    return chunk.lower(*arguments(case), key, jnp.int32(0), rows=rows, **options)


def run(
    case: cases.Case,
    program: Callable[..., Any],
    key: jax.Array,
    samples: int,
    rows: int,
) -> Found:
    """Run chunk after chunk; the host waits for the last only."""
    begin, given = time.perf_counter(), arguments(case)
    counted, accepted, total = 0, 0, 0
    for first in range(0, samples, rows):
        texts, drafted = program(*given, key, jnp.int32(first))
        counted, accepted, total = counted + texts, accepted + drafted, total + rows
    counted = np.asarray(counted)
    seconds = time.perf_counter() - begin
    wanted = target(case.draft, case.setting)
    return Found(
        case,
        total,
        exact.distance(counted, wanted),
        exact.yardstick(wanted, total),
        float(accepted) / total,
        seconds,
    )


@functools.cache
def target(draft: str, setting: str) -> np.ndarray:
    """Return the exact distribution of texts."""
    return exact.joint(cases.TABLES[draft][0], cases.SETTINGS[setting])
