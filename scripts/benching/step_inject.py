"""A target that accepts as a table says, around one whose weights are random.

Only the choice of the target is replaced: its logits get infinity at one token of every
node on the path that is to be accepted, in the expression whose argmax is taken. So all
that a step computes is computed: the drafts of the MTP head, the whole output head, the
walk, the commit of that path. Compiled for an H200 that adds four small kernels to the
1,200 of a step of 35B-A3B.

The table holds, for depths 1, 2, ..., the share of steps that accept at least so many
drafts; a step draws one number for each row, and accepts every depth whose share lies
above it, so that

    mean accept length = 1 + sum(shares).

Which child is taken is drawn, too, and so is the token behind the path, which none of
the drafts carries: texts do not repeat, as those of random weights would. Draws are
hashes of (row, position).
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from models.qwen3_5 import random_weights, target
from treewy_jax import accept
from treewy_jax import cache as cache_lib
from treewy_jax import tree as tree_lib

mix = random_weights.mix


class Weights(NamedTuple):
    """Parameters of the model, and the table.

    The former as a flat tuple: to flatten the modules at every call would take the host
    as long as a step of one row takes the device.
    """

    leaves: tuple[Array, ...]
    rates: Float[Array, " depth"]


@dataclasses.dataclass(frozen=True)
class Builder:
    """As `target.Builder`, from `Weights`; hashable, hence static."""

    inner: target.Builder
    structure: Any

    @property
    def lifecycle(self) -> Any:
        return self.inner.lifecycle

    def params(self, weights: Weights) -> Any:
        """Return the parameters as the model takes them."""
        return jax.tree.unflatten(self.structure, weights.leaves)

    def __call__(self, weights: Weights) -> "Target":
        return Target(self.inner(self.params(weights)), weights.rates)


def join(
    build: target.Builder, params: Any, shares: Sequence[float]
) -> tuple[Builder, Weights]:
    """Return builder and weights of a model with a table; `params` may be shapes."""
    leaves, structure = jax.tree.flatten(params)
    rates = jnp.asarray(shares, jnp.float32).reshape(-1)
    return Builder(build, structure), Weights(tuple(leaves), rates)


class Target:
    """A target whose logits make the walk accept what was drawn.

    `logits` right after `verify` are those of that tree's nodes: a step calls the one
    with the other's result. Any other logits are left as they are.
    """

    def __init__(self, inner: target.Qwen3_5Target, rates: Float[Array, " depth"]):
        self._inner, self._rates, self._forced = inner, rates, None

    @property
    def module(self) -> Any:
        return self._inner.module

    @property
    def draft_head(self) -> target.DraftHead:
        return self._inner.draft_head

    def prefill(self, tokens, lengths, capacity) -> tuple[Array, cache_lib.HybridCache]:
        return self._inner.prefill(tokens, lengths, capacity)

    def verify(self, cache, tree) -> tuple[Array, cache_lib.Records]:
        vocabulary = self.module.config.vocab_size
        self._forced = choices(tree, cache.length, self._rates, vocabulary)
        return self._inner.verify(cache, tree)

    def logits(self, hidden) -> Float[Array, "B n V"]:
        logits = self._inner.logits(hidden)
        forced, self._forced = self._forced, None
        if forced is None:
            return logits
        column = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        return jnp.where(column == forced[..., None], jnp.inf, logits)

    def commit(self, cache, records, accepted: accept.Accepted):
        return self._inner.commit(cache, records, accepted)


def choices(
    tree: tree_lib.DraftTree,
    base: Int[Array, " B"],
    rates: Float[Array, " depth"],
    vocabulary: int,
) -> Int[Array, "B n"]:
    """Return the token that the target names at each node; -1 leaves it to the logits.

    Rows whose path ends at a leaf before the drawn depth stop there.
    """
    word = _words(base)
    drawn = (word[:, 0] >> 8).astype(jnp.float32) * 2.0**-24
    accepted = jnp.sum(drawn[:, None] < rates, axis=1)
    place = jnp.arange(tree.n_max)
    # Scores that differ, in which every node's favourite child has the most.
    score = mix(word[:, 1, None] ^ mix(place.astype(jnp.uint32))) >> 1
    score = jnp.where(tree.valid(), (score & ~1023 | place).astype(jnp.int32), -1)
    is_child = tree.parents()[:, None, :] == place[:, None]  # [B, parent, child]
    most = jnp.max(jnp.where(is_child, score[:, None], -1), axis=2)
    chosen = is_child & (score[:, None] == most[:, :, None])
    favourite = jnp.any(chosen, axis=1) | (place == 0)
    on_path = jnp.all(~tree.ancestors() | favourite[:, None], axis=2)
    depth = tree.depth()
    on_path &= tree.valid() & (depth <= accepted[:, None])
    follow = jnp.max(jnp.where(chosen, tree.tokens[:, None], -1), axis=2)
    stops = (depth == accepted[:, None]) | (most < 0)
    free = _free_token(tree.tokens, word[:, 2], vocabulary)
    return jnp.where(on_path, jnp.where(stops, free[:, None], follow), -1)


def _words(base: Int[Array, " B"]) -> UInt32[Array, "B 3"]:
    """Return three random words for each row and position."""
    row = mix(jnp.arange(base.shape[0], dtype=jnp.uint32) + 1)
    start = mix(row ^ mix(base.astype(jnp.uint32)))
    return mix(start[:, None] + jnp.arange(1, 4, dtype=jnp.uint32))


def _free_token(tokens, word, vocabulary) -> Int[Array, " B"]:
    """Return a random token that no node of the row carries."""
    count = tokens.shape[1]
    first = word % jnp.uint32(vocabulary)
    tried = (first[:, None] + jnp.arange(count + 1, dtype=jnp.uint32)) % vocabulary
    tried = tried.astype(jnp.int32)
    taken = jnp.any(tried[:, :, None] == tokens[:, None], axis=2)
    free = jnp.argmin(taken, axis=1)
    return jnp.take_along_axis(tried, free[:, None], axis=1)[:, 0]


def rates(text: str, tree: str) -> tuple[float, ...]:
    """Return the table for a tree, of as many entries as it is deep.

    `text` is a table such as "0.78,0.60,0.47", or a file: a result of decode.py, whose
    histogram is taken, or of bench_acceptance.py, of which only the mean for the tree
    is known: shares p, p^2, ... with that mean are taken.

    Raises ValueError for what is no table: shares outside [0, 1], rising ones, fewer
    than the tree has levels, or a file that holds none.
    """
    depth = len(tree_lib.parse_widths(tree))
    if depth == 0:
        return ()
    path = pathlib.Path(text)
    found = _read(path, tree, depth) if path.suffix == ".json" else _parse(text)
    if len(found) < depth:
        raise ValueError(
            f"accept {text!r} has {len(found)} shares; tree {tree} needs {depth}"
        )
    return tuple(found[:depth])


def _parse(text: str) -> list[float]:
    allowed = "shares that do not rise, such as 0.78,0.60,0.47, or a .json file"
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"accept is {text!r}; allowed are {allowed}") from None
    below = [1.0, *found[:-1]]
    if not all(0 <= x <= limit for x, limit in zip(found, below, strict=True)):
        raise ValueError(f"accept is {text!r}; allowed are {allowed}")
    return found


def _read(path: pathlib.Path, tree: str, depth: int) -> list[float]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"accept {path}: {error}") from error
    if "accept_length_histogram" in content:
        counts = {int(k): n for k, n in content["accept_length_histogram"].items()}
        total = max(1, sum(counts.values()))
        longest = max(counts, default=1)
        return [
            sum(n for length, n in counts.items() if length > drafts) / total
            for drafts in range(1, longest)
        ]
    try:
        mean = content["trees"][tree]["all"]["lengths"]["mean"]
    except (KeyError, TypeError):
        raise ValueError(
            f"accept {path}: neither an accept_length_histogram nor lengths of tree "
            f"{tree}"
        ) from None
    return _geometric(mean, depth)


def _geometric(mean: float, depth: int) -> list[float]:
    """Return p, p^2, ... with 1 + sum = mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if 1 + sum(_powers(p, depth)) < mean else (low, p)
    return _powers(high, depth)


def _powers(p: float, depth: int) -> list[float]:
    return [p**power for power in range(1, depth + 1)]


def mean_length(shares: Sequence[float]) -> float:
    """Return the tokens that a step emits on average."""
    return 1.0 + sum(shares)


def shapes(tree: Any) -> Any:
    """Return a pytree of arrays as shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
