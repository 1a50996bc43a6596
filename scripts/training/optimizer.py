"""AdamW on float32 parameters: decay on matrices only, warm-up, then a cosine."""

import functools

import optax

from scripts.training import trainable

WARMUP_STEPS = 150
FINAL_SHARE = 0.02
WEIGHT_DECAY = 0.1
CLIP = 1.0
MATRICES = ("kernel", "embedding", "gate_up_proj", "down_proj")


def schedule(peak: float, total_steps: int) -> optax.Schedule:
    """Linear warm-up to `peak`, then a cosine to 2 % of it at `total_steps`."""
    warmup = min(WARMUP_STEPS, max(1, total_steps // 10))
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / warmup,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(total_steps, warmup + 1),
        end_value=FINAL_SHARE * peak,
    )


@functools.cache
def make(peak: float, total_steps: int) -> optax.GradientTransformation:
    """Return the optimiser for flat parameters: clip by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(
            schedule(peak, total_steps),
            b1=0.9,
            b2=0.95,
            weight_decay=WEIGHT_DECAY,
            mask=_is_matrix,
        ),
    )


def _is_matrix(params: trainable.Parameters) -> dict[str, bool]:
    # By name: the weight of a convolution has two dimensions, too.
    return {name: name.endswith(MATRICES) for name in params}
