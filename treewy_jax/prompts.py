"""Check prompts against the model's limits, and pad them to a common length.

The padded length is a power of two, so that few programs are ever compiled.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

SMALLEST_BUCKET = 16

Ids = Sequence[int] | np.ndarray | Array
Prompts = Ids | Sequence[Ids]


def check(prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """Return the prompts as rows of ids; one sequence of ids is one row.

    Raises:
        ValueError: none, an empty one, or an id outside the vocabulary.
    """
    given: list[Any] = list(prompts)
    if not given:
        raise ValueError("prompts is empty: give at least one token id")
    single = np.ndim(given[0]) == 0
    rows = [[int(i) for i in row] for row in ([given] if single else given)]
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{number}] is empty: give at least one token id")
        outside = [i for i in row if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(
                f"prompts[{number}] holds id {outside[0]}: "
                f"allowed are 0 to {vocab_size - 1}"
            )
    return rows


def check_budget(
    rows: Sequence[Sequence[int]], max_new_tokens: int, max_position: int
) -> None:
    """Raise ValueError unless every row and its budget fit the context."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be 1 or more")
    longest = max(map(len, rows))
    if longest + max_new_tokens > max_position:
        raise ValueError(
            f"prompt of {longest} tokens and max_new_tokens={max_new_tokens}: "
            f"together at most {max_position} (max_position_embeddings)"
        )


def bucket(rows: Sequence[Sequence[int]], max_position: int) -> int:
    """Return the padded length: the next power of two, within the context."""
    power = 1 << (max(map(len, rows)) - 1).bit_length()
    return min(max(SMALLEST_BUCKET, power), max_position)


def pad(
    rows: Sequence[Sequence[int]], max_position: int
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Return the rows right-padded to their bucket, and their lengths."""
    tokens = np.zeros((len(rows), bucket(rows, max_position)), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32)
