"""What happens to the recurrent state when a path is accepted: the lifecycles.

| lifecycle     | kept until commit                           | moves of S       |
|---------------|---------------------------------------------|------------------|
| `store-all`   | the full state after every node             | 1 + n; tree: 2n  |
| `reconstruct` | pseudo-values, keys, log decay of the nodes | 3                |
| `fused`       | the same, and of the path accepted before   | 2                |
| `deferred`    | the same, and of some paths before          | 1 + 1 / steps    |

`store-all` only changes an index when it commits: the states lie in a ring of slots.
`fused` folds the path accepted last into S in the pass that verifies the next tree.
`deferred` folds a row only when its history would overflow, every few steps, and reads
the history beside S: see treewy_jax.history. A move is one pass over S.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.commit import op as commit_op
from pallas_kernels.store_all import op as store_all_op
from treewy_jax import deferred, pytree, sharding
from treewy_jax import lifecycle as lifecycle_lib
from treewy_jax import verify as verify_lib

Inputs = lifecycle_lib.Inputs
Lifecycle = lifecycle_lib.Lifecycle

_commit = sharding.by_letters(
    commit_op.commit,
    letters={
        "state": "B Hv Dv Dk",
        "k": "B n Hk Dk",
        "pseudo_values": "B n Hv Dv",
        "log_decay": "B n Hv",
        "path": "B P",
        "count": "B",
    },
)
_store_all = sharding.by_letters(
    store_all_op.store_all,
    letters={
        "q": "B n Hk Dk",
        "k": "B n Hk Dk",
        "v": "B n Hv Dv",
        "log_decay": "B n Hv",
        "beta": "B n Hv",
        "states": "B slots Hv Dv Dk",
        "index": "B",
        "parent": "B n",
    },
)


@dataclasses.dataclass(frozen=True)
class Reconstruct(lifecycle_lib.Options):
    """TreeWY as published: keep pseudo-values, rebuild the accepted state alone."""

    def check(self, depth: int, nodes: int) -> None:
        del depth, nodes  # any

    def init(self, state, key_heads=None, key_dtype=None) -> Float[Array, "B Hv Dv Dk"]:
        del key_heads, key_dtype
        return state.astype(self.state_dtype)

    def materialize(self, state):
        return state

    def verify(self, state, inputs, tree):
        q, k, v, log_decay, beta = inputs
        options = {"impl": self.impl, "precision": self.precision}
        verified = verify_lib.verify(q, k, v, log_decay, beta, state, tree, **options)
        # As it came: a path has no padding.
        log_decay = log_decay.astype(verified.log_decay.dtype)
        return verified.output, (k, verified.pseudo_values, log_decay)

    def commit(self, state, records, accepted):
        k, pseudo_values, log_decay = records
        path, count = accepted.path, accepted.count
        impl = commit_op.IMPLEMENTATIONS.nearest(self.impl)
        return _commit(state, k, pseudo_values, log_decay, path, count, impl=impl)


@pytree.dataclass
class Slots:
    """The states of a row in a ring of slots, and where the committed one lies.

    Verification writes node j to the slot 1 + j behind the committed one, which it only
    reads. What the other slots hold means nothing once the path is committed.

    Attributes:
        states: in their storage dtype.
        index: slot of the committed state.
    """

    states: Float[Array, "B slots Hv Dv Dk"]
    index: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class StoreAll(lifecycle_lib.Options):
    """The baseline every engine ships: a full state for each node, one of them kept.

    Attributes:
        nodes: of the largest tree, padding included; a row has a slot more.
    """

    nodes: int = 40

    def __post_init__(self):
        super().__post_init__()
        if self.nodes < 1:
            raise ValueError(f"nodes is {self.nodes}; 1 or more is allowed")

    def check(self, depth: int, nodes: int) -> None:
        del depth  # any
        if nodes > self.nodes:
            raise ValueError(f"nodes is {self.nodes}; this tree needs {nodes} or more")

    def init(self, state, key_heads=None, key_dtype=None) -> Slots:
        del key_heads, key_dtype
        state = state.astype(self.state_dtype)
        room = ((0, 0), (0, self.nodes)) + ((0, 0),) * 3
        index = jnp.zeros(len(state), jnp.int32)
        return Slots(jnp.pad(state[:, None], room), index)

    def verify(self, state, inputs, tree):
        self.check(tree.depth_max, tree.n_max)
        output, states = _store_all(
            *inputs,
            state.states,
            state.index,
            tree.parents(),
            depth_max=tree.depth_max,
            impl=store_all_op.IMPLEMENTATIONS.nearest(self.impl),
            output_dtype=inputs.q.dtype,
        )
        # What the op returns for padding means nothing.
        output = jnp.where(tree.valid()[..., None, None], output, 0)
        return output, Slots(states, state.index)

    def commit(self, state, records, accepted):
        del state  # its slots are among the records
        moved = (records.index + 1 + accepted.node) % records.states.shape[1]
        index = jnp.where(accepted.count > 0, moved, records.index)
        return Slots(records.states, index)

    def materialize(self, state):
        return jax.vmap(lambda states, slot: states[slot])(state.states, state.index)

    def record_nbytes(self, records) -> int:
        del records  # the ring itself
        return 0


LIFECYCLES = {
    "reconstruct": Reconstruct,
    "store-all": StoreAll,
    "fused": deferred.Fused,
    "deferred": deferred.Deferred,
}


def _options(lifecycle: type) -> list[str]:
    return [field.name for field in dataclasses.fields(lifecycle)]


OPTIONS = tuple(dict.fromkeys(sum(map(_options, LIFECYCLES.values()), [])))


def by_name(name: str, **options) -> Lifecycle:
    """Return the lifecycle called `name`; `-` and `_` are the same.

    Options of other lifecycles are left out, such as the depth of all but `fused` and
    the nodes of all but `store-all`.

    Raises:
        ValueError: the name is not one of `LIFECYCLES`, or an option is unknown or out
            of range.
    """
    key = name.replace("_", "-")
    if key not in LIFECYCLES:
        raise ValueError(f"commit={name!r}: allowed are {', '.join(LIFECYCLES)}")
    for option in options:
        if option not in OPTIONS:
            allowed = ", ".join(OPTIONS)
            raise ValueError(f"{option} is no option; allowed are {allowed}")
    known = _options(LIFECYCLES[key])
    return LIFECYCLES[key](**{k: v for k, v in options.items() if k in known})
