"""Workloads of gdn_front: rows of a tree or a token of a layer of Qwen3.5 35B-A3B."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.gdn_front import config, op
from pallas_kernels.gdn_front import spec as specs
from scripts.workloads import base, draw
from treewy_jax import conv
from treewy_jax import tree as tree_lib

KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 16, 32, 128, 4
GATE_COLUMNS = VALUE_HEADS * DIM  # of the output gate, which lie behind those read
CONFIGS = tuple(
    config.Config(block_heads=heads, span=span, num_warps=warps)
    for heads, span, warps in (
        (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 4, 1), (2, 8, 1), (2, 20, 1), (2, 40, 1),
        (4, 1, 1), (4, 8, 1), (4, 20, 1), (4, 40, 2),
    )
)  # fmt: skip
TREES = {1: (), 4: (1, 1, 1), 7: (2, 2), 15: (2, 2, 2), 40: (3, 3, 3)}


def cases() -> list[base.Case]:
    """Return trees and single tokens; of the former also without the convolution."""
    fronts = [_case(n, batch, WIDTH) for n in (1, 4, 15, 40) for batch in (1, 32, 256)]
    fronts += [_case(n, batch, 0) for n in (4, 40) for batch in (1, 32, 256)]
    return fronts + [_case(7, 2, width, ("small",)) for width in (WIDTH, 0)]


def _case(
    nodes: int, batch: int, width: int, tags: Sequence[str] = ("bench", "tune")
) -> base.Case:
    spec = specs.Spec(
        batch=batch,
        nodes=nodes,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM if width else 0,
        width=width,
        rows_dtype="bfloat16",
        window_dtype="bfloat16",
        gate_dtype="bfloat16",
        accumulation_dtype="float32",
    )
    narrow, wide = 4e-3, 1e-6
    compiled = batch == 32 and nodes in (1, 40)
    return base.Case(
        op="gdn_front",
        label=f"n={nodes} B={batch}" + ("" if width else " no conv"),
        kind="gdn_front",
        spec=spec,
        inputs=functools.partial(inputs, spec=spec),
        call=call if width else call_without_conv,
        exact=exact if width else exact_without_conv,
        bounds=(narrow,) * (3 if width else 2) + (wide, wide),
        configs=CONFIGS,
        match=("batch", "nodes", "key_heads", "value_heads", "key_dim", "width"),
        tags=frozenset(tags) | ({"compile"} if compiled else set()),
    )


@functools.partial(jax.jit, static_argnames="spec")
def inputs(key: jax.Array, *, spec: specs.Spec) -> tuple[jax.Array, ...]:
    """Return rows, window, taps, decay parameters and conv row numbers.

    Rows are as wide as a layer's: q | k | v | b | a | output gate. Without the
    convolution: q, k, raw gates and decay parameters.
    """
    narrow = spec.rows_dtype
    heads = (spec.batch, spec.nodes, spec.value_heads)
    keys = (spec.batch, spec.nodes, spec.key_heads, spec.key_dim)
    if spec.width:
        shapes = [
            (spec.batch, spec.nodes, spec.columns + GATE_COLUMNS),
            (spec.batch, spec.width - 1, spec.channels),
            (spec.channels, spec.width),
        ]
    else:
        shapes = [keys, keys, heads, heads]
    rate, bias, *rows = draw.normals(key, heads[2:], heads[2:], *shapes)
    rows, decay = [x.astype(narrow) for x in rows], (rate, bias - 4)
    if not spec.width:
        return *rows, *decay
    raw, window, taps = rows
    tree = tree_lib.DraftTree.from_widths(TREES[spec.nodes], batch=spec.batch)
    windows = conv.tree_windows(tree, spec.width)
    return raw, window.astype(spec.window_dtype), 0.5 * taps, *decay, windows


def call(impl: str, config: Any = None) -> Callable:
    """Return gdn_front by an implementation, cut as `config` says."""
    sizes = dict(key_heads=KEY_HEADS, key_dim=DIM, value_dim=DIM)
    return functools.partial(op.gdn_front, **sizes, impl=impl, config=config)


def call_without_conv(impl: str, config: Any = None) -> Callable:
    """Return normalize_and_gate by an implementation, cut as `config` says."""
    return functools.partial(op.normalize_and_gate, impl=impl, config=config)


def exact(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return q, k, v and gates of some rows of the batch, in float64."""
    raw, window, taps, *decay, windows = _picked(arguments, rows)
    ends = np.cumsum([window.shape[-1], VALUE_HEADS, VALUE_HEADS])
    raw, b, a, _ = np.split(raw, ends, axis=-1)
    inputs = np.concatenate([window, raw], axis=1)
    numbers = windows.astype(int)
    every = np.arange(len(raw))[:, None]
    mixed = sum(
        inputs[every, numbers[..., w]] * taps[:, w] for w in range(taps.shape[1])
    )
    mixed = mixed / (1 + np.exp(-mixed))
    size = KEY_HEADS * DIM
    q, k, v = np.split(mixed, [size, 2 * size], axis=-1)
    keys = (*raw.shape[:2], KEY_HEADS, DIM)
    q, k = _normalized(q.reshape(keys), k.reshape(keys))
    values = v.reshape(*raw.shape[:2], -1, DIM)
    return q, k, values, *_gates(a, b, *decay)


def exact_without_conv(arguments: tuple, rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return q, k and gates of some rows of the batch, in float64."""
    q, k, *gates = _picked(arguments, rows)
    return *_normalized(q, k), *_gates(*gates)


def _picked(arguments: tuple, rows: Sequence[int]) -> list[np.ndarray]:
    """Return the arguments in float64, those with a batch for `rows` only."""
    picked = (x[np.asarray(rows)] if x.ndim > 2 else x for x in arguments)
    return [np.asarray(jax.device_get(x), np.float64) for x in picked]


def _normalized(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _gates(a, b, log_rate, dt_bias) -> tuple[np.ndarray, np.ndarray]:
    log_decay = -np.exp(log_rate) * np.logaddexp(a + dt_bias, 0)
    return log_decay, 1 / (1 + np.exp(-b))
