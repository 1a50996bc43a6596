"""Any published size with weights that look random, made where they are kept.

Each parameter is the output of one small program that hashes the places of its
elements, so nothing passes through the host and a sharded array is born sharded.
Values are uniform with variance 1 / fan-in, decay rates and steps spread as a fresh
model's are; norms begin at one. A path and the seed decide a parameter: a cut model is
the beginning of the whole one.

Experts are chosen by the token alone, so that their load is known. The embedding writes
`identity` channels of noise and one of ones to the residual stream, where no layer
writes; a router is signs on the former, orthogonal in every `identity` experts, and a
bias on the latter. With load_e the share of tokens that go to expert e,

    score_e = gain / rms * (noise_e + bias_e),  noise_e ~ N(0, 1)
    bias_e  = Phi^-1(load_e)

since the k-th best of many scores, here 0, hardly varies.
"""

import dataclasses
import functools
import math
import statistics
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import random as jax_random
from jaxtyping import Array, Float, UInt32

from models import checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import model as model_lib
from models.qwen3_5 import published, sharding, stored
from treewy_jax import mesh as mesh_lib

ROUTERS = ("uniform", "zipf")
MOST_LOAD = 0.95  # of the tokens that one expert may see
ROUTER_GAIN = 4.0
WRITERS = ("o_proj", "out_proj", "down_proj")  # what layers add to the residual stream


def random(
    name: str,
    *,
    dtype: Any = None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    router: str = "uniform",
    layers: int | None = None,
) -> checkpoints.Model:
    """Return a published size with random weights, whole or cut to its first layers.

    Args:
        name: of `models.qwen3_5.published`, such as "qwen3.5-35b-a3b".
        dtype: of the weights but the float32 ones (`weights.KEEP_FLOAT32`); None as
            published.
        mesh: where parameters lie as `models.qwen3_5.sharding` says; the numbers of
            those that it rearranges are others than without a mesh.
        router: loads of the experts: equal, or falling as 1 / rank ("zipf").
        layers: of the target, a multiple of the super-block; None: all.

    Raises:
        ValueError: an unknown name, dtype or router, a seed or layers out of range.
    """
    options = dict(dtype=dtype, seed=seed, mesh=mesh, router=router)
    return of(cut(name, layers), name, **options)


def of(
    config: config_lib.Qwen3_5Config,
    name: str,
    *,
    dtype: Any = None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    router: str = "uniform",
) -> checkpoints.Model:
    """Return a model of any sizes with random weights; options as of `random`.

    `name` is what the model calls itself.
    """
    dtype = checkpoints.memory_dtype(dtype or config.dtype)
    graphdef, shapes = graph(config, dtype)
    if mesh is not None:
        mesh = mesh_lib.normal(mesh)
        shapes = sharding.abstract(shapes, config, mesh)
    params = make(config, shapes, seed=seed, router=router)
    return checkpoints.Model(config, params, graphdef, None, name, mesh)


def cut(name: str, layers: int | None = None) -> config_lib.Qwen3_5Config:
    """Return the configuration of a published size with its first `layers` only."""
    whole = published.get(name)
    if layers is None:
        return whole
    most, block = whole.num_hidden_layers, whole.full_attention_interval
    if not 1 <= layers <= most or layers % block:
        raise ValueError(
            f"layers is {layers}; {name} allows multiples of {block} up to {most}"
        )
    return dataclasses.replace(whole, num_hidden_layers=layers)


def graph(config: config_lib.Qwen3_5Config, dtype: Any) -> tuple[Any, Any]:
    """Return the module's graph and the shapes of its parameters; nothing is made."""
    build = functools.partial(model_lib.Qwen3_5, config, dtype=dtype)
    return nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(key(0)))))


def make(
    config: config_lib.Qwen3_5Config,
    shapes: Any,
    *,
    seed: int = 0,
    router: str = "uniform",
) -> Any:
    """Return parameters of these shapes, where their shardings say; see `random`."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; 0 to 2**32 - 1 is allowed")
    bias = _bias(config, router)
    leaves, structure = jax.tree.flatten(shapes)
    made = []
    for slot, leaf in zip(stored.slots(shapes), leaves, strict=True):
        recipe = _recipe(slot.path, config)
        program = _program(recipe, leaf.shape, leaf.dtype, leaf.sharding)
        name = zlib.crc32(".".join(map(str, slot.path)).encode())
        made.append(program(np.uint32(name), np.uint32(seed), bias))
    return jax.tree.unflatten(structure, made)


def expert_loads(
    config: config_lib.Qwen3_5Config, router: str = "uniform"
) -> Float[np.ndarray, " E"]:
    """Return the share of tokens that goes to each expert, the busiest first.

    They add up to the experts of a token. "zipf": min(0.95, c / rank).

    Raises ValueError for an unknown router.
    """
    if router not in ROUTERS:
        raise ValueError(f"router {router!r}: allowed are {', '.join(ROUTERS)}")
    experts, chosen = config.num_experts, config.num_experts_per_tok
    if router == "uniform" or chosen >= MOST_LOAD * experts:
        return np.full(experts, chosen / max(experts, 1))
    falling = 1 / np.arange(1, experts + 1)
    low, high = 0.0, float(experts * chosen)
    for _ in range(60):
        scale = (low + high) / 2
        enough = np.minimum(MOST_LOAD, scale * falling).sum() >= chosen
        low, high = (low, scale) if enough else (scale, high)
    return np.minimum(MOST_LOAD, high * falling)


def _bias(config: config_lib.Qwen3_5Config, router: str) -> Float[np.ndarray, " E"]:
    loads = expert_loads(config, router)
    if len(np.unique(loads)) < 2:
        return np.zeros(len(loads), np.float32)
    quantile = statistics.NormalDist().inv_cdf
    return np.array([quantile(load) for load in loads], np.float32)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How a parameter is made.

    Attributes:
        kind: name of the function of `_KINDS`.
        scale: root mean square of noise.
        identity: channels of the residual stream that carry a token's identity; one
            more is constant; none in dense models.
    """

    kind: str
    scale: float = 1.0
    identity: int = 0


def _identity(size: int) -> int:
    """Return a power of two: a sixteenth of the channels, in small models more."""
    most = max(size // 16, min(32, size // 2))
    return 1 << (most.bit_length() - 1)


def _recipe(path: stored.Path, config: config_lib.Qwen3_5Config) -> _Recipe:
    size, names = config.hidden_size, [part for part in path if isinstance(part, str)]
    identity = _identity(size) if config.is_moe else 0
    leaf = names[-1]
    if names[-2:] == ["gate", "weight"]:
        return _Recipe("router", ROUTER_GAIN, identity)
    if leaf == "gate_up_proj" and "experts" not in names:
        return _Recipe("noise", size**-0.5)
    if leaf in ("A_log", "dt_bias"):
        return _Recipe(leaf)
    if leaf == "weight":
        gated = names[-3:-1] == ["linear_attn", "norm"]
        conv = config.linear_conv_kernel_dim**-0.5 / math.sqrt(3)
        return (
            _Recipe("noise", conv)
            if "conv1d" in names
            else _Recipe("ones" if gated else "zeros")
        )
    if leaf == "embedding":
        scale = size**-0.5 if config.tie_word_embeddings else 1.0
        return _Recipe("embedding", scale, identity)
    kind = "noise"
    if identity and any(name in WRITERS for name in names):
        kind = "writer"
    elif identity and names[-2:] == ["fc", "kernel"]:
        kind = "joint"
    return _Recipe(kind, 0.0, identity)


@functools.cache
def _program(recipe: _Recipe, shape, dtype, place) -> Callable:
    """Return the compiled maker of arrays of one kind; names and seeds are data."""

    def make(name, seed, bias):
        fan_in = shape[-2] if len(shape) > 1 else 1
        scaled = (
            recipe if recipe.scale else dataclasses.replace(recipe, scale=fan_in**-0.5)
        )
        start = mix(mix(seed + jnp.uint32(0x9E3779B9)) ^ name)
        return _KINDS[recipe.kind](scaled, start, shape, bias).astype(dtype)

    return jax.jit(make, out_shardings=place)


def _noise(recipe, seed, shape, bias) -> Float[Array, "..."]:
    return recipe.scale * math.sqrt(3) * _uniform(seed, shape)


def _zeros(recipe, seed, shape, bias) -> Float[Array, "..."]:
    return jnp.zeros(shape)


def _ones(recipe, seed, shape, bias) -> Float[Array, "..."]:
    return jnp.ones(shape)


def _log_rate(recipe, seed, shape, bias) -> Float[Array, " Hv"]:
    """Decay rates spread over (0.05, 16)."""
    return jnp.log(0.05 + 15.95 * (0.5 + 0.5 * _uniform(seed, shape)))


def _step_bias(recipe, seed, shape, bias) -> Float[Array, " Hv"]:
    """Inverse softplus of steps spread log-uniformly over (1e-3, 1e-1)."""
    step = jnp.exp(math.log(1e-2) + math.log(10) * _uniform(seed, shape))
    return step + jnp.log(-jnp.expm1(-step))


def _embedding(recipe, seed, shape, bias) -> Float[Array, "V H"]:
    found = _noise(recipe, seed, shape, bias)
    if not recipe.identity:
        return found
    return jnp.where(_place(shape, -1) == recipe.identity, 1.0, found)


def _writer(recipe, seed, shape, bias) -> Float[Array, "... H"]:
    """Noise that leaves identity and the constant alone."""
    kept = _place(shape, -1) <= recipe.identity
    return jnp.where(kept, 0.0, _noise(recipe, seed, shape, bias))


def _joint(recipe, seed, shape, bias) -> Float[Array, "H2 H"]:
    """Noise, and the embedding's identity and constant passed through."""
    same = _place(shape, 0) == _place(shape, 1)
    found = _writer(recipe, seed, shape, bias)
    return jnp.where(same & (_place(shape, 1) <= recipe.identity), 1.0, found)


def _router(recipe, seed, shape, bias) -> Float[Array, "E1 H"]:
    """Signs below identity, the bias of each expert below the constant.

    Walsh functions, times random signs of the channels for every `identity` experts:
    with random signs alone some experts would be like others and share their load.
    The last row, the gate of the shared expert, is noise.
    """
    identity, experts = jnp.uint32(recipe.identity), shape[0] - 1
    expert, channel = _place(shape, 0), _place(shape, 1)
    turned = mix(mix(channel ^ seed) ^ (expert // identity)) >> 31
    walsh = lax.population_count(channel & (expert % identity))
    sign = 1.0 - 2.0 * ((turned + walsh) % 2).astype(jnp.float32)
    # Which experts are busy differs from layer to layer.
    order = jnp.argsort(mix(jnp.arange(experts, dtype=jnp.uint32) ^ mix(seed)))
    bias = jnp.pad(bias[order], (0, 1))[:, None]
    below = jnp.where(channel == identity, bias, 0.0)
    noise = sign / math.sqrt(recipe.identity)
    routed = recipe.scale * jnp.where(channel < identity, noise, below)
    gate = math.sqrt(3 / shape[1]) * _uniform(seed, shape)
    return jnp.where(expert < experts, routed, gate)


_KINDS = {
    "noise": _noise,
    "zeros": _zeros,
    "ones": _ones,
    "A_log": _log_rate,
    "dt_bias": _step_bias,
    "embedding": _embedding,
    "writer": _writer,
    "joint": _joint,
    "router": _router,
}


def _place(shape: tuple[int, ...], axis: int) -> UInt32[Array, "..."]:
    """Return each element's place along an axis."""
    return lax.broadcasted_iota(jnp.uint32, shape, axis % len(shape))


def _uniform(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return numbers in [-1, 1) by the hash of their places.

    The last axis and the others are hashed apart: their product may exceed 32 bits,
    and all but one scrambling is of few numbers.
    """
    outer = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for axis in range(len(shape) - 1):
        outer = outer * jnp.uint32(shape[axis]) + _place(outer.shape, axis)
    inner = mix(lax.iota(jnp.uint32, shape[-1]))
    bits = mix(mix(outer ^ seed) ^ inner)
    return (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1.0


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scramble the bits of 32-bit words (the finaliser of Murmur3, Appleby 2008)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _bits(key: UInt32[Array, " 1"], width: int, shape: tuple[int, ...]) -> Array:
    number = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return mix(mix(number) ^ key[0]).astype(f"uint{width}")


# Numbers that look random, and programs that compile at once: JAX' own generators take
# minutes of compilation where many arrays are made in one program.
HASH = jax_random.define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: mix(seed.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))[None],
    split=lambda key, shape: _bits(key, 32, shape)[..., None],
    random_bits=_bits,
    fold_in=lambda key, data: mix(key ^ mix(data.astype(jnp.uint32) + 1)),
    name="hash",
    tag="hash",
)


def key(seed: int) -> jax.Array:
    """Return a key of the cheap generator, for the functions of `jax.random`."""
    return jax.random.key(seed, impl=HASH)
