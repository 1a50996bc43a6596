"""What happens to the recurrent state when a path is accepted: the lifecycles.

A lifecycle owns an opaque state, one of a layer and a batch. `verify` reads it and
returns records; `commit` turns records and the accepted path into the next state. The
model and the loop touch the state through these methods only.

| lifecycle     | kept until commit                           | moves of S       |
|---------------|---------------------------------------------|------------------|
| `store-all`   | the full state after every node             | 1 + n; tree: 2n  |
| `reconstruct` | pseudo-values, keys, log decay of the nodes | 3                |
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.commit import op as commit_op
from pallas_kernels.store_all import op as store_all_op
from treewy_jax import accept
from treewy_jax import tree as tree_lib
from treewy_jax import verify as verify_lib

STATE_DTYPES = ("float32", "bfloat16", "float64")


class Inputs(NamedTuple):
    """The five arrays that `verify` takes for each node (see treewy_jax.verify)."""

    q: Float[Array, "B n Hk Dk"]
    k: Float[Array, "B n Hk Dk"]
    v: Float[Array, "B n Hv Dv"]
    log_decay: Float[Array, "B n Hv"]
    beta: Float[Array, "B n Hv"]


@runtime_checkable
class Lifecycle(Protocol):
    """One way of carrying the recurrent state from step to step."""

    def init(self, state: Float[Array, "B Hv Dv Dk"]) -> Any:
        """Wrap a plain state S."""
        ...

    def verify(
        self, state: Any, inputs: Inputs, tree: tree_lib.DraftTree
    ) -> tuple[Float[Array, "B n Hv Dv"], Any]:
        """Return the outputs of all nodes and the records `commit` needs."""
        ...

    def commit(self, state: Any, records: Any, accepted: accept.Accepted) -> Any:
        """Return the state after the accepted path; rows with count 0 keep theirs."""
        ...

    def materialize(self, state: Any) -> Float[Array, "B Hv Dv Dk"]:
        """Return the plain state S."""
        ...

    def nbytes(self, state: Any) -> int:
        """Return the bytes of the committed state (records not counted)."""
        ...


@dataclasses.dataclass(frozen=True)
class _PlainState:
    """What lifecycles whose state is S itself have in common."""

    state_dtype: str = "float32"
    impl: str | None = None
    precision: str | None = None

    def __post_init__(self):
        if self.state_dtype not in STATE_DTYPES:
            allowed = ", ".join(STATE_DTYPES)
            raise ValueError(f"state_dtype={self.state_dtype!r}: allowed are {allowed}")
        verify_lib.check_impl(self.impl)

    def init(self, state: Float[Array, "B Hv Dv Dk"]) -> Float[Array, "B Hv Dv Dk"]:
        return state.astype(self.state_dtype)

    def materialize(self, state):
        return state

    def nbytes(self, state) -> int:
        return state.nbytes


@dataclasses.dataclass(frozen=True)
class Reconstruct(_PlainState):
    """TreeWY as published: keep pseudo-values, rebuild the accepted state alone."""

    def verify(self, state, inputs, tree):
        q, k, v, log_decay, beta = inputs
        options = {"impl": self.impl, "precision": self.precision}
        verified = verify_lib.verify(q, k, v, log_decay, beta, state, tree, **options)
        records = (k, verified.pseudo_values, verified.log_decay)
        return verified.output, records

    def commit(self, state, records, accepted):
        k, pseudo_values, log_decay = records
        path, count = accepted.path, accepted.count
        impl = commit_op.IMPLEMENTATIONS.nearest(self.impl)
        return commit_op.commit(
            state, k, pseudo_values, log_decay, path, count, impl=impl
        )


@dataclasses.dataclass(frozen=True)
class StoreAll(_PlainState):
    """The baseline every engine ships: a full state for each node, one of them kept."""

    def verify(self, state, inputs, tree):
        impl = store_all_op.IMPLEMENTATIONS.nearest(self.impl)
        q, k, v, log_decay, beta = inputs
        output, states = store_all_op.store_all(
            q,
            k,
            v,
            log_decay,
            beta,
            state,
            tree.parents(),
            depth_max=tree.depth_max,
            impl=impl,
            output_dtype=inputs.q.dtype,
        )
        # What the op returns for padding means nothing.
        return jnp.where(tree.valid()[..., None, None], output, 0), states

    def commit(self, state, records, accepted):
        chosen = jax.vmap(lambda states, node: states[node])(records, accepted.node)
        kept = (accepted.count == 0)[:, None, None, None]
        return jnp.where(kept, state, chosen)


LIFECYCLES = {"reconstruct": Reconstruct, "store-all": StoreAll}


def by_name(name: str, **options) -> Lifecycle:
    """Return the lifecycle called `name`; `-` and `_` are the same.

    Raises:
        ValueError: the name is not one of `LIFECYCLES`.
    """
    key = name.replace("_", "-")
    if key not in LIFECYCLES:
        raise ValueError(f"commit={name!r}: allowed are {', '.join(LIFECYCLES)}")
    return LIFECYCLES[key](**options)
