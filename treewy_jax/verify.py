"""The op: verify every node of a draft tree from one state, and rebuild one state.

`verify` returns the output of each node and its pseudo-value, the small record from
which `reconstruct` makes the state after any accepted node: one state is held, not n.
Several implementations stand behind it, see `IMPLEMENTATIONS`.
"""

import dataclasses
import importlib
import types
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.tree_verify import spec as specs
from treewy_jax import recurrence, wy
from treewy_jax import tree as tree_lib
from treewy_jax import typing as dtypes

# In order of preference; modules are imported when they are asked for.
IMPLEMENTATIONS = {
    "triton": "pallas_kernels.tree_verify.triton",
    "mosaic_tpu": "pallas_kernels.tree_verify.mosaic_tpu",
    "reference": None,
}


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


class Choice(typing.NamedTuple):
    """The implementation that runs a call, and why it is not a faster one."""

    name: str
    reason: str


# Wrong shapes are reported here as ValueError, before a run-time type checker would.
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
    spec = _spec_of(arrays, tree, precision, output_dtype)
    name = choose(spec, impl).name
    valid = tree.valid()
    rows = [
        jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)
        for x in (q, k, v, log_decay, beta)
    ]
    accumulation = jnp.dtype(spec.accumulation_dtype)
    rows[3:] = [gate.astype(accumulation) for gate in rows[3:]]
    run = _run_reference if name == "reference" else _run_kernel(name)
    output, pseudo_values, path_log_decay = run(spec, *rows, state, tree.ancestors())
    return Verified(
        output.astype(spec.output_dtype), pseudo_values, path_log_decay, rows[3]
    )


def _run_reference(spec, q, k, v, log_decay, beta, state, ancestors):
    deepest = jnp.max(_sweeps(ancestors), initial=0)
    return wy.verify_reference(q, k, v, log_decay, beta, state, ancestors, deepest)


def _run_kernel(name):
    def run(spec, q, k, v, log_decay, beta, state, ancestors):
        high, low = wy.split_path_decay(log_decay, ancestors)
        output, pseudo_values = _module(name).tree_verify(
            q, k, v, high, low, beta, state, ancestors, _sweeps(ancestors), spec=spec
        )
        return output, pseudo_values, jnp.swapaxes(high + low, 1, 2)

    return run


def _sweeps(ancestors):
    """Return the depth of each row's deepest node: what the solve needs."""
    nodes = jnp.max(jnp.sum(ancestors, axis=-1, dtype=jnp.int32), axis=-1)
    return jnp.maximum(nodes - 1, 0)


def choose(spec: specs.Spec, impl: str | None = None) -> Choice:
    """Pick the implementation for a call; the reason is empty where it is the best.

    Raises ValueError for an unknown name, NotImplementedError for a named
    implementation that does not support the call.
    """
    check_impl(impl)
    if impl == "reference":
        return Choice("reference", "")
    platform = specs.target_platform()
    if impl in IMPLEMENTATIONS:
        reason = _module(impl).supports(spec, platform, interpret=True)
        if reason is not None:
            raise NotImplementedError(f"impl={impl!r} does not run here: {reason}")
        return Choice(impl, "")
    refusals = []
    for name in IMPLEMENTATIONS:
        if name == "reference":
            break
        reason = _module(name).supports(spec, platform, interpret=False)
        if reason is None:
            return Choice(name, "")
        refusals.append(f"{name} {reason}")
    return Choice("reference", "; ".join(refusals))


def check_impl(impl: str | None) -> None:
    """Raise ValueError unless `impl` names an implementation, or is None or "auto"."""
    if impl not in (None, "auto", *IMPLEMENTATIONS):
        allowed = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"impl is {impl!r}; allowed: {allowed}")


def explain(spec: specs.Spec, impl: str | None = None) -> str:
    """Return one line: which implementation runs, and why no faster one does."""
    choice = choose(spec, impl)
    because = f" ({choice.reason})" if choice.reason else ""
    return f"verify runs impl={choice.name}{because}"


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(IMPLEMENTATIONS[name])


def replay(
    state: Float[Array, "B Hv Dv Dk"],
    k: Float[Array, "B n Hk Dk"],
    pseudo_values: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> Float[Array, "B Hv Dv Dk"]:
    """Write the first `count` nodes of each path into the state, root first.

    S <- exp(g_i) S + u_i k_i^T for i along the path; no dot, so no cancellation.
    A row with count 0 keeps its state bit for bit. The dtype is that of `state`.
    """
    dtype = dtypes.accumulation_dtype(*(x.dtype for x in (state, k, pseudo_values)))
    value_heads = state.shape[1]

    def write(carry, entry):
        node, position = entry
        k_t, u_t, g_t = (_take(x, node, dtype) for x in (k, pseudo_values, log_decay))
        k_t = recurrence.repeat_key_heads(k_t, value_heads)
        decayed = jnp.exp(g_t)[..., None, None] * carry
        written = decayed + u_t[..., :, None] * k_t[..., None, :]
        return jnp.where((position < count)[:, None, None, None], written, carry), None

    entries = (path.T, jnp.arange(path.shape[1]))
    result, _ = lax.scan(write, state.astype(dtype), entries)
    return result.astype(state.dtype)


def _take(x, node, dtype):
    """Return row node[b] of x[b] for every b, in the computing dtype."""
    index = node.reshape(node.shape + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0].astype(dtype)


@typing.no_type_check
def reconstruct(
    state: Float[Array, "B Hv Dv Dk"],
    k: Float[Array, "B n Hk Dk"],
    verified: Verified,
    tree: tree_lib.DraftTree,
    node: Int[Array, " B"],
) -> Float[Array, "B Hv Dv Dk"]:
    """Return the state after the accepted node, from the records of `verify`.

    A node outside [0, size), such as -1 for "no step", leaves its row as it is.
    """
    if node.shape != (tree.batch,):
        raise ValueError(f"node has shape {node.shape}; [{tree.batch}] is allowed")
    path, count = tree.path(node)
    return replay(state, k, verified.pseudo_values, verified.log_decay, path, count)


def _spec_of(arrays, tree, precision, output_dtype) -> specs.Spec:
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
