"""The decode state of a hybrid model as one pytree: recurrent, conv windows, KV.

Every layer has arrays of its own, which lead with the rows of the batch.
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
        recurrent: the lifecycle's state of each recurrent layer.
        window: their conv windows, raw rows before the conv.
        key: rotated keys of each attention layer; slots from `length` on are unused.
        value: their values.
        length: tokens covered.
    """

    recurrent: tuple[Any, ...]
    window: tuple[Float[Array, "B W1 C"], ...]
    key: tuple[Float[Array, "B S kv D"], ...]
    value: tuple[Float[Array, "B S kv D"], ...]
    length: Int[Array, " B"]


@pytree.dataclass
class Records:
    """What one verification leaves for `commit`.

    Attributes:
        recurrent: the lifecycle's records of each recurrent layer.
        rows: raw conv rows of the nodes there; a target may keep more columns beside
            them until it commits.
        key: rotated keys of the nodes in each attention layer.
        value: their values.
    """

    recurrent: tuple[Any, ...]
    rows: tuple[Float[Array, "B n C"], ...]
    key: tuple[Float[Array, "B n kv D"], ...]
    value: tuple[Float[Array, "B n kv D"], ...]


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

    def window(old, rows):
        return conv.commit(old, rows, path, count)

    def kv(old, rows):
        return slots.append(old, slots.take(rows, path), count, cache.length)

    return HybridCache(
        recurrent=lifecycle.commit_layers(cache.recurrent, records.recurrent, accepted),
        window=tuple(map(window, cache.window, records.rows)),
        key=tuple(map(kv, cache.key, records.key)),
        value=tuple(map(kv, cache.value, records.value)),
        length=cache.length + count,
    )


def take_rows(cache: HybridCache, rows: Int[Array, " b"]) -> HybridCache:
    """Return the cache whose row i is row rows[i], with all that belongs to it."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), cache)


def clear_rows(cache: HybridCache, rows: Bool[Array, " B"]) -> HybridCache:
    """Return the cache with nothing in these rows: no token, a zero state, no history.

    What they held, NaN included, is gone.
    """

    def clear(x):
        chosen = rows.reshape(rows.shape + (1,) * (x.ndim - 1))
        return jnp.where(chosen, jnp.zeros_like(x), x)

    return jax.tree.map(clear, cache)


def state_bytes(
    cache: HybridCache,
    records: Records,
    mtp_kv: Any,
    lifecycle: commit_lib.Lifecycle,
) -> dict[str, int]:
    """Return the bytes held by each part of the decode state, and by the records.

    Records do not count what verification writes over the state itself.
    """
    kept = sum(map(lifecycle.record_nbytes, records.recurrent))
    return {
        "recurrent": pytree.nbytes(cache.recurrent),
        "conv": pytree.nbytes(cache.window),
        "kv": pytree.nbytes((cache.key, cache.value)),
        "mtp_kv": pytree.nbytes(mtp_kv),
        "records": kept + pytree.nbytes((records.rows, records.key, records.value)),
    }
