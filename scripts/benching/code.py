"""Which state of the code a figure was measured with."""

import ast
import functools
import hashlib
import pathlib
from collections.abc import Iterator

import jax

from scripts import reporting

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = "pallas_kernels"


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


def kernels(*ops: str) -> list[str]:
    """Return the folders of ops, of those they import, and the modules all share."""
    found, todo = set(), list(ops)
    while todo:
        op = todo.pop()
        if op not in found:
            found.add(op)
            todo += _imported(ROOT / KERNELS / op)
    shared = [path.name for path in (ROOT / KERNELS).glob("*.py")]
    return [f"{KERNELS}/{name}" for name in sorted([*found, *shared])]


def _imported(folder: pathlib.Path) -> Iterator[str]:
    """Yield the ops that the modules of one import."""
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            package, *inner = (node.module or "").split(".")
            names = inner[:1] or [alias.name for alias in node.names]
            if package == KERNELS:
                yield from (x for x in names if (ROOT / KERNELS / x).is_dir())


def _sources(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.suffix == ".py" or (file.suffix == ".json" and "tuned" in file.parts):
            yield file
