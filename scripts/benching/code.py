"""Which state of the code a figure was measured with."""

import functools
import hashlib
import pathlib
from collections.abc import Iterator

import jax

from scripts import reporting

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def digest(*parts: str) -> str:
    """Return a digest of files and folders of the project, of JAX and of the device.

    Of folders it takes modules and tuned tables: weights that ship are no code.
    """
    found = hashlib.sha256(f"{jax.__version__} {reporting.device()}".encode())
    for part in parts:
        for path in _sources(ROOT / part):
            found.update(path.relative_to(ROOT).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _sources(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.suffix == ".py" or (file.suffix == ".json" and "tuned" in file.parts):
            yield file
