"""The Hopper kernel of history_verify: against the reference, reasons, cuts, lowering.

A CPU interprets the kernel. What no history should show is NaN: unused records, and
padding of trees.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.history_verify import mosaic_gpu
from pallas_kernels.history_verify import mosaic_gpu_plan as plans
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import mosaic_gpu_plan as tree_plans
from pallas_kernels.tree_verify import spec as tree_specs
from treewy_jax import history as history_lib
from treewy_jax import tree as tree_lib

FORK = [-1, 0, 1, 1, 0, 4, 5, 4, 7]
TOLERANCE = {"bfloat16 rows": 1e-5, "float32 rows": 1e-6, "fast": 4e-3}


def chain(nodes):
    return list(range(-1, nodes - 1))


def make_spec(*, horizon=16, record_dtype="float32", fold_above=0, **sizes):
    sizes = {
        "nodes": 40,
        "key_heads": 16,
        "value_heads": 32,
        "key_dim": 128,
        "value_dim": 128,
        "batch": 128,
        "input_dtype": "bfloat16",
        "state_dtype": "float32",
    } | sizes
    spec = tree_specs.make_spec(**sizes)
    past = dict(horizon=horizon, record_dtype=record_dtype, fold_above=fold_above)
    return specs.extend(spec, **past)


def on(kind):
    device = jax.sharding.AbstractDevice(kind, 1, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(
    trees, counts, horizon, *, heads=(1, 2), dims=(64, 64),
    rows="bfloat16", records="float32", state="float32",
):  # fmt: skip
    """Return rows, a history and a tree, drawn at random."""
    rng = np.random.default_rng(len(trees) + horizon)
    tree = tree_lib.DraftTree.stack([tree_lib.DraftTree.from_parents(x) for x in trees])
    normal = functools.partial(lambda *shape: rng.normal(size=shape), len(trees))
    nodes = tree.n_max
    key, value = (nodes, heads[0], dims[0]), (nodes, heads[1], dims[1])
    inputs = [unit(normal(*key)), unit(normal(*key)), normal(*value)]
    inputs = [jnp.asarray(x, rows) for x in inputs]
    gates = -np.abs(normal(*value[:2])), 1 / (1 + np.exp(normal(*value[:2])))
    inputs += [jnp.asarray(x, jnp.float32) for x in gates]
    history = history_lib.History(
        state=jnp.asarray(normal(heads[1], dims[1], dims[0]), state),
        k=jnp.asarray(
            unit(normal(horizon, heads[0], dims[0])), specs.key_dtype(rows, records)
        ),
        pseudo_values=jnp.asarray(normal(horizon, heads[1], dims[1]), records),
        log_decay=jnp.asarray(-np.abs(normal(horizon, heads[1])) / 4, jnp.float32),
        count=jnp.asarray(counts, jnp.int32),
    )
    return inputs, history, tree


def poison(x, used):
    used = jnp.expand_dims(used, range(2, x.ndim))
    return jnp.where(used, x, jnp.asarray(jnp.nan, x.dtype))


def poisoned(inputs, history, tree):
    used = jnp.arange(history.horizon) < history.count[:, None]
    records = (history.k, history.pseudo_values, history.log_decay)
    records = [poison(x, used) for x in records]
    inputs = [poison(x, tree.valid()) for x in inputs]
    return inputs, history_lib.History(history.state, *records, history.count)


def error(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def errors(inputs, history, tree, fold_above, output="float32"):
    """Return those of outputs, pseudo-values, state; see that other rows keep S."""
    run = functools.partial(history_lib.verify, output_dtype=output)
    wanted, after = run(*inputs, history, fold_above, tree, impl="reference")
    inputs, history = poisoned(inputs, history, tree)
    run = jax.jit(functools.partial(run, impl="mosaic_gpu"), static_argnums=6)
    found, new = run(*inputs, history, fold_above, tree)
    for row, count in enumerate(history.count):
        if count <= fold_above:
            assert jnp.array_equal(new.state[row], history.state[row])
    assert new.count.tolist() == after.count.tolist()
    assert not jnp.where(tree.valid()[..., None, None], 0, found.output).any()
    pairs = [
        (found.output, wanted.output),
        (found.pseudo_values, wanted.pseudo_values),
        (new.state, after.state),
    ]
    return [error(*pair) for pair in pairs]


interpreted = pytest.mark.skipif(
    mosaic_gpu.supports(make_spec(), jax.default_backend(), interpret=True) is not None,
    reason="needs Hopper, or a CPU to interpret the kernel",
)
CASES = {
    "none and all of the records": (
        [FORK, chain(6)], (0, 5), 5, 0, {},
    ),
    "bfloat16 records, two chunks": (
        [[-1, 0, 0, 0], chain(3)], (16, 9), 16, 9,
        {"records": "bfloat16", "dims": (128, 64), "heads": (2, 2)},
    ),
    "float32 rows, few lines, three heads a key head": (
        [chain(2), [-1]], (1, 3), 3, 1,
        {"rows": "float32", "dims": (64, 8), "heads": (1, 3)},
    ),
    "many nodes and records, bfloat16 state": (
        [[-1] + [0] * 32], (18,), 33, 17, {"state": "bfloat16", "heads": (1, 1)},
    ),
    "float32 rows and bfloat16 records and state": (
        [chain(5)], (7,), 17, 0,
        {"rows": "float32", "records": "bfloat16", "state": "bfloat16"},
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_the_reference_gives(case):
    trees, counts, horizon, fold_above, options = CASES[case]
    drawn = draw(trees, counts, horizon, **options)
    *results, state = errors(*drawn, fold_above)
    assert max(results) < TOLERANCE[f"{options.get('rows', 'bfloat16')} rows"]
    # S_0 is made in float32 and rounded once; few elements lie next to a middle.
    assert state < (1e-6 if options.get("state") != "bfloat16" else 1e-4)


@interpreted
def test_fast_results_come_with_an_exact_state():
    drawn = draw([FORK], (4,), 4)
    *results, state = errors(*drawn, 0, output="bfloat16")
    assert max(results) < TOLERANCE["fast"]
    assert state < 1e-6


def leaf_arguments(inputs, history, tree):
    return (
        *inputs, history.state, history.k, history.pseudo_values, history.log_decay,
        history.count, tree.ancestors(), tree.size, tree.deepest(),
    )  # fmt: skip


CONFIGS = [
    tree_plans.Config(64, heads=2, blocks=1, staged=True),
    tree_plans.Config(64, heads=1, blocks=1),
    tree_plans.Config(64, heads=2, blocks=1, ahead=1),
    tree_plans.Config(64, heads=1, blocks=1, ahead=5),
    tree_plans.Config(64, heads=2, blocks=1, separate=True),
    tree_plans.Config(64, heads=1, blocks=1, ahead=1, separate=True),
]
if jax.default_backend() != "cpu":
    CONFIGS += [
        tree_plans.Config(128, heads=2, teams=2, blocks=1, staged=True),
        tree_plans.Config(128, heads=1, teams=3, blocks=2),
        tree_plans.Config(128, heads=2, blocks=1, ahead=1, separate=True),
        tree_plans.Config(128, heads=2, blocks=2, staged=True, separate=True),
    ]


@interpreted
@pytest.mark.parametrize("config", CONFIGS)
def test_a_block_takes_rows_of_different_counts_in_turn(config):
    """What is fetched ahead belongs to the next row: its count, records and state."""
    lines = max(config.block_v, 64)
    inputs, history, tree = draw(
        [chain(3), FORK, chain(1)], (2, 6, 0), 6, dims=(64, lines)
    )
    wanted, after = history_lib.verify(*inputs, history, 2, tree, impl="reference")
    spec = make_spec(
        nodes=9, batch=3, key_heads=1, value_heads=2, key_dim=64, value_dim=lines,
        precision="high", output_dtype="float32", horizon=6, fold_above=2,
    )  # fmt: skip
    inputs, history = poisoned(inputs, history, tree)
    call = functools.partial(mosaic_gpu.history_verify, spec=spec, config=config)
    arguments = leaf_arguments(inputs, history, tree)
    output, pseudo_values, state = jax.jit(call)(*arguments)
    assert error(pseudo_values, wanted.pseudo_values) < TOLERANCE["bfloat16 rows"]
    assert error(output, wanted.output) < 4e-3  # that of the reference is bfloat16
    assert error(state, after.state) < 1e-6
    for row in (0, 2):
        assert jnp.array_equal(state[row], history.state[row])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="breaks the interpreted one")
def test_the_check_sees_a_history_that_is_not_read(monkeypatch):
    from pallas_kernels.history_verify import mosaic_gpu_kernel

    monkeypatch.setattr(
        mosaic_gpu_kernel.Warpgroup, "_there", lambda self, row: jnp.bool_(False)
    )
    drawn = draw([chain(3)], (2,), 3)
    assert min(errors(*drawn, 0)) > 1e-2


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"horizon": 65}, "at most 64 horizon, not 65"),
        ({"key_dim": 32}, "key_dim to be a multiple of 64, not 32"),
        ({"key_dim": 96}, "key_dim to be 16, 32 or a multiple of 64, not 96"),
        ({"nodes": 65}, "at most 64 nodes, not 65"),
        ({"record_dtype": "float16"}, "record dtype float16"),
        ({"accumulation_dtype": "float64"}, "accumulates in float32"),
        ({"key_dim": 512, "horizon": 64}, "bytes of shared memory"),
    ],
)
def test_it_says_what_it_cannot_do(sizes, reason):
    with on("NVIDIA H200"):
        assert reason in mosaic_gpu.supports(make_spec(**sizes), "gpu")


def test_it_needs_hopper():
    assert "needs a GPU" in mosaic_gpu.supports(make_spec(), "cpu")
    with on("NVIDIA B200"):
        assert "needs Hopper" in mosaic_gpu.supports(make_spec(), "gpu")


@pytest.mark.parametrize("record_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("horizon", [1, 16, 32, 64])
@pytest.mark.parametrize("nodes", [1, 4, 15, 40, 64])
def test_it_takes_these(nodes, horizon, record_dtype):
    spec = make_spec(nodes=nodes, horizon=horizon, record_dtype=record_dtype)
    assert mosaic_gpu.supports(spec, "cpu", interpret=True) is None
    config = tree_plans.choose(spec, plan=plans.Plan)
    assert plans.Plan(spec, config).fits
    assert config.heads == 2 or (nodes, horizon) == (64, 64)


@pytest.mark.parametrize(
    ("nodes", "cut"),
    [(4, {"ahead": 2}), (40, {"ahead": 1, "given": 32})],
)
def test_a_history_of_16_records_leaves_room_for_the_fastest_cut(nodes, cut):
    spec = make_spec(nodes=nodes, output_dtype="bfloat16")
    config = tree_plans.choose(spec, plan=plans.Plan)
    assert config == tree_plans.Config(128, heads=2, separate=True, **cut)


def test_registers_are_given_by_those_that_prepare():
    def given(count, **more):
        config = tree_plans.Config(128, heads=2, given=count, **more)
        return tree_plans.choose(make_spec(nodes=40), config, plan=plans.Plan)

    plan = plans.Plan(make_spec(nodes=40), given(32, separate=True))
    few, many = plan.registers
    assert few + plan.groups * many == 3 * 168 and many > few
    for count, more in ((32, {}), (8, {"separate": True}), (160, {"separate": True})):
        with pytest.raises(ValueError, match=f"given is {count}"):
            given(count, **more)


def test_a_cut_has_to_leave_room_for_the_history():
    spec = make_spec(nodes=4, output_dtype="bfloat16", horizon=64)
    config = tree_plans.Config(128, heads=2, ahead=2, separate=True)
    assert tree_plans.choose(spec, config) == config
    with pytest.raises(ValueError, match="bytes of shared memory"):
        tree_plans.choose(spec, config, plan=plans.Plan)


def shapes(spec):
    batch, nodes, horizon = spec.batch, spec.nodes, spec.horizon
    key, value = (spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim)
    kinds = [((batch, nodes, *x), spec.input_dtype) for x in (key, key, value)]
    kinds += [((batch, nodes, spec.value_heads), "float32")] * 2
    kinds += [((batch, *value, spec.key_dim), spec.state_dtype)]
    kinds += [((batch, horizon, *key), spec.record_key_dtype)]
    kinds += [((batch, horizon, *value), spec.record_dtype)]
    kinds += [((batch, horizon, spec.value_heads), "float32")]
    kinds += [((batch,), "int32"), ((batch, nodes, nodes), "bool")]
    kinds += [((batch,), "int32")] * 2
    return [jax.ShapeDtypeStruct(*kind) for kind in kinds]


@pytest.mark.parametrize(
    "sizes",
    [
        {"nodes": 4, "output_dtype": "bfloat16"},
        {"nodes": 40, "horizon": 32, "record_dtype": "bfloat16"},
        {"nodes": 7, "batch": 2, "value_dim": 16, "input_dtype": "float32"},
    ],
)
def test_it_lowers_without_a_device_and_writes_the_state_in_place(sizes):
    spec = make_spec(**sizes)
    call = functools.partial(mosaic_gpu.history_verify, spec=spec)
    with on("NVIDIA H200"):
        traced = jax.jit(call, donate_argnums=5).trace(*shapes(spec))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    alias = "output_tuple_indices = [2], operand_index = 5"
    assert alias in text


def test_it_runs_in_a_loop_over_layers_with_64_bits_enabled(double):
    spec = make_spec(nodes=4, batch=2, output_dtype="bfloat16")
    call = functools.partial(mosaic_gpu.history_verify, spec=spec)

    def scanned(states, *arguments):
        def one(carry, state):
            output, _, state = call(*arguments[:5], state, *arguments[5:])
            return carry + output.sum(), state

        return lax.scan(one, jnp.zeros((), spec.output_dtype), states)

    arguments = shapes(spec)
    state = arguments.pop(5)
    states = jax.ShapeDtypeStruct((3, *state.shape), state.dtype)
    with on("NVIDIA H200"):
        traced = jax.jit(scanned).trace(states, *arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
