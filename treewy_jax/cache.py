"""The decode state of a hybrid model as one pytree: recurrent, conv windows, KV.

Leaves of the recurrent part lead with [blocks, layers a block], those of attention with
[blocks], as the layers are scanned.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from treewy_jax import accept, conv, pytree, slots
from treewy_jax import commit as commit_lib


@pytree.dataclass
class HybridCache:
    """What the target keeps between steps; it covers the tokens before the root.

    Attributes:
        recurrent: the lifecycle's states, leaves [L, R, B, ...].
        window: conv windows, raw rows before the conv.
        key: rotated keys of the attention layers; slots from `length` on are unused.
        value: their values.
        length: tokens covered.
    """

    recurrent: Any
    window: Float[Array, "L R B W1 C"]
    key: Float[Array, "L B S kv D"]
    value: Float[Array, "L B S kv D"]
    length: Int[Array, " B"]


@pytree.dataclass
class Records:
    """What one verification leaves for `commit`.

    Attributes:
        recurrent: the lifecycle's records, leaves [L, R, B, ...].
        rows: raw conv rows of the nodes.
        key: rotated keys of the nodes in the attention layers.
        value: their values.
    """

    recurrent: Any
    rows: Float[Array, "L R B n C"]
    key: Float[Array, "L B n kv D"]
    value: Float[Array, "L B n kv D"]


def commit(
    cache: HybridCache,
    records: Records,
    accepted: accept.Accepted,
    lifecycle: commit_lib.Lifecycle,
) -> HybridCache:
    """Advance every part of the state along the accepted path.

    Rows with count 0 keep their state bit for bit.
    """
    path, count = accepted.path, accepted.count

    def recurrent(state, layer_records):
        return lifecycle.commit(state, layer_records, accepted)

    def window(old, rows):
        return conv.commit(old, rows, path, count)

    def kv(old, rows):
        return slots.append(old, slots.take(rows, path), count, cache.length)

    per_layer, per_block = (lambda f: jax.vmap(jax.vmap(f))), jax.vmap
    return HybridCache(
        recurrent=per_layer(recurrent)(cache.recurrent, records.recurrent),
        window=per_layer(window)(cache.window, records.rows),
        key=per_block(kv)(cache.key, records.key),
        value=per_block(kv)(cache.value, records.value),
        length=cache.length + count,
    )


def take_rows(cache: HybridCache, rows: Int[Array, " b"]) -> HybridCache:
    """Return the cache whose row i is row rows[i], with all that belongs to it."""
    return _each_part(lambda x, axis: jnp.take(x, rows, axis=axis), cache)


def clear_rows(cache: HybridCache, rows: Bool[Array, " B"]) -> HybridCache:
    """Return the cache with nothing in these rows: no token, a zero state, no history.

    What they held, NaN included, is gone.
    """

    def clear(x, axis):
        chosen = rows.reshape((1,) * axis + rows.shape + (1,) * (x.ndim - axis - 1))
        return jnp.where(chosen, jnp.zeros_like(x), x)

    return _each_part(clear, cache)


def _each_part(change, cache: HybridCache) -> HybridCache:
    """Apply change(array, its batch axis) to every array."""

    def along(axis):
        return lambda part: jax.tree.map(lambda x: change(x, axis), part)

    return HybridCache(
        recurrent=along(2)(cache.recurrent),
        window=along(2)(cache.window),
        key=along(1)(cache.key),
        value=along(1)(cache.value),
        length=along(0)(cache.length),
    )


def nbytes(part: Any) -> int:
    """Return the bytes of all arrays in `part` (arrays or their shapes)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))


def state_bytes(cache: HybridCache, records: Records, mtp_kv: Any) -> dict[str, int]:
    """Return the bytes held by each part of the decode state, and by the records."""
    return {
        "recurrent": nbytes(cache.recurrent),
        "conv": nbytes(cache.window),
        "kv": nbytes((cache.key, cache.value)),
        "mtp_kv": nbytes(mtp_kv),
        "records": nbytes(records),
    }
