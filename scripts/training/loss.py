"""Cross-entropy and embedding lookup that never hold a [tokens, vocabulary] array.

Both replace what autodiff would do: the loss computes its gradient while the logits
of a few rows exist; the lookup's gradient is a dot with one-hot rows, several times
faster on a GPU than the scatter-add of the plain rule.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden: Float[Array, "N H"],
    table: Float[Array, "V H"],
    labels: Int[Array, " N"],
    weights: Float[Array, " N"],
    rows: int,
) -> tuple[Float[Array, ""], Int[Array, " N"]]:
    """Return `sum_n weights_n * -log softmax(table hidden_n)[labels_n]` and argmaxes.

    `table` is rounded to `hidden`'s dtype for the dots, which accumulate in float32;
    its gradient is float32. `rows` tokens are worked on at a time.
    """

    def step(total, chunk):
        loss, best, _, _ = _rows(chunk, table, want_gradient=False)
        return total + loss, best

    chunks = _chunked((hidden, labels, weights), rows)
    total, best = lax.scan(step, jnp.float32(0), chunks)
    return total, best.reshape(-1)[: len(labels)]


def _cross_entropy_forward(hidden, table, labels, weights, rows):
    def step(carry, chunk):
        total, grad_table = carry
        loss, best, grad_hidden, grad = _rows(chunk, table, want_gradient=True)
        return (total + loss, grad_table + grad), (best, grad_hidden)

    chunks = _chunked((hidden, labels, weights), rows)
    zero = jnp.zeros(table.shape, jnp.float32)
    (total, grad_table), (best, grad_hidden) = lax.scan(
        step, (jnp.float32(0), zero), chunks
    )
    grad_hidden = grad_hidden.reshape(-1, hidden.shape[-1])[: len(labels)]
    best = best.reshape(-1)[: len(labels)]
    return (total, best), (grad_hidden, grad_table)


def _cross_entropy_backward(rows, kept, gradients):
    del rows
    grad_hidden, grad_table = kept
    scale = gradients[0]
    grad_hidden = (scale * grad_hidden).astype(grad_hidden.dtype)
    return grad_hidden, scale * grad_table, None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _rows(chunk, table: Array, *, want_gradient: bool):
    """Loss, argmaxes and both gradients of one chunk of rows."""
    hidden, labels, weights = chunk
    table = table.astype(hidden.dtype)
    logits = dot("nh,vh->nv", hidden, table)
    # The maximum by its index: each further reduction reads all logits once more.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top, chosen = (
        jnp.take_along_axis(logits, index[:, None], axis=-1)[:, 0]
        for index in (best, labels)
    )
    norm = top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))
    loss = jnp.sum(weights * (norm - chosen))
    if not want_gradient:
        return loss, best, None, None
    hit = labels[:, None] == jnp.arange(table.shape[0])
    slope = weights[:, None] * (jnp.exp(logits - norm[:, None]) - hit)
    slope = slope.astype(hidden.dtype)
    grad_hidden = dot("nv,vh->nh", slope, table).astype(hidden.dtype)
    return loss, best, grad_hidden, dot("nv,nh->vh", slope, hidden)


def dot(spec: str, a: Array, b: Array) -> Array:
    """Contract exactly as the operands are, accumulating in float32."""
    low = a.dtype == jnp.bfloat16
    precision = lax.Precision.DEFAULT if low else lax.Precision.HIGHEST
    return jnp.einsum(
        spec, a, b, precision=precision, preferred_element_type=jnp.float32
    )


def _chunked(arrays, rows: int):
    """Reshape leading N to [chunks, rows], padded with zeros (weight 0)."""
    count = arrays[0].shape[0]
    rows = min(rows, count)
    spare = -count % rows

    def fold(x):
        x = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, rows, *x.shape[1:])

    return tuple(fold(x) for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(
    table: Float[Array, "V H"], tokens: Int[Array, "B T"], dtype: jnp.dtype, rows: int
) -> Float[Array, "B T H"]:
    """Return rows of `table` rounded to `dtype`; the gradient is summed in float32."""
    del rows
    return table[tokens].astype(dtype)


def _lookup_forward(table, tokens, dtype, rows):
    # The empty array carries the table's shape and dtype to the backward pass.
    like = jnp.zeros((table.shape[0], 0), table.dtype)
    return lookup(table, tokens, dtype, rows), (tokens, like)


def _lookup_backward(dtype, rows, kept, gradient):
    del dtype
    tokens, like = kept
    size, width = like.shape[0], gradient.shape[-1]

    def step(total, chunk):
        token, gradient, real = chunk
        hot = (token[:, None] == jnp.arange(size)) & (real[:, None] > 0)
        return total + dot("nv,nh->vh", hot.astype(gradient.dtype), gradient), None

    flat = (tokens.reshape(-1), gradient.reshape(-1, width), jnp.ones(tokens.size))
    zero = jnp.zeros((size, width), jnp.float32)
    total, _ = lax.scan(step, zero, _chunked(flat, rows))
    return total.astype(like.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)
