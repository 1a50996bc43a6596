"""Where a training step's time goes: whole steps in variants, and their parts."""

import collections
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from models.qwen3_5 import config as config_lib
from pallas_kernels.chunk_prefill import reference as chunk_prefill
from scripts.training import attention, loss, step, trainable
from treewy_jax import recurrence

REPEATS = 10
# Variants of the whole step; the first is the one that is looked into.
VARIANTS = {
    "base": {},
    "cudnn": {"cudnn": True},
    "remat": {"remat": True},
}


def measure(function: Callable, *arguments: Any) -> float:
    """Median seconds of a compiled call, after three that do not count."""
    times = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:]))


def attempt(function: Callable[[], dict]) -> dict:
    """Run one measurement; a variant that cannot run is a result, too."""
    try:
        return function()
    except Exception as error:  # whatever a backend refuses with
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def profile_steps(
    config: config_lib.Qwen3_5Config,
    params: trainable.Parameters,
    transform: Any,
    goal: step.Objective,
    windows: np.ndarray,
) -> dict[str, dict]:
    """Time the whole step in each variant: compile, step, tokens/s, memory."""
    tokens = windows.shape[0] * (windows.shape[1] - step.DEPTHS - 1)

    def one(options: dict, inside: bool) -> dict:
        plan = trainable.structure(config, compute_dtype=goal.dtype, **options)
        state = step.create_state(params, transform, goal.mtp_only)
        function = step.make_step(plan, transform, goal, donate=False)
        start = time.perf_counter()
        compiled = function.lower(state, windows).compile()
        result: dict[str, Any] = {"compile_seconds": time.perf_counter() - start}
        seconds = measure(compiled, state, windows)
        result |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
        memory = compiled.memory_analysis()
        result["temporary_gib"] = memory.temp_size_in_bytes / 2**30
        if inside:
            result["kernels"] = attempt(lambda: kernels(compiled, state, windows))
        return result

    return {
        name: attempt(lambda o=options, n=name: one(o, n == "base"))
        for name, options in VARIANTS.items()
    }


def kernels(compiled: Any, *arguments: Any) -> dict[str, list]:
    """Milliseconds and launches by kernel, the longest first, with its source line."""
    from jax.experimental.mosaic.gpu import profiler

    _, timings = profiler.Cupti().measure(compiled, aggregate=False)(*arguments)
    spent: dict[str, list] = collections.defaultdict(lambda: [0.0, 0])
    for name, milliseconds in timings or ():
        spent[name][0] += milliseconds
        spent[name][1] += 1
    origins = _origins(compiled.as_text())
    order = sorted(spent.items(), key=lambda item: -item[1][0])
    return {
        name: [round(total, 3), launches, origins.get(name, "")]
        for name, (total, launches) in order
    }


def _origins(text: str) -> dict[str, str]:
    """Map the kernel names that XLA makes of instructions to their op names."""
    pattern = re.compile(r'%?([\w.\-]+) = .*?metadata={.*?op_name="([^"]*)"')
    found = {}
    for line in text.splitlines():
        match = pattern.search(line)
        if match:
            name, origin = match.groups()
            found[re.sub(r"[.\-]", "_", name)] = origin[-120:]
    return found


def profile_parts(
    config: config_lib.Qwen3_5Config, batch: int, length: int, dtype: Any
) -> dict[str, dict]:
    """Time forward and gradient of the pieces that have a choice to make."""
    cases: dict[str, tuple[Callable, tuple]] = {}
    for chunk in (32, 64, 128):
        name = f"chunk_prefill chunk={chunk}"
        cases[name] = _chunk_case(config, batch, length, dtype, chunk)
    for cudnn in (False, True):
        for rows in (256, 1024) if not cudnn else (0,):
            name = f"attention cudnn={cudnn} rows={rows}"
            case = _attention_case(config, batch, length, dtype, cudnn, rows)
            cases[name] = case
    for rows in (4096, 8192, 16384):
        name = f"cross_entropy rows={rows}"
        cases[name] = _loss_case(config, batch * length, dtype, rows)
    cases["lookup"] = _lookup_case(config, batch, length, dtype)
    return {
        name: attempt(lambda c=case: _time_part(*c)) for name, case in cases.items()
    }


def check(dtype: Any) -> dict[str, float]:
    """Relative errors of the chunked forward on this device, against the recurrence.

    About 1e-6 in float32 and below 1e-2 in bfloat16; nothing is worth timing beyond.
    """
    q, k, v, log_decay, beta = _chunk_arrays(2, 256, 2, 4, 128, 128, jnp.dtype(dtype))
    k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)
    state = _normal(5, (2, 4, 128, 128), jnp.float32)
    errors = {}
    for name, kind in (("float32", jnp.float32), (str(dtype), dtype)):
        rows = [x.astype(kind) for x in (q, k, v)]
        exact = [x.astype(jnp.float32) for x in rows]
        got = chunk_prefill.chunk_prefill(*rows, log_decay, beta, state)
        wanted = recurrence.sequence(*exact, log_decay, beta, state)
        for part, a, b in zip(("output", "state"), got, wanted, strict=True):
            a = a.astype(jnp.float32)
            error = jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())
            errors[f"{part} {name}"] = float(error)
    return errors


def _time_part(function: Callable, arguments: tuple) -> dict:
    forward = jax.jit(lambda *x: jnp.sum(function(*x).astype(jnp.float32)))
    both = jax.jit(jax.value_and_grad(forward, argnums=tuple(range(len(arguments)))))
    return {
        "forward_ms": 1e3 * measure(forward, *arguments),
        "gradient_ms": 1e3 * measure(both, *arguments),
    }


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _chunk_arrays(batch, length, heads, value_heads, key_dim, value_dim, dtype):
    """Random q, k, v, log_decay, beta: keys of norm about 1, decays of all lengths."""
    keys = (batch, length, heads, key_dim)
    q, k = (_normal(i, keys, dtype) * key_dim**-0.5 for i in (0, 1))
    v = _normal(2, (batch, length, value_heads, value_dim), dtype)
    rows = (batch, length, value_heads)
    log_decay = -jax.nn.softplus(_normal(3, rows, jnp.float32) - 3)
    return q, k, v, log_decay, jax.nn.sigmoid(_normal(4, rows, jnp.float32))


def _chunk_case(config, batch, length, dtype, chunk):
    heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    arrays = _chunk_arrays(batch, length, heads, value_heads, key_dim, value_dim, dtype)
    state = jnp.zeros((batch, value_heads, value_dim, key_dim))

    def function(*arrays):
        return chunk_prefill.chunk_prefill(*arrays, state, chunk=chunk)[0]

    return function, arrays


def _attention_case(config, batch, length, dtype, cudnn, rows):
    q = _normal(0, (batch, length, config.num_attention_heads, config.head_dim), dtype)
    shape = (batch, length, config.num_key_value_heads, config.head_dim)
    k, v = _normal(1, shape, dtype), _normal(2, shape, dtype)

    def function(q, k, v):
        return attention.causal(q, (k, v), rows=rows, cudnn=cudnn)

    return function, (q, k, v)


def _loss_case(config, count, dtype, rows):
    hidden = _normal(0, (count, config.hidden_size), dtype)
    table = 0.05 * _normal(1, (config.vocab_size, config.hidden_size), jnp.float32)
    labels = jax.random.randint(jax.random.key(2), (count,), 0, config.vocab_size)
    weights = jnp.full(count, 1 / count)

    def function(hidden, table):
        return loss.cross_entropy(hidden, table, labels, weights, rows)[0]

    return function, (hidden, table)


def _lookup_case(config, batch, length, dtype):
    table = _normal(0, (config.vocab_size, config.hidden_size), jnp.float32)
    shape = (batch, length)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)

    def function(table):
        return loss.lookup(table, tokens, jnp.dtype(dtype), trainable.LOOKUP_ROWS)

    return function, (table,)


def show(results: dict[str, dict]) -> None:
    """Print the measurements, the longest kernels of the first variant last."""
    console = rich.console.Console(width=160)
    console.print("errors of the chunked forward:", results["check"])
    for name in ("steps", "parts"):
        table = rich.table.Table("what", "result", title=name)
        for key, value in results[name].items():
            cells = (f"{k} {_short(v)}" for k, v in value.items() if k != "kernels")
            table.add_row(key, "  ".join(cells))
        console.print(table)
    inside = results["steps"]["base"].get("kernels", {})
    if "error" in inside:
        console.print(f"no kernel times: {inside['error']}")
        return
    total = sum(row[0] for row in inside.values())
    table = rich.table.Table("ms", "launches", "kernel", "op", title=f"{total:.1f} ms")
    for name, (milliseconds, launches, origin) in list(inside.items())[:40]:
        table.add_row(f"{milliseconds:.2f}", str(launches), name[:50], origin)
    console.print(table)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
