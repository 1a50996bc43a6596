"""Compiles the decode step of a published model for devices that need not be there.

The program is `treewy_jax.loop.step` with its state donated, all layers and the kernels
of the device, spread over a mesh as models.qwen3_5.sharding says. Only shapes are made.
"""

import dataclasses
import time
from typing import Any

import jax

from models import checkpoints
from models.qwen3_5 import random_weights, target
from models.qwen3_5 import sharding as places
from scripts.benching import step_mesh, step_program, step_state
from scripts.compiling import hosts, model_copies
from treewy_jax import commit as commit_lib
from treewy_jax import generate, loop, memory, sharding
from treewy_jax import mesh as mesh_lib

BASELINE = "store-all"


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
        model: a published size.
        layers: its first ones, or None for all.
        target: as `hosts.parse` takes it.
        mesh: as `treewy_jax.mesh.parse` takes it; None spreads heads over all devices.
        tree: widths.
        batch: rows.
        context: tokens that the state covers.
        commit: the lifecycle.
        horizon: records of a deferred history.
        dtype: of the weights.
        state_dtype: of the recurrent states.
    """

    model: str
    target: str
    commit: str = "reconstruct"
    layers: int | None = None
    mesh: str | None = None
    tree: str = "3,3,3"
    batch: int = 64
    context: int = 32768
    horizon: int = memory.HORIZON
    dtype: str = "bfloat16"
    state_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one device holds, in bytes, or why there is no program.

    Attributes:
        nodes: of the tree, the root included.
        devices: of the mesh.
        parts: what the step is called with: weights, states, history, kv, conv, mtp_kv
            and the rest.
        records: what verification leaves until commit, by formula; it lies in the
            temporaries.
        temporaries, peak: by XLA's count; peak has the parts and results in it.
        whole_peak: the peak with all layers, where some are left out: see
            `kept_by_more_layers`.
        limit: bytes of the device.
        copies: weights, states or KV that the program copies or gathers whole.
        kernels, collectives: how many of each kind the program holds.
        trace_s, compile_s: seconds.
        problem: what the compiler said.
    """

    commit: str
    nodes: int | None = None
    devices: int | None = None
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    records: int | None = None
    limit: int | None = None
    temporaries: int | None = None
    peak: int | None = None
    whole_peak: int | None = None
    copies: tuple[model_copies.Copy, ...] = ()
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    trace_s: float | None = None
    compile_s: float | None = None
    problem: str | None = None


def check(case: Case) -> None:
    """Raise ValueError for a case that cannot be; nothing is compiled."""
    hosts.parse(case.target)
    if case.mesh is not None:
        mesh_lib.parse(case.mesh)
    for name in ("batch", "context"):
        if getattr(case, name) < 1:
            raise ValueError(f"{name} is {getattr(case, name)}; 1 or more is allowed")
    checkpoints.memory_dtype(case.dtype)
    config = random_weights.cut(case.model, case.layers)
    drafter = generate.default_drafter(case.tree, config)
    lifecycle_of(case, drafter).check(drafter.depth_max, drafter.n_max)
    most = config.max_position_embeddings
    most -= step_program.CALLS * (drafter.depth_max + 1)
    if case.context > most:
        raise ValueError(
            f"context is {case.context}; {case.model} allows {most} at most here"
        )


def lifecycle_of(case: Case, drafter: Any) -> commit_lib.Lifecycle:
    """Return the lifecycle for the drafter's trees."""
    return commit_lib.by_name(
        case.commit,
        state_dtype=case.state_dtype,
        depth=drafter.depth_max,
        nodes=drafter.n_max,
        horizon=case.horizon,
    )


def make_mesh(case: Case) -> jax.sharding.Mesh:
    """Return the mesh of a case.

    Raises ValueError where it is not one of all devices, or does not divide the batch.
    """
    found = hosts.mesh(hosts.parse(case.target), case.mesh)
    mesh_lib.check_batch(case.batch, found)
    return found


def compile_case(case: Case) -> Result:
    """Compile the step; whatever goes wrong becomes the `problem` of the result.

    `targets.prepare` comes first, in the process or in the one that starts it.
    """
    host, mesh = hosts.parse(case.target), make_mesh(case)
    subject, shapes = subject_of(case)
    arguments = arguments_of(subject, shapes, mesh)
    result = Result(
        commit=case.commit,
        nodes=subject.drafter.n_max,
        devices=mesh.size,
        parts=parts_of(*arguments),
        records=records_of(case, subject, mesh),
        limit=host.memory,
    )
    try:
        result = _compile(host, mesh, subject, arguments, result)
        more = kept_by_more_layers(case, mesh)
        return dataclasses.replace(result, whole_peak=result.peak + more)
    except Exception as error:  # each compiler has its own
        lines = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0][:500]}"
        return dataclasses.replace(result, problem=problem)


def kept_by_more_layers(case: Case, mesh: jax.sharding.Mesh) -> int:
    """Return the bytes that a device keeps for the layers left out: blocks are alike.

    Those of arguments and records. Other temporaries are those of one layer at a time,
    nearly: a peak found by 4 of 60 layers is 0.3 to 0.4 % below that of all.
    """
    whole = random_weights.cut(case.model)
    left = whole.num_hidden_layers - (case.layers or whole.num_hidden_layers)
    if not left:
        return 0
    block = whole.full_attention_interval
    more = dataclasses.replace(case, layers=case.layers + block)
    return (_kept(more, mesh) - _kept(case, mesh)) * left // block


def _kept(case: Case, mesh: jax.sharding.Mesh) -> int:
    subject, shapes = subject_of(case)
    parts = parts_of(*arguments_of(subject, shapes, mesh))
    return sum(parts.values()) + records_of(case, subject, mesh)


def subject_of(case: Case) -> tuple[step_program.Subject, Any]:
    """Return what is compiled, and the shapes of its parameters as stored."""
    config = random_weights.cut(case.model, case.layers)
    dtype = checkpoints.memory_dtype(case.dtype)
    graphdef, shapes = random_weights.graph(config, dtype)
    drafter = generate.default_drafter(case.tree, config)
    subject = step_program.Subject(
        name=case.model,
        config=config,
        build=target.Builder(graphdef, lifecycle_of(case, drafter)),
        drafter=drafter,
        weights=lambda: shapes,
        batch=case.batch,
        context=case.context,
    )
    return subject, shapes


def arguments_of(
    subject: step_program.Subject, shapes: Any, mesh: jax.sharding.Mesh
) -> tuple[Any, Any, loop.LoopState, loop.Rules]:
    """Return shapes and places of parameters, drafter, state and rules."""
    params = places.abstract(shapes, subject.config, mesh)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    row = step_state.one_row(subject.name, subject.config, subject.build.graphdef)

    def start(params):
        return step_state.dressed(subject, params, step_program.start(row, params))

    state = jax.eval_shape(start, plain)
    rules = jax.eval_shape(lambda: step_program.rules(subject.batch))
    drafter = jax.eval_shape(lambda: subject.drafter)
    rest = (drafter, state, rules)
    return params, *step_mesh.placed(*rest, subject.config, subject.batch, mesh)


def arrays_of(params: Any, state: loop.LoopState) -> dict[str, list[Any]]:
    """Return the arrays that a step keeps, by what they are."""
    cache, draft = state.cache, state.draft
    letters = places.cache_letters(cache).recurrent
    found: dict[str, list[Any]] = {"weights": jax.tree.leaves(params)}
    found |= {"states": [], "history": []}
    pairs = zip(jax.tree.leaves(cache.recurrent), jax.tree.leaves(letters), strict=True)
    for leaf, text in pairs:
        kind = "states" if text.endswith("Hv Dv Dk") else "history"
        found[kind].append(leaf)
    found["kv"] = [*cache.key, *cache.value]
    found["conv"] = list(cache.window)
    found["mtp_kv"] = [draft.key, draft.value] if hasattr(draft, "key") else []
    return found


def parts_of(params, drafter, state, rules) -> dict[str, int]:
    """Return the bytes of a device's arguments, by part."""
    found = {
        name: step_mesh.nbytes(arrays)
        for name, arrays in arrays_of(params, state).items()
    }
    whole = step_mesh.nbytes((params, drafter, state, rules))
    return found | {"rest": whole - sum(found.values())}


def records_of(
    case: Case, subject: step_program.Subject, mesh: jax.sharding.Mesh
) -> int:
    """Return the bytes of a device's records by formula (treewy_jax.memory)."""
    config, nodes = subject.config, subject.drafter.n_max
    shape = memory.Shape.from_config(config)
    options = dict(state_dtype=case.state_dtype, activation_dtype=case.dtype)
    of_heads = memory.record_bytes(shape, nodes, case.commit, **options)
    kv = memory.kv_bytes(shape, nodes, case.dtype)
    of_heads -= kv
    kv *= places.kv_copies(config, mesh)
    axes = places.axes(config, mesh, case.batch)
    rows = case.batch // sharding.parts("B", axes, mesh)
    heads, copies = (sharding.parts(letter, axes, mesh) for letter in ("Hv", "kv"))
    return rows * (of_heads // heads + kv // copies)


def _compile(host, mesh, subject, arguments, result: Result) -> Result:
    begin = time.perf_counter()
    state = arguments[2]
    with jax.sharding.use_abstract_mesh(hosts.abstract(host, mesh)):
        traced = step_mesh.program(state, mesh).trace(subject.build, *arguments)
        lowered = traced.lower(lowering_platforms=(host.target.platform,))
    traced_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    arrays = arrays_of(arguments[0], state)
    return dataclasses.replace(
        result,
        temporaries=sizes.temp_size_in_bytes,
        peak=held - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes,
        copies=(
            *model_copies.whole(text, arrays),
            *model_copies.gathered(text, arrays),
        ),
        kernels=model_copies.kernels(text),
        collectives=model_copies.collectives(text),
        trace_s=traced_at - begin,
        compile_s=compiled_at - traced_at,
    )
