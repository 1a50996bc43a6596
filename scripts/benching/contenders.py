"""What is timed against each other: implementations or configurations of some cases.

Each passes the correctness gate first: fresh random inputs, memory that its outputs may
get filled with NaN before, the first and the last row held against float64, and equal
bits in all rows when it is called again and again.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device
from scripts.benching import chains, timing
from scripts.workloads import base

SEED = 20
ROWS = (0, -1)
REPEATS = 20  # on a GPU; interpreted kernels are slow, and always the same


@dataclasses.dataclass(eq=False)
class Contender:
    """One implementation and configuration of one case, and what became of it.

    Attributes:
      absent: why it does not run on this device; no failure.
      problem: what went wrong; it is not timed then.
      errors: relative error of each output against float64.
      inputs, single, program: compiled: the case's inputs, one call, the chain of them.
      device_us, in_jit_us: samples, microseconds a run.
      kernels: microseconds a run of each kernel name.
    """

    case: base.Case
    impl: str
    config: Any = None
    absent: str | None = None
    problem: str | None = None
    errors: tuple[float, ...] = ()
    chain: chains.Plan | None = None
    inputs: Any = None
    single: Any = None
    program: Any = None
    device_us: list[float] = dataclasses.field(default_factory=list)
    in_jit_us: list[float] = dataclasses.field(default_factory=list)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether there is something to time."""
        return self.absent is None and self.problem is None

    def attempt(self, action: Callable[[], Any]) -> None:
        """Do something for this contender; an exception becomes its problem."""
        if not self.runs:
            return
        try:
            action()
        except Exception as error:  # each compiler and device has its own
            lines = str(error).strip().splitlines() or [""]
            self.problem = f"{type(error).__name__}: {lines[0][:200]}"


def of_case(case: base.Case, names: Sequence[str] | None = None) -> list[Contender]:
    """Return a contender of each implementation, those that cannot run with reasons."""
    platform = device.platform()
    found = []
    for name in names or case.implementations.modules:
        found.append(Contender(case, name, absent=_reason(case, name, platform)))
    return found


def _reason(case: base.Case, name: str, platform: str) -> str | None:
    """Return why an implementation cannot run a case here, or None."""
    if name == "reference":
        return None
    try:
        module = case.implementations.module(name)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return module.supports(case.spec, platform, interpret=platform == "cpu")


def plan(case: base.Case, impl: str) -> chains.Plan:
    """Return how runs of a case are chained; off a GPU few of them."""
    if jax.default_backend() == "gpu":
        return chains.plan(case, impl)
    return chains.plan(case, impl, evict=0, least_runs=2, seconds=0)


def build(
    entrants: Sequence[Contender], advance: Callable[[], Any] = lambda: None
) -> None:
    """Trace every program, and compile all of them side by side."""
    cached = functools.cache(plan)
    generator = functools.cache(_lower_inputs)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = []
        for entrant in entrants:
            entrant.attempt(
                lambda e=entrant: pending.append((e, _lower(e, cached, generator)))
            )
        compiling = functools.cache(lambda lowered: pool.submit(lowered.compile))
        done = [
            (entrant, part, compiling(lowered))
            for entrant, parts in pending
            for part, lowered in parts.items()
        ]
        for entrant, part, future in done:
            entrant.attempt(
                lambda e=entrant, p=part, f=future: setattr(e, p, f.result())
            )
            advance()


def _lower_inputs(case: base.Case) -> jax.stages.Lowered:
    return jax.jit(case.inputs).lower(jax.random.key(0))


def _lower(
    entrant: Contender, plan_of: Callable, generator: Callable
) -> dict[str, jax.stages.Lowered]:
    entrant.chain = plan_of(entrant.case, entrant.impl)
    arguments = entrant.case, entrant.impl, entrant.config
    return {
        "inputs": generator(entrant.case),
        "single": chains.lower_once(*arguments),
        "program": chains.lower(*arguments, entrant.chain),
    }


def run(entrants: Sequence[Contender], rounds: int) -> None:
    """Check contenders of one or several cases, then time them turn by turn."""
    cases = dict.fromkeys(entrant.case for entrant in entrants if entrant.runs)
    data = {}
    for case in cases:
        mine = [e for e in entrants if e.case == case and e.runs]
        try:
            most = max(mine, key=lambda entrant: entrant.chain.sets)
            data[case] = Data(case, most.chain, most.inputs)
        except Exception as error:
            for entrant in mine:
                entrant.problem = f"inputs: {type(error).__name__}: {error}"[:200]
            continue
        for entrant in mine:
            entrant.attempt(lambda e=entrant: check(e, data[e.case]))
    turns = {}
    for entrant in entrants:
        entrant.attempt(lambda e=entrant: turns.update({e: Turn(e, data[e.case])}))
    for _ in range(rounds):
        for entrant, turn in turns.items():
            entrant.attempt(turn.take)


class Data:
    """The inputs of a case, on the device; what programs overwrite is replaced."""

    def __init__(
        self, case: base.Case, chain: chains.Plan, make: Callable | None = None
    ):
        make = make or jax.jit(case.inputs)
        first = jax.random.key(SEED)
        sets = [make(jax.random.fold_in(first, i)) for i in range(chain.sets)]
        size = jax.tree.leaves(chains.output_shapes(case))[0].shape[0]
        self.rows = sorted({row % size for row in ROWS})
        self.exact = case.exact(sets[0], self.rows)
        self.leaves = chains.divide([jax.tree.leaves(x) for x in sets], chain)
        self._structure = jax.tree.structure(sets[0])

    def arguments(self, place: int) -> tuple:
        """Return the arguments of an input set."""
        leaves = self.leaves.of(place)
        ordered = [leaves[i] for i in range(len(leaves))]
        return jax.tree.unflatten(self._structure, ordered)


def check(entrant: Contender, data: Data, repeats: int | None = None) -> None:
    """Hold one call on the first input set against float64; sets `errors`.

    Then repeat it: a kernel in which copies overtake reads is wrong in a few elements
    of a few calls, which the first and the last row of one call seldom show.
    """
    if repeats is None:
        repeats = REPEATS if jax.default_backend() == "gpu" else 1
    poison(jax.tree.leaves(chains.output_shapes(entrant.case, entrant.impl)))
    outputs = _call(entrant, data)
    picked = [x[np.asarray(data.rows)] for x in outputs]
    pairs = zip(picked, data.exact, strict=True)
    entrant.errors = tuple(base.relative_error(got, want) for got, want in pairs)
    bounds = entrant.case.bounds
    # Not "above": NaN is above nothing.
    if any(not e <= b for e, b in zip(entrant.errors, bounds, strict=True)):
        found = ", ".join(f"{e:.1e}" for e in entrant.errors)
        allowed = ", ".join(f"{b:.1e}" for b in bounds)
        entrant.problem = f"wrong: relative errors {found}; allowed: {allowed}"
    elif not all(_same(outputs, _call(entrant, data)) for _ in range(repeats)):
        entrant.problem = "wrong: outputs differ from call to call"


def _call(entrant: Contender, data: "Data") -> list[jax.Array]:
    arguments = list(data.arguments(0))
    for position in entrant.case.donate:
        arguments[position] = jax.tree.map(jnp.copy, arguments[position])
    return jax.tree.leaves(entrant.single(*arguments))


@jax.jit
def _same(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> jax.Array:
    """Tell whether all elements are equal; NaN is equal to NaN."""
    pairs = zip(first, second, strict=True)
    alike = [(x == y) | ((x != x) & (y != y)) for x, y in pairs]
    return jnp.all(jnp.stack([jnp.all(x) for x in alike]))


def poison(shapes: Iterable[Any]) -> None:
    """Leave NaN in memory that the next outputs of these shapes are likely to get."""
    filled = [
        jnp.full(
            x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 1, x.dtype
        )
        for x in shapes
    ]
    jax.block_until_ready(filled)


class Turn:
    """A contender's turns: each adds samples of the device's and the host's clock."""

    def __init__(self, entrant: Contender, data: Data):
        self.entrant, self.data = entrant, data
        self.calls = timing.enough(self.launch)

    def launch(self) -> Any:
        """Run the program once; returns outputs to wait for."""
        leaves, sets = self.data.leaves, self.entrant.chain.sets
        owned, given = self.entrant.program(*leaves.head(sets))
        self.data.leaves = leaves._replace(owned=owned + leaves.owned[sets:])
        return owned, given

    def take(self) -> None:
        """Time some calls by both clocks; off a GPU by the host's only."""
        entrant, runs = self.entrant, self.entrant.chain.total
        entrant.in_jit_us.append(timing.host_us(self.launch, self.calls) / runs)
        if jax.default_backend() != "gpu":
            return
        calls = timing.kernels(self.launch, self.calls)
        entrant.device_us += [sum(us for _, us in one) / runs for one in calls]
        entrant.kernels = timing.by_name(calls, runs)
