"""The MTP head trained as it is used: chained over its own hidden states.

At inference the head has run over the committed pairs (x_{s+1}, h_s), s <= t, and
drafts on from there: draft d is made from (x_{t+d}, m^{d-1}_t) at position t + d - 1,
attending to the committed keys and to the earlier drafts of the same chain. Training
does this from every t at once, with the text's tokens as drafts:

    m^1_t = head(x_{t+1}, h_t)       keys: depth 1, rows 0..t
    m^d_t = head(x_{t+d}, m^{d-1}_t) keys: depth 1, rows 0..t; depths 2..d, row t
    m^d_t predicts x_{t+d+1}
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from models.qwen3_5 import mtp
from scripts.training import attention


def chain(
    head: mtp.MTPHead,
    embedded: Sequence[Float[Array, "B T H"]],
    hidden: Float[Array, "B T H"],
    *,
    cudnn: bool = False,
) -> list[Float[Array, "B T H"]]:
    """Return m^1, m^2, ... for the embeddings of x_{t+1}, x_{t+2}, ... at each t.

    `hidden` is the target's, after its final norm.
    """
    prefix, own, outputs = None, [], []
    (layer,) = head.layers
    mixer = layer.self_attn
    steps = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])
    for depth, tokens in enumerate(embedded):

        def mix(x, depth=depth):
            nonlocal prefix, own
            q, gate, k, v = mixer.project(x, steps + depth)
            if depth == 0:
                prefix = (k, v)
            else:
                own = [*own, (k, v)]
            mixed = attention.causal(q, prefix, own, cudnn=cudnn)
            return mixer.output(mixed, gate), ()

        rows, _ = layer(head.join(tokens, hidden), mix)
        hidden = head.norm(rows)
        outputs.append(hidden)
    return outputs
