"""The op: verify every node of a draft tree from one state, and rebuild one state.

`verify` returns the output of each node and its pseudo-value, the small record from
which `reconstruct` makes the state after any accepted node: one state is held, not n.
Several implementations stand behind it, see `IMPLEMENTATIONS`.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import implementations
from pallas_kernels.commit import op as commit
from pallas_kernels.tree_verify import spec as specs
from treewy_jax import sharding, wy
from treewy_jax import tree as tree_lib
from treewy_jax import typing as dtypes

# In order of preference.
IMPLEMENTATIONS = implementations.Implementations(
    "verify",
    {
        "mosaic_gpu": "pallas_kernels.tree_verify.mosaic_gpu",
        "triton": "pallas_kernels.tree_verify.triton",
        "mosaic_tpu": "pallas_kernels.tree_verify.mosaic_tpu",
        "jax_triton": "pallas_kernels.tree_verify.jax_triton",
        "reference": "treewy_jax.wy",
    },
    optional=("jax_triton",),
)
choose = IMPLEMENTATIONS.choose
check_impl = IMPLEMENTATIONS.check
explain = IMPLEMENTATIONS.explain


# Unflattening a pytree may put anything into the fields: no run-time type checking.
@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` knows of each node; rows of padding are 0.

    Attributes:
      output: o, in the output dtype.
      pseudo_values: u, float32 (float64 for float64 inputs).
      path_log_decay: log decay summed from the root to the node, itself included;
        each node's decay counts as at least -1000, beyond which exp is 0 anyway.
      log_decay: the node's own log decay, in the dtype of the pseudo-values.
    """

    output: Float[Array, "B n Hv Dv"]
    pseudo_values: Float[Array, "B n Hv Dv"]
    path_log_decay: Float[Array, "B n Hv"]
    log_decay: Float[Array, "B n Hv"]


jax.tree_util.register_dataclass(
    Verified,
    data_fields=["output", "pseudo_values", "path_log_decay", "log_decay"],
    meta_fields=[],
)


# Wrong shapes are reported here as ValueError, before a run-time type checker would.
@sharding.by_letters
@typing.no_type_check
def verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    tree: tree_lib.DraftTree,
    *,
    impl: str | None = None,
    precision: str | None = None,
    output_dtype: DTypeLike | None = None,
) -> Verified:
    """Run the gated delta rule over all nodes of a tree, reading the state once.

    q and k are normalised and scaled already, log_decay <= 0, the state covers the
    tokens before the root. Contents of padding rows, NaN included, change no bit.

    Args:
      impl: None or "auto" takes the best implementation that supports the call; a
        name of `IMPLEMENTATIONS` runs that one (kernels are interpreted on a CPU).
      precision: "high" is as exact as float32, "fast" may round the operands of dots
        to bfloat16; None is "fast" for bfloat16 outputs. More than asked is allowed.
      output_dtype: dtype of the output, default that of q.

    Raises:
      ValueError: an argument has a wrong shape, dtype or name.
      NotImplementedError: the named implementation does not support the call.
    """
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        "beta": beta,
        "state": state,
    }
    spec = spec_of(arrays, tree, precision, output_dtype)
    name = choose(spec, impl).name
    accumulation = jnp.dtype(spec.accumulation_dtype)
    log_decay, beta = (gate.astype(accumulation) for gate in (log_decay, beta))
    ancestors = tree.ancestors()
    run = _run_reference if name == "reference" else _run_kernel(name)
    output, pseudo_values = run(spec, q, k, v, log_decay, beta, state, ancestors, tree)
    return verified(spec, output, pseudo_values, log_decay, tree)


@typing.no_type_check
def verified(spec, output, pseudo_values, log_decay, tree) -> Verified:
    """Put together what a verification knows."""
    # Kernels do this themselves: unless it is asked for it costs nothing.
    log_decay = zero_padding(log_decay, tree)
    high, low = wy.split_path_decay(log_decay, tree.ancestors())
    return Verified(
        output.astype(spec.output_dtype),
        pseudo_values,
        jnp.swapaxes(high + low, 1, 2),
        log_decay,
    )


def _run_reference(spec, q, k, v, log_decay, beta, state, ancestors, tree):
    del spec
    rows = (q, k, v, log_decay, beta)
    q, k, v, log_decay, beta = (zero_padding(x, tree) for x in rows)
    deepest = jnp.max(tree.deepest(), initial=0)
    return wy.verify_reference(q, k, v, log_decay, beta, state, ancestors, deepest)


def _run_kernel(name):
    def run(spec, q, k, v, log_decay, beta, state, ancestors, tree):
        return IMPLEMENTATIONS.module(name).tree_verify(
            q, k, v, log_decay, beta, state, ancestors, tree.size, tree.deepest(),
            spec=spec,
        )  # fmt: skip

    return run


def zero_padding(x, tree):
    """Return x [B, n, ...] with zeros where there is no node."""
    valid = tree.valid()
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)


@sharding.by_letters
@typing.no_type_check
def reconstruct(
    state: Float[Array, "B Hv Dv Dk"],
    k: Float[Array, "B n Hk Dk"],
    verified: Verified,
    tree: tree_lib.DraftTree,
    node: Int[Array, " B"],
    *,
    impl: str | None = None,
) -> Float[Array, "B Hv Dv Dk"]:
    """Return the state after the accepted node, from the records of `verify`.

    A node outside [0, size), such as -1 for "no step", leaves its row as it is. `impl`
    is a name of the implementations in `pallas_kernels.commit.op`.
    """
    if node.shape != (tree.batch,):
        raise ValueError(f"node has shape {node.shape}; [{tree.batch}] is allowed")
    path, count = tree.path(node)
    return commit.commit(
        state, k, verified.pseudo_values, verified.log_decay, path, count, impl=impl
    )


def spec_of(arrays, tree, precision, output_dtype) -> specs.Spec:
    """Check every argument of `verify` and describe the call."""
    if not isinstance(tree, tree_lib.DraftTree):
        raise ValueError(f"tree is a {type(tree).__name__}; a DraftTree is allowed")
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; a float dtype is allowed")
    for name, rank in (("k", 4), ("v", 4)):
        if arrays[name].ndim != rank:
            shape = arrays[name].shape
            raise ValueError(f"{name} has shape {shape}; {rank} axes are allowed")
    batch, n = tree.tokens.shape
    (key_heads, key_dim), (value_heads, value_dim) = (
        arrays["k"].shape[2:],
        arrays["v"].shape[2:],
    )
    expected = {
        "q": (batch, n, key_heads, key_dim),
        "k": (batch, n, key_heads, key_dim),
        "v": (batch, n, value_heads, value_dim),
        "log_decay": (batch, n, value_heads),
        "beta": (batch, n, value_heads),
        "state": (batch, value_heads, value_dim, key_dim),
    }
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"{name} has shape {arrays[name].shape}; {shape} is allowed "
                f"(tree of {batch} rows and {n} nodes)"
            )
    if value_heads % key_heads:
        raise ValueError(
            f"v has {value_heads} value heads; a multiple of the {key_heads} key heads "
            "of k is allowed"
        )
    names = ("q", "k", "v")
    return specs.make_spec(
        batch=batch,
        nodes=n,
        depth=tree.depth_max,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        input_dtype=jnp.result_type(*(arrays[name].dtype for name in names)),
        state_dtype=arrays["state"].dtype,
        output_dtype=arrays["q"].dtype if output_dtype is None else output_dtype,
        accumulation_dtype=dtypes.accumulation_dtype(
            *(x.dtype for x in arrays.values())
        ),
        precision=precision,
    )
