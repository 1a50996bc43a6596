"""Prompts of any kind become padded rows, or one clear error."""

import jax.numpy as jnp
import numpy as np
import pytest

from treewy_jax import prompts


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, jnp.asarray])
def test_one_sequence_is_one_row(kind):
    assert prompts.check(kind([3, 1, 2]), 4) == [[3, 1, 2]]


def test_rows_of_any_length():
    ragged = [[1], np.asarray([1, 2]), (3, 2, 1)]
    assert prompts.check(ragged, 4) == [[1], [1, 2], [3, 2, 1]]


def test_padding_keeps_the_ids_on_the_left():
    tokens, lengths = prompts.pad([[5, 6, 7], [8]], 512)
    assert tokens.shape == (2, prompts.SMALLEST_BUCKET)
    assert tokens[0, :4].tolist() == [5, 6, 7, 0] and lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("longest", "bucket"), [(1, 16), (16, 16), (17, 32), (257, 512), (600, 700)]
)
def test_buckets_are_powers_of_two_within_the_context(longest, bucket):
    assert prompts.bucket([[0] * longest], 700) == bucket


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_budget_is_positive(tokens):
    with pytest.raises(ValueError, match=f"max_new_tokens={tokens}"):
        prompts.check_budget([[1]], tokens, 8)


def test_prompt_and_budget_fit_the_context_exactly():
    prompts.check_budget([[1] * 5], 3, 8)
    with pytest.raises(ValueError, match="together at most 8"):
        prompts.check_budget([[1] * 5], 4, 8)
