"""The interface of lifecycles: how the recurrent state goes from step to step.

A lifecycle owns an opaque state, one of a layer and a batch. `verify` reads it and
returns records; `commit` turns records and the accepted path into the next state. The
model and the loop touch the state through these methods only. All its arrays lead with
the batch, so rows are moved and freed without knowing what they hold.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from treewy_jax import accept, pytree
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

    def check(self, depth: int, nodes: int) -> None:
        """Raise ValueError where trees of this depth or so many nodes are too large."""
        ...

    def init(
        self,
        state: Float[Array, "B Hv Dv Dk"],
        key_heads: int | None = None,
        key_dtype: DTypeLike | None = None,
    ) -> Any:
        """Wrap a plain state S of a layer with so many key heads, whose keys are such.

        Without `key_dtype` committed keys are stored as pseudo-values are.
        """
        ...

    def verify(
        self, state: Any, inputs: Inputs, tree: tree_lib.DraftTree
    ) -> tuple[Float[Array, "B n Hv Dv"], Any]:
        """Return the outputs of all nodes and the records `commit` needs."""
        ...

    def commit(self, state: Any, records: Any, accepted: accept.Accepted) -> Any:
        """Return the state after the accepted path; rows with count 0 keep theirs."""
        ...

    def commit_layers(
        self, states: Sequence[Any], records: Sequence[Any], accepted: accept.Accepted
    ) -> tuple[Any, ...]:
        """Return what `commit` returns for each layer, at once where that is faster."""
        ...

    def materialize(self, state: Any) -> Float[Array, "B Hv Dv Dk"]:
        """Return the plain state S."""
        ...

    def nbytes(self, state: Any) -> int:
        """Return the bytes of the committed state (records not counted)."""
        ...

    def record_nbytes(self, records: Any) -> int:
        """Return the bytes of records, without a state that was written in place."""
        ...


@dataclasses.dataclass(frozen=True)
class Options:
    """What all lifecycles are asked for, and what they do alike."""

    state_dtype: str = "float32"
    impl: str | None = None
    precision: str | None = None

    def __post_init__(self):
        check_dtype("state_dtype", self.state_dtype)
        verify_lib.check_impl(self.impl)

    def commit_layers(self, states, records, accepted) -> tuple[Any, ...]:
        """Commit one layer after the other."""
        pairs = zip(states, records, strict=True)
        return tuple(self.commit(*pair, accepted) for pair in pairs)

    def nbytes(self, state) -> int:
        return pytree.nbytes(state)

    def record_nbytes(self, records) -> int:
        return pytree.nbytes(records)


def check_dtype(name: str, dtype: str) -> None:
    """Raise ValueError unless states can be stored in this dtype."""
    if dtype not in STATE_DTYPES:
        raise ValueError(f"{name}={dtype!r}: allowed are {', '.join(STATE_DTYPES)}")
