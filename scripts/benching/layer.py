"""The work that kernels are compared on across projects: one layer, raw rows in.

Inputs are what the projections of a Gated DeltaNet layer leave: q and k before they are
normalised, gates before their activations. So normalisation and gates are part of the
work of whoever takes part, and exact results start from the same rows, in float64.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunk_prefill import op as chunk_prefill
from pallas_kernels.commit import op as commit
from pallas_kernels.decode import op as decode
from pallas_kernels.gdn_front import op as gdn_front
from scripts.workloads import base
from scripts.workloads import chunk_prefill as prefill_workloads
from scripts.workloads import history_verify as history_workloads
from treewy_jax import history, verify
from treewy_jax import tree as tree_lib

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
EPSILON = 1e-6  # of the norms of q and k
# Relative errors that bfloat16 outputs may have, of ours and of anyone else.
BOUND = 1e-2

Exact = Callable[[tuple, Sequence[int]], tuple]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Least bytes and flops of a call; flops are not counted here."""

    bytes_moved: int
    flops: int = 1


@dataclasses.dataclass(frozen=True)
class Work:
    """One comparison.

    Attributes:
      name: "verify", "decode" or "prefill".
      batch: rows.
      parents: of each node, root first with -1; of a chain each is the one before.
      key_heads, value_heads, dim: heads and their size, Dk = Dv.
      state_dtype: in which the state is stored.
    """

    name: str
    batch: int
    parents: tuple[int, ...]
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128
    state_dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """Nodes or tokens a row."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before."""
        return self.parents == tuple(range(-1, self.tokens - 1))

    @property
    def label(self) -> str:
        """Sizes and dtypes, as tables show them."""
        shape = "chain" if self.is_chain else "tree"
        unit = {"verify": f"{shape} n=", "prefill": "T=", "decode": "T="}[self.name]
        return (
            f"{self.name} {unit}{self.tokens} B={self.batch} "
            f"Hk={self.key_heads} S={self.state_dtype}"
        )

    def path(self) -> list[int]:
        """Return the nodes down to the last one, root first: a deepest path."""
        found = [self.tokens - 1]
        while self.parents[found[0]] >= 0:
            found.insert(0, self.parents[found[0]])
        return found

    def cost(self, state_moves: int) -> Cost:
        """Return the least traffic with the state read (1) or also written (2)."""
        state = self.value_heads * self.dim * self.dim
        rows = self.tokens * self.dim * (2 * self.key_heads + 2 * self.value_heads)
        size = jnp.dtype(self.state_dtype).itemsize
        return Cost(self.batch * (state_moves * state * size + 2 * rows))


def inputs(work: Work, key: jax.Array) -> tuple:
    """Return q, k, v, a, b in bfloat16, A_log, dt_bias, the state and the tree.

    Keys share a part and decays reach from none to strong, as in trained layers.
    """
    keys = jax.random.split(key, 9)
    normal = jax.random.normal
    rows = (work.batch, work.tokens)
    q_shape = (*rows, work.key_heads, work.dim)
    gates = (*rows, work.value_heads)
    common = normal(keys[0], (work.batch, 1, *q_shape[2:]))
    narrow = (
        normal(keys[1], q_shape),
        common + normal(keys[2], q_shape),
        normal(keys[3], (*gates, work.dim)),
        2 * normal(keys[4], gates),
        normal(keys[5], gates),
    )
    state = normal(keys[6], (work.batch, work.value_heads, work.dim, work.dim))
    return (
        *(x.astype(jnp.bfloat16) for x in narrow),
        normal(keys[7], (work.value_heads,)) - 1,
        normal(keys[8], (work.value_heads,)) - 1,
        (0.3 * state).astype(work.state_dtype),
        tree(work),
    )


def tree(work: Work) -> tree_lib.DraftTree:
    """Return the tree of a work, the same in each row."""
    return tree_lib.DraftTree(
        tokens=jnp.zeros((work.batch, work.tokens), jnp.int32),
        parent=jnp.asarray(work.parents, jnp.int32),
        size=jnp.full(work.batch, work.tokens, jnp.int32),
        depth_max=len(work.path()) - 1,
    )


def remembered(work: Work) -> Exact:
    """Return `exact_rows` of a work; the same rows are not computed again."""
    known: dict = {}

    def exact(arrays: tuple, rows: Sequence[int]) -> tuple:
        key = tuple(rows), np.asarray(arrays[0][np.asarray(rows)]).tobytes()
        if key not in known:
            known[key] = exact_rows(work, arrays, rows)
        return known[key]

    return exact


def cases(work: Work, exact: Exact) -> list[base.Case]:
    """Return what of ours takes part in a comparison."""
    case = functools.partial(
        base.Case,
        label=work.label,
        kind="",
        inputs=functools.partial(inputs, work),
        tags=frozenset(),
    )
    if work.name != "verify":
        run = {"decode": decode_once, "prefill": prefill}[work.name]
        return [
            case(
                op=work.name,
                spec=work.cost(2),
                call=lambda impl, config: run,
                exact=exact,
                bounds=(BOUND, BOUND),
                donate=(7,) if work.name == "decode" else (),
            )
        ]
    known = tree(work)
    return [
        case(
            op="verify",
            spec=work.cost(1),
            call=lambda impl, config: lambda *arrays: verify_tree(known, *arrays)[:1],
            exact=lambda arrays, rows: exact(arrays, rows)[:1],
            bounds=(BOUND,),
        ),
        case(
            op="verify + commit",
            spec=work.cost(3),
            call=lambda impl, config: functools.partial(verify_and_commit, work, known),
            exact=exact,
            bounds=(BOUND, BOUND),
            donate=(7,),
        ),
        case(
            op="fused step",
            spec=work.cost(2),
            inputs=functools.partial(fused_inputs, work),
            call=lambda impl, config: functools.partial(fused_step, work, known),
            exact=functools.partial(exact_fused, work),
            bounds=(BOUND,) * 6,
            donate=(7,),
        ),
    ]


def verify_tree(known, q, k, v, a, b, A_log, dt_bias, state, _) -> tuple:
    """Return the outputs of all nodes, and the records of the verification.

    The tree is `known`, a constant of the program: its masks are made before, as those
    of the other projects are. In a model one set serves all layers.
    """
    q, k, log_decay, beta = gdn_front.normalize_and_gate(q, k, a, b, A_log, dt_bias)
    verified = verify.verify(
        q, k, v, log_decay, beta, state, known, output_dtype=v.dtype
    )
    return verified.output, verified, k


def verify_and_commit(work: Work, known, *arrays: Any) -> tuple:
    """Return the outputs, and the state after the path to the last node."""
    output, verified, k = verify_tree(known, *arrays)
    path = jnp.tile(jnp.asarray(work.path(), jnp.int32), (work.batch, 1))
    count = jnp.full(work.batch, path.shape[1], jnp.int32)
    records = k, verified.pseudo_values, verified.log_decay
    return output, commit.commit(arrays[7], *records, path, count)


def fused_inputs(work: Work, key: jax.Array) -> tuple:
    """Return `inputs` with a history in place of the state: one path to be written."""
    arrays = inputs(work, key)
    rows = work.batch, len(work.path())
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    values = (*rows, work.value_heads)
    k = jax.random.normal(keys[0], (*rows, work.key_heads, work.dim))
    past = history.History(
        state=arrays[7],
        k=k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        pseudo_values=0.3 * jax.random.normal(keys[1], (*values, work.dim)),
        log_decay=-jnp.exp(jax.random.normal(keys[2], values) - 2),
        count=jnp.full(work.batch, rows[1], jnp.int32),
    )
    return (*arrays[:7], past, arrays[8])


def fused_step(work: Work, known, q, k, v, a, b, A_log, dt_bias, past, _) -> tuple:
    """Return the outputs, and the history with the path to the last node.

    The path before is written into the state in the pass that verifies.
    """
    q, k, log_decay, beta = gdn_front.normalize_and_gate(q, k, a, b, A_log, dt_bias)
    verified, written = history.verify(
        q, k, v, log_decay, beta, past, 0, known, output_dtype=v.dtype
    )
    path = jnp.tile(jnp.asarray(work.path(), jnp.int32), (work.batch, 1))
    (past,) = history.append_layers(
        [dataclasses.replace(past, state=written.state)],
        [(k, verified.pseudo_values, verified.log_decay)],
        path,
        jnp.full(work.batch, path.shape[1], jnp.int32),
        fold_above=0,
    )
    return verified.output, past


def decode_once(q, k, v, a, b, A_log, dt_bias, state, tree) -> tuple:
    """Return output and state of one token."""
    q, k, log_decay, beta = gdn_front.normalize_and_gate(q, k, a, b, A_log, dt_bias)
    rows = (x[:, 0] for x in (q, k, v, log_decay, beta))
    output, state = decode.decode(*rows, state)
    return output[:, None], state


def prefill(q, k, v, a, b, A_log, dt_bias, state, tree) -> tuple:
    """Return outputs and last state of a prompt."""
    q, k, log_decay, beta = gdn_front.normalize_and_gate(q, k, a, b, A_log, dt_bias)
    return chunk_prefill.chunk_prefill(q, k, v, log_decay, beta, state)


def exact_gates(a, b, A_log, dt_bias) -> tuple[np.ndarray, np.ndarray]:
    """Return log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b)."""
    log_decay = -np.exp(A_log) * np.logaddexp(0.0, a + dt_bias)
    return log_decay, 1 / (1 + np.exp(-b))


def exact_rows(work: Work, arrays: tuple, rows: Sequence[int]) -> tuple:
    """Return outputs, and the state after the last node, of some rows in float64.

    S' = exp(g) S + u k^T,  u = beta (v - exp(g) S k),  o = S' q Dk^-0.5,  S of the
    parent, q and k divided by their norms.
    """
    state = _host(arrays[7], rows)
    q, k, v, log_decay, beta = exact_front(work, arrays, rows)
    if work.name == "prefill":  # node by node it would take a minute a row
        whole = (work.dim**-0.5 * q, k, v, log_decay, beta, state)
        return prefill_workloads.exact(whole, range(len(rows)))
    return _walk_rows(work, q, k, v, log_decay, beta, state)[:2]


def exact_fused(work: Work, arrays: tuple, rows: Sequence[int]) -> tuple:
    """Return the outputs, and the leaves of the history, of some rows in float64."""
    past = arrays[7]
    records = (past.k, past.pseudo_values, past.log_decay)
    before = [_host(x, rows) for x in (past.state, *records)]
    count = len(work.path())
    state = np.stack(
        [history_workloads.after(*row, count) for row in zip(*before, strict=True)]
    )
    q, k, v, log_decay, beta = exact_front(work, arrays, rows)
    output, _, u = _walk_rows(work, q, k, v, log_decay, beta, state)
    k = k[:, :, :: work.value_heads // work.key_heads]
    path = work.path()
    new = (x[:, path] for x in (k, u, log_decay))
    return output, state, *new, np.full(len(rows), count)


def exact_front(work: Work, arrays: tuple, rows: Sequence[int]) -> tuple:
    """Return q and k, normalised and a value head each, v and the gates, in float64."""
    q, k, v, a, b = (_host(x, rows) for x in arrays[:5])
    A_log, dt_bias = (np.asarray(x, np.float64) for x in arrays[5:7])
    log_decay, beta = exact_gates(a, b, A_log, dt_bias)
    norms = (np.sqrt(np.sum(x * x, -1, keepdims=True) + EPSILON) for x in (q, k))
    group = work.value_heads // work.key_heads
    q, k = (
        np.repeat(x / norm, group, axis=2)
        for x, norm in zip((q, k), norms, strict=True)
    )
    return q, k, v, log_decay, beta


def _host(x: Any, rows: Sequence[int]) -> np.ndarray:
    return np.asarray(jax.device_get(x[np.asarray(rows)]), np.float64)


def _walk_rows(work: Work, *arrays: np.ndarray) -> tuple:
    walked = [_walk(work, *row) for row in zip(*arrays, strict=True)]
    return tuple(np.stack(parts) for parts in zip(*walked, strict=True))


def _walk(work: Work, q, k, v, log_decay, beta, state) -> tuple:
    """Return outputs, last state and pseudo-values of one row, node by node."""
    states: dict[int, np.ndarray] = {-1: state}
    last_use = {parent: node for node, parent in enumerate(work.parents)}
    output, values = np.empty_like(v), np.empty_like(v)
    for node, parent in enumerate(work.parents):
        decayed = np.exp(log_decay[node])[:, None, None] * states[parent]
        known = np.einsum("hvk,hk->hv", decayed, k[node])
        u = beta[node][:, None] * (v[node] - known)
        values[node] = u
        new = decayed + u[:, :, None] * k[node][:, None, :]
        output[node] = np.einsum("hvk,hk->hv", new, q[node]) * work.dim**-0.5
        states[node] = new
        if last_use[parent] == node:  # a prompt's states do not fit all at once
            del states[parent]
    return output, new, values
