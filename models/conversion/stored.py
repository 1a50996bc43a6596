"""Stored tensors as bytes: where one lies, the parts it is moved in, its checksum."""

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import tensorstore

# Of one part of a tensor, which is one file of the orbax side. Memory holds about six.
PART_BYTES = 8 * 2**20
PREFIX = 8  # bytes in front of a header: its length, little-endian
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}

Buffer = bytes | bytearray | memoryview
Advance = Callable[[int], None]


class Damage(ValueError):
    """Stored bytes are not those that their checksum was taken of."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor, as the header of its safetensors file describes it.

    Attributes:
        code: dtype as the header spells it ("BF16").
        begin: offset of the first byte in the file.
    """

    key: str
    file: str
    code: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> tensorstore.dtype:
        return tensorstore.dtype(DTYPES[self.code])

    @property
    def itemsize(self) -> int:
        return self.dtype.numpy_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Return a block of at most PART_BYTES whose bytes lie in one piece."""
        block = list(self.shape)
        for axis, size in enumerate(block):
            rest = math.prod(block[axis + 1 :]) * self.itemsize
            if size * rest <= PART_BYTES:
                break
            block[axis] = max(1, PART_BYTES // rest)
        return tuple(max(1, size) for size in block)

    def parts(self) -> Iterator[tuple[slice, ...]]:
        """Yield the parts in the order of their bytes."""
        axes = zip(self.shape, self.part_shape, strict=True)
        return itertools.product(
            *(
                [slice(i, min(i + step, size)) for i in range(0, size, step)]
                for size, step in axes
            )
        )

    def part_bytes(self, part: tuple[slice, ...]) -> int:
        return math.prod(s.stop - s.start for s in part) * self.itemsize


@runtime_checkable
class Store(Protocol):
    """A checkpoint's tensors on disk, of one of the two kinds."""

    def prepare(self) -> None:
        """Make room for tensors to be written; what is there stays."""
        ...

    def read(self, tensor: Tensor) -> Iterator[Buffer]:
        """Yield the bytes of each part; raises Damage where they are not there."""
        ...

    def write(self, tensor: Tensor, parts: Iterable[Buffer]) -> None: ...
    def where(self, tensor: Tensor) -> str:
        """Name the tensor and its place, for messages."""
        ...

    def finish(self) -> list[str]:
        """Complete the files when all tensors are in; returns names to checksum."""
        ...


def listed(headers: Mapping[str, str]) -> list[Tensor]:
    """List the tensors of all files in the order of their bytes.

    Args:
        headers: of each safetensors file, as it stands there.

    Raises:
        NotImplementedError: a dtype or a name that cannot be kept, with the tensor.
    """
    found = []
    for file, header in headers.items():
        data = PREFIX + len(header.encode("utf-8"))
        fields = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        tensors = [
            Tensor(
                key, file, v["dtype"], tuple(v["shape"]), data + v["data_offsets"][0]
            )
            for key, v in fields.items()
        ]
        found += sorted(tensors, key=lambda tensor: tensor.begin)
    for tensor in found:
        _check(tensor)
    return found


def _check(tensor: Tensor) -> None:
    if tensor.code not in DTYPES:
        raise NotImplementedError(
            f"{tensor.file}: {tensor.key} is {tensor.code}; supported: "
            f"{', '.join(DTYPES)}"
        )
    for name in (tensor.file, tensor.key):  # both name files, none outside its folder
        plain = name and pathlib.PurePath(name).name == name
        if not plain or name[0] in "._" or len(name.encode()) > 255:
            raise NotImplementedError(
                f"{tensor.file}: {name!r} is no name for a file of a checkpoint"
            )


def checksum(
    store: Store, tensor: Tensor, advance: Advance = lambda nbytes: None
) -> str:
    """Return the SHA-256 of a stored tensor, read part by part."""
    total = hashlib.sha256()
    for part in store.read(tensor):
        total.update(part)
        advance(len(part))
    return total.hexdigest()


def copy(
    source: Store, target: Store, tensor: Tensor, advance: Advance = lambda nbytes: None
) -> str:
    """Copy a tensor part by part; returns the SHA-256 of what was read.

    Raises:
        Damage: what was written reads back as something else.
    """
    total = hashlib.sha256()

    def parts() -> Iterator[Buffer]:
        for part in source.read(tensor):
            total.update(part)
            yield part
            advance(len(part))

    target.write(tensor, parts())
    if checksum(target, tensor) != total.hexdigest():
        raise Damage(f"{target.where(tensor)}: reads back other than it was written")
    return total.hexdigest()


def file_checksum(path: pathlib.Path) -> str:
    """Return the SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
