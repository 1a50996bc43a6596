"""Validation by source: losses, and how well the MTP chain guesses the target.

Teacher-forced on the text, so cheaper than decoding and not the same: a draft counts
as right when it is the target's own choice behind the text's tokens.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from scripts.training import loss, step, trainable


@functools.cache
def make_evaluate(
    structure: trainable.Structure, goal: step.Objective, batch: int
) -> Callable:
    """Return `evaluate(params, {source: windows}) -> {source: {metric: value}}`.

    Metrics: `ce`; for each depth d `mtp<d>` (loss on the text), `top1_<d>`, `top3_<d>`
    (the target's choice is the draft, or among the best three); and `chain`, one plus
    the expected number of drafts right in a row.
    """
    sums = jax.jit(functools.partial(_sums, structure=structure, goal=goal))

    def evaluate(params, sources: Mapping[str, np.ndarray]) -> dict[str, dict]:
        return {name: _average(sums, params, w, batch) for name, w in sources.items()}

    return evaluate


def _average(sums: Callable, params, windows: np.ndarray, batch: int) -> dict:
    """Run in batches of one size, the last filled with rows that do not count."""
    total: dict[str, float] = {}
    for start in range(0, len(windows), batch):
        rows = windows[start : start + batch]
        spare = batch - len(rows)
        real = np.arange(batch) < len(rows)
        rows = np.pad(rows, [(0, spare), (0, 0)])
        for name, value in jax.device_get(sums(params, rows, real)).items():
            total[name] = total.get(name, 0.0) + float(value)
    return {k: v / total["rows"] for k, v in total.items() if k != "rows"}


def _sums(params, windows: Int[Array, "B W"], real, *, structure, goal) -> dict:
    """Sums over the real rows; a row's value is its mean over the positions."""
    model = structure.module(params, goal.dtype)
    rows = step.hidden_states(model, windows)
    length = rows[0].shape[1]
    kernel = params.get("lm_head.kernel")
    table = params["embed_tokens.embedding"] if kernel is None else kernel.T
    table = table.astype(goal.dtype)

    def of_row(inputs):
        window, *hidden = inputs
        return _row_metrics(window, hidden, table, length)

    # One row's logits [T, V] at a time.
    values = lax.map(of_row, (windows, *rows))
    sums = {k: jnp.sum(jnp.where(real, v, 0)) for k, v in values.items()}
    return sums | {"rows": jnp.sum(real)}


def _row_metrics(
    window: Int[Array, " W"],
    hidden: list[Float[Array, "T H"]],
    table: Float[Array, "V H"],
    length: int,
) -> dict[str, Float[Array, ""]]:
    logits = loss.dot("th,vh->tv", hidden[0], table)
    metrics = {"ce": _mean_ce(logits, window[1 : length + 1])}
    choice = jnp.argmax(logits, axis=-1)
    # Rows whose whole chain the target has an opinion on.
    count = length - step.DEPTHS
    right, chain = jnp.ones(count, bool), jnp.ones(count)
    for depth, row in enumerate(hidden[1:], start=1):
        logits = loss.dot("th,vh->tv", row, table)
        labels = window[depth + 1 : depth + 1 + length]
        metrics[f"mtp{depth}"] = _mean_ce(logits, labels)
        wanted = choice[depth : depth + count]
        _, best = lax.top_k(logits[:count], 3)
        hit = best == wanted[:, None]
        right = right & hit[:, 0]
        chain = chain + right
        metrics[f"top1_{depth}"] = jnp.mean(hit[:, 0].astype(jnp.float32))
        metrics[f"top3_{depth}"] = jnp.mean(jnp.any(hit, 1).astype(jnp.float32))
    return metrics | {"chain": jnp.mean(chain)}


def _mean_ce(logits: Float[Array, "T V"], labels: Int[Array, " T"]) -> Array:
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
