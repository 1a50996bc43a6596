"""Chunked gated delta rule in plain JAX, for prefill and for training.

Inside a chunk of C tokens entered with state S, with c the cumulative log decay
from the chunk's first token, D[t,i] = exp(c_t - c_i) for i <= t, and the paper's
pseudo-values U (method: Yang et al., "Gated Delta Networks", arXiv 2412.06464):

    (I + A) U = diag(beta) (V - diag(e^c) K S^T)      A = diag(beta) (K K^T o D), i < t
    O  = diag(e^c) Q S^T + M U                        M = Q K^T o D, i <= t
    S' = e^{c_C} S + U^T diag(e^{c_C - c}) K

With X = (I + A)^-1 diag(beta) everything that reads S becomes linear in it:

    O  = R S^T + (M X) V          R = diag(e^c) Q - (M X diag(e^c)) K
    S' = e^{c_C} S - S E + W      E = (Y diag(e^c) K)^T K,  W = (Y V)^T K
                                  Y = diag(e^{c_C - c}) X

so only the S' line is sequential; all else is batched over the chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.chunk_prefill import linear
from pallas_kernels.chunk_prefill import spec as spec_lib


class Decays(NamedTuple):
    """Decay factors of each chunk, all in (0, 1].

    Attributes:
        between: D[t, i], zero above the diagonal.
        start: e^{c_t}, from the chunk's start to token t.
        end: e^{c_C - c_i}, from token i to the chunk's end.
        whole: e^{c_C}, over the whole chunk.
    """

    between: Float[Array, "N B Hk G C C"]
    start: Float[Array, "N B Hk G C"]
    end: Float[Array, "N B Hk G C"]
    whole: Float[Array, "N B Hk G"]


def chunk_prefill(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    *,
    chunk: int = 64,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dv Dk"]]:
    """Advance the gated delta rule over T tokens; differentiable in every array.

    Value head j reads key head j // (Hv // Hk). A token with beta = 0 and
    log_decay = 0 leaves the state as it is, so such rows pad ragged batches.

    Args:
        q: queries, normalised and scaled.
        k: keys, normalised.
        v: values.
        log_decay: log of the decay before each token, base e, <= 0.
        beta: write strength of each token.
        state: state before the first token.
        chunk: chunk length, a power of two; shorter sequences use a shorter one.

    Returns:
        The outputs in v's dtype and the last state in `state`'s dtype.

    Raises:
        ValueError: if shapes, dtypes or `chunk` do not fit together.
    """
    spec = spec_lib.make_spec(q, k, v, log_decay, beta, state, chunk)
    wide, low = spec.accumulator_dtype, spec.compute_dtype
    q, k, v = (_split(x.astype(low), spec) for x in (q, k, v))
    log_decay, beta = (_split(x.astype(wide), spec) for x in (log_decay, beta))
    heads = (spec.batch, spec.key_heads, spec.group)
    first = state.astype(wide).reshape(*heads, *state.shape[2:])
    output, last = _chunks(q[:, :, :, 0], k[:, :, :, 0], v, log_decay, beta, first)
    return _merge(output, spec).astype(v.dtype), last.reshape(state.shape).astype(
        state.dtype
    )


def _chunks(
    q: Float[Array, "N B Hk C Dk"],
    k: Float[Array, "N B Hk C Dk"],
    v: Float[Array, "N B Hk G C Dv"],
    log_decay: Float[Array, "N B Hk G C"],
    beta: Float[Array, "N B Hk G C"],
    state: Float[Array, "B Hk G Dv Dk"],
) -> tuple[Float[Array, "N B Hk G C Dv"], Float[Array, "B Hk G Dv Dk"]]:
    low, wide = q.dtype, state.dtype
    decays = chunk_decays(log_decay)
    inverse, read = _triangles(q, k, beta, decays, wide)
    mixed = linear.einsum("nbhgti,nbhgij->nbhgtj", read, inverse, low, wide)
    kept = decays.end[..., None] * inverse
    start = decays.start[..., None, :]
    pull = linear.einsum("nbhgti,nbhid->nbhgtd", mixed * start, k, low, low)
    query = decays.start[..., None] * q[:, :, :, None] - pull
    within = linear.einsum("nbhgti,nbhgiv->nbhgtv", mixed, v, low, low)
    row = linear.einsum("nbhgti,nbhid->nbhgtd", kept * start, k, low, low)
    erase = linear.einsum("nbhgtd,nbhte->nbhgde", row, k, low, low)
    value = linear.einsum("nbhgti,nbhgiv->nbhgtv", kept, v, low, low)
    write = linear.einsum("nbhgtv,nbhtd->nbhgvd", value, k, low, wide)
    before, last = linear.carry(decays.whole, erase, write, state)
    across = linear.einsum("nbhgtd,nbhgvd->nbhgtv", query, before, low, wide)
    return (across + within).astype(low), last


def _triangles(
    q: Array, k: Array, beta: Array, decays: Decays, wide: jnp.dtype
) -> tuple[Float[Array, "N B Hk G C C"], Float[Array, "N B Hk G C C"]]:
    """Return X = (I + A)^-1 diag(beta) and M, both lower triangular."""
    key_gram = linear.einsum("nbhtd,nbhid->nbhti", k, k, k.dtype, wide)
    query_gram = linear.einsum("nbhtd,nbhid->nbhti", q, k, k.dtype, wide)
    lower = beta[..., None] * key_gram[:, :, :, None] * decays.between
    inverse = linear.unit_lower_inverse(jnp.tril(lower, -1))
    return inverse * beta[..., None, :], query_gram[:, :, :, None] * decays.between


def chunk_decays(log_decay: Float[Array, "N B Hk G C"]) -> Decays:
    """Exponentials of the log decay between the tokens of a chunk.

    The difference of one rounded sum loses a small decay after a large one (-0.1
    after -300), so multiples of 1/16, whose sums are exact in float32 up to a
    million, are summed apart from the small rest. The rest carries the gradient.
    """
    coarse = jax.lax.stop_gradient(jnp.round(log_decay * 16) / 16)
    parts = [jnp.cumsum(part, axis=-1) for part in (coarse, log_decay - coarse)]
    pairs = [part[..., :, None] - part[..., None, :] for part in parts]
    causal = jnp.tril(jnp.ones(pairs[0].shape[-2:], bool))
    # Masked before exp: above the diagonal the differences are positive.
    return Decays(
        between=jnp.exp(jnp.where(causal, sum(pairs), -jnp.inf)),
        start=jnp.exp(sum(parts)),
        end=jnp.exp(sum(part[..., -1:] - part for part in parts)),
        whole=jnp.exp(sum(part[..., -1] for part in parts)),
    )


def _split(x: Array, spec: spec_lib.Spec) -> Array:
    """[B, T, H, ...] to [N, B, Hk, H / Hk, C, ...], padded with zeros."""
    pads = [(0, 0)] * x.ndim
    pads[1] = (0, spec.padding)
    x = jnp.pad(x, pads)
    group = x.shape[2] // spec.key_heads
    x = x.reshape(
        spec.batch, spec.chunks, spec.chunk, spec.key_heads, group, *x.shape[3:]
    )
    return jnp.moveaxis(x, (0, 1, 2), (1, 0, 4))


def _merge(x: Array, spec: spec_lib.Spec) -> Array:
    """[N, B, Hk, G, C, D] back to [B, T, Hv, D], the padding dropped."""
    x = jnp.moveaxis(x, (1, 0, 4), (0, 1, 2))
    x = x.reshape(spec.batch, -1, spec.value_heads, x.shape[-1])
    return x[:, : spec.tokens]
