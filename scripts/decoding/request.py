"""What decode.py is asked to do, checked in full before anything is computed."""

import dataclasses
import sys
from typing import Any

import models
from models.qwen3_5 import random_weights
from models.qwen3_5 import sharding as model_sharding
from pallas_kernels.history_verify import spec as history_specs
from pallas_kernels.tree_verify import spec as specs
from scripts import room
from scripts.decoding import drafting, prompt, topology
from scripts.decoding import options as options_lib
from treewy_jax import accept, drafters, history, sampling, sharding, verify
from treewy_jax import commit as commit_lib
from treewy_jax import mesh as mesh_lib
from treewy_jax import prompts as prompts_lib
from treewy_jax import tree as tree_lib


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, prompts, and how to decode them.

    Attributes:
        tree: topology of what is verified each step; parents are -1 where it changes.
        dtype: of weights and activations.
        state_dtype: storage of the recurrent states.
        horizon, record_dtype: of histories, where the lifecycle keeps one.
        verify: one line, which implementation of verify runs and why no faster one.
    """

    model: Any
    prompts: list[list[int]]
    tree: tree_lib.DraftTree
    drafter: drafters.Drafter
    lifecycle: commit_lib.Lifecycle
    sampling: sampling.Sampling
    dtype: str
    state_dtype: str
    horizon: int
    record_dtype: str
    verify: str


def prepare(options: options_lib.Options) -> Request:
    """Load the model and check every option against it.

    Raises:
        ValueError: a wrong argument.
        NotImplementedError: a legal one that does not work here.
    """
    chosen = sampling.Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
    )
    tree = topology.read(options.tree, options.n_max)
    _lifecycle(options, tree)
    texts = prompt.texts(options)
    mesh = None if options.mesh is None else mesh_lib.make(options.mesh)
    mesh_lib.check_batch(len(texts or [options.prompt_ids]), mesh)
    if options.stream and texts and len(texts) > 1:
        raise ValueError(f"--stream: {len(texts)} prompts came; one is allowed")

    model = _model(options, mesh)
    prompts = prompt.token_ids(texts, model, options)
    config = model.config
    prompts_lib.check(prompts, config.vocab_size)
    prompts_lib.check_budget(
        prompts, options.max_new_tokens, config.max_position_embeddings
    )
    tree, drafter = drafting.make(tree, options, model, prompts)
    accept.by_name(options.accept).check(drafter, chosen)
    state_dtype = options.state_dtype or config.mamba_ssm_dtype
    impl = options.impl.replace("-", "_")
    lifecycle = _lifecycle(options, tree, state_dtype=state_dtype, impl=impl)
    spec = _spec(config, tree, len(prompts), options.dtype, state_dtype, mesh)
    return Request(
        model=model,
        prompts=prompts,
        tree=tree,
        drafter=drafter,
        lifecycle=lifecycle,
        sampling=chosen,
        dtype=options.dtype,
        state_dtype=state_dtype,
        horizon=options.horizon,
        record_dtype=options.record_dtype,
        verify=_explain(spec, lifecycle),
    )


def _model(options, mesh) -> Any:
    if options.random_weights:
        name, layers = options.model, options.layers
        room.check(name, random_weights.cut(name, layers), options.dtype, mesh)
        return models.random(name, dtype=options.dtype, layers=layers, mesh=mesh)
    show_bar = sys.stderr.isatty()
    name, dtype = options.model, options.dtype
    return models.load(name, dtype=dtype, progress=show_bar, mesh=mesh)


def _lifecycle(options, tree, **more) -> commit_lib.Lifecycle:
    """Return the lifecycle by name, which has to take this tree."""
    lifecycle = commit_lib.by_name(
        options.commit,
        depth=tree.depth_max,
        nodes=tree.n_max,
        horizon=options.horizon,
        record_dtype=options.record_dtype,
        **more,
    )
    lifecycle.check(tree.depth_max, tree.n_max)
    return lifecycle


def _explain(spec, lifecycle) -> str:
    """Return one line: which implementation verifies, and why no faster one."""
    if isinstance(lifecycle, commit_lib.StoreAll):
        return "store-all runs the recurrence over the tree; verify is not used"
    explained = verify.explain(spec, lifecycle.impl)
    if isinstance(lifecycle, commit_lib.Reconstruct):
        return explained
    behind = history_specs.extend(
        spec, horizon=lifecycle.horizon, record_dtype=lifecycle.record_dtype
    )
    table = history.IMPLEMENTATIONS
    return table.explain(behind, table.nearest(lifecycle.impl))


def _spec(config, tree, batch, dtype, state_dtype, mesh) -> specs.Spec:
    """Describe the call of verify that a device makes in each GDN layer and step."""
    axes = model_sharding.axes(config, mesh, batch)
    rows, heads = (sharding.parts(letter, axes, mesh) for letter in ("B", "Hk"))
    return specs.make_spec(
        batch=batch // rows,
        nodes=tree.n_max,
        depth=tree.depth_max,
        key_heads=config.linear_num_key_heads // heads,
        value_heads=config.linear_num_value_heads // heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        input_dtype=dtype,
        state_dtype=state_dtype,
    )
