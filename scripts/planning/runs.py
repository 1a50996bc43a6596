"""Whole decodes with a tree, timed: the loop that `generate` runs, compiled ahead.

A tree is two programs, `loop.start` (the prompts) and `loop.run` (every step until all
rows are done). All prompts share a bucket, so nothing compiles while the clock runs.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.decoding import topology
from treewy_jax import commit as commit_lib
from treewy_jax import drafters, loop, planning
from treewy_jax import generate as generation_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

SAMPLING = sampling_lib.Sampling()


class Batch(NamedTuple):
    """Rows decoded together: prompts by number, of one half, -1 for an empty row."""

    half: int
    prompts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, padded prompts, and how they are decoded."""

    model: Any
    tokens: jax.Array
    lengths: jax.Array
    batch: int
    commit: str
    max_new_tokens: int

    @classmethod
    def of(cls, model: Any, ids: Sequence[Sequence[int]], **options) -> "Work":
        """Pad all prompts to one bucket; ValueError where they do not fit."""
        most = model.config.max_position_embeddings
        prompts_lib.check_budget(ids, options["max_new_tokens"], most)
        return cls(model, *prompts_lib.pad(ids, most), **options)

    @property
    def capacity(self) -> int:
        """Slots of the KV cache."""
        most = self.model.config.max_position_embeddings
        return min(self.tokens.shape[1] + self.max_new_tokens, most)

    def drafter(self, tree: tree_lib.DraftTree) -> drafters.Drafter:
        """Return the drafter of a tree; ValueError for a model that has none."""
        return generation_lib.default_drafter(tree, self.model.config)

    def lifecycle(self, drafter: drafters.Drafter) -> commit_lib.Lifecycle:
        """Return the lifecycle for these trees; ValueError for one that cannot be."""
        size = dict(depth=drafter.depth_max, nodes=drafter.n_max)
        state_dtype = self.model.config.mamba_ssm_dtype
        made = commit_lib.by_name(self.commit, state_dtype=state_dtype, **size)
        made.check(drafter.depth_max, drafter.n_max)
        return made

    def take(self, batch: Batch) -> tuple[jax.Array, jax.Array, loop.Rules]:
        """Return tokens, lengths and rules; an empty row has a budget of one token."""
        rows = np.asarray(batch.prompts)
        budget = np.where(rows < 0, 1, self.max_new_tokens)
        rules = loop.Rules(
            budget=jnp.asarray(budget, jnp.int32),
            eos=jnp.asarray(tuple(self.model.config.eos_token_ids), jnp.int32),
            key=jax.random.key(0),
        )
        rows = np.maximum(rows, 0)
        return self.tokens[rows], self.lengths[rows], rules


class Programs(NamedTuple):
    """A tree, compiled: `start(tokens, lengths, rules)`, `run(state, rules)`."""

    parents: list[int]
    start: Callable[..., loop.LoopState]
    run: Callable[..., loop.LoopState]


class Decoded(NamedTuple):
    """A batch that was decoded.

    Attributes:
        start_s: seconds of the prompts.
        run_s: seconds of the loop, from the call to its result.
        steps: of the loop.
        texts: tokens of each row.
        lengths: accept lengths of each row.
        cut: the row's last step was cut short by end of text or budget.
    """

    start_s: float
    run_s: float
    steps: int
    texts: list[list[int]]
    lengths: list[list[int]]
    cut: list[bool]


def batches(halves: Sequence[int], size: int, most: int | None = None) -> list[Batch]:
    """Return the prompts of each half in batches, those that are missing as -1.

    `halves` are in the order of the prompts; `most` takes the first so many prompts.
    """
    found = []
    for half in sorted(set(halves)):
        rows = [n for n, one in enumerate(halves[:most]) if one == half]
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            found.append(Batch(half, (*some, *[-1] * (size - len(some)))))
    return found


def programs(work: Work, trees: Sequence[tree_lib.DraftTree]) -> Iterator[Programs]:
    """Yield the programs of each tree; all are traced first, and compile in threads."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = []
        for tree in trees:
            drafter = work.drafter(tree)
            lowered = _lower(work, drafter)
            made.append((tree, drafter, [pool.submit(one.compile) for one in lowered]))
        for tree, drafter, compiled in made:
            start, run = (_bound(one.result(), work, drafter) for one in compiled)
            yield Programs(topology.parents_of(tree), start, run)


def _lower(work, drafter):
    build = work.model.builder(work.lifecycle(drafter))
    tokens, lengths, rules = work.take(Batch(0, (-1,) * work.batch))
    held = (build, work.model.params, drafter)
    sizes = dict(capacity=work.capacity, max_new_tokens=work.max_new_tokens)
    start = loop.start.lower(*held, tokens, lengths, rules, sampling=SAMPLING, **sizes)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.out_info
    )
    steps = jnp.int32(work.max_new_tokens)
    return start, loop.run.lower(*held, state, rules, steps, sampling=SAMPLING)


def _bound(program, work, drafter):
    return lambda *arguments: program(work.model.params, drafter, *arguments)


def decode(work: Work, made: Programs, batch: Batch) -> Decoded:
    """Decode a batch to its end, each of the two programs timed."""
    tokens, lengths, rules = jax.block_until_ready(work.take(batch))
    steps = jnp.int32(work.max_new_tokens)
    begin = time.perf_counter()
    state = jax.block_until_ready(made.start(tokens, lengths, rules))
    middle = time.perf_counter()
    state = jax.block_until_ready(made.run(state, rules, steps))
    end = time.perf_counter()
    taken = int(state.steps)
    accepted = np.asarray(state.accept_lengths[:, :taken])
    texts = [
        row[:count].tolist()
        for row, count in zip(
            np.asarray(state.tokens), np.asarray(state.emitted), strict=True
        )
    ]
    return Decoded(
        middle - begin,
        end - middle,
        taken,
        texts,
        [row[row > 0].tolist() for row in accepted],
        np.asarray(state.cut).tolist(),
    )


def measure(
    work: Work,
    made: Sequence[Programs],
    groups: Sequence[Sequence[Batch]],
    rounds: int,
) -> Iterator[list[dict[str, Any]]]:
    """Decode each tree's own batches: once to warm up, then by the clock, in turn.

    Yields the fields of a row for each tree after every round. What is decoded is the
    same each time; of the seconds there is one number a round.
    """
    pairs = list(zip(made, groups, strict=True))
    first = [_decode_all(work, *pair) for pair in pairs]
    timed: list[list[list[Decoded]]] = [[] for _ in pairs]
    for _ in range(rounds):
        for found, pair in zip(timed, pairs, strict=True):
            found.append(_decode_all(work, *pair))
        yield [
            _row(work, *pair, one, found)
            for pair, one, found in zip(pairs, first, timed, strict=True)
        ]


def _decode_all(work, made, groups) -> list[Decoded]:
    return [decode(work, made, batch) for batch in groups]


def _row(work, made, groups, first, timed) -> dict[str, Any]:
    sums = []
    for half in sorted({batch.half for batch in groups}):
        own = [n for n, batch in enumerate(groups) if batch.half == half]
        told: dict[str, Any] = {"half": half} | _sums([first[n] for n in own])
        for name in ("start_s", "run_s"):
            told[name] = [sum(getattr(one[n], name) for n in own) for one in timed]
        sums.append(told)
    return {
        "nodes": len(made.parents),
        "depth": planning.depth_of(made.parents),
        "parents": made.parents,
        "batch": work.batch,
        "halves": sums,
        "texts": _texts(groups, first),
    }


def _sums(found: Sequence[Decoded]) -> dict[str, int]:
    """Count steps of the loop, steps of rows, and tokens; of whole steps, too."""
    rows = [
        (lengths, cut)
        for one in found
        for lengths, cut in zip(one.lengths, one.cut, strict=True)
    ]
    whole = [lengths[: len(lengths) - cut] for lengths, cut in rows]
    return {
        "steps": sum(one.steps for one in found),
        "row_steps": sum(len(lengths) for lengths, _ in rows),
        "tokens": sum(sum(lengths) for lengths, _ in rows),
        "whole_steps": sum(map(len, whole)),
        "whole_tokens": sum(map(sum, whole)),
    }


def _texts(groups, found) -> dict[str, list[int]]:
    """Return the text of each prompt by its number."""
    return {
        str(number): text
        for batch, one in zip(groups, found, strict=True)
        for number, text in zip(batch.prompts, one.texts, strict=True)
        if number >= 0
    }
