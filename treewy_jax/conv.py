"""The short causal convolution in front of the recurrence, along a sequence or a tree.

The state of a depthwise conv of width W is its *window*: the last W-1 raw input rows.
On a tree, a node's window is its W-1 nearest proper ancestors, then the committed
window where the path is shorter. Only raw rows are kept until commit, never a window
a node: at n = 40 those would outweigh the recurrent state itself.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from treewy_jax import slots
from treewy_jax import tree as tree_lib


def empty_window(rows: Float[Array, "B T C"], width: int) -> Float[Array, "B W1 C"]:
    """Return the window before the first token: W-1 zero rows."""
    return jnp.zeros((rows.shape[0], width - 1, rows.shape[-1]), rows.dtype)


def causal(
    rows: Float[Array, "B T C"],
    window: Float[Array, "B W1 C"],
    weight: Float[Array, "C W"],
) -> Float[Array, "B T C"]:
    """Convolve a sequence: out_t = sum_w weight[:, w] row_{t-(W-1)+w}, in float32."""
    length = rows.shape[1]
    padded = jnp.concatenate([window.astype(rows.dtype), rows], axis=1)
    width = weight.shape[-1]
    return _weigh([padded[:, w : w + length] for w in range(width)], weight)


def tree_windows(tree: tree_lib.DraftTree, width: int) -> Int[Array, "B n W"]:
    """Return each node's conv inputs, oldest first, as rows of [window; node rows].

    Row W-1+i is node i; rows 0..W-2 are the committed window. A node at depth d sees
    d ancestors and then the newest rows of the window.
    """
    depth = tree.depth()
    columns = []
    for distance in range(width - 1, -1, -1):
        beyond = (width - 1) + depth - distance
        ancestor = tree.ancestor_at(distance)
        columns.append(jnp.where(distance <= depth, width - 1 + ancestor, beyond))
    return jnp.stack(columns, axis=-1)


def tree(
    rows: Float[Array, "B n C"],
    window: Float[Array, "B W1 C"],
    weight: Float[Array, "C W"],
    windows: Int[Array, "B n W"],
) -> Float[Array, "B n C"]:
    """Convolve every node with its ancestors' rows (`windows`: `tree_windows`)."""
    padded = jnp.concatenate([window.astype(rows.dtype), rows], axis=1)
    width = weight.shape[-1]
    return _weigh([slots.take(padded, windows[..., w]) for w in range(width)], weight)


def window_at(
    rows: Float[Array, "B T C"],
    window: Float[Array, "B W1 C"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B W1 C"]:
    """Return the window after `lengths` rows: the last W-1 of [window; rows]."""
    padded = jnp.concatenate([window, rows.astype(window.dtype)], axis=1)
    return slots.take(padded, lengths[:, None] + jnp.arange(window.shape[1]))


def commit(
    window: Float[Array, "B W1 C"],
    rows: Float[Array, "B n C"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> Float[Array, "B W1 C"]:
    """Return the window after `count` nodes of `path`; count 0 changes no bit."""
    return window_at(slots.take(rows, path), window, count)


def _weigh(
    inputs: list[Float[Array, "B T C"]], weight: Float[Array, "C W"]
) -> Float[Array, "B T C"]:
    """Weigh the W inputs of every row by the taps, oldest first, in float32."""
    wide = jnp.promote_types(inputs[0].dtype, jnp.float32)
    taps = weight.astype(wide)
    total = inputs[0].astype(wide) * taps[:, 0]
    for w, part in enumerate(inputs[1:], 1):
        total += part.astype(wide) * taps[:, w]
    return total
