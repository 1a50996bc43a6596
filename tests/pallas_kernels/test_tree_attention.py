"""Tree attention: one suite over all implementations, against a float64 softmax.

Kernels are interpreted on a CPU and run for real on the device that they are made for.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.tree_attention import config as configs
from pallas_kernels.tree_attention import mosaic_tpu, op, triton
from pallas_kernels.tree_attention import spec as specs

DIM = 128
SMALL = configs.Config(block_rows=16, block_slots=16, num_stages=1)
VARIANTS = {
    "reference": ("reference", None),
    "triton": ("triton", SMALL),
    "triton split": (
        "triton",
        dataclasses.replace(SMALL, splits=4, block_slots=32, overlap=True),
    ),
    "mosaic_tpu": ("mosaic_tpu", SMALL),
}
BOUNDS = {jnp.float32: 1e-5, jnp.bfloat16: 5e-3}
# Most tests share one shape, so that a variant is compiled once.
SLOTS, NODES, HEADS, LENGTHS = 48, 7, (4, 2), (48, 21, 0)


def runs_here(name):
    """On a CPU all are interpreted; elsewhere a kernel runs on its own device."""
    made_for = {"triton": "gpu", "mosaic_tpu": "tpu"}.get(VARIANTS[name][0])
    return made_for is None or device.platform() in ("cpu", made_for)


HERE = [name for name in VARIANTS if runs_here(name)]
over_variants = pytest.mark.parametrize("variant", HERE)
# The plain loop of one program is left out where a test compiles sizes of its own.
over_leaves = pytest.mark.parametrize("variant", [v for v in HERE if v != "triton"])
over_dtypes = pytest.mark.parametrize(
    ("dtype", "variant"),
    [(d, v) for d in BOUNDS for v in HERE if (d, v) != (jnp.bfloat16, "triton")],
)


def random_mask(rng, nodes):
    """Return ancestor-or-self of a random preorder tree."""
    mask = np.zeros((nodes, nodes), bool)
    for node in range(nodes):
        parent = node - 1 - rng.integers(0, min(node, 3)) if node else -1
        mask[node] = mask[parent] if node else False
        mask[node, node] = True
    return mask


def inputs(
    dtype=jnp.float32,
    *,
    queries=NODES,
    nodes=NODES,
    slots=SLOTS,
    heads=HEADS,
    lengths=LENGTHS,
    common=0.3,
):
    """Return NumPy arrays q, old k, old v, k, v, length, mask; keys share a direction.

    `heads` is (query heads, key heads); the queries are the last of the nodes.
    """
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(len(lengths), 1, 1, DIM))

    def make(tokens, count, share):
        noise = rng.normal(size=(len(lengths), tokens, count, DIM))
        mixed = np.sqrt(1 - share) * noise + np.sqrt(share) * shared
        return np.array(jnp.asarray(mixed, dtype))

    q = make(queries, heads[0], common)
    old_k, old_v = make(slots, heads[1], common), make(slots, heads[1], 0)
    k, v = make(nodes, heads[1], common), make(nodes, heads[1], 0)
    mask = np.stack([random_mask(rng, nodes)[nodes - queries :] for _ in lengths])
    return [q, old_k, old_v, k, v, np.asarray(lengths, np.int32), mask]


# Most of the time goes to compiling, so XLA optimises little.
@functools.partial(
    jax.jit,
    static_argnames=("impl", "config"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def run(q, old_k, old_v, k, v, length, mask, *, impl, config):
    return op.tree_attention(
        q, (old_k, old_v), (k, v), length, mask, impl=impl, config=config
    )


def call(arrays, variant):
    impl, config = VARIANTS[variant]
    return np.asarray(run(*arrays, impl=impl, config=config))


def exact(q, old_k, old_v, k, v, length, mask):
    """Softmax over what each query sees, query by query and head by head."""
    q, old_k, old_v, k, v = (np.asarray(x, np.float64) for x in (q, old_k, old_v, k, v))
    output = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen, j = mask[b, t], h // (q.shape[2] // k.shape[2])
        keys = np.concatenate([old_k[b, : length[b], j], k[b, seen, j]])
        values = np.concatenate([old_v[b, : length[b], j], v[b, seen, j]])
        scores = keys @ q[b, t, h] / np.sqrt(DIM)
        weights = np.exp(scores - scores.max())
        output[b, t, h] = weights @ values / weights.sum()
    return output


def relative(actual, expected):
    actual = np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@over_dtypes
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 16, 17), (32, 33, 47)])
def test_ragged_lengths(lengths, dtype, variant):
    """None, one, a whole block, one more, all, and one less of the slots."""
    arrays = inputs(dtype, lengths=lengths)
    output, expected = call(arrays, variant), exact(*arrays)
    assert output.dtype == dtype
    for b in range(3):
        assert relative(output[b], expected[b]) < BOUNDS[dtype]


@over_leaves
@pytest.mark.parametrize(
    "sizes",
    [
        dict(queries=39, nodes=39, slots=17, heads=(3, 1)),
        dict(queries=3, nodes=64, slots=20, heads=(8, 2)),
    ],
)
def test_odd_sizes(sizes, variant):
    """The last: drafting asks for some of the nodes, m queries over n nodes."""
    arrays = inputs(**sizes, lengths=(sizes["slots"],))
    assert relative(call(arrays, variant), exact(*arrays)) < 1e-5


@over_leaves
def test_a_cache_of_another_dtype(variant):
    """The output has the dtype of q and a float32's accuracy."""
    arrays = inputs(queries=1, nodes=1, slots=33, heads=(3, 3), lengths=(33, 0))
    for i in (1, 2):
        arrays[i] = np.array(jnp.asarray(arrays[i], jnp.bfloat16))
    output, expected = call(arrays, variant), exact(*arrays)
    assert output.dtype == jnp.float32
    assert relative(output, expected) < (3e-3 if variant == "reference" else 1e-5)


@over_dtypes
def test_what_nobody_sees_changes_no_bit(dtype, variant):
    """Slots behind the length, nodes outside the mask, and queries of padding."""
    arrays = inputs(dtype)
    arrays[6][:, :, 4:] = arrays[6][:, 4:] = False
    clean = call(arrays, variant)[:, :4]
    for b, length in enumerate(LENGTHS):
        for cache in arrays[1:3]:
            cache[b, length:] = np.nan
    for x in (arrays[0], *arrays[3:5]):
        x[:, 4:] = np.nan
    dirty = call(arrays, variant)[:, :4]
    assert np.all(np.isfinite(clean.astype(np.float32)))
    assert clean.tobytes() == dirty.tobytes()


@over_variants
def test_a_node_changes_no_bit_outside_its_subtree(variant):
    arrays = inputs()
    before = call(arrays, variant)
    for node in (0, 2, 6):
        changed = [x.copy() for x in arrays]
        for i in (0, 3, 4):
            changed[i][:, node] = 1e3
        moved = np.any(before != call(changed, variant), axis=(2, 3))
        assert moved.tolist() == arrays[6][:, :, node].tolist()


@over_variants
def test_large_scores_do_not_overflow(variant):
    """The largest score takes all: it is far above the next one."""
    arrays = inputs(common=0.0)
    for i in (0, 1, 3):
        arrays[i] *= 1e3
    assert relative(call(arrays, variant), exact(*arrays)) < 1e-5


@over_variants
def test_the_root_alone_returns_its_value(variant):
    arrays = inputs(lengths=(0, 0, 0))
    arrays[6][:] = np.eye(NODES, dtype=bool)
    expected = np.repeat(arrays[4], 2, axis=2)
    np.testing.assert_allclose(call(arrays, variant), expected, rtol=1e-5)


FAULTS = {
    "sums keep their scale": ("_weigh", lambda found: (*found[:2], 0 * found[2] + 1)),
    "all heads are the first": ("_rows", lambda rows: rows._replace(head=jnp.int32(0))),
    "siblings are seen": ("_rows", lambda rows: rows._replace(node=rows.node * 0 + 6)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_twin_is_seen(fault, monkeypatch):
    """Each fault of the kernel is far outside the bounds of the tests above."""
    name, spoil = FAULTS[fault]
    sound = getattr(triton, name)
    monkeypatch.setattr(triton, name, lambda *a: spoil(sound(*a)))
    arrays = inputs(lengths=(30,))
    spec = specs.spec_of(*pairs(arrays))
    output = triton.tree_attention(*pairs(arrays), spec=spec, config=SMALL)
    assert relative(output, exact(*arrays)) > 1e-2


def pairs(arrays):
    """Return arguments of the op: q, prefix, nodes, length, mask."""
    q, old_k, old_v, k, v, length, mask = (jnp.asarray(x) for x in arrays)
    return q, (old_k, old_v), (k, v), length, mask


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q has shape", lambda a: [a[0][0], *a[1:]]),
        ("prefix holds k", lambda a: [a[0], a[1][:, :5], *a[2:]]),
        ("prefix has shape", lambda a: [a[0], a[1][..., :8], a[2][..., :8], *a[3:]]),
        ("nodes has shape", lambda a: [*a[:3], a[3][:1], a[4][:1], *a[5:]]),
        (
            "nodes have 1 heads",
            lambda a: [*a[:3], a[3][:, :, :1], a[4][:, :, :1], *a[5:]],
        ),
        ("heads is 3", lambda a: [a[0][:, :, :3], *a[1:]]),
        ("length has shape", lambda a: [*a[:5], a[5][:1], a[6]]),
        ("length has dtype", lambda a: [*a[:5], a[5].astype(np.float32), a[6]]),
        ("mask has shape", lambda a: [*a[:6], a[6][:, :, :2]]),
        ("mask has dtype", lambda a: [*a[:6], a[6].astype(np.int32)]),
        ("slots is 0", lambda a: [a[0], a[1][:, :0], a[2][:, :0], *a[3:]]),
    ],
)
def test_wrong_arguments_are_named(message, change):
    with pytest.raises(ValueError, match=message):
        op.tree_attention(*pairs(change(inputs())))


def test_a_wrong_name_is_refused():
    with pytest.raises(ValueError, match="impl is 'cuda'"):
        op.tree_attention(*pairs(inputs()), impl="cuda")


def make_spec(**changes):
    sizes = dict(queries=4, nodes=4, slots=64, heads=4, kv_heads=2, head_dim=128)
    return specs.make_spec(**(sizes | changes))


@pytest.mark.parametrize(
    ("module", "platform", "changes", "reason"),
    [
        (triton, "gpu", {}, None),
        (triton, "gpu", {"head_dim": 256, "input_dtype": "bfloat16"}, None),
        (triton, "cpu", {}, "needs a GPU; the device is a cpu"),
        (triton, "gpu", {"head_dim": 96}, "power of two >= 16, not 96"),
        (triton, "gpu", {"head_dim": 512}, "at most 256 head_dim, not 512"),
        (triton, "gpu", {"input_dtype": "float64"}, "not input dtype float64"),
        (triton, "gpu", {"prefix_dtype": "float16"}, "not prefix dtype float16"),
        (mosaic_tpu, "tpu", {}, None),
        (mosaic_tpu, "gpu", {}, "needs a TPU; the device is a gpu"),
        (mosaic_tpu, "tpu", {"head_dim": 64}, "multiple of 128, not 64"),
        (mosaic_tpu, "tpu", {"queries": 64, "heads": 512}, "bytes of sums a batch row"),
        (mosaic_tpu, "tpu", {"node_dtype": "float64"}, "not node dtype float64"),
    ],
)
def test_supports_gives_its_reason(module, platform, changes, reason):
    found = module.supports(make_spec(**changes), platform)
    assert found is None if reason is None else reason in found


def test_float64_runs_the_reference(double):
    arrays = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs()]
    choice = op.IMPLEMENTATIONS.choose(specs.spec_of(*pairs(arrays)))
    assert choice.name == "reference"
    output = op.tree_attention(*pairs(arrays))
    assert output.dtype == jnp.float64
    assert relative(output, exact(*arrays)) < 1e-14


def test_an_explicit_config_comes_first():
    spec = make_spec(input_dtype="bfloat16")
    assert configs.choose(spec, "gpu", "NVIDIA H200", SMALL) is SMALL
    chosen = configs.choose(spec, "gpu", "no such device")
    assert chosen == configs.heuristic(spec, "gpu")


def test_the_tuned_table_is_read():
    """Every entry is a configuration, and a size that was measured finds its own."""
    files = list(configs.TUNED.glob("*.json"))
    entries = [entry for file in files for entry in json.loads(file.read_text())]
    assert entries
    for entry in entries:
        found = configs.Config(**entry["config"])
        spec = make_spec(input_dtype="bfloat16", heads=16)
        assert configs.choose(spec, "gpu", "no such device", found) is found
    sizes = dict(queries=4, nodes=4, heads=16, head_dim=256, input_dtype="bfloat16")
    spec = make_spec(batch=256, slots=1024, **sizes)
    assert configs.choose(spec, "gpu", "NVIDIA H200") in (
        configs.Config(**entry["config"]) for entry in entries
    )
    assert configs.heuristic(spec, "gpu") != configs.choose(spec, "gpu", "NVIDIA H200")


@pytest.mark.parametrize("field", ["block_rows", "block_slots", "splits"])
def test_sizes_of_a_config_are_powers_of_two(field):
    wrong = dataclasses.replace(SMALL, **{field: 48})
    with pytest.raises(ValueError, match=f"{field} is 48"):
        configs.choose(make_spec(), "gpu", "NVIDIA H200", wrong)


def test_few_prefixes_are_split():
    """One sequence of 8,192 slots is spread over the device; 32 of them need less."""
    sizes = dict(heads=16, slots=8192, head_dim=256, input_dtype="bfloat16")
    alone, many = (
        configs.heuristic(make_spec(batch=batch, **sizes), "gpu") for batch in (1, 256)
    )
    assert alone.splits > 16
    assert many.splits == 1


def test_spec_counts():
    spec = make_spec(batch=2, filled=10, input_dtype="bfloat16", prefix_dtype="float32")
    assert (spec.group, spec.rows) == (2, 8)
    cache, nodes, mask = 10 * 2 * 2 * 128 * 4, 4 * 2 * 2 * 128 * 2, 4 * 4
    assert spec.bytes_moved == 2 * (cache + nodes + 2 * 4 * 4 * 128 * 2 + mask + 4)
    assert spec.flops == 2 * 4 * 4 * 4 * (10 + 4) * 128
