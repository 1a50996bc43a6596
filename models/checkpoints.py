"""Checkpoint folders: load a model by name or path, read and write safetensors."""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import tokenizers
from flax import nnx
from safetensors import numpy as safetensors_numpy

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import model as model_lib
from models.qwen3_5 import published
from models.qwen3_5 import target as target_lib
from treewy_jax import commit
from treewy_jax import mesh as mesh_lib

SHIPPED = ("tiny",)
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 15 * 2**20
DTYPE_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
FLOATS = tuple(DTYPE_NAMES.values())


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model: what it is, its weights, and how its text is split.

    Attributes:
        params: nnx state; `nnx.merge(graphdef, params)` is the module.
        tokenizer: None where the folder has no tokenizer.json.
        name: the name or path it was loaded by.
        mesh: the devices that the weights are spread over; None: one device.
    """

    config: config_lib.Qwen3_5Config
    params: Any
    graphdef: Any
    tokenizer: tokenizers.Tokenizer | None
    name: str
    mesh: jax.sharding.Mesh | None = None

    def builder(self, lifecycle: commit.Lifecycle) -> target_lib.Builder:
        """Return the function from `params` to the target that the loop compiles."""
        return target_lib.Builder(self.graphdef, lifecycle)


def load(
    path_or_name: str | os.PathLike,
    dtype: Any = None,
    progress: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Model:
    """Load the model that ships ("tiny") or a folder of Qwen3.5.

    The folder is a Hugging Face one or what scripts/convert.py made of one.

    Args:
        dtype: of the weights in memory, None for the stored one; decay parameters
            and the gated norm are float32 in any case.
        progress: show a bar on stderr.
        mesh: devices to spread the weights over (treewy_jax.mesh), with all of its
            axes; None: one device. Of a tensor that is spread, only the parts that the
            devices of this process hold are read, one at a time.

    Raises:
        ValueError: unknown name, incomplete folder, damaged file, or tensors that do
            not fit the config (all of them named).
        NotImplementedError: a model of the family that this code does not compute.
    """
    from models.qwen3_5 import weights  # it reads and writes through this module

    dtype = memory_dtype(dtype)
    mesh = None if mesh is None else mesh_lib.normal(mesh)
    folder = resolve(path_or_name)
    config = read_config(folder)
    tokenizer = _read_tokenizer(folder)
    with _open_any(folder) as reader:
        graphdef, state = _abstract(config, dtype or weights.stored_dtype(reader))
        params = weights.load_weights(state, reader, config, dtype, progress, mesh)
    return Model(config, params, graphdef, tokenizer, os.fspath(path_or_name), mesh)


@functools.cache
def _abstract(config: config_lib.Qwen3_5Config, dtype: np.dtype) -> tuple[Any, Any]:
    """Return the module's graph and the shapes of its parameters; nothing is made."""
    make = functools.partial(model_lib.Qwen3_5, config, dtype=dtype)
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))


def memory_dtype(dtype: Any) -> np.dtype | None:
    """Check the dtype that weights are asked for; None keeps the stored one.

    Raises:
        ValueError: not a supported float, or float64 without jax_enable_x64.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in FLOATS:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(FLOATS)}")
    if name == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype 'float64': expected jax_enable_x64 to be set for it")
    return jnp.dtype(name)


def resolve(path_or_name: str | os.PathLike) -> pathlib.Path:
    """Return the checkpoint folder behind a shipped name or a path."""
    name = os.fspath(path_or_name)
    allowed = f"expected {' or '.join(SHIPPED)}, or a folder with config.json"
    if name in SHIPPED:
        return pathlib.Path(str(importlib.resources.files("models"))) / (
            f"pretrained/{name}"
        )
    folder = pathlib.Path(name).expanduser()
    if not name or not folder.exists():
        known = name.lower() in published.CONFIGS
        reason = "no weights ship for it" if known else "unknown"
        raise ValueError(f"model {name!r}: {reason}, {allowed}")
    if not folder.is_dir():
        raise ValueError(f"model {name!r}: not a folder, {allowed}")
    return folder


def read_config(folder: str | os.PathLike) -> config_lib.Qwen3_5Config:
    """Read config.json, and EOS ids of generation_config.json where there is one.

    Raises:
        ValueError: no config.json, or one that is no valid configuration.
    """
    path = pathlib.Path(folder, "config.json")
    if not path.is_file():
        raise ValueError(f"model {os.fspath(folder)!r}: the folder has no config.json")
    generation = path.with_name("generation_config.json")
    extra = _read_json(generation) if generation.is_file() else None
    raw = _read_json(path)
    try:
        return config_lib.Qwen3_5Config.from_hf(raw, extra)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises no narrower type
        raise ValueError(f"{path}: not a tokenizer ({error})") from error


@runtime_checkable
class Reader(Protocol):
    """Named tensors, each read only when asked for."""

    @property
    def name(self) -> str: ...
    def keys(self) -> list[str]: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
    def dtype(self, key: str) -> str: ...
    def read(self, key: str, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or a part of it."""
        ...


@dataclasses.dataclass(frozen=True)
class FolderReader:
    """The tensors of all weight files in a folder; headers are read, data is not."""

    name: str
    files: Mapping[str, Any]  # tensor name -> the open file that holds it

    def keys(self) -> list[str]:
        return list(self.files)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.files[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """Return the numpy name of a float type, else the name the file uses."""
        code = str(self.files[key].get_slice(key).get_dtype())
        return DTYPE_NAMES.get(code, code)

    def read(self, key: str, part: tuple[slice, ...] | None = None) -> np.ndarray:
        file = self.files[key]
        return file.get_tensor(key) if part is None else file.get_slice(key)[part]


@contextlib.contextmanager
def open_folder(folder: str | os.PathLike) -> Iterator[FolderReader]:
    """Open the weight files that the index names, or all there are without one.

    Raises:
        ValueError: no weight files, a file the index names is absent, a file is
            truncated or otherwise damaged, or two files hold the same tensor.
    """
    files: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for path in weight_files(pathlib.Path(folder)):
            try:
                opened = stack.enter_context(safetensors.safe_open(path, "numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path}: truncated or damaged safetensors file ({error})"
                ) from error
            for key in opened.keys():
                if key in files:
                    raise ValueError(f"{path}: {key} is in another file as well")
                files[key] = opened
        yield FolderReader(os.fspath(folder), files)


def _open_any(folder: pathlib.Path) -> contextlib.AbstractContextManager["Reader"]:
    """Open an orbax folder of scripts/convert.py, or a Hugging Face one."""
    from models.conversion import manifest  # it reads through this module

    if not manifest.is_orbax(folder):
        return open_folder(folder)
    from models.conversion import orbax_store

    return contextlib.nullcontext(orbax_store.open_reader(folder))


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the weight files that the index names, or all there are without one."""
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"model {str(folder)!r}: no *.safetensors in the folder")
        return found
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: field weight_map is missing")
    paths = [folder / name for name in sorted(set(names.values()))]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ValueError(f"{index}: names files that are absent: {', '.join(absent)}")
    return paths


@runtime_checkable
class Tensor(Protocol):
    """A tensor to write: its size is known before it is made."""

    @property
    def nbytes(self) -> int: ...
    def read(self) -> np.ndarray: ...


def write_folder(
    folder: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    documents: Mapping[str, dict | str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weight files with their index, and documents (JSON or text) beside them.

    Files take their places only when all of them are written. Weight files of an
    earlier save are removed, other files of the folder stay.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes}: expected at least 1")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        draft = pathlib.Path(temporary)
        for name, keys in shards.items():
            arrays = {key: tensors[key].read() for key in keys}
            safetensors_numpy.save_file(arrays, draft / name, {"format": "pt"})
        for name, document in {**documents, INDEX: index}.items():
            text = (
                document
                if isinstance(document, str)
                else json.dumps(document, indent=1)
            )
            (draft / name).write_text(text, "utf-8")
        written = sorted(draft.iterdir())
        for path in written:
            os.replace(path, folder / path.name)
        for path in folder.glob("model*.safetensors"):
            if path.name not in shards:
                path.unlink()


def _shards(
    tensors: Mapping[str, Tensor], max_shard_bytes: int
) -> dict[str, list[str]]:
    """Fill files in order; a header entry is at most the name and 128 bytes."""
    groups: list[list[str]] = []
    room = 0
    for key, tensor in tensors.items():
        size = tensor.nbytes + len(key) + 128
        if not groups or size > room:
            groups.append([])
            room = max_shard_bytes - 128
        groups[-1].append(key)
        room -= size
    count = len(groups)
    return {
        f"model-{i:05}-of-{count:05}.safetensors": keys
        for i, keys in enumerate(groups, 1)
    }
