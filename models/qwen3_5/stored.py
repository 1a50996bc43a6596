"""Which checkpoint tensors hold each parameter, and how.

A parameter path names its tensor; only the leaf differs. `JOINS` lists parameters that
hold several tensors. Names leave out the prefix of the main model ("model." or
"model.language_model.").
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import sharding

Path = sharding.Path
Array = Shaped[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How parameters whose path ends in `ours` are stored: renamed, reshaped."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    load: Callable[[Array], Array]
    save: Callable[[Array], Array]
    part: Callable[[sharding.Part], sharding.Part]  # of ours -> of theirs


def _keep(x: Any) -> Any:
    return x


def swap(x: Array) -> Array:
    """Transpose: stored matrices are [out, in], ours [in, out]."""
    return np.swapaxes(x, -1, -2)


def swap_part(part: sharding.Part) -> sharding.Part:
    return (*part[:-2], part[-1], part[-2])


RULES = (
    Rule(("embedding",), ("weight",), _keep, _keep, _keep),
    Rule(("kernel",), ("weight",), swap, swap, swap_part),
    Rule(
        ("conv1d", "weight"),
        ("conv1d", "weight"),
        lambda x: x[:, 0],
        lambda x: x[:, None],
        lambda part: (part[0], slice(None), part[1]),
    ),
    *(
        Rule(("experts", name), ("experts", name), swap, swap, swap_part)
        for name in ("gate_up_proj", "down_proj")
    ),
    Rule((), (), _keep, _keep, _keep),
)


@dataclasses.dataclass(frozen=True)
class Join:
    """A parameter of several stored tensors, which follow each other on an axis.

    Attributes:
        ours: end of the parameter's path.
        theirs: end of the name of each tensor, in its place.
        axis: of the parameter.
        sizes: the lengths of the tensors, from the config and that of the axis.
        rule: how each of them is stored.
    """

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]
    axis: int
    sizes: Callable[[config_lib.Qwen3_5Config, int], Sequence[int]]
    rule: Rule


JOINS = (
    Join(
        ("mlp", "gate", "weight"),
        (("mlp", "gate", "weight"), ("mlp", "shared_expert_gate", "weight")),
        axis=0,
        sizes=lambda config, rows: (rows - 1, 1),
        rule=Rule((), (), _keep, _keep, _keep),
    ),
    *(
        Join(
            (owner, "gate_up_proj"),
            ((owner, "gate_proj", "weight"), (owner, "up_proj", "weight")),
            axis=1,
            sizes=lambda config, halves: (1,) * halves,
            rule=Rule(
                (),
                (),
                lambda x: x.T[:, None],  # [I, H] stored, [H, 1, I] ours
                lambda x: x[:, 0].T,
                lambda part: (part[2], part[0]),
            ),
        )
        for owner in ("mlp", "shared_expert")
    ),
    Join(
        ("in_proj", "kernel"),
        tuple((f"in_proj_{name}", "weight") for name in ("qkv", "b", "a", "z")),
        axis=1,
        sizes=lambda config, columns: (
            config.conv_dim,
            config.linear_num_value_heads,
            config.linear_num_value_heads,
            config.value_dim,
        ),
        rule=Rule((), (), swap, swap, swap_part),
    ),
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One stored tensor of the fused layout: `key` with `shape`, for `path`.

    Of a parameter with other tensors it is the part at `index`.
    """

    key: str
    shape: tuple[int, ...]
    path: Path
    rule: Rule
    index: sharding.Part = ()


def flatten(state: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """Return (path, leaf) pairs and the tree structure of an nnx state or dict."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    return [(sharding.path_of(keys), leaf) for keys, leaf in leaves], structure


def slots(state: Any) -> list[Slot]:
    """List the parameters of `state` (arrays or their abstract shapes) as stored.

    One that holds several tensors is there once, under its own name (see `tensors`).
    """
    return [slot_of(path, tuple(leaf.shape)) for path, leaf in flatten(state)[0]]


def tensors(
    path: Path, shape: tuple[int, ...], config: config_lib.Qwen3_5Config
) -> list[Slot]:
    """List the tensors that hold one parameter."""
    join = next((j for j in JOINS if path[len(path) - len(j.ours) :] == j.ours), None)
    if join is None:
        return [slot_of(path, shape)]
    sizes = join.sizes(config, shape[join.axis])
    ends = itertools.accumulate(sizes)
    found = []
    for names, size, end in zip(join.theirs, sizes, ends, strict=True):
        whole = [slice(None)] * len(shape)
        whole[join.axis] = slice(end - size, end)
        part = (*shape[: join.axis], size, *shape[join.axis + 1 :])
        key = path[: len(path) - len(join.ours)] + names
        found.append(_made(key, part, path, join.rule, tuple(whole)))
    return found


def slot_of(path: Path, shape: tuple[int, ...]) -> Slot:
    """Return a parameter as one tensor, under its own name."""
    rule = next(r for r in RULES if path[len(path) - len(r.ours) :] == r.ours)
    names = path[: len(path) - len(rule.ours)] + rule.theirs
    return _made(names, shape, path, rule)


def _made(names, shape, path, rule, index=()) -> Slot:
    stored = rule.save(np.broadcast_to(np.int8(0), shape)).shape
    return Slot(".".join(map(str, names)), stored, path, rule, index)
