"""Write text: `generate` checks a request, runs the loop, and reads the result back."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from treewy_jax import accept as accept_lib
from treewy_jax import cache as cache_lib
from treewy_jax import commit as commit_lib
from treewy_jax import drafters, loop
from treewy_jax import mesh as mesh_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

N_MAX = 64
STEPS_PER_BLOCK = 8


@runtime_checkable
class Model(Protocol):
    """A loaded model: static configuration, parameters, and how to bind the two.

    A model may have a `mesh`, the devices that its parameters are spread over.
    """

    config: Any
    params: Any

    def builder(self, lifecycle: commit_lib.Lifecycle) -> Callable[[Any], loop.Target]:
        """Return a hashable function from `params` to a `loop.Target`."""
        ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` wrote, row by row, and what it cost.

    Attributes:
        token_ids: emitted tokens, without the prompt.
        accept_lengths: accepted drafts + 1 at each step; with the first token, which
            the prompt pass emits, they add up to the tokens of the row.
        cut: the row's last step was cut short by end-of-text or budget.
        steps: target passes after the prompt, the same for all rows.
        state_bytes: bytes allocated for recurrent, conv, kv, mtp_kv and records; an
            external draft model's whole cache counts as mtp_kv.
        last_tree: the last tree verified, as (tokens, parents, accepted path) a row.
    """

    token_ids: list[list[int]]
    accept_lengths: list[list[int]]
    cut: list[bool]
    steps: int
    state_bytes: dict[str, int]
    last_tree: list[tuple[list[int], list[int], list[int]]]

    @property
    def whole_accept_lengths(self) -> list[int]:
        """All rows' accept lengths but those cut short."""
        rows = zip(self.accept_lengths, self.cut, strict=True)
        return [a for lengths, cut in rows for a in lengths[: len(lengths) - cut]]

    @property
    def mean_accept_length(self) -> float:
        """Mean accept length over steps that were not cut short; NaN without any."""
        lengths = self.whole_accept_lengths
        return float(np.mean(lengths)) if lengths else float("nan")


def generate(
    model: Model,
    prompts: prompts_lib.Prompts,
    *,
    tree: tree_lib.DraftTree | Sequence[int] | str,
    max_new_tokens: int,
    drafter: drafters.Drafter | None = None,
    commit: str | commit_lib.Lifecycle = "reconstruct",
    sampling: sampling_lib.Sampling | None = None,
    accept: str | accept_lib.Rule = "match",
    seed: int | Sequence[int] = 0,
    impl: str | None = None,
    state_dtype: str | None = None,
    eos_token_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Generation:
    """Continue prompts with tree-speculative decoding.

    Args:
        model: from `models.load`.
        prompts: one sequence of ids, or several of any lengths.
        tree: widths `(3, 3, 3)` or `"3,3,3"`, `"none"`, a chain by name such as
            `"chain3+leaf"` (see `tree.parse`), or a `DraftTree`. Not used when
            `drafter` is given.
        max_new_tokens: budget of each row.
        drafter: None drafts with the model's MTP head.
        commit: a lifecycle of `treewy_jax.commit`, by name or itself.
        sampling: None is greedy.
        accept: a rule of `treewy_jax.accept`, by name or itself.
        seed: of all draws; a text depends on it and on the row's number alone. With a
            list, one seed a row, a row's text is that of its seed and prompt alone.
        impl: implementation of `verify`; None picks one.
        state_dtype: storage of the recurrent state; None as the configuration says.
        eos_token_ids: None as the configuration says.
        on_tokens: called with (row, new tokens) as text appears.

    Raises:
        ValueError: an argument is out of range; nothing was computed.
    """
    config = model.config
    max_position = config.max_position_embeddings
    rows = prompts_lib.check(prompts, config.vocab_size)
    prompts_lib.check_budget(rows, max_new_tokens, max_position)
    mesh = getattr(model, "mesh", None)
    mesh_lib.check_batch(len(rows), mesh)
    sampling = sampling or sampling_lib.Sampling()
    rule = accept_lib.by_name(accept)
    key = _key(seed, len(rows))
    if drafter is None:
        drafter = default_drafter(tree, config, sampled=rule.needs_draft)
    rule.check(drafter, sampling)
    lifecycle = _lifecycle(
        commit,
        state_dtype=state_dtype or config.mamba_ssm_dtype,
        impl=impl,
        depth=drafter.depth_max,
        nodes=drafter.n_max,
    )
    lifecycle.check(drafter.depth_max, drafter.n_max)
    program = _Program(
        build=model.builder(lifecycle),
        params=model.params,
        drafter=drafter,
        sampling=sampling,
        accept=rule,
    )
    eos = config.eos_token_ids if eos_token_ids is None else eos_token_ids
    rules = loop.Rules(
        budget=jnp.full(len(rows), max_new_tokens, jnp.int32),
        eos=jnp.asarray(tuple(eos), jnp.int32),
        key=key,
    )
    tokens, lengths = prompts_lib.pad(rows, max_position)
    capacity = min(tokens.shape[1] + max_new_tokens, max_position)
    with mesh_lib.use(mesh):
        state = program.start(tokens, lengths, rules, capacity, max_new_tokens)
        sizes = program.state_bytes(state, lifecycle)
        state = _finish(program, state, rules, max_new_tokens, on_tokens)
        return _read(state, sizes)


def as_tree(tree: tree_lib.DraftTree | Sequence[int] | str) -> tree_lib.DraftTree:
    """Return the tree that `tree` describes, of at most 64 nodes if in words."""
    if isinstance(tree, tree_lib.DraftTree):
        return tree
    if isinstance(tree, str):
        return tree_lib.parse(tree, N_MAX)
    tree_lib.DraftTree.from_widths(tree, n_max=N_MAX)
    return tree_lib.DraftTree.from_widths(tree)


def default_drafter(
    tree: tree_lib.DraftTree | Sequence[int] | str,
    config: Any,
    *,
    sampled: bool = False,
) -> drafters.Drafter:
    """Return the MTP drafter of this topology; the root alone needs none.

    A `sampled` one draws its tokens, as some rules of acceptance need.

    Raises:
        ValueError: the model has no MTP head, or fewer tokens than a node has children.
    """
    tree = as_tree(tree)
    if tree.depth_max == 0:
        return drafters.NoDrafter()
    if not config.mtp_num_hidden_layers:
        raise ValueError(
            "drafter 'mtp': the model has no MTP head; allowed are another drafter, "
            "such as ngram, or tree none"
        )
    drafter = drafters.MTPDrafter.from_tree(tree, sampled=sampled)
    if drafter.rank_max > config.vocab_size:
        raise ValueError(
            f"tree: a node has {drafter.rank_max} children; allowed are at most the "
            f"{config.vocab_size} tokens of the vocabulary"
        )
    return drafter


@dataclasses.dataclass(frozen=True)
class _Program:
    """The compiled loop with the arguments that stay the same between calls."""

    build: Callable[[Any], loop.Target]
    params: Any
    drafter: drafters.Drafter
    sampling: sampling_lib.Sampling
    accept: accept_lib.Rule

    def start(self, tokens, lengths, rules, capacity, max_new_tokens):
        return loop.start(
            self.build,
            self.params,
            self.drafter,
            tokens,
            lengths,
            rules,
            capacity=capacity,
            max_new_tokens=max_new_tokens,
            sampling=self.sampling,
        )

    def run(self, state, rules, steps):
        return loop.run(
            self.build,
            self.params,
            self.drafter,
            state,
            rules,
            jnp.int32(steps),
            sampling=self.sampling,
            accept=self.accept,
        )

    def state_bytes(
        self, state: loop.LoopState, lifecycle: commit_lib.Lifecycle
    ) -> dict[str, int]:
        """Return the bytes of the allocated state, and of the records of one step."""
        shapes = _records.eval_shape(self.build, self.params, state.cache, state.tree)
        kept = ("key", "value", "cache")  # of the MTP head, or of a draft model
        drafter = [getattr(state.draft, name, ()) for name in kept]
        return cache_lib.state_bytes(state.cache, shapes, drafter, lifecycle)


@functools.partial(jax.jit, static_argnames="build")
def _records(build, params, cache, tree):
    """Return what one verification leaves for commit; only its shapes are used."""
    return build(params).verify(cache, tree)[1]


def _finish(program, state, rules, max_new_tokens, on_tokens):
    """Run to the end, in one call, or in blocks of steps when someone is watching."""
    if on_tokens is None:
        return program.run(state, rules, max_new_tokens)
    told = [0] * state.root.shape[0]
    while True:
        _tell(state, told, on_tokens)
        if bool(jnp.all(state.done)):
            return state
        state = program.run(state, rules, STEPS_PER_BLOCK)


def _tell(state, told, on_tokens):
    tokens, emitted = mesh_lib.fetch((state.tokens, state.emitted))
    for row, upto in enumerate(emitted.tolist()):
        if upto > told[row]:
            on_tokens(row, tokens[row, told[row] : upto].tolist())
            told[row] = upto


def _read(state: loop.LoopState, sizes: dict[str, int]) -> Generation:
    """Fetch what the loop wrote."""
    state = mesh_lib.fetch(dataclasses.replace(state, cache=None, draft=None))
    steps = int(state.steps)
    lengths = state.accept_lengths[:, :steps].tolist()
    tokens, emitted = state.tokens, state.emitted.tolist()
    parents = np.asarray(state.tree.parents())
    trees = [
        (
            state.tree.tokens[row, :size].tolist(),
            parents[row, :size].tolist(),
            state.accepted.path[row, : state.accepted.count[row]].tolist(),
        )
        for row, size in enumerate(state.tree.size.tolist())
    ]
    return Generation(
        token_ids=[row[:m].tolist() for row, m in zip(tokens, emitted, strict=True)],
        accept_lengths=[[a for a in row if a > 0] for row in lengths],
        cut=state.cut.tolist(),
        steps=steps,
        state_bytes=sizes,
        last_tree=trees,
    )


def _key(seed, batch):
    """Return the key of the batch, or one a row: that which the row has alone."""
    if isinstance(seed, (int, np.integer)):
        return jax.random.key(seed)
    seeds = list(seed)
    if len(seeds) != batch:
        raise ValueError(
            f"seed has {len(seeds)} entries; an int is allowed, or one for each of the "
            f"{batch} prompts"
        )
    for one in seeds:
        if not isinstance(one, (int, np.integer)) or not 0 <= one < 2**32:
            raise ValueError(f"seed {one!r}: ints in [0, 2**32) are allowed")
    first_row = lambda one: jax.random.fold_in(jax.random.key(one), 0)  # noqa: E731
    return jax.vmap(first_row)(jnp.asarray(seeds, jnp.uint32))


def _lifecycle(commit, **options):
    if not isinstance(commit, str):
        return commit
    return commit_lib.by_name(commit, **options)
