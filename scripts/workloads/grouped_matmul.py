"""Routes and expert layer at the sizes of Qwen3.5 35B-A3B and 397B-A17B."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import config as configs
from pallas_kernels.grouped_matmul import op, router
from pallas_kernels.grouped_matmul import spec as specs
from scripts.workloads import base, draw

SIZES = {
    "35B-A3B": dict(experts=256, per_token=8, hidden=2048, inner=512),
    "397B-A17B": dict(experts=512, per_token=10, hidden=4096, inner=1024),
}
# A verified tree of 4 or 40 nodes, four of 40, a prompt; and both ends.
TOKENS = (1, 4, 40, 160, 1024, 2048)
# The expert layer also of 128 and 256 trees of 40 nodes.
MANY_TOKENS = (5120, 10240)
# With the shared expert, as a model calls it: of one device, and of one of several.
SHARED_TOKENS = (1, 4, 40)
PARTS = {
    "35B-A3B/2": dict(experts=128, per_token=4, hidden=2048, inner=512, shared=256),
    "397B-A17B/8": dict(experts=64, per_token=1, hidden=4096, inner=1024, shared=128),
}
MATCH = ("experts", "hidden", "inner", "input_dtype", "tokens")
# In bfloat16 every product and the output are rounded once.
BOUNDS = {"bfloat16": 8e-3, "float32": 2e-6}
# One token; fewer pairs than experts; more, of no round number.
SMALL = (
    dict(tokens=1, per_token=1, experts=1, hidden=128, inner=128),
    dict(tokens=3, per_token=8, experts=40, hidden=256, inner=128),
    dict(tokens=39, per_token=3, experts=7, hidden=384, inner=256),
    dict(tokens=5, per_token=2, experts=6, hidden=128, inner=128, shared=128),
    dict(tokens=21, per_token=2, experts=6, hidden=128, inner=128, shared=64),
)
SMALL_ROUTES = (
    dict(tokens=3, per_token=7, experts=7),
    dict(tokens=5, per_token=10, experts=40, shared=True),
    dict(tokens=5, per_token=3, experts=40, shared=True, hidden=256),
)


def cases() -> list[base.Case]:
    """Return the calls of the published sizes, and small ones of odd sizes."""
    large = [
        _case(
            f"35B-A3B T={tokens} bfloat16",
            specs.make_spec(tokens=tokens, **SIZES["35B-A3B"]),
            ("bench", "tune", *(("compile",) if tokens in (4, 1024) else ())),
        )
        for tokens in TOKENS + MANY_TOKENS
    ]
    large += [
        _case(
            f"{model} T={tokens} bfloat16 shared",
            specs.make_spec(tokens=tokens, **sizes),
            ("bench", "compile"),
        )
        for model, sizes in _with_shared().items()
        for tokens in SHARED_TOKENS
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
            f"T={sizes['tokens']} E={sizes['experts']} {dtype}"
            + (" shared" if "shared" in sizes else ""),
            specs.make_spec(**sizes, input_dtype=dtype),
            ("small",),
        )
        for sizes in SMALL
        for dtype in BOUNDS
    ]
    return large + small + routes()


def _with_shared() -> dict[str, dict[str, int]]:
    whole = {
        model: sizes | dict(shared=sizes["inner"]) for model, sizes in SIZES.items()
    }
    return whole | PARTS


def routes() -> list[base.Case]:
    """Return the choices of experts, the shared expert's gate among them."""
    large = [
        _routes(
            f"routes {model} T={tokens} bfloat16",
            router.make_spec(
                tokens=tokens,
                experts=sizes["experts"],
                per_token=sizes["per_token"],
                shared=True,
                hidden=sizes["hidden"],
                input_dtype="bfloat16",
            ),
            ("bench", *(("compile-cuda",) if tokens in (4, 40) else ())),
        )
        for model, sizes in SIZES.items()
        for tokens in TOKENS
    ]
    small = [
        _routes(
            f"routes T={sizes['tokens']} E={sizes['experts']} H={sizes.get('hidden')}",
            router.make_spec(**sizes),
            ("small",),
        )
        for sizes in SMALL_ROUTES
    ]
    return large + small


def _routes(label: str, spec: router.Spec, tags: tuple[str, ...]) -> base.Case:
    return base.Case(
        op="grouped_matmul",
        label=label,
        kind="routes",
        spec=spec,
        inputs=functools.partial(rows_or_logits, spec),
        call=functools.partial(call_router, spec),
        exact=functools.partial(exact_routes, spec),
        bounds=(1e-6, 0.0),
        tags=frozenset(tags),
        table="pallas_kernels.grouped_matmul.router",
        kernels=("grouped_matmul_scores", "grouped_matmul_top_k"),
    )


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
    """Return x, gate_up, down, experts, weights, and the shared expert where asked for.

    All experts are equally popular: the number of those touched is `spec.touched`, the
    most for so many tokens. The tokens share a part, as hidden states of a trained
    model do.
    """
    keys = jax.random.split(key, 8)
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
    if not spec.shared:
        return x, gate_up, down, experts, weights
    gate = jax.nn.sigmoid(jax.random.normal(keys[5], (spec.tokens, 1)))
    weights = jnp.concatenate([weights, gate], axis=-1)
    shared = (
        normal(keys[6], (hidden, 2 * spec.shared), hidden**-0.5),
        normal(keys[7], (spec.shared, hidden), spec.shared**-0.5),
    )
    return x, gate_up, down, experts, weights, shared


def rows_or_logits(spec: router.Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Return rows and the gate's matrix, or logits; no two are equal in practice."""
    dtype = jnp.dtype(spec.input_dtype)
    if not spec.hidden:
        return (jax.random.normal(key, (spec.tokens, spec.columns), dtype),)
    x, weight = draw.normals(
        key, (spec.tokens, spec.hidden), (spec.columns, spec.hidden)
    )
    return x.astype(dtype), (weight * spec.hidden**-0.5).astype(dtype)


def call(impl: str, config: configs.Config | None):
    """Return the op with an implementation and a configuration."""
    return functools.partial(op.swiglu_experts, impl=impl, config=config)


def call_router(spec: router.Spec, impl: str, config: None):
    """Return the choice of experts by an implementation; there is nothing to cut."""
    run = router.route if spec.hidden else router.route_top_k
    return functools.partial(run, k=spec.per_token, shared=spec.shared, impl=impl)


def exact(arguments: tuple, rows: list[int]) -> tuple[np.ndarray, ...]:
    """Return the output of some tokens, computed in float64 on the host."""
    x, gate_up, down, experts, weights, *shared = arguments
    experts, weights = np.asarray(experts), np.asarray(weights, np.float64)
    output = np.zeros((len(rows), x.shape[1]))
    for place, row in enumerate(rows):
        token = np.asarray(x[row], np.float64)
        pairs = [(gate_up[expert], down[expert]) for expert in experts[row]] + shared
        for (first, second), weight in zip(pairs, weights[row], strict=True):
            gate, up = np.split(token @ np.asarray(first, np.float64), 2)
            inner = gate / (1 + np.exp(-gate)) * up
            output[place] += weight * (inner @ np.asarray(second, np.float64))
    return (output,)


def exact_routes(
    spec: router.Spec, arguments: tuple, rows: list[int]
) -> tuple[np.ndarray, ...]:
    """Return weights and experts of some tokens, computed in float64 on the host."""
    found, *weight = (np.asarray(array, np.float64) for array in arguments)
    found = found[np.asarray(rows)]
    if weight:
        found = found @ weight[0].T
    choices = np.argsort(-found[:, : spec.experts], axis=-1, kind="stable")
    choices = choices[:, : spec.per_token]
    best = np.exp(np.take_along_axis(found, choices, axis=-1))
    gate = 1 / (1 + np.exp(-found[:, spec.experts :]))
    weights = np.concatenate([best / best.sum(-1, keepdims=True), gate], axis=-1)
    return weights, choices


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
