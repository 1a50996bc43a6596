"""A short history of committed tokens that the state lacks, and verification behind it.

Committing a path need not write the state: its records (keys k, pseudo-values u, log
decays g) say all there is to say. With S the state that was written last, m records
since, h_j the log decay from there up to record j and H = h_m, the state before the
tree is

    S_0 = e^H S + sum_j e^(H - h_j) u_j k_j^T

and what a node reads from it is e^H S x + sum_j e^(H - h_j) u_j (k_j . x): the history
joins the ancestors of the whole tree, and S_0 need not be formed. Folding writes S_0
over S and empties the history. ReplaySSM (vLLM RFC 47572) defers the write for chains;
here the records of an accepted path of any tree are appended in its order.
"""

import functools
import typing
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import implementations
from pallas_kernels.commit import op as commit_op
from pallas_kernels.history_append import op as append_op
from pallas_kernels.history_verify import spec as specs
from treewy_jax import pytree, sharding, wy
from treewy_jax import tree as tree_lib
from treewy_jax import verify as verify_lib

IMPLEMENTATIONS = implementations.Implementations(
    "history_verify",
    {
        "mosaic_gpu": "pallas_kernels.history_verify.mosaic_gpu",
        "triton": "pallas_kernels.history_verify.triton",
        "mosaic_tpu": "pallas_kernels.history_verify.mosaic_tpu",
        "reference": "treewy_jax.history",
    },
)


@pytree.dataclass
class History:
    """A state, and the records committed since it was written.

    Attributes:
        state: S, in its storage dtype.
        k: keys of the records, normalised, in the order of the text.
        pseudo_values: u.
        log_decay: g <= 0, each record's own.
        count: how many of the m records of a row there are; 0 is an empty history.
    """

    state: Float[Array, "B Hv Dv Dk"]
    k: Float[Array, "B m Hk Dk"]
    pseudo_values: Float[Array, "B m Hv Dv"]
    log_decay: Float[Array, "B m Hv"]
    count: Int[Array, " B"]

    @property
    def horizon(self) -> int:
        """Records that a row has room for."""
        return self.k.shape[1]


def empty(
    state: Float[Array, "B Hv Dv Dk"],
    key_heads: int,
    horizon: int,
    record_dtype: DTypeLike,
    key_dtype: DTypeLike | None = None,
) -> History:
    """Return a state with a history of no records and room for `horizon`.

    Keys are stored in the narrower of the two dtypes; None is that of the records.
    """
    batch, value_heads, value_dim, key_dim = state.shape
    room = (batch, horizon)
    decays = jnp.promote_types(record_dtype, jnp.float32)
    stored = specs.key_dtype(
        record_dtype if key_dtype is None else key_dtype, record_dtype
    )
    return History(
        state=state,
        k=jnp.zeros((*room, key_heads, key_dim), stored),
        pseudo_values=jnp.zeros((*room, value_heads, value_dim), record_dtype),
        log_decay=jnp.zeros((*room, value_heads), decays),
        count=jnp.zeros(batch, jnp.int32),
    )


def append_layers(
    histories: Sequence[History],
    nodes: Sequence[Sequence[Array]],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    fold_above: int | None = None,
    impl: str | None = None,
) -> list[History]:
    """Append the first `count` nodes of each path to the histories of some layers.

    `nodes` are k, pseudo_values and log_decay of each layer.

    A row that `verify` folded with the same `fold_above` begins anew; None: none does.
    No other slot changes; there has to be room.
    """
    pasts = [
        append_op.Past(x.k, x.pseudo_values, x.log_decay, x.count) for x in histories
    ]
    append = functools.partial(
        append_op.append_layers,
        fold_above=fold_above,
        impl=append_op.IMPLEMENTATIONS.nearest(impl),
    )
    past = append_op.Past("B m Hk Dk", "B m Hv Dv", "B m Hv", "B")
    pasts = sharding.run(
        append,
        (pasts, [tuple(each) for each in nodes], path, count),
        ([past] * len(pasts), [tuple(past[:3])] * len(nodes), "B P", "B"),
        [past] * len(pasts),
    )
    pairs = zip(histories, pasts, strict=True)
    return [History(history.state, *past) for history, past in pairs]


@sharding.by_letters
def fold(history: History, *, impl: str | None = None) -> Float[Array, "B Hv Dv Dk"]:
    """Return S_0, the state with the whole history in it."""
    batch, room = history.k.shape[:2]
    return commit_op.commit(
        history.state,
        history.k,
        history.pseudo_values,
        history.log_decay,
        jnp.broadcast_to(jnp.arange(room, dtype=jnp.int32), (batch, room)),
        history.count,
        impl=commit_op.IMPLEMENTATIONS.nearest(impl),
    )


# Wrong shapes are reported as ValueError, before a run-time type checker would.
@sharding.by_letters
@typing.no_type_check
def verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    history: History,
    fold_above: int,
    tree: tree_lib.DraftTree,
    *,
    impl: str | None = None,
    precision: str | None = None,
    output_dtype: DTypeLike | None = None,
) -> tuple[verify_lib.Verified, History]:
    """Run the gated delta rule over all nodes of a tree behind a history.

    Rows of more than `fold_above` records write S_0 over their state, in the same pass,
    and leave an empty history; the state of other rows keeps its bits. Both give the
    outputs that `treewy_jax.verify.verify` gives from S_0.

    Args, Returns, Raises: see `treewy_jax.verify.verify`.
    """
    arrays = dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=history.state)
    spec = specs.extend(
        verify_lib.spec_of(arrays, tree, precision, output_dtype),
        horizon=history.horizon,
        record_dtype=history.pseudo_values.dtype.name,
        record_key_dtype=history.k.dtype.name,
        fold_above=fold_above,
    )
    name = IMPLEMENTATIONS.choose(spec, impl).name
    accumulation = jnp.dtype(spec.accumulation_dtype)
    log_decay, beta = (gate.astype(accumulation) for gate in (log_decay, beta))
    run = _run_reference if name == implementations.REFERENCE else _run_kernel(name)
    rows = (q, k, v, log_decay, beta)
    output, pseudo_values, state = run(spec, rows, history, tree)
    verified = verify_lib.verified(spec, output, pseudo_values, log_decay, tree)
    count = jnp.where(folding(history.count, spec), 0, history.count)
    return verified, History(
        state, history.k, history.pseudo_values, history.log_decay, count
    )


def folding(count: Int[Array, "..."], spec: specs.Spec) -> Bool[Array, "..."]:
    """Tell which rows fold, by their numbers of records."""
    return specs.records(count, spec) > spec.fold_above


def _run_reference(spec, rows, history, tree):
    dtype = jnp.dtype(spec.accumulation_dtype)
    exact = History(
        *(
            x.astype(dtype)
            for x in (
                history.state,
                history.k,
                history.pseudo_values,
                history.log_decay,
            )
        ),
        history.count,
    )
    before = fold(exact, impl=implementations.REFERENCE)
    q, k, v, log_decay, beta = (verify_lib.zero_padding(x, tree) for x in rows)
    output, pseudo_values = wy.verify_reference(
        q, k, v, log_decay, beta, before, tree.ancestors(),
        jnp.max(tree.deepest(), initial=0),
    )  # fmt: skip
    written = before.astype(history.state.dtype)
    folds = folding(history.count, spec)[:, None, None, None]
    state = jnp.where(folds, written, history.state)
    return output, pseudo_values, state


def _run_kernel(name):
    def run(spec, rows, history, tree):
        return IMPLEMENTATIONS.module(name).history_verify(
            *rows, history.state, history.k, history.pseudo_values, history.log_decay,
            history.count, tree.ancestors(), tree.size, tree.deepest(),
            spec=spec,
        )  # fmt: skip

    return run
