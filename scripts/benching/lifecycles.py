"""Lifecycles against each other: steps of verify and commit in many layers.

A program takes some steps in a row, as decoding does: all layers verify, one after the
other, then all commit the path that each row accepts. The state is donated and carried.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts.benching import movement
from scripts.workloads import recurrent
from treewy_jax import accept as accept_lib
from treewy_jax import commit
from treewy_jax import tree as tree_lib

WIDTHS = {4: (1, 1, 1), 15: (2, 2, 2), 40: (3, 3, 3)}
# Tokens a step that are accepted on average, the target's own one included.
ACCEPT = {4: 3.2, 15: 3.4, 40: 3.6}
# What they run, beside XLA.
OPS = ("tree_verify", "commit", "store_all", "history_verify", "history_append")
PLAIN = ("store-all", "reconstruct", "fused")
# Where the source of a kernel has this name, it is none of the lifecycle's.
BRIDGE = "bridge"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, of the model whose layers are meant, and of a program."""

    layers: int = 30
    key_heads: int = recurrent.KEY_HEADS
    value_heads: int = recurrent.VALUE_HEADS
    dim: int = recurrent.DIM
    steps: int = 20


SMALL = Sizes(layers=2, key_heads=1, value_heads=2, dim=16, steps=6)


@dataclasses.dataclass(frozen=True)
class Group:
    """What cells have in common that are timed in the same rounds."""

    nodes: int
    batch: int
    state_dtype: str
    accept: float
    sizes: Sizes = Sizes()

    @property
    def widths(self) -> tuple[int, ...]:
        """Children of a node, level by level."""
        return WIDTHS[self.nodes]

    @property
    def tree(self) -> tree_lib.DraftTree:
        """The tree, the same in every row."""
        return tree_lib.DraftTree.from_widths(self.widths, batch=self.batch)

    @property
    def parents(self) -> list[int]:
        """The parent of each node; -1 for the root."""
        return np.asarray(self.tree.parents())[0].tolist()

    @property
    def state_bytes(self) -> int:
        """S of a layer and all rows."""
        elements = self.batch * self.sizes.value_heads * self.sizes.dim**2
        return elements * jnp.dtype(self.state_dtype).itemsize

    def draw(self, key: jax.Array) -> tuple[commit.Inputs, jax.Array]:
        """Return rows of a layer, in bfloat16, and a state."""
        sizes = self.sizes
        *rows, state = recurrent.inputs(
            key,
            batch=self.batch,
            nodes=self.nodes,
            heads=(sizes.key_heads, sizes.value_heads),
            dims=(sizes.dim, sizes.dim),
            input_dtype="bfloat16",
            state_dtype=self.state_dtype,
        )
        return commit.Inputs(*rows), state


@dataclasses.dataclass(eq=False)
class Cell:
    """A lifecycle in a group, and what became of it.

    Attributes:
        layers: of the program; those of the model where they fit.
        problem: what went wrong; it is not timed then.
        errors: of outputs and states against float64.
        moves: what XLA copies that is as large as half a layer's states.
        bridges: kernels that only make a layer wait for the last; not counted.
        device_us, wall_us: samples, microseconds a layer and step.
        kernels: microseconds a layer and step of each kernel name.
        launches: kernels a step.
        folds, records: rows that fold, and records that are read, a step.
        accepted: tokens a step and row.
    """

    group: Group
    label: str
    lifecycle: commit.Lifecycle
    layers: int = 0
    problem: str | None = None
    errors: tuple[float, ...] = ()
    program: Any = None
    moves: list[movement.Move] = dataclasses.field(default_factory=list)
    bridges: frozenset[str] = frozenset()
    device_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    launches: float | None = None
    folds: float = 0.0
    records: float = 0.0
    accepted: float = 0.0

    @functools.cached_property
    def shapes(self) -> tuple[Any, Any, Any, Any]:
        """Rows, a layer's state, what verification returns, and the tree, as shapes."""
        group, lifecycle = self.group, self.lifecycle
        rows, plain = jax.eval_shape(group.draw, jax.random.key(0))
        tree = jax.eval_shape(lambda: group.tree)
        keys = dict(key_heads=group.sizes.key_heads, key_dtype=rows.k.dtype)
        state = jax.eval_shape(functools.partial(lifecycle.init, **keys), plain)
        return rows, state, jax.eval_shape(lifecycle.verify, state, rows, tree), tree

    def attempt(self, action: Callable[[], Any]) -> None:
        """Do something for this cell; an exception becomes its problem."""
        if self.problem is not None:
            return
        try:
            action()
        except Exception as error:  # each compiler and device has its own
            lines = str(error).strip().splitlines() or [""]
            self.problem = f"{type(error).__name__}: {lines[0][:200]}"


def cell(group: Group, label: str, **options: Any) -> Cell:
    """Return the cell of store-all, reconstruct, fused, or deferred-HORIZON.

    Raises ValueError for any other label, and where the tree is too deep for it.
    """
    sizes = dict(depth=len(group.widths), nodes=group.nodes)
    name, _, horizon = label.replace("_", "-").partition("deferred-")
    if name in PLAIN:
        label = name
    elif not name and horizon.isdecimal():
        label, name = f"deferred-{int(horizon)}", "deferred"
        options |= {"horizon": int(horizon)}
    else:
        allowed = ", ".join([*PLAIN, "deferred-8"])
        raise ValueError(f"lifecycles names {label!r}; allowed: {allowed} or any other")
    options |= {"state_dtype": group.state_dtype, **sizes}
    found = commit.by_name(name, **options)
    found.check(**sizes)
    return Cell(group, label, found)


def schedule(
    group: Group, rng: np.random.Generator, skip: float = 0.0
) -> accept_lib.Accepted:
    """Draw what each row accepts in each step, [steps, B, ...], on the host.

    A child is accepted with the probability that makes the mean `group.accept`, and
    which child it is has even odds. A part `skip` of the rows does no step.
    """
    depth, parents = len(group.widths), group.parents
    children = np.zeros((group.nodes, max(group.widths)), np.int32)
    for node in range(group.nodes):
        below = [t for t, parent in enumerate(parents) if parent == node]
        children[node, : len(below)] = below
    shape = (group.sizes.steps, group.batch)
    going = rng.random(shape) >= skip
    count, node, path = going.astype(np.int32), np.zeros(shape, np.int32), []
    for width in group.widths:
        path.append(node)
        going &= rng.random(shape) < probability(group.accept, depth)
        node = np.where(going, children[node, rng.integers(width, size=shape)], node)
        count += going
    return accept_lib.Accepted(
        node, np.stack([*path, node], axis=-1), count, np.zeros_like(node)
    )


def probability(mean: float, depth: int) -> float:
    """Return p with 1 + p + ... + p^depth = mean, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (
            (p, high) if sum(p**i for i in range(depth + 1)) < mean else (low, p)
        )
    return low


def cadence(cell: Cell, steps: accept_lib.Accepted) -> tuple[float, float]:
    """Return rows that fold in a step, and records that a step reads, of all rows.

    The steps are repeated until where they began does not matter.
    """
    lifecycle, count = cell.lifecycle, np.zeros(cell.group.batch, np.int64)
    if not hasattr(lifecycle, "fold_above"):
        return 0.0, 0.0
    most = lifecycle.fold_above(len(cell.group.widths))
    folding = records = taken = 0
    for accepted in np.tile(steps.count, (64, 1)):
        folds = count > most
        folding, records, taken = (
            folding + folds.sum(),
            records + count.sum(),
            taken + 1,
        )
        count = np.where(folds, 0, count) + accepted
    return float(folding / taken), float(records / taken)


def program(lifecycle: commit.Lifecycle) -> Callable:
    """Return the steps as a function of what is carried, rows, accepted paths, tree.

    What is carried, and returned, is a list of states and the last layer's outputs.
    """
    verify = jax.jit(lifecycle.verify)  # traced once, however many layers there are

    def run(carried, inputs, paths, tree):
        def step(number, carried):
            states, output = carried
            records = []
            for state in states:
                rows = inputs._replace(log_decay=behind(inputs.log_decay, output))
                output, left = verify(state, rows, tree)
                records.append(left)
            accepted = jax.tree.map(lambda x: behind(x[number], output), paths)
            states = lifecycle.commit_layers(states, records, accepted)
            return list(states), output

        return lax.fori_loop(0, paths.count.shape[0], step, carried)

    return run


def behind(x: jax.Array, output: jax.Array) -> jax.Array:
    """Return `x` once `output` is there; 0 times it may be NaN, so XLA computes it.

    So layers run one after another, as in a model, and commit follows the last.
    """
    with jax.named_scope(BRIDGE):
        first = output[(0,) * output.ndim].astype(jnp.float32)
        return x + (0.0 * first).astype(x.dtype)
