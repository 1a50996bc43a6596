"""The oracle itself, against NumPy in float64 and against its own identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.treewy_jax import strategies
from treewy_jax import recurrence, tree

recurrent_tree = jax.jit(recurrence.recurrent_tree)
sequence = jax.jit(recurrence.sequence)


@pytest.mark.parametrize("shape", strategies.SHAPES)
def test_a_tree_equals_numpy(double, shape):
    case = strategies.make_case(strategies.SHAPES[shape], seed=1)
    arguments = strategies.batch([case], 16, jnp.float64)
    output, states = recurrent_tree(*arguments)
    expected_output, expected_states = strategies.oracle(case)
    n = len(case.parents)
    assert output.dtype == states.dtype == jnp.float64
    assert strategies.relative(np.asarray(output)[0, :n], expected_output) < 1e-14
    assert strategies.relative(np.asarray(states)[0, :n], expected_states) < 1e-14


def test_a_chain_equals_the_sequence():
    case = strategies.make_case(strategies.SHAPES["chain"], seed=2)
    *rows, state, chain = strategies.batch([case], 16)
    output, states = recurrent_tree(*rows, state, chain)
    expected, last = sequence(*rows, state)
    assert strategies.relative(output, expected) < 1e-6
    assert strategies.relative(states[:, -1], last) < 1e-6


def test_padding_does_not_act():
    case = strategies.make_case(strategies.SHAPES["fork"], seed=3)
    *rows, state, forked = strategies.batch([case], 16, fill=np.nan)
    output, states = recurrent_tree(*rows, state, forked)
    n = len(case.parents)
    assert not np.any(output[:, n:])
    assert np.array_equal(states[0, n:], np.repeat(state, 16 - n, axis=0))
    clean = strategies.batch([case], 16)
    assert np.array_equal(output, recurrent_tree(*clean)[0])


def test_a_token_without_gates_leaves_the_state():
    case = strategies.make_case([-1, 0, 1], seed=4)
    *rows, state, _ = strategies.batch([case], 3)
    rows[3:] = [jnp.zeros_like(gate) for gate in rows[3:]]
    assert np.array_equal(sequence(*rows, state)[1], state)


def test_low_precision_states_accumulate_in_float32():
    case = strategies.make_case([-1, 0], seed=5)
    *rows, state, chain = strategies.batch([case], 2, jnp.bfloat16)
    output, states = recurrent_tree(*rows, state, chain)
    assert output.dtype == states.dtype == jnp.float32


def test_each_value_head_reads_its_key_head():
    case = strategies.make_case([-1], seed=6)
    *rows, state, root = strategies.batch([case], 1)
    base = recurrent_tree(*rows, state, root)[0]
    rows[1] = rows[1].at[:, :, 1].multiply(-1.5)
    changed = recurrent_tree(*rows, state, root)[0] != base
    assert jnp.any(changed, axis=(0, 1, 3)).tolist() == [False] * 3 + [True] * 3


def test_a_tree_of_several_rows_keeps_them_apart():
    shapes = (strategies.SHAPES["star"], strategies.SHAPES["comb"])
    cases = [strategies.make_case(s, seed=i) for i, s in enumerate(shapes)]
    output = np.asarray(recurrent_tree(*strategies.batch(cases, 16))[0])
    for row, case in enumerate(cases):
        expected = strategies.oracle(case)[0]
        assert strategies.relative(output[row, : len(expected)], expected) < 1e-6


def test_a_node_continues_from_its_parent_and_not_from_its_sibling():
    case = strategies.make_case([-1, 0, 0], seed=7)
    *rows, state, _ = strategies.batch([case], 3)
    wrong = tree.DraftTree.chain(2)
    output, _ = recurrent_tree(*rows, state, wrong)
    assert strategies.relative(output[0], strategies.oracle(case)[0]) > 1e-3
