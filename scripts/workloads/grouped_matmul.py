"""The expert layer at the sizes of Qwen3.5 35B-A3B and 397B-A17B."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import op
from pallas_kernels.grouped_matmul import spec as specs
from scripts.workloads import base

SIZES = {
    "35B-A3B": dict(experts=256, per_token=8, hidden=2048, inner=512),
    "397B-A17B": dict(experts=512, per_token=10, hidden=4096, inner=1024),
}
# A verified tree of 4 or 40 nodes, four of 40, a prompt; and both ends.
TOKENS = (1, 4, 40, 160, 1024, 2048)
MATCH = ("experts", "hidden", "inner", "input_dtype", "tokens")
# In bfloat16 every product and the output are rounded once.
BOUNDS = {"bfloat16": 8e-3, "float32": 2e-6}
# One token; fewer pairs than experts; more, of no round number.
SMALL = (
    dict(tokens=1, per_token=1, experts=1, hidden=128, inner=128),
    dict(tokens=3, per_token=8, experts=40, hidden=256, inner=128),
    dict(tokens=39, per_token=3, experts=7, hidden=384, inner=256),
)


def cases() -> list[base.Case]:
    """Return the calls of the published sizes, and small ones of odd sizes."""
    large = [
        _case(
            f"35B-A3B T={tokens} bfloat16",
            specs.make_spec(tokens=tokens, **SIZES["35B-A3B"]),
            ("bench", "tune", *(("compile",) if tokens in (4, 1024) else ())),
        )
        for tokens in TOKENS
    ]
    large += [
        _case(
            "397B-A17B T=40 bfloat16",
            specs.make_spec(tokens=40, **SIZES["397B-A17B"]),
            ("bench", "tune", "compile"),
        ),
        _case(
            "35B-A3B T=40 float32",
            specs.make_spec(tokens=40, input_dtype="float32", **SIZES["35B-A3B"]),
            ("compile",),
        ),
    ]
    small = [
        _case(
            f"T={sizes['tokens']} E={sizes['experts']} {dtype}",
            specs.make_spec(**sizes, input_dtype=dtype),
            ("small",),
        )
        for sizes in SMALL
        for dtype in BOUNDS
    ]
    return large + small


def _case(label: str, spec: specs.Spec, tags: tuple[str, ...]) -> base.Case:
    return base.Case(
        op="grouped_matmul",
        label=label,
        kind=spec.input_dtype,
        spec=spec,
        inputs=functools.partial(inputs, spec),
        call=call,
        exact=exact,
        bounds=(BOUNDS[spec.input_dtype],),
        configs=tuple(candidates(spec)) if "tune" in tags else (),
        match=MATCH,
        tags=frozenset(tags),
    )


def inputs(spec: specs.Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Return x, gate_up, down, experts, weights; all experts are equally popular.

    So the number of experts touched is that of `spec.touched`, the most for so many
    tokens. The tokens share a part, as hidden states of a trained model do.
    """
    keys = jax.random.split(key, 5)
    dtype = jnp.dtype(spec.input_dtype)
    hidden, inner = spec.hidden, spec.inner

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, scale):
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    x = normal(keys[0], (spec.tokens, hidden), 1.0)
    x = x + normal(keys[1], (1, hidden), 1.0)
    gate_up = normal(keys[2], (spec.experts, hidden, 2 * inner), hidden**-0.5)
    down = normal(keys[3], (spec.experts, inner, hidden), inner**-0.5)
    scores = jax.random.normal(keys[4], (spec.tokens, spec.experts))
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores), spec.per_token)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return x, gate_up, down, experts, weights


def call(impl: str, config: configs.Config | None):
    """Return the op with an implementation and a configuration."""
    return functools.partial(op.swiglu_experts, impl=impl, config=config)


def exact(arguments: tuple, rows: list[int]) -> tuple[np.ndarray, ...]:
    """Return the output of some tokens, computed in float64 on the host."""
    x, gate_up, down, experts, weights = arguments
    experts, weights = np.asarray(experts), np.asarray(weights, np.float64)
    output = np.zeros((len(rows), x.shape[1]))
    for place, row in enumerate(rows):
        token = np.asarray(x[row], np.float64)
        for expert, weight in zip(experts[row], weights[row], strict=True):
            gate, up = np.split(token @ np.asarray(gate_up[expert], np.float64), 2)
            inner = gate / (1 + np.exp(-gate)) * up
            output[place] += weight * (inner @ np.asarray(down[expert], np.float64))
    return (output,)


def candidates(spec: specs.Spec) -> list[configs.Config]:
    """Return the configurations that the tuner tries for a call on a GPU.

    Each product runs with the same tile: one run times both kernels.
    """
    mean = spec.pairs / spec.experts
    rows = (16,) if mean <= 8 else (32, 64) if mean <= 32 else (64, 128)
    tiles = ((64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3))
    return [
        configs.Config(
            rows=block,
            up_columns=columns,
            up_depth=depth,
            down_columns=columns,
            down_depth=depth,
            up_warps=warps,
            up_stages=stages,
            down_warps=warps,
            down_stages=stages,
            weights_first=weights_first,
        )
        for block in rows
        for columns, depth, warps, stages in tiles
        for weights_first in (False, True)
    ]
