"""Does the drafted text equal that of plain decoding, and if not, was it a near tie?"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import checkpoints
from scripts.decoding import request, result
from treewy_jax import commit
from treewy_jax import mesh as mesh_lib

# In float32 the two programs round differently; nearer ties than this may flip.
NEAR_TIE = 1e-3
PLAIN = commit.Reconstruct()


def differences(
    asked: request.Request, drafted: list[list[int]], plain: list[list[int]]
) -> list[result.Difference]:
    """Return the first difference of each row that has one."""
    found = []
    for row, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        if ours == theirs:
            continue
        index = first_difference(ours, theirs)
        tokens = [*asked.prompts[row], *ours[:index]]
        gap = logit_gap(asked.model, tokens, asked.lifecycle)
        token, plain_token = (
            tokens[index] if index < len(tokens) else None for tokens in (ours, theirs)
        )
        found.append(result.Difference(row, index, token, plain_token, gap))
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens the two begin with in common."""
    pairs = zip(ours, theirs, strict=False)
    same = min(len(ours), len(theirs))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), same)


def logit_gap(
    model: checkpoints.Model,
    tokens: Sequence[int],
    lifecycle: commit.Lifecycle = PLAIN,
) -> float:
    """Return the target's best logit after `tokens` less its second best."""
    padded = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)
    padded[0, : len(tokens)] = tokens
    build = model.builder(lifecycle)
    length = jnp.full(1, len(tokens), jnp.int32)
    with mesh_lib.use(getattr(model, "mesh", None)):
        best = _top_two(build, model.params, jnp.asarray(padded), length)
    return float(best[0] - best[1])


@functools.partial(jax.jit, static_argnames="build")
def _top_two(build, params, tokens, length):
    target = build(params)
    hidden, _ = target.prefill(tokens, length, tokens.shape[1])
    last = lax.dynamic_slice_in_dim(hidden, length[0] - 1, 1, axis=1)
    return lax.top_k(target.logits(last)[0, 0], 2)[0]
