"""The Hugging Face side: safetensors files, read and written at byte offsets.

The safetensors package checks the files; it writes only what is whole in memory, so the
bytes are moved here. Headers are kept as they are, hence so are the files.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from models import checkpoints
from models.conversion import stored


def read_headers(folder: pathlib.Path) -> dict[str, str]:
    """Return the header of each weight file, by its name.

    Raises:
        ValueError: as `checkpoints.open_folder` does for damaged or absent files.
    """
    with checkpoints.open_folder(folder):  # checks structure, sizes and doubles
        return {path.name: _header(path) for path in checkpoints.weight_files(folder)}


def _header(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(stored.PREFIX), "little")
        return file.read(length).decode("utf-8")


@dataclasses.dataclass(frozen=True)
class SafetensorsStore:
    """Tensors in safetensors files of `folder`, which have these headers."""

    folder: pathlib.Path
    headers: Mapping[str, str]

    def prepare(self) -> None:
        ends = dict.fromkeys(self.headers, 0)
        for tensor in stored.listed(self.headers):
            ends[tensor.file] = max(ends[tensor.file], tensor.begin + tensor.nbytes)
        for name, header in self.headers.items():
            encoded = header.encode("utf-8")
            path = self.folder / name
            path.touch()
            with open(path, "r+b") as file:
                file.write(len(encoded).to_bytes(stored.PREFIX, "little") + encoded)
                file.truncate(max(ends[name], file.tell()))

    def read(self, tensor: stored.Tensor) -> Iterator[stored.Buffer]:
        try:
            with open(self.folder / tensor.file, "rb", buffering=0) as file:
                file.seek(tensor.begin)
                for part in tensor.parts():
                    yield _read_exactly(file, tensor.part_bytes(part))
        except (OSError, EOFError) as error:
            raise stored.Damage(f"{self.where(tensor)}: {error}") from error

    def write(self, tensor: stored.Tensor, parts: Iterable[stored.Buffer]) -> None:
        with open(self.folder / tensor.file, "r+b") as file:
            file.seek(tensor.begin)
            for part in parts:
                file.write(part)

    def where(self, tensor: stored.Tensor) -> str:
        return f"{self.folder / tensor.file}: tensor {tensor.key}"

    def finish(self) -> list[str]:
        if read_headers(self.folder) != self.headers:
            raise stored.Damage(f"{self.folder}: headers read back otherwise")
        return []


def _read_exactly(file, size: int) -> bytearray:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        count = file.readinto(view[filled:])
        if not count:
            raise EOFError("the file ends inside it")
        filled += count
    return buffer
