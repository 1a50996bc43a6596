"""Running lifecycles against each other: compiled together, checked, timed in turn."""

import concurrent.futures
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benching import lifecycles, movement, timing
from scripts.workloads import base, recurrent
from treewy_jax import accept as accept_lib
from treewy_jax import pytree

SEED = 7
ROWS = (0, -1)  # that are held against float64
MEMORY = 0.85  # of what the process may take, for all cells of a group
# Largest relative error of outputs and states against float64, by the state's dtype;
# rows are bfloat16, and products of theirs are rounded to it.
BOUNDS = {"float32": (8e-3, 5e-3), "bfloat16": (1e-2, 1e-2)}


def layers_that_fit(cells: Sequence[lifecycles.Cell], memory: float) -> int:
    """Return the layers, at most the model's, whose states of all cells fit together.

    Beside them there is what verification leaves in the layers of one cell, and twice
    the rows. A ring of states among that is the one of before, in its memory. One layer
    is tried anyway.
    """
    states, left, fixed = 0, 0, 0
    for each in cells:
        rows, state, verified, _ = each.shapes
        states += pytree.nbytes(state)
        left = max(left, pytree.nbytes(verified) - _in_place(each, state, verified))
        fixed = max(fixed, 2 * pytree.nbytes(rows) + 2 * pytree.nbytes(state))
    fits = int((memory - fixed) // (states + left))
    return max(1, min(cells[0].group.sizes.layers, fits))


def _in_place(cell: lifecycles.Cell, state: Any, verified: Any) -> int:
    """Return the bytes of rings of states that verification gets and returns."""
    least = cell.group.state_bytes
    rings = [x for x in jax.tree.leaves(state) if pytree.nbytes(x) > least]
    held = {(x.shape, x.dtype) for x in rings}
    returned = jax.tree.leaves(verified)
    return sum(pytree.nbytes(x) for x in returned if (x.shape, x.dtype) in held)


def memory() -> float:
    """Return bytes that the cells of a group may take on this device."""
    stats = jax.devices()[0].memory_stats() or {}
    return MEMORY * stats.get("bytes_limit", 2**30)


def lower(cell: lifecycles.Cell, paths: accept_lib.Accepted) -> jax.stages.Lowered:
    """Trace the program of a cell; its `compile` may run in a thread."""
    rows, state, (output, _), tree = cell.shapes
    carried = ([state] * cell.layers, output)
    jitted = jax.jit(lifecycles.program(cell.lifecycle), donate_argnums=0)
    return jitted.lower(carried, rows, jax.eval_shape(lambda: paths), tree)


def build(cells: Sequence[lifecycles.Cell], paths: accept_lib.Accepted) -> None:
    """Compile the programs of a group side by side, and list what XLA moves."""
    for each in cells:
        each.attempt(lambda each=each: each.shapes)
    able = [each for each in cells if each.problem is None]
    layers = layers_that_fit(able, memory()) if able else 0
    lowered = {}
    for each in cells:
        each.layers = layers
        each.attempt(lambda each=each: lowered.update({each: lower(each, paths)}))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = {each: pool.submit(x.compile) for each, x in lowered.items()}
    for each, future in pending.items():
        each.attempt(lambda each=each, f=future: _compiled(each, f.result()))


def _compiled(cell: lifecycles.Cell, compiled: Any) -> None:
    cell.program, text = compiled, compiled.as_text()
    cell.moves = movement.moves(text, cell.group.state_bytes // 2)
    cell.bridges = bridges(text)


def bridges(text: str) -> frozenset[str]:
    """Return the kernels, as CUPTI names them, that come from `lifecycles.behind`."""
    sources = movement.sources(text).items()
    return frozenset(
        re.sub(r"\W", "_", name)
        for name, where in sources
        if lifecycles.BRIDGE in where
    )


def run(cells: Sequence[lifecycles.Cell], rounds: int) -> None:
    """Compile, check and time the cells of a group, turn by turn."""
    group = cells[0].group
    # Rows that skip steps at first then fold at different times.
    rng = np.random.default_rng(SEED)
    paths = [lifecycles.schedule(group, rng, skip) for skip in (0.5, 0.0)]
    build(cells, paths[0])
    for each in cells:
        each.folds, each.records = lifecycles.cadence(each, paths[-1])
        each.accepted = float(paths[-1].count.mean())
    if all(each.problem for each in cells):
        return
    data = Data(group, paths, cells[0].layers)
    turns = {}
    for each in cells:
        each.attempt(lambda each=each: turns.update({each: Turn(each, data)}))
    for _ in range(rounds):
        for each, turn in turns.items():
            each.attempt(turn.take)
    for each in cells:
        each.program = None


class Data:
    """Rows, paths and first states of a group, and float64 results of two rows."""

    def __init__(
        self, group: lifecycles.Group, paths: Sequence[accept_lib.Accepted], layers: int
    ):
        self._make = jax.jit(group.draw)
        self.group, self.paths = group, list(paths)
        self.rows = sorted({row % group.batch for row in ROWS})
        self.tree = group.tree
        self.inputs = [self._make(jax.random.key(i))[0] for i in range(len(paths))]
        self.calls = [
            (rows, jax.device_put(path))
            for rows, path in zip(self.inputs, paths, strict=True)
        ]
        self.layers = sorted({0, layers - 1})
        self.exact = [self._exact(layer) for layer in self.layers]

    def plain(self, layer: int) -> jax.Array:
        """Return the first state of a layer."""
        return self._make(jax.random.key(100 + layer))[1]

    def _exact(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        first = recurrent.host([self.plain(layer)], self.rows)[0]
        hosted = [recurrent.host(rows, self.rows) for rows in self.inputs]
        found = [
            sequential(
                state,
                [
                    ([x[i] for x in rows], path.path[:, row], path.count[:, row])
                    for rows, path in zip(hosted, self.paths, strict=True)
                ],
                self.group.parents,
            )
            for i, (row, state) in enumerate(zip(self.rows, first, strict=True))
        ]
        outputs, states = zip(*found, strict=True)
        return np.stack(outputs), np.stack(states)


def sequential(
    state: np.ndarray, calls: Sequence[tuple], parents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Run the gated delta rule over what one row accepts, token by token.

    `calls` are pairs of rows and the paths and counts of each step. Returns outputs of
    all nodes in the last step, and the state behind it.
    """
    outputs = np.zeros(0)
    for (q, k, v, log_decay, beta), paths, counts in calls:
        one = [x[None] for x in (q, k, v, log_decay, beta)]
        keys = np.repeat(k, v.shape[1] // k.shape[1], axis=1)
        for number, (path, count) in enumerate(zip(paths, counts, strict=True)):
            if paths is calls[-1][1] and number == len(paths) - 1:
                outputs = recurrent.every_node(*one, state[None], np.asarray(parents))
                outputs = outputs[0][0]
            for t in path[:count]:
                state = state * np.exp(log_decay[t])[:, None, None]
                read = (state @ keys[t][..., None])[..., 0]
                u = beta[t][:, None] * (v[t] - read)
                state = state + u[..., None] * keys[t][:, None, :]
    return outputs, state


class Turn:
    """A cell's turns; to begin with, it is held against float64."""

    def __init__(self, cell: lifecycles.Cell, data: Data):
        self.cell, group = cell, data.group
        keys = group.sizes.key_heads, data.inputs[0].k.dtype
        states = [
            cell.lifecycle.init(data.plain(layer), *keys)
            for layer in range(cell.layers)
        ]
        output = cell.shapes[2][0]
        self._tree = data.tree
        self._carried = states, jnp.zeros(output.shape, output.dtype)
        del states
        for self._rest in data.calls:  # those of the last call are timed
            states, output = self.launch()
        cell.errors = self._errors(data, states, output)
        bounds = BOUNDS[group.state_dtype]
        # Not "above": NaN is above nothing.
        if any(not e <= b for e, b in zip(cell.errors, bounds, strict=True)):
            found = ", ".join(f"{e:.1e}" for e in cell.errors)
            allowed = ", ".join(f"{b:.1e}" for b in bounds)
            raise ValueError(f"wrong: relative errors {found}; allowed: {allowed}")
        del states, output
        self.calls = timing.enough(self.launch)

    def launch(self) -> Any:
        """Take some steps; returns what is to wait for."""
        self._carried = self.cell.program(self._carried, *self._rest, self._tree)
        return self._carried

    def _errors(self, data: Data, states: Any, output: Any) -> tuple[float, ...]:
        """Return the errors of the last layer's outputs, and the larger of states."""
        picked = np.asarray(data.rows)
        found = []
        for layer, (_, exact) in zip(data.layers, data.exact, strict=True):
            few = jax.tree.map(lambda x: x[picked], states[layer])
            found.append(
                base.relative_error(self.cell.lifecycle.materialize(few), exact)
            )
        outputs = base.relative_error(output[picked], data.exact[-1][0])
        return outputs, float(np.max(found))

    def take(self) -> None:
        """Time some calls by both clocks; off a GPU by the host's only."""
        cell = self.cell
        runs = cell.layers * cell.group.sizes.steps
        cell.wall_us.append(timing.host_us(self.launch, self.calls) / runs)
        if jax.default_backend() != "gpu":
            return
        calls = [
            [(name, us) for name, us in one if name not in cell.bridges]
            for one in timing.kernels(self.launch, self.calls)
        ]
        cell.device_us += [sum(us for _, us in one) / runs for one in calls]
        cell.kernels = timing.by_name(calls, runs)
        cell.launches = len(calls[0]) / cell.group.sizes.steps
