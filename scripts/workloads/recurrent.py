"""Inputs and float64 results that the ops of the recurrence have in common.

The sizes are those of a Gated DeltaNet layer of Qwen3.5 35B-A3B.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from scripts.workloads import draw
from treewy_jax import tree as tree_lib

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
# From the nodes of a tree to its widths.
TREES = {
    1: (),
    3: (2,),
    4: (1, 1, 1),
    7: (2, 2),
    15: (2, 2, 2),
    39: (2, 2, 8),
    40: (3, 3, 3),
    64: (3, 4, 4),
}


def tree(nodes: int, batch: int) -> tree_lib.DraftTree:
    """Return the tree of `TREES` with so many nodes, for every row of a batch."""
    return tree_lib.DraftTree.from_widths(TREES[nodes], batch=batch)


def inputs(
    key: jax.Array,
    *,
    batch: int,
    nodes: int,
    heads: tuple[int, int] = (KEY_HEADS, VALUE_HEADS),
    dims: tuple[int, int] = (DIM, DIM),
    input_dtype: str,
    state_dtype: str,
) -> tuple[jax.Array, ...]:
    """Return q, k, v, log_decay, beta and a full state; `dims` are Dk and Dv.

    Keys are correlated and decays run from none to strong: independent keys and mild
    decays hide what a solver loses.
    """
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    rows = (batch, nodes, key_heads, key_dim)
    gates = (batch, nodes, value_heads)
    common, q, k, v, decay, strength, state = draw.normals(
        key,
        (batch, 1, *rows[2:]),
        rows,
        rows,
        (*gates, value_dim),
        gates,
        gates,
        (batch, value_heads, value_dim, key_dim),
    )
    return (
        (draw.unit(q) * key_dim**-0.5).astype(input_dtype),
        draw.unit(k + 2 * common).astype(input_dtype),
        v.astype(input_dtype),
        -jnp.exp(2 * decay - 3),
        jax.nn.sigmoid(strength),
        (0.3 * state).astype(state_dtype),
    )


def host(arrays: Sequence[jax.Array], rows: Sequence[int]) -> list[np.ndarray]:
    """Return some rows of the arrays in float64, on the host."""
    picked = [x[np.asarray(rows)] for x in arrays]
    return [np.asarray(jax.device_get(x), np.float64) for x in picked]


def every_node(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    parent: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the gated delta rule along a tree, node by node.

    `parent` [n] is the same for all rows. Returns outputs and pseudo-values
    [B, n, Hv, Dv] and states [B, n, Hv, Dv, Dk].
    """
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    outputs, values, states = [], [], []
    for t, above in enumerate(parent):
        before = state if above < 0 else states[above]
        decayed = before * np.exp(log_decay[:, t])[..., None, None]
        read = np.einsum("bhvd,bhd->bhv", decayed, k[:, t])
        values.append(beta[:, t, :, None] * (v[:, t] - read))
        states.append(decayed + values[-1][..., None] * k[:, t, :, None])
        outputs.append(np.einsum("bhvd,bhd->bhv", states[-1], q[:, t]))
    stacked = (np.stack(x, axis=1) for x in (outputs, values, states))
    return tuple(stacked)  # pyright: ignore[reportReturnType]
