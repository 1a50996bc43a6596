"""One jitted program that runs an op many times, each run waiting for the last.

That is how a model runs an op: many layers, one after another, none of whose data is
in the cache. Several input sets take turns, so that what one run reads is not what the
last one left in L2 (the implementation in plain XLA, which is slow to compile, has one
set: what the cache gives is in its favour). The small arguments, which in a model the
kernel before has just written, are the same in all sets. Each run depends on the one
before by an argument that cannot be known earlier, so neither XLA nor a graph of the
device runs two at once or drops one: an output takes the place of an argument of its
shape; where none fits, a small argument gets a number added that is 0 times an output.
A loop on the device goes through the sets again and again, so the host, which needs
longer to start a program the more arrays it has, is not what the clock shows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scripts.workloads import base
from treewy_jax import pytree

# Arguments that differ by set make up this part of a set's bytes, or more.
VARIED = 0.75
# Moved between two uses of the same data; beyond the L2 cache of a H200 (60 MB).
EVICT_BYTES = 150e6
# Of all input sets together.
INPUT_BYTES = 32e9
MOST_SETS = 48
LEAST_RUNS = 8  # of one trip of the loop, which has a kernel of its own
# That a program should take, guessed from bytes and flops at about a H200's rates.
SECONDS = 1e-3


@dataclasses.dataclass(frozen=True)
class Plan:
    """How runs are chained; arguments and outputs are numbered as pytree leaves.

    Attributes:
      sets: input sets that take turns.
      runs: runs of the op in one trip of the loop.
      trips: of the loop of one program.
      varied: arguments that differ by set, apart from those in `overwrites`.
      overwrites: from an argument that is donated to the output that replaces it.
      carried: argument that each run takes from the last one, and the output it is.
      nudged: argument that gets 0 times an output added, where `carried` is None.
    """

    sets: int
    runs: int
    trips: int = 1
    varied: tuple[int, ...] = ()
    overwrites: tuple[tuple[int, int], ...] = ()
    carried: tuple[int, int] | None = None
    nudged: int | None = None

    @property
    def total(self) -> int:
        """Runs of one program."""
        return self.runs * self.trips

    @property
    def chained_by(self) -> str:
        """What makes a run wait for the one before, in words."""
        if self.carried is not None:
            return f"output {self.carried[1]} is argument {self.carried[0]} of the next"
        if self.nudged is not None:
            return f"0 x output 0 is added to argument {self.nudged}: one more kernel"
        return "the state that it overwrites" if self.overwrites else "nothing"


def plan(
    case: base.Case,
    impl: str,
    *,
    evict: float = EVICT_BYTES,
    least_runs: int = LEAST_RUNS,
    seconds: float = SECONDS,
) -> Plan:
    """Choose sets and runs by size, and what runs are chained by.

    Raises ValueError where an argument is to be overwritten that no output can replace.
    """
    inputs = jax.tree.leaves(case.shapes())
    outputs = jax.tree.leaves(output_shapes(case, impl))
    donated = donated_leaves(case)
    overwrites = []
    for argument in donated:
        free = [o for o in range(len(outputs)) if o not in dict(overwrites).values()]
        output = _alike(inputs[argument], outputs, free)
        if output is None:
            raise ValueError(f"{case.op}: no output can replace argument {argument}")
        overwrites.append((argument, output))
    size = pytree.nbytes(inputs)
    if impl == "reference":  # XLA compiles every run anew, and tunes its products
        evict = 0
    moved = min(size, case.spec.bytes_moved)  # an op need not read all that it gets
    varied = _largest(inputs, donated)
    sets = min(MOST_SETS, math.ceil(evict / moved), int(INPUT_BYTES / size))
    sets = max(1, sets)
    runs = sets * max(1, math.ceil(least_runs / sets))
    guess = max(case.spec.bytes_moved / 4e12, case.spec.flops / 8e14, 3e-6)
    trips = max(1, math.ceil(seconds / (runs * guess)))
    chosen = Plan(sets, runs, trips, varied, tuple(overwrites))
    if overwrites and sets == 1:
        return chosen
    free = [o for o in range(len(outputs)) if o not in dict(overwrites).values()]
    for argument, shape in enumerate(inputs):
        output = _alike(shape, outputs, free) if _is_float(shape) else None
        if argument not in donated and output is not None:
            return dataclasses.replace(chosen, carried=(argument, output))
    floats = [i for i, x in enumerate(inputs) if i not in donated and _is_float(x)]
    return dataclasses.replace(
        chosen, nudged=min(floats, key=lambda i: pytree.nbytes(inputs[i]))
    )


def output_shapes(case: base.Case, impl: str = "reference") -> Any:
    """Return the outputs of an implementation as jax.ShapeDtypeStruct."""
    return jax.eval_shape(case.call(impl, None), *case.shapes())


def donated_leaves(case: base.Case) -> list[int]:
    """Return the leaf numbers of the arguments that an output may overwrite."""
    number, found = 0, []
    for position, argument in enumerate(case.shapes()):
        leaves = range(number, number + len(jax.tree.leaves(argument)))
        found += leaves if position in case.donate else []
        number += len(leaves)
    return found


class Leaves(NamedTuple):
    """Arguments by leaf number: what is overwritten and what varies, set by set."""

    owned: list[dict]
    varied: list[dict]
    shared: dict

    def of(self, place: int) -> dict:
        """Return the arguments of a set."""
        return self.owned[place] | self.varied[place] | self.shared

    def head(self, sets: int) -> "Leaves":
        """Return the first sets."""
        return Leaves(self.owned[:sets], self.varied[:sets], self.shared)


def divide(sets: Sequence[Sequence[Any]], chain: Plan) -> Leaves:
    """Sort the leaves of each set; those that do not differ are the first set's."""
    places = dict(chain.overwrites)
    return Leaves(
        [{i: leaves[i] for i in places} for leaves in sets],
        [{i: leaves[i] for i in chain.varied} for leaves in sets],
        {
            i: x
            for i, x in enumerate(sets[0])
            if i not in places and i not in chain.varied
        },
    )


def chained(function: Callable, treedef: Any, chain: Plan) -> Callable:
    """Return the program, from `Leaves` as three arguments to two results.

    First what was overwritten, by set; then what the next run would get of the last.
    """
    places = dict(chain.overwrites)
    function = jax.jit(function)  # traced once, however many runs there are

    def run(arguments: dict, given: Any, before: Any) -> tuple[list, Any]:
        # XLA may not do what only needs this run's other arguments beforehand, and not
        # leave out what nobody reads of the run before.
        arguments, given, _ = lax.optimization_barrier((arguments, given, before))
        if chain.carried is not None:
            arguments[chain.carried[0]] = given
        elif chain.nudged is not None:
            arguments[chain.nudged] = _nudge(arguments[chain.nudged], given)
        ordered = [arguments[i] for i in range(len(arguments))]
        outputs = jax.tree.leaves(function(*jax.tree.unflatten(treedef, ordered)))
        if chain.carried is not None:
            return outputs, outputs[chain.carried[1]]
        return outputs, given if chain.nudged is None else outputs[0]

    def program(owned: list[dict], varied: list[dict], shared: dict) -> tuple:
        def trip(_: Any, state: tuple) -> tuple:
            leaves, given = Leaves(list(state[0]), varied, shared), state[1]
            outputs: list = []
            for place in (i % chain.sets for i in range(chain.runs)):
                outputs, given = run(leaves.of(place), given, outputs)
                leaves.owned[place] = {i: outputs[o] for i, o in places.items()}
            given, _ = lax.optimization_barrier((given, outputs))
            return leaves.owned, given if chain.carried else _first(given)

        first = Leaves(owned, varied, shared).of(0)
        start = jnp.float32(0) if chain.carried is None else first[chain.carried[0]]
        return lax.fori_loop(0, chain.trips, trip, (owned, start))

    return program


def lower(case: base.Case, impl: str, config: Any, chain: Plan) -> jax.stages.Lowered:
    """Trace the program of an implementation; its `compile` may run in a thread."""
    shapes = case.shapes()
    program = chained(case.call(impl, config), jax.tree.structure(shapes), chain)
    donate = (0,) if chain.overwrites else ()
    jitted = jax.jit(program, donate_argnums=donate)
    return jitted.lower(*divide([jax.tree.leaves(shapes)] * chain.sets, chain))


def lower_once(case: base.Case, impl: str, config: Any) -> jax.stages.Lowered:
    """Trace a single call, as a user makes it."""
    jitted = jax.jit(case.call(impl, config), donate_argnums=case.donate)
    return jitted.lower(*case.shapes())


def _largest(shapes: Sequence[Any], donated: Sequence[int]) -> tuple[int, ...]:
    """Return arguments that, with those donated, hold most of the bytes."""
    left = (1 - VARIED) * pytree.nbytes(shapes)
    small = []
    for i in sorted(range(len(shapes)), key=lambda i: pytree.nbytes(shapes[i])):
        left -= pytree.nbytes(shapes[i])
        if left < 0:
            break
        small.append(i)
    return tuple(i for i in range(len(shapes)) if i not in (*small, *donated))


def _alike(shape: Any, outputs: Sequence[Any], free: Sequence[int]) -> int | None:
    same = (o for o in free if (outputs[o].shape, outputs[o].dtype) == _key(shape))
    return next(same, None)


def _key(x: Any) -> tuple:
    return x.shape, x.dtype


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _first(x: jax.Array) -> jax.Array:
    """Return the first element, in float32."""
    return x[(0,) * x.ndim].astype(jnp.float32)


def _nudge(x: jax.Array, given: jax.Array) -> jax.Array:
    """Return `x` once `given` is there; 0 times it may be NaN, so XLA computes it."""
    return x + (0.0 * _first(given)).astype(x.dtype)
