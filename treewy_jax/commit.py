"""What happens to the recurrent state when a path is accepted: the lifecycles.

| lifecycle     | kept until commit                           | moves of S       |
|---------------|---------------------------------------------|------------------|
| `store-all`   | the full state after every node             | 1 + n; tree: 2n  |
| `reconstruct` | pseudo-values, keys, log decay of the nodes | 3                |
| `fused`       | the same, and of the path accepted before   | 2                |
| `deferred`    | the same, and of some paths before          | 1 + 1 / steps    |

`fused` folds the path accepted last into S in the pass that verifies the next tree.
`deferred` folds a row only when its history would overflow, every few steps, and reads
the history beside S: see treewy_jax.history. A move is one pass over S.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.commit import op as commit_op
from pallas_kernels.store_all import op as store_all_op
from treewy_jax import deferred
from treewy_jax import lifecycle as lifecycle_lib
from treewy_jax import verify as verify_lib

Inputs = lifecycle_lib.Inputs
Lifecycle = lifecycle_lib.Lifecycle


@dataclasses.dataclass(frozen=True)
class _PlainState(lifecycle_lib.Options):
    """What lifecycles whose state is S itself have in common."""

    def check(self, depth: int) -> None:
        del depth

    def init(self, state, key_heads=None) -> Float[Array, "B Hv Dv Dk"]:
        del key_heads
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

    Options of other lifecycles are left out, such as the depth of all but `fused`.

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
