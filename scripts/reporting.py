"""What every result file says of itself, and how it is written: whole or not at all."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("treewy-jax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def device() -> str:
    """Return what the programs run on."""
    first = jax.devices()[0]
    kind = first.device_kind
    return kind if kind == first.platform else f"{first.platform}, {kind}"


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter here."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a bare clone
            found[name] = None
    return found


def result_path(name: str, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return `folder`/`name`.json, by default in a folder named after the device."""
    if folder is None:
        kind = jax.devices()[0].device_kind.lower()
        folder = RESULTS / re.sub("[^a-z0-9]+", "-", kind).strip("-")
    return folder / f"{name}.json"


def write_result(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Write `fields` as JSON, with date, device and versions in front."""
    about = {
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about | dict(fields), indent=1, allow_nan=False)
    replace(path, lambda draft: draft.write_text(text + "\n", "utf-8"))


def replace(path: pathlib.Path, save: Callable[[pathlib.Path], Any]) -> None:
    """Let `save` write a file beside `path`, which takes its place once complete."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".draft-") as folder:
        draft = pathlib.Path(folder, path.name)
        save(draft)
        os.replace(draft, path)
