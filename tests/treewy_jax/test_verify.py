"""One suite over every implementation of `verify`, and `reconstruct` behind it."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs
from tests.treewy_jax import strategies
from treewy_jax import recurrence, verify, wy
from treewy_jax import tree as tree_lib

N_MAX = 16
BATCH = 2


def runs_here(name):
    """Whether an implementation runs on this device; a CPU interprets the kernels."""
    module = verify.IMPLEMENTATIONS.module(name)
    call = specs.make_spec(
        nodes=N_MAX,
        key_heads=strategies.KEY_HEADS,
        value_heads=strategies.VALUE_HEADS,
        key_dim=strategies.DIM,
        value_dim=strategies.DIM,
    )
    platform = jax.default_backend()
    return name == "reference" or not module.supports(call, platform, interpret=True)


HERE = set(filter(runs_here, verify.IMPLEMENTATIONS.modules))
every_implementation = pytest.mark.parametrize("impl", sorted(HERE))
# Pallas' interpreter of GPU threads takes a second a call: fewer examples for it.
SLOW = {"mosaic_gpu"} if jax.default_backend() == "cpu" else set()


def each_of(names):
    return pytest.mark.parametrize("impl", sorted(names))


both_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
FLOOR = 1e-6
# Of bfloat16 inputs, "high" writes float32 operands as two bfloat16 parts on a GPU.
HIGH = {"mosaic_tpu": 1e-6, "reference": 1e-6}

KINDS = {
    "mixed": {},
    "correlated": {"gates": "slow", "correlation": 0.99},
    "cliff": {"gates": "cliff"},
    "no decay": {"gates": "none"},
}


rebuild = jax.jit(verify.reconstruct)
ancestors = jax.jit(tree_lib.DraftTree.ancestors)


@functools.cache
def jitted(impl, **options):
    return jax.jit(functools.partial(verify.verify, impl=impl, **options))


@functools.cache
def rebuild_all():
    """Return the state after every node of every row, one `reconstruct` a node."""

    def rebuild(state, k, verified, tree):
        def after(node):
            nodes = jnp.full((tree.batch,), node)
            return verify.reconstruct(state, k, verified, tree, nodes)

        return jnp.moveaxis(jax.lax.map(after, jnp.arange(tree.n_max)), 0, 1)

    return jax.jit(rebuild)


def two_cases(parents, seed, **kind):
    """A row with this tree, and a row with the chain, both of one kind."""
    chain = list(range(-1, N_MAX - 1))
    return [
        strategies.make_case(parents, seed, **kind),
        strategies.make_case(chain, seed + 1, **kind),
    ]


def row_errors(expected, output, states):
    """Errors of one row; NumPy slices, since each shape costs JAX a compilation."""
    n = len(expected[0])
    return [
        strategies.relative(np.asarray(actual)[:n], exact)
        for actual, exact in zip((output, states), expected, strict=True)
    ]


def typed(arguments, dtype):
    """Store q, k and v in this dtype; gates and state stay float32."""
    return *(x.astype(dtype) for x in arguments[:3]), *arguments[3:]


def check_float32(impl, cases, n_max=N_MAX):
    """Outputs and states within max(2x the sequential float32 error, FLOOR)."""
    # Errors are those of the computation: the inputs are rounded beforehand.
    cases = [rounded(case) for case in cases]
    arguments = strategies.batch(cases, n_max)
    verified = jitted(impl)(*arguments)
    *_, state, tree = arguments
    states = rebuild_all()(state, arguments[1], verified, tree)
    sequential = jax.jit(recurrence.recurrent_tree)(*arguments)
    output, states, sequential = jax.device_get((verified.output, states, sequential))
    for row, case in enumerate(cases):
        expected = strategies.oracle(case)
        errors = row_errors(expected, output[row], states[row])
        bounds = row_errors(expected, sequential[0][row], sequential[1][row])
        for error, bound in zip(errors, bounds, strict=True):
            assert error <= max(2 * bound, FLOOR)


def rounded(case, dtype=np.float32):
    values = {
        name: np.asarray(jnp.asarray(getattr(case, name), dtype), np.float64)
        for name in ("q", "k", "v", "log_decay", "beta", "state")
    }
    return strategies.Case(**values, parents=case.parents)


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", strategies.SHAPES)
def test_float32_is_as_exact_as_the_recurrence(impl, kind, shape):
    parents = strategies.SHAPES[shape]
    check_float32(impl, two_cases(parents, seed=1, **KINDS[kind]))


random_trees = hypothesis.given(
    strategies.preorder_parents(N_MAX), st.sampled_from(list(KINDS)), st.integers(0, 99)
)


@each_of(HERE - SLOW)
@random_trees
def test_float32_on_random_trees(impl, parents, kind, seed):
    check_float32(impl, two_cases(parents, seed, **KINDS[kind]))


@each_of(HERE & SLOW)
@hypothesis.settings(max_examples=6)
@random_trees
def test_float32_on_a_few_random_trees(impl, parents, kind, seed):
    check_float32(impl, two_cases(parents, seed, **KINDS[kind]))


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
def test_float32_on_trees_of_64_nodes(impl, kind):
    rng = np.random.default_rng(3)
    cases = [
        strategies.make_case(strategies.random_parents(rng, 64), 5, **KINDS[kind]),
        strategies.make_case(list(range(-1, 63)), 6, **KINDS[kind]),
    ]
    check_float32(impl, cases, n_max=64)


@hypothesis.given(st.integers(1, 64), st.sampled_from(list(KINDS)), st.integers(0, 99))
def test_float64_equals_the_recurrence(double, size, kind, seed):
    parents = strategies.random_parents(np.random.default_rng(seed), size)
    case = strategies.make_case(parents, seed, **KINDS[kind])
    arguments = strategies.batch([case], 64, jnp.float64)
    verified = jitted(None)(*arguments)
    *_, state, tree = arguments
    states = rebuild_all()(state, arguments[1], verified, tree)
    assert verified.output.dtype == verified.pseudo_values.dtype == jnp.float64
    output, states = jax.device_get((verified.output, states))
    errors = row_errors(strategies.oracle(case), output[0], states[0])
    assert max(errors) < 1e-14


@every_implementation
def test_a_tree_of_one_node_is_plain_decoding(impl):
    cases = [strategies.make_case([-1], seed) for seed in range(2)]
    check_float32(impl, cases, n_max=1)


@every_implementation
@both_dtypes
def test_contents_of_padding_change_no_bit(impl, dtype):
    cases = two_cases(strategies.SHAPES["comb"], seed=2)
    cases[1] = strategies.make_case([-1], seed=9)
    clean = jitted(impl)(*typed(strategies.batch(cases, N_MAX), dtype))
    clean = jax.device_get(clean)
    for fill in (np.nan, np.inf, 1e30):
        dirty = strategies.batch(cases, N_MAX, fill=fill)
        dirty = jitted(impl)(*typed(dirty, dtype))
        assert_equal_bits(clean, dirty)
    for part in jax.tree.leaves(clean):
        assert not np.any(part[0, len(cases[0].parents) :])
        assert np.all(np.isfinite(part.astype(np.float32)))


a_tree_and_a_node = hypothesis.given(strategies.preorder_parents(N_MAX), st.data())


@each_of(HERE - SLOW)
@both_dtypes
@hypothesis.settings(max_examples=15)
@a_tree_and_a_node
def test_a_node_changes_no_bit_of_a_non_descendant(impl, dtype, parents, data):
    check_that_a_node_changes_only_what_is_below(impl, dtype, parents, data)


@each_of(HERE & SLOW)
@both_dtypes
@hypothesis.settings(max_examples=4)
@a_tree_and_a_node
def test_a_node_changes_no_bit_of_a_non_descendant_in_a_few(impl, dtype, parents, data):
    check_that_a_node_changes_only_what_is_below(impl, dtype, parents, data)


def check_that_a_node_changes_only_what_is_below(impl, dtype, parents, data):
    node = data.draw(st.integers(0, len(parents) - 1))
    case, other = two_cases(parents, seed=4)
    arguments = typed(strategies.batch([case, other], N_MAX), dtype)
    before = jax.device_get(jitted(impl)(*arguments))
    case.q[node] *= -3
    case.k[node] *= 30
    case.v[node] += 1e4
    case.log_decay[node] -= 200
    case.beta[node] = 1.0
    *_, tree = arguments = typed(strategies.batch([case, other], N_MAX), dtype)
    after = jax.device_get(jitted(impl)(*arguments))
    below = np.asarray(ancestors(tree))[0, :, node]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert_equal_bits(old[0, ~below], new[0, ~below])
        assert_equal_bits(old[1], new[1])
        assert not np.array_equal(old[0, node], new[0, node])


@every_implementation
@pytest.mark.parametrize(
    ("options", "state_dtype", "bound"),
    [
        ({"precision": "high", "output_dtype": jnp.float32}, jnp.bfloat16, None),
        ({}, jnp.float32, 1e-2),
    ],
    ids=["high", "fast"],
)
def test_bfloat16_inputs(impl, options, state_dtype, bound):
    cases = [
        rounded(case, jnp.bfloat16)
        for case in two_cases(strategies.SHAPES["fork"], seed=7)
    ]
    *rows, state, tree = typed(strategies.batch(cases, N_MAX), jnp.bfloat16)
    verified = jitted(impl, **options)(*rows, state.astype(state_dtype), tree)
    assert verified.output.dtype == options.get("output_dtype", jnp.bfloat16)
    assert verified.pseudo_values.dtype == jnp.float32
    for row, case in enumerate(cases):
        exact = strategies.oracle(case)[0]
        output = np.asarray(verified.output, np.float32)[row, : len(exact)]
        assert strategies.relative(output, exact) < (bound or HIGH.get(impl, 5e-6))


@every_implementation
def test_as_many_key_heads_as_value_heads(impl):
    cases = [strategies.make_case(strategies.SHAPES["comb"], 8, heads=(3, 3))] * 2
    check_float32(impl, cases)


@every_implementation
def test_it_runs_inside_a_compiled_loop(impl):
    arguments = strategies.batch(two_cases(strategies.SHAPES["fork"], 1), N_MAX)
    *rows, state, tree = arguments

    @jax.jit
    def three_steps(state):
        def step(carry):
            count, state = carry
            verified = verify.verify(*rows, state, tree, impl=impl)
            node = jnp.asarray([5, 15])
            return count + 1, verify.reconstruct(state, rows[1], verified, tree, node)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, state))[1]

    expected = state
    for _ in range(3):
        verified = jitted("reference")(*rows, expected, tree)
        node = jnp.asarray([5, 15])
        expected = rebuild(expected, rows[1], verified, tree, node)
    assert strategies.relative(three_steps(state), np.asarray(expected)) < 1e-5


def test_another_topology_traces_nothing_new():
    traces = []

    @jax.jit
    def run(*arguments):
        traces.append(1)
        return verify.verify(*arguments).output

    for parents in strategies.SHAPES.values():
        run(*strategies.batch(two_cases(parents, 1), N_MAX))
    assert len(traces) == 1


def test_the_check_sees_a_perturbed_decay():
    case, other = map(rounded, two_cases(strategies.SHAPES["fork"], 1))
    arguments = list(strategies.batch([case, other], N_MAX))
    arguments[3] = arguments[3].at[0, 1].add(-1e-4)
    output = np.asarray(jitted("reference")(*arguments).output)[0]
    exact = strategies.oracle(case)[0]
    assert strategies.relative(output[: len(exact)], exact) > 1e-6


def test_the_check_sees_a_sibling_in_the_mask():
    case = rounded(strategies.make_case([-1, 0, 0], 1))
    *arrays, tree = strategies.batch([case], 3)
    mask = tree.ancestors()
    exact = strategies.oracle(case)[0]
    solve = jax.jit(wy.verify_reference)
    good = solve(*arrays, mask, 2)[0][0]
    bad = solve(*arrays, mask.at[0, 2, 1].set(True), 2)[0][0]
    assert strategies.relative(good, exact) < 1e-6
    assert strategies.relative(bad, exact) > 1e-3


def assert_equal_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class TestReconstruct:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_no_step_keeps_the_state(self, dtype):
        *rows, state, tree = strategies.batch(two_cases([-1, 0], 1), N_MAX)
        state = state.astype(dtype).at[0, 0, 0, 0].set(-0.0)
        verified = jitted(None)(*rows, state, tree)
        poisoned = rows[1].at[:].set(jnp.nan)
        node = jnp.asarray([-1, N_MAX])
        kept = rebuild(state, poisoned, verified, tree, node)
        assert_equal_bits(kept, state)

    def test_only_the_path_is_written(self):
        cases = two_cases(strategies.SHAPES["fork"], 2)
        *rows, state, tree = strategies.batch(cases, N_MAX)
        verified = jitted(None)(*rows, state, tree)
        node = jnp.asarray([5, 5])
        base = rebuild(state, rows[1], verified, tree, node)
        off_path = ~tree.ancestors()[:, 5]
        poisoned = jnp.where(off_path[:, :, None, None], jnp.nan, rows[1])
        assert_equal_bits(base, rebuild(state, poisoned, verified, tree, node))
        on_path = jnp.where(off_path[:, :, None, None], rows[1], jnp.nan)
        spoilt = rebuild(state, on_path, verified, tree, node)
        assert not np.any(np.isfinite(spoilt))

    def test_a_low_precision_state_is_rounded_once(self):
        cases = two_cases(strategies.SHAPES["chain"], 3)
        *rows, state, tree = strategies.batch(cases, N_MAX)
        narrow = state.astype(jnp.bfloat16)
        verified = jitted(None)(*rows, narrow, tree)
        node = jnp.asarray([N_MAX - 1] * 2)
        wide = rebuild(narrow.astype(jnp.float32), rows[1], verified, tree, node)
        rebuilt = rebuild(narrow, rows[1], verified, tree, node)
        assert rebuilt.dtype == jnp.bfloat16
        assert_equal_bits(rebuilt, wide.astype(jnp.bfloat16))

    def test_node_needs_a_row_axis(self):
        *rows, state, tree = strategies.batch(two_cases([-1, 0], 1), N_MAX)
        verified = jitted(None)(*rows, state, tree)
        with pytest.raises(ValueError, match=r"node has shape \(\); \[2\] is allowed"):
            verify.reconstruct(state, rows[1], verified, tree, jnp.asarray(0))


def test_a_cut_value_dimension_changes_nothing():
    from pallas_kernels.tree_verify import triton

    arguments = strategies.batch(two_cases(strategies.SHAPES["fork"], 1), N_MAX)
    q, k, v, log_decay, beta, state, tree = arguments
    wide = jnp.concatenate([v, v], axis=-1)
    tall = jnp.concatenate([state, state], axis=2)
    spec = specs.make_spec(
        batch=2,
        nodes=N_MAX,
        depth=N_MAX - 1,
        key_heads=strategies.KEY_HEADS,
        value_heads=strategies.VALUE_HEADS,
        key_dim=strategies.DIM,
        value_dim=2 * strategies.DIM,
    )
    output, _ = triton.tree_verify(
        *(q, k, wide, log_decay, beta, tall, tree.ancestors(), tree.size),
        jnp.full((2,), N_MAX - 1, jnp.int32),
        spec=spec,
        config=configs.Config(block_v=strategies.DIM),
    )
    expected = jitted("reference")(*arguments).output
    for half in jnp.split(output, 2, axis=-1):
        assert strategies.relative(half, np.asarray(expected)) < 1e-6


def test_a_batch_of_trees_matches_its_rows_alone():
    cases = two_cases(strategies.SHAPES["star"], 5)
    together = jitted(None)(*strategies.batch(cases, N_MAX)).output
    swapped = jitted(None)(*strategies.batch(cases[::-1], N_MAX)).output
    for row, case in enumerate(cases):
        alone = jitted(None)(*strategies.batch([case], N_MAX)).output
        assert strategies.relative(together[row], np.asarray(alone[0])) < 1e-6
        assert_equal_bits(together[row], swapped[1 - row])


def test_a_shared_parent_list_serves_every_row():
    cases = [strategies.make_case([-1, 0, 0, 2], seed) for seed in range(2)]
    *arrays, _ = strategies.batch(cases, 4)
    shared = tree_lib.DraftTree.from_parents([-1, 0, 0, 2], batch=2)
    assert shared.parent.ndim == 1
    output = jitted(None)(*arrays, shared).output
    for row, case in enumerate(cases):
        assert strategies.relative(output[row], strategies.oracle(case)[0]) < 1e-6
