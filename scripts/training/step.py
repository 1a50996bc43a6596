"""One training step: windows in, new parameters and metrics out, as one program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from scripts.training import loss, mtp_chain, trainable

# Drafts of an MTP chain; a window holds one token more than inputs plus drafts.
DEPTHS = 3


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        mtp_weight: weight of the mean loss over the MTP depths.
        mtp_only: leave the target as it is; train the head alone.
        mtp_labels: what a draft should be: the text's token, or the target's own
            choice there (what acceptance compares with).
        dtype: compute type; parameters, gates, states and losses stay float32.
        rows: tokens whose logits exist at one time.
    """

    mtp_weight: float = 0.3
    mtp_only: bool = False
    mtp_labels: Literal["text", "target"] = "text"
    dtype: Any = jnp.bfloat16
    rows: int = 8192


class State(NamedTuple):
    """Everything that training changes.

    Attributes:
        step: steps taken.
        params: what is trained, by name.
        frozen: what is not, by name.
        optimizer: the optimiser's state for `params`.
    """

    step: Int[Array, ""]
    params: dict[str, Array]
    frozen: dict[str, Array]
    optimizer: Any

    @property
    def all_params(self) -> dict[str, Array]:
        """Trained and frozen parameters together."""
        return self.frozen | self.params


def create_state(
    params: trainable.Parameters,
    transform: optax.GradientTransformation,
    mtp_only: bool,
) -> State:
    """Start training `params`, or with `mtp_only` those of the MTP head."""
    chosen = {k: v for k, v in params.items() if not mtp_only or k.startswith("mtp.")}
    frozen = {k: v for k, v in params.items() if k not in chosen}
    return State(jnp.int32(0), chosen, frozen, transform.init(chosen))


def hidden_states(
    model: trainable.TrainableModel, windows: Int[Array, "B W"]
) -> list[Float[Array, "B T H"]]:
    """Return the target's hidden states and those of each MTP depth.

    T = W - DEPTHS - 1; the state of depth d at t (0 for the target's) predicts token
    t + d + 1 of the window.
    """
    length = windows.shape[1] - DEPTHS - 1
    hidden = model.forward(windows[:, :length])
    # One lookup for all depths: its gradient costs as much as a small layer.
    ahead = model.embed(windows[:, 1 : length + DEPTHS])
    embedded = [ahead[:, d : d + length] for d in range(DEPTHS)]
    chain = mtp_chain.chain(model.mtp, embedded, hidden, cudnn=model.cudnn)
    return [hidden, *chain]


def objective(
    params: trainable.Parameters,
    windows: Int[Array, "B W"],
    structure: trainable.Structure,
    goal: Objective,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return CE + mtp_weight * mean CE of the MTP depths, and the parts.

    `ce`, `mtp1`... are mean losses; `agree1`... how often a depth's best token is the
    one that the target itself chooses there.
    """
    model = structure.module(params, goal.dtype)
    rows = hidden_states(model, windows)
    # Text completion heads share the table, or have their own [H, V] kernel.
    tied = "lm_head.kernel" not in params
    table = params["embed_tokens.embedding"] if tied else params["lm_head.kernel"].T
    ce, choice = _mean_loss(rows[0], table, windows, 0, goal)
    metrics, total = {"ce": ce}, jnp.float32(0) if goal.mtp_only else ce
    for depth, row in enumerate(rows[1:], start=1):
        wanted = choice if goal.mtp_labels == "target" else None
        value, guess = _mean_loss(row, table, windows, depth, goal, wanted)
        metrics[f"mtp{depth}"] = value
        same = guess[:, :-depth] == choice[:, depth:]
        metrics[f"agree{depth}"] = jnp.mean(same.astype(jnp.float32))
        total = total + goal.mtp_weight / DEPTHS * value
    return total, metrics


def _mean_loss(
    hidden: Float[Array, "B T H"],
    table: Float[Array, "V H"],
    windows: Int[Array, "B W"],
    depth: int,
    goal: Objective,
    choice: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, "B T"]]:
    """Mean loss of one depth's predictions, and its own choices.

    With the target's `choice` as labels the last `depth` rows have none.
    """
    length = hidden.shape[1]
    weights = jnp.ones(hidden.shape[:2], jnp.float32)
    if choice is None:
        labels = windows[:, depth + 1 : depth + 1 + length]
    else:
        labels = jnp.roll(choice, -depth, axis=1)
        weights = weights * (jnp.arange(length) < length - depth)
    weights = weights / jnp.sum(weights)
    value, best = loss.cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        table,
        labels.reshape(-1),
        weights.reshape(-1),
        goal.rows,
    )
    return value, best.reshape(hidden.shape[:2])


@functools.cache
def make_step(
    structure: trainable.Structure,
    transform: optax.GradientTransformation,
    goal: Objective,
    donate: bool = True,
) -> Callable[[State, Int[Array, "B W"]], tuple[State, dict[str, Array]]]:
    """Return the compiled step; it consumes the state that it is given."""

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def step(state: State, windows: Int[Array, "B W"]):
        def value(params):
            return objective(state.frozen | params, windows, structure, goal)

        gradient, metrics = jax.grad(value, has_aux=True)(state.params)
        squares = (jnp.sum(leaf**2) for leaf in gradient.values())
        metrics["gradient_norm"] = jnp.sqrt(sum(squares))
        updates, optimizer = transform.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(
            step=state.step + 1, params=params, optimizer=optimizer
        ), metrics

    return step
