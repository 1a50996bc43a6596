"""Workloads of tree_attention: one attention layer of Qwen3.5, by context and tree."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import config as configs
from pallas_kernels.tree_attention import op
from pallas_kernels.tree_attention import spec as specs
from scripts.workloads import base
from treewy_jax import tree as tree_lib

# Query heads, key heads, head_dim: Qwen3.5 35B-A3B, and the tiny model.
LARGE, TINY = (16, 2, 256), (4, 2, 128)
MATCH = ("batch", "queries", "slots", "heads", "kv_heads", "head_dim", "prefix_dtype")
# Relative error of the output.
BOUNDS = {"bfloat16": (5e-3,), "float32": (1e-5,)}
# Share of a direction that all keys and queries of a head have.
COMMON = 0.3
MEASURED = ("bench", "tune")
EVERYWHERE = (*MEASURED, "compile")


def cases() -> list[base.Case]:
    """Return the 35B-A3B's layer, then the tiny model's, then odd sizes."""
    layer = functools.partial(_case, heads=LARGE)
    odd = functools.partial(_case, tags=("small",), lengths="ragged")
    return [
        layer(32, 1, 8192, MEASURED),
        layer(32, 4, 8192, EVERYWHERE),
        layer(32, 15, 8192, MEASURED),
        layer(32, 40, 8192, EVERYWHERE),
        layer(32, 64, 8192, MEASURED),
        layer(32, 4, 8192, ("bench",), lengths="ragged"),
        layer(32, 40, 8192, ("bench",), lengths="ragged"),
        layer(1, 4, 8192, EVERYWHERE),
        layer(1, 40, 8192, MEASURED),
        layer(1, 4, 32768, MEASURED),
        layer(1, 40, 32768, MEASURED),
        layer(256, 4, 1024, EVERYWHERE),
        layer(256, 40, 1024, EVERYWHERE),
        layer(8, 40, 2048, EVERYWHERE, dtype="float32"),
        _case(1, 40, 512, EVERYWHERE, heads=TINY, dtype="float32"),
        _case(1, 40, 512, EVERYWHERE, heads=TINY),
        odd(3, 7, 70, heads=(6, 2, 128), dtype="float32"),
        odd(2, 39, 33, heads=(4, 1, 128)),
        odd(2, 1, 130, heads=(3, 3, 256)),
    ]


def _case(
    batch: int,
    nodes: int,
    slots: int,
    tags: Sequence[str],
    *,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
    lengths: str = "full",
) -> base.Case:
    """`heads` is (query heads, key heads, head_dim); `lengths` "full" or "ragged"."""
    length = np.full(batch, slots)
    if lengths == "ragged":
        length = np.linspace(0, slots, batch).round().astype(int)
    spec = specs.make_spec(
        batch=batch,
        queries=nodes,
        nodes=nodes,
        slots=slots,
        filled=int(length.mean()),
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        input_dtype=dtype,
    )
    full = "" if lengths == "full" else f" {lengths}"
    return base.Case(
        op="tree_attention",
        label=f"n={nodes} B={batch} S={slots}{full} D={heads[2]} {dtype}",
        kind=f"{dtype} D={heads[2]}",
        spec=spec,
        inputs=functools.partial(_inputs, spec, tuple(length.tolist())),
        call=_call,
        exact=_exact,
        bounds=BOUNDS[dtype],
        configs=tuple(_configs(spec)) if "tune" in tags else (),
        match=MATCH,
        tags=frozenset(tags),
    )


def _inputs(spec: specs.Spec, length: tuple[int, ...], key: jax.Array) -> tuple:
    """Return q, prefix, nodes, length, mask; every slot holds finite numbers."""
    batch, kv, dim = spec.batch, spec.kv_heads, spec.head_dim
    keys = jax.random.split(key, 6)
    common = jax.random.normal(keys[0], (batch, 1, kv, dim))

    def make(key, tokens, dtype, share):
        noise = jax.random.normal(key, (batch, tokens, kv, dim), dtype)
        return ((1 - share) ** 0.5 * noise + share**0.5 * common).astype(dtype)

    prefix, nodes = (
        (make(a, tokens, dtype, COMMON), make(b, tokens, dtype, 0.0))
        for a, b, tokens, dtype in (
            (keys[2], keys[3], spec.slots, spec.prefix_dtype),
            (keys[4], keys[5], spec.nodes, spec.node_dtype),
        )
    )
    noise = jax.random.normal(keys[1], (batch, spec.queries, kv, spec.group, dim))
    q = (1 - COMMON) ** 0.5 * noise + COMMON**0.5 * common[:, :, :, None]
    q = q.reshape(batch, spec.queries, spec.heads, dim).astype(spec.input_dtype)
    mask = jnp.stack([_mask(spec.nodes)] * batch)
    return q, prefix, nodes, jnp.asarray(length, jnp.int32), mask


def _mask(nodes: int) -> jax.Array:
    """Return ancestor-or-self of the tree 3,3,3 for 40 nodes, else of a chain."""
    if nodes == 40:
        return tree_lib.DraftTree.from_widths((3, 3, 3), n_max=nodes).ancestors()[0]
    return jnp.tril(jnp.ones((nodes, nodes), bool))


def _call(impl: str, config: configs.Config | None) -> Callable:
    return functools.partial(op.tree_attention, impl=impl, config=config)


def _configs(spec: specs.Spec) -> list[configs.Config]:
    """Return blocks that fit, with half to twice the splits that are guessed."""
    guess = configs.heuristic(spec, "gpu")
    shapes = [guess]
    if spec.input_dtype == "bfloat16":
        wide = configs.Config(128, 64, num_warps=8)
        shapes = [configs.Config(64, 64, num_stages=3), configs.Config(64, 32)]
        shapes += [dataclasses.replace(shapes[1], num_stages=4)]
        if spec.rows > 64:
            shapes += [wide, dataclasses.replace(wide, overlap=True)]
    splits = {max(1, guess.splits // 2), guess.splits, guess.splits * 2}
    tried = itertools.product(shapes, sorted(splits))
    return [dataclasses.replace(shape, splits=count) for shape, count in tried]


def _exact(inputs: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Softmax over the visible slots, head by head in float64."""
    q, prefix, nodes, length, mask = inputs
    picked = np.asarray(rows)
    q, old_k, old_v, k, v = (
        np.asarray(x[picked], np.float64) for x in (q, *prefix, *nodes)
    )
    length, mask = np.asarray(length)[picked], np.asarray(mask)[picked]
    group = q.shape[2] // k.shape[2]
    output = np.zeros(q.shape)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        some = slice(0, length[b])
        keys = np.concatenate([old_k[b, some, h // group], k[b, :, h // group]])
        values = np.concatenate([old_v[b, some, h // group], v[b, :, h // group]])
        scores = q[b, :, h] @ keys.T * q.shape[3] ** -0.5
        scores[:, length[b] :][~mask[b]] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        output[b, :, h] = weights @ values / weights.sum(1, keepdims=True)
    return (output,)
