"""Lifecycles that write the state later than a path is accepted: fused and deferred.

Their state is a `treewy_jax.history.History`: S, and the records that it lacks.
Rows of more than so many records fold them into S, in the pass that verifies; `commit`
then puts the accepted path where their history began. Both tell by the count alone.
"""

import dataclasses

from jaxtyping import Array, Float

from treewy_jax import history as history_lib
from treewy_jax import lifecycle, pytree


@pytree.dataclass
class Written:
    """Records of the lifecycles with a history.

    Attributes:
        state: S; of rows that folded, with their history in it.
        k, pseudo_values, log_decay: of the nodes.
        fold_above: rows of more records than that folded them.
    """

    state: Float[Array, "B Hv Dv Dk"]
    k: Float[Array, "B n Hk Dk"]
    pseudo_values: Float[Array, "B n Hv Dv"]
    log_decay: Float[Array, "B n Hv"]
    fold_above: int = pytree.static()


@dataclasses.dataclass(frozen=True)
class _Deferring(lifecycle.Options):
    """What lifecycles that write S later have in common; their state is a History.

    Attributes:
        state_dtype: storage of S. Warning: bfloat16 drifts where little decays and
            writes are weak, since every fold rounds S. From 512 to 8,192 tokens its
            relative error then grew as tokens^0.4, from 1.7e-2 to 5.3e-2 (fused),
            7.5e-3 to 2.3e-2 (horizon 16) and 5.2e-3 to 1.6e-2 (horizon 32), and more
            slowly to 2.8e-2 (horizon 16) at 32,768. On inputs of the shipped model it
            stayed at 2e-3 to 6e-3. float32 ended within 1.4 times the error of the
            recurrence in float32, below 2e-6, on all inputs.
        record_dtype: storage of committed keys and pseudo-values; keys that are
            narrower stay as they are. bfloat16 rounds each once: with a float32 state
            the error is 2e-3 to 5e-3 and does not grow.
            (All by scripts/bench_drift.py on a CPU, implementation "reference".)
    """

    record_dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        lifecycle.check_dtype("record_dtype", self.record_dtype)

    def init(self, state, key_heads=None, key_dtype=None) -> history_lib.History:
        if key_heads is None:
            raise ValueError("key_heads is None; the key heads of the layer are needed")
        state = state.astype(self.state_dtype)
        dtypes = (self.record_dtype, key_dtype)
        return history_lib.empty(state, key_heads, self.horizon, *dtypes)

    def verify(self, state, inputs, tree):
        self.check(tree.depth_max, tree.n_max)
        fold_above = self.fold_above(tree.depth_max)
        verified, history = history_lib.verify(
            *inputs,
            state,
            fold_above,
            tree,
            impl=history_lib.IMPLEMENTATIONS.nearest(self.impl),
            precision=self.precision,
        )
        # As it came: a path has no padding.
        log_decay = inputs.log_decay.astype(verified.log_decay.dtype)
        records = (inputs.k, verified.pseudo_values, log_decay)
        return verified.output, Written(history.state, *records, fold_above)

    def commit(self, state, records, accepted):
        return self.commit_layers((state,), (records,), accepted)[0]

    def commit_layers(self, states, records, accepted):
        """Commit all layers in one launch where a device allows it.

        Raises ValueError where trees of different depth were verified.
        """
        found = sorted({left.fold_above for left in records})
        if len(found) != 1:
            raise ValueError(f"records have fold_above {found}; one value is allowed")
        pairs = zip(states, records, strict=True)
        histories = history_lib.append_layers(
            [dataclasses.replace(state, state=left.state) for state, left in pairs],
            [(left.k, left.pseudo_values, left.log_decay) for left in records],
            accepted.path,
            accepted.count,
            fold_above=found[0],
            impl=self.impl,
        )
        return tuple(histories)

    def materialize(self, state):
        return history_lib.fold(state, impl=self.impl)

    def record_nbytes(self, records) -> int:
        nodes = (records.k, records.pseudo_values, records.log_decay)
        return super().record_nbytes(nodes)  # S lies where it was


@dataclasses.dataclass(frozen=True)
class Fused(_Deferring):
    """Fold the path accepted last into S while the next tree is verified.

    Attributes:
        depth: of the deepest tree.
    """

    depth: int = 3

    def __post_init__(self):
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth is {self.depth}; 0 or more is allowed")

    @property
    def horizon(self) -> int:
        """Records of a row: one path."""
        return self.depth + 1

    def check(self, depth: int, nodes: int) -> None:
        del nodes  # any
        if depth > self.depth:
            raise ValueError(f"depth is {self.depth}; this tree needs {depth} or more")

    def fold_above(self, depth: int) -> int:
        """Return the most records of a row that does not fold: none."""
        del depth
        return 0


@dataclasses.dataclass(frozen=True)
class Deferred(_Deferring):
    """Keep accepted records beside S, and fold them when they would overflow.

    Attributes:
        horizon: records that a row has room for; more means fewer writes of S and a
            longer history to read.
    """

    horizon: int = 16

    def __post_init__(self):
        super().__post_init__()
        if self.horizon < 1:
            raise ValueError(f"horizon is {self.horizon}; 1 or more is allowed")

    def check(self, depth: int, nodes: int) -> None:
        del nodes  # any
        if depth + 1 > self.horizon:
            raise ValueError(
                f"horizon is {self.horizon}; a path of this tree has up to {depth + 1} "
                f"nodes, so {depth + 1} or more is allowed"
            )

    def fold_above(self, depth: int) -> int:
        """Return the most records of a row that has room for a path more."""
        return self.horizon - depth - 1
