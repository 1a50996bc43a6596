"""Frozen dataclasses that JAX carries as pytrees, and the bytes of any pytree."""

import dataclasses
import typing

import jax


@typing.dataclass_transform(frozen_default=True)
def dataclass[T: type](cls: T) -> T:
    """Make `cls` a frozen dataclass and a pytree; `static()` fields are metadata.

    Run-time type checking stays out of it: unflattening may put placeholders of any
    type into the fields.
    """
    frozen = dataclasses.dataclass(frozen=True)(typing.no_type_check(cls))
    return jax.tree_util.register_dataclass(frozen)


def static(**options) -> typing.Any:
    """Return a field that is compared and hashed by `jit` instead of traced."""
    return dataclasses.field(metadata=dict(static=True), **options)


def nbytes(tree: typing.Any) -> int:
    """Return the bytes of all arrays in a pytree, or of arrays of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
