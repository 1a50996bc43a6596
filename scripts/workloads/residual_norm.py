"""Workloads of residual_norm: what ends the halves of layers of published models."""

import functools

import jax
import numpy as np

from pallas_kernels.residual_norm import op
from pallas_kernels.residual_norm import spec as specs
from scripts.workloads import base, draw

EPS = 1e-6
# A product's parts, and the terms of a mixture of experts, by hidden size.
PARTS = dict(parts=8, parts_dtype="float32")
TERMS = {2048: dict(parts=9), 4096: dict(parts=11)}
# A chain of 4, a tree of 40, 32 chains.
TOKENS = (4, 40, 128)
BOUNDS = {"bfloat16": (4e-3, 6e-3), "float32": (1e-6, 1e-6)}
SMALL = (
    dict(tokens=1, parts=1, hidden=128),
    dict(tokens=3, parts=3, hidden=384),
    dict(tokens=11, parts=2, hidden=128),
)


def cases() -> list[base.Case]:
    """Return the calls of the published sizes, and small ones of odd sizes."""
    large = [
        _case(dict(tokens=tokens, hidden=hidden, **sizes), ("bench", "compile"))
        for hidden, terms in TERMS.items()
        for sizes in (PARTS, terms)
        for tokens in TOKENS
    ]
    others = [
        dict(tokens=4, hidden=5120, **PARTS),
        dict(tokens=512, hidden=2560, parts=1),
        dict(tokens=40, hidden=8192, parts=8, rows_dtype="float32"),
    ]
    small = [
        _case(sizes | dict(rows_dtype=dtype), ("small",))
        for sizes in SMALL
        for dtype in BOUNDS
    ]
    return large + [_case(sizes, ("compile",)) for sizes in others] + small


def _case(sizes: dict, tags: tuple[str, ...]) -> base.Case:
    spec = specs.make_spec(**sizes)
    return base.Case(
        op="residual_norm",
        label=f"T={spec.tokens} P={spec.parts} H={spec.hidden} {spec.rows_dtype}, "
        f"parts {spec.parts_dtype}",
        kind=spec.rows_dtype,
        spec=spec,
        inputs=functools.partial(inputs, spec),
        call=call,
        exact=exact,
        bounds=BOUNDS[spec.rows_dtype],
        tags=frozenset(tags),
    )


def inputs(spec: specs.Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Return rows, parts and the norm's weight."""
    rows, parts = (spec.tokens, spec.hidden), (spec.tokens, spec.parts, spec.hidden)
    h, parts, weight = draw.normals(key, rows, parts, rows[1:])
    return (
        h.astype(spec.rows_dtype),
        parts.astype(spec.parts_dtype),
        (0.1 * weight).astype(spec.weight_dtype),
    )


def call(impl: str, config: None):
    """Return the op with an implementation; there is nothing to cut."""
    return functools.partial(op.residual_norm, eps=EPS, impl=impl)


def exact(arguments: tuple, rows: list[int]) -> tuple[np.ndarray, ...]:
    """Return h' and x of some rows, computed in float64 on the host."""
    h, parts, weight = (np.asarray(x, np.float64) for x in arguments)
    picked = np.asarray(rows)
    h = h[picked] + parts[picked].sum(1)
    root = np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + EPS)
    return h, h / root * (1 + weight)
