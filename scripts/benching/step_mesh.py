"""A decode step on a mesh of devices: where its arguments lie, and a device's share.

Parameters, states and KV lie where models.qwen3_5.sharding says, the rest where the
letters of its classes do (treewy_jax.sharding), and the state stays where it was put.
The programs are traced with the mesh in use (`treewy_jax.mesh.use`). A mesh of None is
one device, for which nothing here changes anything.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from models.qwen3_5 import sharding as places
from scripts.benching import step_inject, step_program, step_state
from treewy_jax import loop, sharding
from treewy_jax import mesh as mesh_lib

Mesh = jax.sharding.Mesh | None
Arguments = tuple[Any, loop.LoopState, loop.Rules]


def canonical(text: str | None) -> str | None:
    """Return a mesh in one way of writing: axes in order; None for one device.

    Raises ValueError for what is no mesh of devices that are there.
    """
    if text is None:
        return None
    sizes = mesh_lib.parse(text)
    mesh_lib.make(sizes)
    named = [axis for axis in mesh_lib.AXES if sizes.get(axis, 1) > 1]
    return ",".join(f"{axis}={sizes[axis]}" for axis in named) or None


def make(text: str | None) -> Mesh:
    """Return the mesh; None for None."""
    return None if text is None else mesh_lib.make(text)


def placed(
    drafter: Any, state: Any, rules: Any, config: Any, batch: int, mesh: Any
) -> Arguments:
    """Return the shapes of these arguments, with the places where they lie."""
    axes = places.axes(config, mesh, batch)
    return (
        _placed(drafter, sharding.letters_of(type(drafter), drafter), axes, mesh),
        _placed(state, _state_letters(state), axes, mesh),
        _placed(rules, sharding.letters_of(type(rules), rules), axes, mesh),
    )


def _state_letters(state: loop.LoopState) -> Any:
    rest = dataclasses.replace(state, cache=None)
    found = sharding.letters_of(type(rest), rest)
    return dataclasses.replace(found, cache=places.cache_letters(state.cache))


def _placed(shapes: Any, letters: Any, axes: sharding.Axes, mesh) -> Any:
    def one(x, text):
        spec = sharding.spec(text, axes) if text else PartitionSpec()
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(one, shapes, letters)


def _of(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def program(state: loop.LoopState, mesh: Any) -> Any:
    """Return the jitted `step_program.step` that leaves the state where it lies."""
    if mesh is None:
        return step_program.step
    return jax.jit(
        step_program.step.__wrapped__,
        static_argnames="build",
        donate_argnames="state",
        out_shardings=_of(state),
    )


def whole(value: Any, mesh: Mesh) -> Any:
    """Put a copy of the arrays on each device."""
    if mesh is None:
        return value
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec()))


def shapes(
    subject: step_program.Subject, weights: Any, start: loop.LoopState, mesh: Mesh
) -> Arguments:
    """Return drafter, state and rules to lower a step for; no state is allocated."""
    rules = step_program.rules(subject.batch)
    state = step_state.shapes(subject, weights, start)
    if mesh is None:
        return subject.drafter, state, rules
    drafter = jax.eval_shape(lambda: subject.drafter)
    return placed(drafter, state, rules, subject.config, subject.batch, mesh)


def arrays(
    subject: step_program.Subject, weights: Any, start: loop.LoopState, mesh: Mesh
) -> Arguments:
    """Return drafter, state and rules of a step, where `shapes` says."""
    rules = step_program.rules(subject.batch)
    if mesh is None:
        state = step_state.dressed(subject, weights, start)
        return subject.drafter, state, rules
    drafter, state, rule_places = shapes(subject, weights, start, mesh)
    known = step_inject.shapes(weights)
    # Born where it lies: no device holds the rows or heads of others.
    dress = jax.jit(
        lambda start: step_state.dressed(subject, known, start),
        out_shardings=_of(state),
    )
    return (
        jax.device_put(subject.drafter, _of(drafter)),
        dress(start),
        jax.device_put(rules, _of(rule_places)),
    )


def shard_bytes(leaf: Any) -> int:
    """Return the bytes of a device's part of an array, or of the shape of one."""
    shape = leaf.shape
    if getattr(leaf, "sharding", None) is not None:
        shape = leaf.sharding.shard_shape(shape)
    return math.prod(shape) * leaf.dtype.itemsize


def nbytes(tree: Any) -> int:
    """Return the bytes that a device holds of a pytree."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))


def rows(mesh: Mesh) -> int:
    """Return the parts that the rows of a batch are cut in."""
    return 1 if mesh is None else mesh.shape["data"]


def share(subject: step_program.Subject, mesh: Mesh) -> step_program.Subject:
    """Return a subject of the rows and heads that one device has.

    Sizes of the configuration other than heads are those of the model, and it is no
    model that could run: it is what formulas of bytes a device start from.
    """
    if mesh is None:
        return subject
    config, batch = subject.config, subject.batch
    axes = places.axes(config, mesh, batch)

    def here(count: int, letter: str) -> int:
        return count // sharding.parts(letter, axes, mesh)

    kv = config.num_key_value_heads * places.kv_copies(config, mesh)
    heads = {
        "linear_num_key_heads": here(config.linear_num_key_heads, "Hk"),
        "linear_num_value_heads": here(config.linear_num_value_heads, "Hv"),
        "num_attention_heads": here(config.num_attention_heads, "heads"),
        "num_key_value_heads": here(kv, "kv"),
    }
    return dataclasses.replace(
        subject, config=dataclasses.replace(config, **heads), batch=here(batch, "B")
    )


def vocabulary(config: Any, mesh: Mesh) -> int:
    """Return the tokens whose logits a device computes."""
    axes = places.axes(config, mesh) if mesh is not None else None
    parts = 1 if axes is None else sharding.parts("V", axes, mesh)
    return config.vocab_size // parts
