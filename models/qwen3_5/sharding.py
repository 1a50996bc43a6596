"""Where the parameters and the cache of a Qwen3.5 model lie on a mesh of devices.

`LETTERS` names the dimensions of each parameter; treewy_jax.sharding says which axis a
letter is spread over, and that it stays whole where the axis does not divide it. Some
parameters are rearranged, so that a device's part is that of its own heads:

* the conv channels q | k | v are ordered by device: q, k, v of its heads;
* so are the joint columns q | k | v | b | a | z of the input projection;
* key heads of attention that are fewer than the devices are there once for each.

A spread model computes what the stored one does; its parameters are not to be saved.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Shaped

from models.qwen3_5 import config as config_lib
from treewy_jax import cache as cache_lib
from treewy_jax import mesh as mesh_lib
from treewy_jax import sharding

Path = tuple[Any, ...]
Part = tuple[slice, ...]
Config = config_lib.Qwen3_5Config

# By the end of a parameter's path; others are whole on each device. A letter of heads
# also stands for their channels, which follow each other.
LETTERS = {
    ("embed_tokens", "embedding"): "V H",
    ("lm_head", "kernel"): "H V",
    ("in_proj", "kernel"): "H joint",
    ("conv1d", "weight"): "C W",
    ("A_log",): "Hv",
    ("dt_bias",): "Hv",
    ("out_proj", "kernel"): "Hv H",
    ("q_proj", "kernel"): "H heads",
    ("k_proj", "kernel"): "H kv",
    ("v_proj", "kernel"): "H kv",
    ("o_proj", "kernel"): "heads H",
    ("mlp", "gate_up_proj"): "H G I",
    ("shared_expert", "gate_up_proj"): "H G I",
    ("down_proj", "kernel"): "I H",
    ("experts", "gate_up_proj"): "E H F2",
    ("experts", "down_proj"): "E F H",
}
STATE = "B Hv Dv Dk"


def path_of(keys: tuple[Any, ...]) -> Path:
    """Return the names on the way to a parameter, from its path in a pytree."""
    if isinstance(keys[-1], jax.tree_util.GetAttrKey):  # the value of an nnx variable
        keys = keys[:-1]
    return tuple(getattr(key, "key", getattr(key, "idx", None)) for key in keys)


def letters(state: Any) -> list[str]:
    """Return the letters of the parameters in an nnx state, or a part of one."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [_letters(path_of(keys)) for keys, _ in leaves]


def _letters(path: Path) -> str:
    found = (path[-n:] for n in (1, 2))
    return next((LETTERS[end] for end in found if end in LETTERS), "")


def axes(
    config: Config, mesh: mesh_lib.AnyMesh | None = None, batch: int | None = None
) -> sharding.Axes:
    """Return the axes of each letter; mesh None takes the one in use."""
    mesh = sharding.active() if mesh is None else mesh
    sizes = {
        "B": () if batch is None else (batch,),
        "Hk": (config.linear_num_key_heads,),
        "Hv": (config.linear_num_value_heads,),
        "heads": (config.num_attention_heads,),
        "kv": (config.num_key_value_heads * kv_copies(config, mesh),),
        "E": (config.num_experts,),
        "I": (config.shared_expert_intermediate_size or config.intermediate_size or 0,),
        "V": (config.vocab_size,),
    }
    return sharding.split(sizes, mesh)


def kv_copies(config: Config, mesh: mesh_lib.AnyMesh | None) -> int:
    """Return how often each key head is there: once for each device that reads it."""
    devices = 1 if mesh is None else mesh.shape["tensor"]
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % devices or devices % kv:
        return 1
    return devices // kv


def blocks(config: Config, letter: str) -> tuple[int, ...]:
    """Return the widths of what lies side by side in the channels of a letter.

    C: q, k and v; joint: b, a and z behind them.
    """
    conv = (config.key_dim, config.key_dim, config.value_dim)
    heads = config.linear_num_value_heads
    return conv if letter == "C" else (*conv, heads, heads, config.value_dim)


def pieces(config: Config, letter: str, parts: int, number: int) -> list[slice]:
    """Return the stored channels of one part: its share of each block, in order."""
    found, start = [], 0
    for width in blocks(config, letter):
        share = width // parts
        found.append(slice(start + number * share, start + (number + 1) * share))
        start += width
    return found


def parameter_sharding(path: Path, config: Config, mesh: Mesh) -> NamedSharding:
    """Return where a parameter lies."""
    return NamedSharding(mesh, sharding.spec(_letters(path), axes(config, mesh)))


def place(
    path: Path,
    shape: tuple[int, ...],
    read: Callable[[Part], Shaped[np.ndarray, "..."]],
    config: Config,
    mesh: Mesh,
) -> jax.Array:
    """Return a stored parameter on the mesh, read part by part.

    A process reads what its devices hold, each part once; one is in memory at a time.
    Key heads that are there more than once are read whole.

    Args:
        shape: as stored.
        read: returns a part of the stored parameter.
    """
    text = _letters(path).split()
    if "kv" in text:
        whole = tuple(slice(0, size) for size in shape)
        array = _copy_heads(read(whole), config, mesh)
        shape, read = array.shape, array.__getitem__
    for letter in {"C", "joint"} & set(text):
        read = _in_order(read, text.index(letter), letter, config, mesh)
    where = parameter_sharding(path, config, mesh)
    holders: dict[Part, list[jax.Device]] = {}
    for device, part in where.addressable_devices_indices_map(shape).items():
        holders.setdefault(part, []).append(device)
    placed = [
        copy
        for part, devices in holders.items()
        for copy in _copies(read(part), devices)
    ]
    return jax.make_array_from_single_device_arrays(shape, where, placed)


def _copy_heads(array, config: Config, mesh: Mesh) -> Shaped[np.ndarray, "H kv"]:
    """Repeat every key head for the devices that read it."""
    heads = array.reshape(*array.shape[:-1], -1, config.head_dim)
    copied = np.repeat(heads, kv_copies(config, mesh), axis=-2)
    return copied.reshape(*array.shape[:-1], -1)


def _in_order(read, axis: int, letter: str, config: Config, mesh: Mesh) -> Callable:
    """Return a reader of parts of the parameter whose channels are ordered by device.

    A part is put together of what `read` returns of each block.
    """
    parts = sharding.parts(letter, axes(config, mesh), mesh)
    if parts == 1:
        return read
    size = sum(blocks(config, letter)) // parts

    def read_ordered(part: Part) -> Shaped[np.ndarray, "..."]:
        found = pieces(config, letter, parts, part[axis].start // size)
        read_each = (read((*part[:axis], x, *part[axis + 1 :])) for x in found)
        return np.concatenate(list(read_each), axis)

    return read_ordered


def _copies(array, devices) -> list[jax.Array]:
    copies = [jax.device_put(array, device) for device in devices]
    # Or the next part would be read while this one is still in memory.
    return jax.block_until_ready(copies)


def abstract(state: Any, config: Config, mesh: Mesh) -> Any:
    """Return shapes and shardings of parameters on a mesh, from their stored shapes.

    `out_shardings` of a program that makes random weights, or what to compile for.
    """

    def one(keys, leaf):
        path, shape = path_of(keys), list(leaf.shape)
        text = _letters(path).split()
        if "kv" in text:
            shape[text.index("kv")] *= kv_copies(config, mesh)
        where = parameter_sharding(path, config, mesh)
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(one, state)


def cache_letters(cache: cache_lib.HybridCache) -> Any:
    """Return the letters of every array of a cache; states may be plain or opaque."""
    found = sharding.letters_of(cache_lib.HybridCache, cache)
    states = (
        sharding.letters_of(type(state), state) or STATE for state in cache.recurrent
    )
    return cache_lib.HybridCache(**(vars(found) | {"recurrent": tuple(states)}))


def cache_shardings(cache: cache_lib.HybridCache, config: Config, mesh: Mesh) -> Any:
    """Return where a cache (arrays or their shapes) lies."""
    places = axes(config, mesh, cache.length.shape[0])
    return jax.tree.map(
        lambda text: NamedSharding(mesh, sharding.spec(text, places)),
        cache_letters(cache),
    )


def constrain_cache(
    cache: cache_lib.HybridCache, config: Config
) -> cache_lib.HybridCache:
    """Keep the cache where it lies on the mesh in use, if there is one."""
    if sharding.active() is None:
        return cache
    places = axes(config, batch=cache.length.shape[0])
    return sharding.constrain(cache, cache_letters(cache), places)
