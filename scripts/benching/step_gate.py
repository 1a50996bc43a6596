"""Does a layer verify a tree on a mesh as the reference does on one device?

What is run is the lifecycle's own `verify`, as every GDN layer of the step calls it:
the model's heads spread over the mesh, the step's tree and dtypes, the implementation
that is picked by itself, for some rows of random inputs whose keys are correlated. The
other side is the reference of treewy_jax.verify in float32, without a mesh. The error
is ||ours - reference|| / ||reference|| over all outputs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models.qwen3_5 import sharding as places
from scripts.benching import step_program
from scripts.workloads import recurrent, tree_verify
from treewy_jax import commit, sharding
from treewy_jax import mesh as mesh_lib
from treewy_jax import tree as tree_lib

# Errors allowed on one device (scripts/workloads), by dtype of the rows.
BOUNDS = {
    "bfloat16": tree_verify.BOUNDS["fast"],
    "float32": tree_verify.BOUNDS["high"],
}
STORE_ALL = 4e-3  # of bfloat16 rows: the outputs of scripts/workloads/store_all.py
ROWS = 4  # of each part of the batch, at most


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and a tree; hashable, hence compared once."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: str
    lifecycle: commit.Lifecycle
    parents: tuple[int, ...]
    batch: int

    @classmethod
    def of(
        cls, subject: step_program.Subject, dtype: str, mesh: jax.sharding.Mesh
    ) -> "Case":
        """Return the case of a step whose rows are of this dtype."""
        config = subject.config
        parents = np.asarray(getattr(subject.drafter, "parent", [-1])).tolist()
        return cls(
            heads=(config.linear_num_key_heads, config.linear_num_value_heads),
            dims=(config.linear_key_head_dim, config.linear_value_head_dim),
            dtype=dtype,
            lifecycle=subject.build.lifecycle,
            parents=tuple(parents),
            batch=min(subject.batch, ROWS * mesh.shape["data"]),
        )


def bound(case: Case) -> float:
    """Return the largest error that is right."""
    if case.dtype == "bfloat16" and isinstance(case.lifecycle, commit.StoreAll):
        return STORE_ALL
    return BOUNDS[case.dtype]


@functools.cache
def verify_error(case: Case, mesh: jax.sharding.Mesh) -> float:
    """Return the relative error of a layer's outputs on the mesh; see above."""
    rows, state, tree = _draw(case)
    wide = commit.Inputs(*(x.astype(jnp.float32) for x in rows))
    plain = commit.Reconstruct(case.lifecycle.state_dtype, "reference", "high")
    wanted = _verify(plain, state, wide, tree)
    with mesh_lib.use(mesh):
        found = _verify(case.lifecycle, *_spread(state, rows, tree, mesh))
    wanted, found = (np.asarray(jax.device_get(x), np.float64) for x in (wanted, found))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _draw(case: Case) -> tuple[commit.Inputs, jax.Array, tree_lib.DraftTree]:
    *rows, state = recurrent.inputs(
        step_program.key(3),
        batch=case.batch,
        nodes=len(case.parents),
        heads=case.heads,
        dims=case.dims,
        input_dtype=case.dtype,
        state_dtype=case.lifecycle.state_dtype,
    )
    tree = tree_lib.DraftTree.from_parents(case.parents, batch=case.batch)
    return commit.Inputs(*rows), state, tree


def _spread(state, rows, tree, mesh) -> tuple[Any, ...]:
    """Return the arguments where a layer of the model finds them."""
    values = (state, rows, tree)
    letters = (places.STATE, *(sharding.letters_of(type(x), x) for x in (rows, tree)))
    axes = sharding.split(sharding.sizes_of(values, letters), mesh)

    def put(x, text):
        return jax.device_put(x, NamedSharding(mesh, sharding.spec(text, axes)))

    return jax.tree.map(put, values, letters)


@functools.partial(jax.jit, static_argnums=0)
def _verify(lifecycle, state, rows, tree) -> jax.Array:
    key_heads, key_dtype = rows.k.shape[2], rows.k.dtype
    return lifecycle.verify(lifecycle.init(state, key_heads, key_dtype), rows, tree)[0]
