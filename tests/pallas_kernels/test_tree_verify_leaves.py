"""What only the two successors of the Triton kernel do: reasons, cuts, lowering."""

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_verify import jax_triton, mosaic_gpu
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans
from pallas_kernels.tree_verify import spec as specs

LEAVES = {"mosaic_gpu": mosaic_gpu, "jax_triton": jax_triton}


def make_spec(**sizes):
    sizes = {
        "nodes": 40,
        "key_heads": 16,
        "value_heads": 32,
        "key_dim": 128,
        "value_dim": 128,
        "batch": 256,
        "input_dtype": "bfloat16",
        "state_dtype": "bfloat16",
    } | sizes
    return specs.make_spec(**sizes)


def on(kind):
    device = jax.sharding.AbstractDevice(kind, 1, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def shapes(spec):
    keys = (spec.batch, spec.nodes, spec.key_heads, spec.key_dim)
    values = (spec.batch, spec.nodes, spec.value_heads, spec.value_dim)
    state = (spec.batch, spec.value_heads, spec.value_dim, spec.key_dim)
    kinds = [(keys, spec.input_dtype)] * 2 + [(values, spec.input_dtype)]
    kinds += [(values[:3], "float32")] * 2 + [(state, spec.state_dtype)]
    kinds += [((spec.batch, spec.nodes, spec.nodes), "bool")]
    kinds += [((spec.batch,), "int32")] * 2
    return [jax.ShapeDtypeStruct(*kind) for kind in kinds]


def lowered(leaf, spec, config=None):
    call = functools.partial(leaf.tree_verify, spec=spec, config=config)
    traced = jax.jit(call).trace(*shapes(spec))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("leaf", LEAVES)
def test_another_platform_is_refused(leaf):
    reason = LEAVES[leaf].supports(make_spec(), "tpu", interpret=True)
    assert reason == "needs a GPU; the device is a tpu"
    assert "needs a GPU" in LEAVES[leaf].supports(make_spec(), "cpu")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"key_dim": 96}, "key_dim to be 16, 32 or a multiple of 64, not 96"),
        ({"value_dim": 96}, "value_dim to be a multiple of 64, or of 8 below 64"),
        ({"value_dim": 12}, "not 12"),
        ({"nodes": 65}, "at most 64 nodes, not 65"),
        ({"state_dtype": "float16"}, "state dtype float16"),
        ({"accumulation_dtype": "float64"}, "accumulates in float32"),
        ({"nodes": 64, "key_dim": 512, "input_dtype": "float32"}, "shared memory"),
    ],
)
def test_mosaic_gpu_says_what_it_cannot_do(sizes, reason):
    with on("NVIDIA H200"):
        assert reason in mosaic_gpu.supports(make_spec(**sizes), "gpu")


@pytest.mark.parametrize("nodes", [1, 7, 64])
@pytest.mark.parametrize("dim", [16, 32, 64, 256])
def test_mosaic_gpu_takes_these(nodes, dim):
    spec = make_spec(nodes=nodes, key_dim=dim, value_dim=dim)
    assert mosaic_gpu.supports(spec, "cpu", interpret=True) is None
    assert plans.Plan(spec, plans.choose(spec)).fits


@pytest.mark.parametrize("kind", ["NVIDIA B200", "NVIDIA A100-SXM4-80GB"])
def test_mosaic_gpu_needs_hopper(kind):
    with on(kind):
        reason = mosaic_gpu.supports(make_spec(), "gpu")
    assert reason == f"needs Hopper (H100, H200); the device is {kind}"


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_mosaic_gpu_lowers_without_a_device(kind):
    with on(kind):
        for sizes in (
            {"nodes": 4},
            {"nodes": 39, "batch": 1},
            {"nodes": 40},
            {"nodes": 7, "key_dim": 16, "value_dim": 16, "input_dtype": "float32"},
        ):
            spec = make_spec(**sizes)
            assert mosaic_gpu.supports(spec, "gpu") is None
            assert "mosaic_gpu" in lowered(mosaic_gpu, spec)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (plans.Config(96), "block_v is 96"),
        (plans.Config(256), "block_v is 256"),
        (plans.Config(64, heads=3), "heads is 3"),
        (plans.Config(64, teams=0), "teams is 0"),
        (plans.Config(64, ahead=-1), "ahead is -1"),
        (plans.Config(128, heads=2, teams=2, staged=True), "bytes of shared memory"),
        (plans.Config(64, teams=9), "9 warpgroups"),
    ],
)
def test_a_configuration_that_does_not_fit(config, problem):
    with pytest.raises(ValueError, match=problem):
        plans.choose(make_spec(), config)


def test_heads_are_shared_among_teams_only_where_there_are_enough():
    assert plans.choose(make_spec(batch=1)).heads == 1
    assert plans.choose(make_spec(batch=256)).heads == 2
    assert plans.choose(make_spec(batch=256, key_heads=32)).heads == 1


def absent(monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x: None if x == name else find("jax")
    )


def versions(monkeypatch, **found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: found[name.replace("-", "_")]
    )


def test_jax_triton_names_the_missing_package(monkeypatch):
    absent(monkeypatch, "jax_triton")
    assert jax_triton.supports(make_spec(), "gpu") == "needs the package jax-triton"
    absent(monkeypatch, "triton")
    assert jax_triton.supports(make_spec(), "gpu") == "needs the package triton"


@pytest.mark.parametrize(
    ("bridge", "triton", "reason"),
    [
        ("0.3.1", "3.6.0", None),
        ("0.3.1", "3.5.1", "needs triton >= 3.6 for this jax-triton"),
        ("0.4.1", "3.6.0", "needs triton >= 3.7 for this jax-triton"),
        ("0.4.1", "3.9.0", None),
    ],
)
def test_jax_triton_and_triton_have_to_match(monkeypatch, bridge, triton, reason):
    versions(monkeypatch, jax_triton=bridge, triton=triton)
    assert jax_triton.supports(make_spec(), "gpu") == reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"key_dim": 96}, "key_dim to be a power of two >= 16, not 96"),
        ({"value_dim": 8}, "value_dim to be a power of two >= 16, not 8"),
        ({"nodes": 129}, "at most 128 nodes, not 129"),
        ({"input_dtype": "float16"}, "input dtype float16"),
    ],
)
def test_jax_triton_says_what_it_cannot_do(monkeypatch, sizes, reason):
    versions(monkeypatch, jax_triton="0.3.1", triton="3.6.0")
    assert reason in jax_triton.supports(make_spec(**sizes), "gpu")


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
def test_jax_triton_lowers_without_a_device(kind):
    for name in ("jax_triton", "jax_cuda13_plugin"):
        pytest.importorskip(name)
    for sizes in ({"nodes": 4}, {"nodes": 40, "precision": "high"}):
        with on(kind):
            text = lowered(jax_triton, make_spec(batch=2, **sizes))
        assert "triton_kernel_call" in text


def test_the_names_of_the_result_follow_the_version():
    def old(*, out_shape, compute_capability=None):
        return out_shape, compute_capability

    def new(*, out_type, compute_capability=None):
        return out_type, compute_capability

    with on("NVIDIA H200"):
        assert jax_triton.options(old, 1) == {"out_shape": 1, "compute_capability": 90}
    with on("NVIDIA B200"):
        assert jax_triton.options(new, 1) == {"out_type": 1, "compute_capability": 100}


def two_trees():
    """Return arguments with a fork and a padded chain, and the float64 result."""
    rng = np.random.default_rng(0)
    parents, sizes = ([-1, 0, 1, 1, 0, 4, 5, 4, 7], list(range(-1, 8))), (9, 6)
    spec = make_spec(
        batch=2, nodes=9, key_heads=1, value_heads=2, key_dim=64, precision="high",
        output_dtype="float32",
    )  # fmt: skip
    arrays = [rng.normal(size=x.shape) for x in shapes(spec)[:6]]
    arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
    arrays[3], arrays[4] = -np.abs(arrays[3]), 1 / (1 + np.exp(arrays[4]))
    arrays = [
        jnp.asarray(x, y.dtype) for x, y in zip(arrays, shapes(spec), strict=False)
    ]
    q, k, v, log_decay, beta, state = (np.asarray(x, np.float64) for x in arrays)
    ancestors = np.zeros((2, 9, 9), bool)
    wanted = np.zeros((2, *v.shape))
    for row, size in enumerate(sizes):
        states = {-1: state[row]}
        for t in range(size):
            parent = parents[row][t]
            ancestors[row, t] = ancestors[row, parent] if t else False
            ancestors[row, t, t] = True
            decayed = np.exp(log_decay[row, t])[:, None, None] * states[parent]
            known = decayed @ k[row, t, 0]
            wanted[1, row, t] = beta[row, t][:, None] * (v[row, t] - known)
            states[t] = decayed + wanted[1, row, t][:, :, None] * k[row, t, 0]
            wanted[0, row, t] = states[t] @ q[row, t, 0]
    arrays[:5] = [x.at[1, sizes[1] :].set(jnp.nan) for x in arrays[:5]]
    arrays += [jnp.asarray(x) for x in (ancestors, np.int32(sizes), np.int32([3, 5]))]
    return spec, arrays, wanted


def error(leaf_call, arrays, wanted):
    found = np.stack([np.asarray(x, np.float64) for x in jax.jit(leaf_call)(*arrays)])
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


# Few warpgroups for a CPU that interprets the kernel; see mosaic_gpu_plan.choose. The
# interpreter tells of one that waits at a barrier without having done so in each phase;
# on the device it may wait for ever.
CONFIGS = [
    plans.Config(64, heads=2, blocks=1, staged=True),
    plans.Config(128, heads=2, blocks=1, staged=True),
    plans.Config(128, heads=1, blocks=1),
    plans.Config(64, heads=1, blocks=3),
    plans.Config(64, heads=2, blocks=1, separate=True),
    plans.Config(64, heads=1, blocks=3, ahead=3, separate=True),
]
if jax.default_backend() != "cpu":
    CONFIGS += [
        plans.Config(128, heads=2, teams=2, blocks=1, staged=True),
        plans.Config(128, heads=1, teams=3, blocks=2),
        plans.Config(128, heads=2, teams=2, blocks=1, separate=True),
    ]


@pytest.mark.skipif(
    mosaic_gpu.supports(make_spec(), jax.default_backend(), interpret=True) is not None,
    reason="needs Hopper, or a CPU to interpret the kernel",
)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_cut_gives_the_recurrence(config):
    spec, arrays, wanted = two_trees()
    call = functools.partial(mosaic_gpu.tree_verify, spec=spec, config=config)
    assert error(call, arrays, wanted) < 5e-6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="breaks the interpreted one")
def test_the_check_sees_a_node_among_its_ancestors(monkeypatch):
    from pallas_kernels.tree_verify import mosaic_gpu_steps as steps

    pack = steps.pack
    monkeypatch.setattr(steps, "pack", lambda *x, **y: pack(*x, **y)[:1] * 2)
    spec, arrays, wanted = two_trees()
    call = functools.partial(mosaic_gpu.tree_verify, spec=spec)
    assert error(call, arrays, wanted) > 1e-2
