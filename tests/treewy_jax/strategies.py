"""Random trees and inputs, and an oracle in NumPy that shares no code with ours."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from treewy_jax import tree as tree_lib

KEY_HEADS, VALUE_HEADS, DIM = 2, 6, 16

SHAPES = {
    "root": [-1],
    "chain": list(range(-1, 15)),
    "star": [-1] + [0] * 15,
    "comb": [-1, 0, 1, 1, 3, 3, 5, 5, 7, 7],
    "fork": [-1, 0, 1, 2, 2, 4, 0, 6, 6, 8, 8, 8],
}


@st.composite
def preorder_parents(draw, most=16):
    """Draw a tree: each node hangs below the one before or one of its ancestors."""
    size = draw(st.integers(1, most))
    parents, branch = [-1], [0]
    for node in range(1, size):
        # 0 goes deeper, so hypothesis shrinks towards a chain.
        up = draw(st.integers(0, min(3, len(branch) - 1)))
        branch = branch[: len(branch) - up]
        parents.append(branch[-1])
        branch.append(node)
    return parents


def random_parents(rng, size):
    """Return the same kind of tree from a NumPy generator."""
    parents, branch = [-1], [0]
    for node in range(1, size):
        branch = branch[: len(branch) - rng.integers(0, min(4, len(branch)))]
        parents.append(int(branch[-1]))
        branch.append(node)
    return parents


def root_path(parents, node):
    """Return the nodes from the root to `node`, none of them for None."""
    path = [] if node is None else [node]
    while path and parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@dataclasses.dataclass
class Case:
    """One row of inputs to `verify`, in float64, and the tree they belong to."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    parents: list[int]

    def rows(self):
        return [self.q, self.k, self.v, self.log_decay, self.beta]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gates_mixed(rng, shape):
    """Decays near 0 and near 1 and writes near 0 and near 1, side by side."""
    half_life = 10.0 ** rng.uniform(-2, 4, shape)
    return -np.log(2) / half_life, rng.uniform(0.01, 0.99, shape)


def gates_none(rng, shape):
    return np.zeros(shape), np.ones(shape)


def gates_slow(rng, shape):
    return np.full(shape, -1e-3), np.full(shape, 0.99)


def gates_cliff(rng, shape):
    """One log decay of -300 on the third node, -0.1 on all others."""
    log_decay = np.full(shape, -0.1)
    log_decay[min(2, shape[0] - 1)] = -300.0
    return log_decay, np.full(shape, 0.9)


GATES = {
    "mixed": gates_mixed,
    "none": gates_none,
    "slow": gates_slow,
    "cliff": gates_cliff,
}


def make_case(
    parents, seed=0, gates="mixed", correlation=0.0, heads=(KEY_HEADS, VALUE_HEADS)
):
    """Make one row of inputs; keys share a direction with weight `correlation`."""
    rng = np.random.default_rng(seed)
    (key_heads, value_heads), n = heads, len(parents)
    q, noise = rng.normal(size=(2, n, key_heads, DIM))
    common = unit(rng.normal(size=(1, key_heads, DIM)))
    k = unit(np.sqrt(correlation) * common + np.sqrt(1 - correlation) * unit(noise))
    log_decay, beta = GATES[gates](rng, (n, value_heads))
    return Case(
        q=unit(q) * DIM**-0.5,
        k=k,
        v=rng.normal(size=(n, value_heads, DIM)),
        log_decay=log_decay,
        beta=beta,
        state=rng.normal(size=(value_heads, DIM, DIM)),
        parents=list(parents),
    )


def oracle(case, dtype=np.float64):
    """Run the recurrence node by node from each parent; return outputs and states."""
    q, k, v, log_decay, beta = (x.astype(dtype) for x in case.rows())
    start = case.state.astype(dtype)
    group = v.shape[1] // k.shape[1]
    outputs, states = np.zeros_like(v), np.zeros((len(v), *start.shape), dtype)
    for t, parent in enumerate(case.parents):
        above = start if parent < 0 else states[parent]
        for h in range(v.shape[1]):
            key = k[t, h // group]
            decayed = np.exp(log_decay[t, h]) * above[h]
            write = beta[t, h] * (v[t, h] - decayed @ key)
            states[t, h] = decayed + np.outer(write, key)
            outputs[t, h] = states[t, h] @ q[t, h // group]
    return outputs, states


def batch(cases, n_max, dtype=jnp.float32, fill=0.0):
    """Put cases into one envelope; returns the arguments of `verify` in its order."""

    def pad(x):
        room = ((0, n_max - len(x)),) + ((0, 0),) * (x.ndim - 1)
        return np.pad(x, room, constant_values=fill)

    columns = zip(*(case.rows() for case in cases), strict=True)
    arrays = [jnp.asarray(np.stack([pad(x) for x in rows]), dtype) for rows in columns]
    state = jnp.asarray(np.stack([case.state for case in cases]), dtype)
    parents = [case.parents + [-1] * (n_max - len(case.parents)) for case in cases]
    tree = tree_lib.DraftTree(
        tokens=jnp.zeros((len(cases), n_max), jnp.int32),
        parent=jnp.asarray(parents, jnp.int32),
        size=jnp.asarray([len(case.parents) for case in cases], jnp.int32),
        depth_max=n_max - 1,
    )
    return *arrays, state, tree


def spoil_slots(records, value):
    """Put a value into all slots of a ring but the committed one, in axis -4."""
    states, index = records.states, records.index
    slots = jnp.arange(states.shape[-4])
    held = (index[..., None] == slots)[..., None, None, None]
    return dataclasses.replace(records, states=jnp.where(held, states, value))


def relative(actual, expected):
    """Return the Frobenius error of `actual` relative to `expected`."""
    actual = np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)
