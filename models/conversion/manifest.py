"""What a converted folder says of itself: conversion.json, written last."""

import dataclasses
import fcntl
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from models.conversion import stored

NAME = "conversion.json"
FORMAT = 1
HUGGINGFACE, ORBAX = "huggingface", "orbax"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What lies in a converted folder.

    Attributes:
        kind: HUGGINGFACE or ORBAX.
        headers: of the safetensors files, verbatim, by file name.
        checksums: SHA-256 of each tensor's bytes.
        documents: SHA-256 of every other file, by its path in the folder.
    """

    kind: str
    headers: Mapping[str, str]
    checksums: Mapping[str, str]
    documents: Mapping[str, str]


def is_orbax(folder: pathlib.Path) -> bool:
    """Return whether `folder` is an orbax checkpoint made by scripts/convert.py."""
    return pathlib.Path(folder, NAME).is_file() and read(folder).kind == ORBAX


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write conversion.json."""
    described = {
        tensor.key: {
            "file": tensor.file,
            "dtype": tensor.code,
            "shape": tensor.shape,
            "sha256": manifest.checksums[tensor.key],
        }
        for tensor in stored.listed(manifest.headers)
    }
    body = {
        "format": FORMAT,
        "kind": manifest.kind,
        "tensors": described,
        "documents": dict(manifest.documents),
        "headers": dict(manifest.headers),
    }
    text = json.dumps({"sha256": fingerprint(body)} | body, indent=1)
    (folder / NAME).write_text(text + "\n", "utf-8")


def read(folder: pathlib.Path) -> Manifest:
    """Read conversion.json.

    Raises:
        Damage: it is not as it was written.
        NotImplementedError: it is of another format.
    """
    path = pathlib.Path(folder, NAME)
    try:
        body = json.loads(path.read_text("utf-8"))
        whole = body.pop("sha256") == fingerprint(body)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise stored.Damage(f"{path}: damaged ({error})") from error
    if not whole:
        raise stored.Damage(f"{path}: damaged (its own checksum differs)")
    if body["format"] != FORMAT:
        raise NotImplementedError(f"{path}: format {body['format']}; read: {FORMAT}")
    checksums = {key: fields["sha256"] for key, fields in body["tensors"].items()}
    return Manifest(body["kind"], body["headers"], checksums, body["documents"])


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Journal:
    """The checksum of each tensor that an unfinished conversion has written.

    One line each, behind a line that says what is converted; a torn last line is
    dropped. Only one process at a time holds it.
    """

    def __init__(self, path: pathlib.Path, conversion: str):
        self._file = open(path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{path.parent}: another process is at work here"
            ) from None
        first, self.done, size = _parse(path)
        self._file.truncate(size)
        if first is None:
            self._append({"conversion": conversion})

    def add(self, key: str, checksum: str) -> None:
        """Note that a tensor is written."""
        self._append({"key": key, "sha256": checksum})
        self.done[key] = checksum

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, str]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def peek(path: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """Return what a journal is of, None where it is of nothing yet, and its tensors."""
    first, done, _ = _parse(path)
    return first, done


def _parse(path: pathlib.Path) -> tuple[str | None, dict[str, str], int]:
    data = path.read_bytes() if path.is_file() else b""
    size = data.rfind(b"\n") + 1
    lines = []
    for line in data[:size].splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # a damaged line is a tensor not written
            lines.append({})
    first = str(lines[0].get("conversion")) if lines else None
    done = {
        line["key"]: line["sha256"]
        for line in lines
        if {"key", "sha256"} <= line.keys()
    }
    return first, done, size
