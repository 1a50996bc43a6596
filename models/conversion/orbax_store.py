"""The orbax side: a PyTree {stored name: array as stored}, an array a folder.

Orbax' OCDBT files mix tensors and its save holds whole arrays and starts over, so each
array is written by tensorstore in orbax' per-parameter layout, and orbax adds its own
metadata; any orbax restores it. Arrays keep shape, dtype and bits of the Hugging Face
tensors; transposes and `KEEP_FLOAT32` come where a model is loaded.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore
from jaxtyping import Shaped

from models.conversion import manifest as manifest_lib
from models.conversion import stored

PARAMS = "params"
METADATA = "_METADATA"


@functools.cache
def _context() -> tensorstore.Context:
    """Return the one context of all arrays: more threads would keep more buffers.

    Files are flushed together before the folder takes its place.
    """
    one = {"limit": 1}
    return tensorstore.Context(
        {
            "data_copy_concurrency": one,
            "file_io_concurrency": one,
            "file_io_sync": False,
        }
    )


@dataclasses.dataclass(frozen=True)
class OrbaxStore:
    """Tensors as uncompressed zarr arrays, a file a part, below `folder`/params."""

    folder: pathlib.Path
    keys: tuple[str, ...]

    def prepare(self) -> None:
        (self.folder / PARAMS).mkdir(exist_ok=True)

    def read(self, tensor: stored.Tensor) -> Iterator[stored.Buffer]:
        try:
            array = tensorstore.open(self._spec(tensor), context=_context()).result()
            if array.dtype != tensor.dtype or array.shape != tensor.shape:
                raise ValueError(f"is {array.dtype.name} {array.shape}")
            for part in tensor.parts():
                yield _bytes(array[part].read(order="C").result())
        except (ValueError, OSError) as error:
            raise self._damage(tensor, error) from error

    def read_part(
        self, tensor: stored.Tensor, part: tuple[slice, ...]
    ) -> Shaped[np.ndarray, "..."]:
        """Return a part of a tensor; raises Damage where it is not there."""
        try:
            array = tensorstore.open(self._spec(tensor), context=_context()).result()
            return array[part].read(order="C").result()
        except (ValueError, OSError) as error:
            raise self._damage(tensor, error) from error

    def _damage(self, tensor: stored.Tensor, error: Exception) -> stored.Damage:
        reason = str(error).partition(" [tensorstore_spec")[0]
        return stored.Damage(f"{self.where(tensor)}: {reason}")

    def write(self, tensor: stored.Tensor, parts: Iterable[stored.Buffer]) -> None:
        layout = {"chunks": tensor.part_shape, "compressor": None, "order": "C"}
        spec = self._spec(tensor) | {
            "dtype": tensor.dtype.name,
            "metadata": {"shape": tensor.shape, "dimension_separator": "."} | layout,
        }
        array = tensorstore.open(
            spec, create=True, delete_existing=True, context=_context()
        ).result()
        for part, buffer in zip(tensor.parts(), parts, strict=True):
            shape = [s.stop - s.start for s in part]
            values = np.frombuffer(buffer, tensor.dtype.numpy_dtype).reshape(shape)
            array[part].write(values).result()

    def where(self, tensor: stored.Tensor) -> str:
        return f"{self._path(tensor)}: tensor {tensor.key}"

    def finish(self) -> list[str]:
        _write_metadata(self.folder / PARAMS, self.keys)
        return [f"{PARAMS}/{METADATA}"]

    def _path(self, tensor: stored.Tensor) -> pathlib.Path:
        return self.folder / PARAMS / tensor.key

    def _spec(self, tensor: stored.Tensor) -> dict[str, Any]:
        place = {"driver": "file", "path": f"{self._path(tensor).absolute()}/"}
        return {"driver": "zarr", "kvstore": place}


def _bytes(array: Shaped[np.ndarray, "..."]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


class _Written:
    """A leaf whose array is on disk already."""


def _write_metadata(folder: pathlib.Path, keys: Iterable[str]) -> None:
    """Let orbax describe the arrays in `folder` as a PyTree that it saved."""
    import orbax.checkpoint as ocp  # 1 s, and no one who only reads needs it

    class Handler(ocp.type_handlers.NumpyHandler):
        """Saves nothing; to readers these are numpy arrays."""

        async def serialize(self, values, infos, args=None):
            return []

    registry = ocp.type_handlers.create_type_handler_registry((_Written, Handler()))
    (folder / METADATA).unlink(missing_ok=True)
    tree = {key: _Written() for key in keys}
    with _silent():
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, type_handler_registry=registry
        )
        handler.save(folder, args=ocp.args.PyTreeSave(tree))
        handler.finalize(folder)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep back orbax' warnings that this is neither jax.Array nor OCDBT."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def restore(
    folder: pathlib.Path, sharding: Callable[[str, tuple[int, ...]], Any]
) -> dict[str, jax.Array]:
    """Restore every tensor by its stored name, placed as asked; a device reads its own.

    Checksums are not compared: no one reads a whole tensor.

    Args:
        folder: made by scripts/convert.py.
        sharding: of a tensor by name and shape, on any mesh.
    """
    import orbax.checkpoint as ocp

    folder = pathlib.Path(folder).absolute()
    like = {
        tensor.key: jax.ShapeDtypeStruct(
            tensor.shape,
            tensor.dtype.numpy_dtype,
            sharding=sharding(tensor.key, tensor.shape),
        )
        for tensor in stored.listed(manifest_lib.read(folder).headers)
    }
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / PARAMS, like)


@dataclasses.dataclass(frozen=True)
class Reader:
    """`checkpoints.Reader` of an orbax folder; each tensor's checksum is compared.

    Before its first part is returned a tensor is read once from end to end.
    """

    name: str
    store: OrbaxStore
    tensors: Mapping[str, stored.Tensor]
    checksums: Mapping[str, str]
    compared: set[str] = dataclasses.field(default_factory=set)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

    def dtype(self, key: str) -> str:
        return self.tensors[key].dtype.name

    def read(
        self, key: str, part: tuple[slice, ...] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        tensor = self.tensors[key]
        if part is not None:
            if key not in self.compared:
                self._compare(tensor)
            return self.store.read_part(tensor, part)
        out = np.empty(tensor.shape, tensor.dtype.numpy_dtype)
        self._compare(tensor, out)
        return out

    def _compare(
        self, tensor: stored.Tensor, out: Shaped[np.ndarray, "..."] | None = None
    ) -> None:
        """Read a tensor in small parts, into `out` where there is one.

        Raises Damage where its checksum differs.
        """
        total = hashlib.sha256()
        for part, buffer in zip(tensor.parts(), self.store.read(tensor), strict=True):
            total.update(buffer)
            if out is not None:
                out[part] = np.frombuffer(buffer, out.dtype).reshape(out[part].shape)
        if total.hexdigest() != self.checksums[tensor.key]:
            raise stored.Damage(f"{self.store.where(tensor)}: its checksum differs")
        self.compared.add(tensor.key)


def open_reader(folder: pathlib.Path) -> Reader:
    """Open an orbax folder of scripts/convert.py for `models.load`."""
    manifest = manifest_lib.read(folder)
    found = {tensor.key: tensor for tensor in stored.listed(manifest.headers)}
    store = OrbaxStore(folder, tuple(found))
    return Reader(str(folder), store, found, manifest.checksums)
