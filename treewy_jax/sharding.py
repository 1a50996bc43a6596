"""Where arrays lie on a mesh of devices: told by the letters of their dimensions.

| axis     | what is spread over it                                          |
|----------|-----------------------------------------------------------------|
| `data`   | rows of the batch                                               |
| `tensor` | heads, channels of the conv, intermediates, the vocabulary      |
| `expert` | experts, which are spread over `tensor` as well; intermediates  |

`LETTERS` is the table and `split` the one rule: what an axis does not divide stays
whole on each of its devices. An op that sees only its own rows and heads runs by
`by_letters`, each device on its part, and no device waits for another in it. Between
such ops XLA partitions the program by itself (axes of type Auto).

Without a mesh in use (treewy_jax.mesh) ops run as if nothing of this were there.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from treewy_jax import mesh as mesh_lib

# Letters that stand together are spread together or not at all.
LETTERS = {
    ("B",): ("data",),
    ("Hk", "Hv", "C", "joint"): ("tensor",),
    ("heads", "kv"): ("tensor",),
    ("E",): ("expert", "tensor"),
    ("I",): ("expert", "tensor"),
    ("V",): ("tensor",),
}

Axes = Mapping[str, tuple[str, ...]]


def active() -> jax.sharding.AbstractMesh | None:
    """Return the mesh in use; None without one, and inside of an op run on its part."""
    mesh = jax.sharding.get_abstract_mesh()
    known = set(mesh_lib.AXES) <= set(mesh.axis_names)
    if not known or mesh.size == 1 or mesh.manual_axes:
        return None
    return mesh


def split(
    sizes: Mapping[str, Collection[int]], mesh: mesh_lib.AnyMesh | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the axes that each letter is spread over; () leaves it whole.

    `sizes` are the lengths that a letter stands for. Of the axes that `LETTERS` names,
    those are taken, in order, whose devices divide all lengths of the group. None takes
    the mesh in use.
    """
    mesh = active() if mesh is None else mesh
    axes = {}
    for group, names in LETTERS.items():
        lengths = [length for letter in group for length in sizes.get(letter, ())]
        taken: tuple[str, ...] = ()
        for name in names if mesh is not None else ():
            parts = math.prod(mesh.shape[axis] for axis in (*taken, name))
            if mesh.shape[name] > 1 and not any(n % parts for n in lengths):
                taken += (name,)
        axes |= dict.fromkeys(group, taken)
    return axes


def spec(letters: str, axes: Axes) -> PartitionSpec:
    """Return where an array of dimensions such as "B Hv Dv Dk" lies."""
    places = (axes.get(letter, ()) for letter in letters.split())
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in places))


def parts(letter: str, axes: Axes, mesh: mesh_lib.AnyMesh | None = None) -> int:
    """Return how many parts a letter is cut in; mesh None is the one in use."""
    mesh = active() if mesh is None else mesh
    return math.prod(mesh.shape[axis] for axis in axes[letter])


def total(x: Shaped[Array, "..."], axes: tuple[str, ...]) -> Shaped[Array, "..."]:
    """Add up the parts that the devices of `axes` have; inside an op run on parts."""
    return lax.psum(x, axes) if axes else x


def letters_of(annotation: Any, value: Any = None) -> Any:
    """Return the letters of an annotated value, in a pytree of its structure.

    Annotations are jaxtyping's, tuples and sequences of them, and classes whose fields
    have some. `value` tells what an annotation leaves open; without any it is "".
    """
    if hasattr(annotation, "dim_str"):
        return annotation.dim_str.strip()
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return letters_of(_member(inner, value), value)
    if origin is tuple and Ellipsis not in inner:
        values = [None] * len(inner) if value is None else value
        return tuple(map(letters_of, inner, values))
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        one = inner[0] if inner else Any
        return type(value)(letters_of(one, part) for part in value)
    fields = _fields(annotation if value is None else type(value))
    if fields:
        return _of_fields(fields, annotation, value)
    return jax.tree.map(lambda _: "", value)


def _member(options, value):
    """Return the member of a union that a value is of, by its number of dimensions."""
    rank = getattr(value, "ndim", None)
    for option in options:
        if len(getattr(option, "dim_str", "").split()) == rank:
            return option
    return next((option for option in options if _fields(option)), Any)


def _fields(cls) -> dict[str, Any]:
    """Return name and annotation of the arrays in a pytree class, or nothing."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        return {f.name: f.type for f in fields if not f.metadata.get("static")}
    return dict(cls.__annotations__) if hasattr(cls, "_fields") else {}


def _of_fields(fields, cls, value):
    if value is None:
        return cls(**{name: letters_of(kind) for name, kind in fields.items()})
    parts = {name: (kind, getattr(value, name)) for name, kind in fields.items()}
    found = {
        name: letters_of(*pair) for name, pair in parts.items() if has_arrays(pair[1])
    }
    replace = getattr(value, "_replace", None)
    return replace(**found) if replace else dataclasses.replace(value, **found)


def has_arrays(value: Any) -> bool:
    """Tell whether a pytree holds arrays, or shapes of arrays."""
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(value))


def run(
    function: Callable,
    arguments: Sequence[Any],
    letters: Sequence[Any],
    returns: Any,
    axes: Axes | None = None,
) -> Any:
    """Call `function` on each device with its part of the arguments.

    Args:
        arguments: pytrees of arrays.
        letters: the letters of each array.
        returns: those of the result, a prefix of its pytree.
        axes: of each letter; None follows from the arguments.
    """
    if active() is None:
        return function(*arguments)
    axes = split(sizes_of(arguments, letters)) if axes is None else axes
    place = functools.partial(jax.tree.map, lambda text: spec(text, axes))
    mapped = jax.shard_map(
        function,
        in_specs=place(tuple(letters)),
        out_specs=place(returns),
        # Kernels do not say what varies over the mesh.
        check_vma=False,
    )
    return mapped(*arguments)


def sizes_of(arrays: Any, letters: Any) -> dict[str, set[int]]:
    """Return the lengths that each letter stands for in a pytree of arrays."""
    found: dict[str, set[int]] = {}
    texts = jax.tree.leaves(letters)
    for array, text in zip(jax.tree.leaves(arrays), texts, strict=True):
        for letter, length in zip(text.split(), array.shape, strict=bool(text)):
            found.setdefault(letter, set()).add(length)
    return found


def by_letters(
    function: Callable,
    letters: Mapping[str, str] | None = None,
    sizes: Mapping[str, str] | None = None,
) -> Callable:
    """Make an op run on each device's part where a mesh is in use.

    The letters are those of the signature.

    Args:
        function: returns arrays whose letters all occur in its arguments.
        letters: of arguments whose annotations do not tell them.
        sizes: names of arguments that are the length of a letter, such as
            `key_heads="Hk"`; a device gets that of its part.
    """
    signature = inspect.signature(function)
    kinds = {name: p.annotation for name, p in signature.parameters.items()}
    letters, sizes = letters or {}, sizes or {}

    @functools.wraps(function)
    def mapped(*args, **kwargs):
        if active() is None:
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        arrays = {name: x for name, x in given.items() if has_arrays(x)}
        texts = {
            name: letters[name] if name in letters else letters_of(kinds[name], x)
            for name, x in arrays.items()
        }
        if not _ranks_fit(arrays, texts):
            return function(*args, **kwargs)  # which says what is wrong
        lengths = sizes_of(arrays, texts)
        for name, letter in sizes.items():
            lengths.setdefault(letter, set()).add(given[name])
        axes = split(lengths)
        here = {
            name: given[name] // parts(letter, axes) for name, letter in sizes.items()
        }

        def on_part(arrays):
            return function(**(given | here | arrays))

        returns = letters_of(signature.return_annotation)
        return run(on_part, (arrays,), (texts,), returns, axes)

    return mapped


def _ranks_fit(arrays, texts) -> bool:
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(texts), strict=True)
    return all(not text or len(text.split()) == x.ndim for x, text in pairs)


def constrain(value: Any, letters: Any = None, axes: Axes | None = None) -> Any:
    """Say where the arrays of a pytree lie on the mesh in use; "" says nothing.

    Letters None are those of the value's class.
    """
    if active() is None:
        return value
    letters = letters_of(type(value), value) if letters is None else letters
    axes = split(sizes_of(value, letters)) if axes is None else axes

    def place(x, text):
        return lax.with_sharding_constraint(x, spec(text, axes)) if text else x

    return jax.tree.map(place, value, letters)


def top_k(
    logits: Float[Array, "B n V"], k: int
) -> tuple[Float[Array, "B n k"], Int[Array, "B n k"]]:
    """Return what `lax.top_k` does; of a spread vocabulary only the best move.

    Each device finds the best of its part, and the best of those are the result: equal
    values come in the order of the vocabulary in both.
    """
    axes = split({"B": (logits.shape[0],), "V": (logits.shape[-1],)})
    over = axes["V"]
    if not over or k > logits.shape[-1] // parts("V", axes):
        return _best(logits, k)

    def on_part(logits):
        values, tokens = _best(logits, k)
        tokens += logits.shape[-1] * lax.axis_index(over)
        values, tokens = (
            lax.all_gather(x, over, axis=x.ndim - 1, tiled=True)
            for x in (values, tokens)
        )
        values, rank = lax.top_k(values, k)
        return values, jnp.take_along_axis(tokens, rank, axis=-1)

    return run(on_part, (logits,), ("B n V",), ("B n k", "B n k"), axes)


def _best(logits: Float[Array, "B n V"], k: int) -> tuple[Array, Array]:
    """Return `lax.top_k`; for one choice by a maximum, 5 us for 39 on an H200."""
    if k != 1:
        return tuple(lax.top_k(logits, k))
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(logits, best, axis=-1), best
