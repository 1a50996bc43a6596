"""What a conversion needs to know, checked before anything is written."""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

from models.conversion import manifest as manifest_lib
from models.conversion import safetensors_store, stored

# What travels beside the weights: configs, tokenizers, chat templates, texts.
DOCUMENTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
JOURNAL = ".journal"
OTHER = {
    manifest_lib.HUGGINGFACE: manifest_lib.ORBAX,
    manifest_lib.ORBAX: manifest_lib.HUGGINGFACE,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that may begin, or one whose result is there to be verified.

    Attributes:
        expected: checksums of the source's tensors, where a manifest has them.
        complete: `out` is there already.
    """

    source: pathlib.Path
    out: pathlib.Path
    kind: str
    headers: Mapping[str, str]
    tensors: list[stored.Tensor]
    documents: Mapping[str, str]
    expected: Mapping[str, str]
    complete: bool

    @property
    def staging(self) -> pathlib.Path:
        """Where `out` grows."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def identity(self) -> str:
        """Tell conversions apart by what they copy, not by where it lies."""
        return manifest_lib.fingerprint([self.kind, dict(self.headers)])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def make(source: pathlib.Path, out: pathlib.Path) -> Plan:
    """Check a conversion before anything is written.

    Raises:
        ValueError: `source` is no checkpoint or a damaged one, `out` is something else,
            or the room on the disk is too small.
        NotImplementedError: a tensor of a dtype or name that cannot be kept.
    """
    source, out = pathlib.Path(source).absolute(), pathlib.Path(out).absolute()
    found = None
    if (source / manifest_lib.NAME).is_file():
        found = manifest_lib.read(source)
    if found and found.kind == manifest_lib.ORBAX:
        kind, headers = found.kind, found.headers
    else:
        _check_is_hugging_face(source)
        kind, headers = manifest_lib.HUGGINGFACE, safetensors_store.read_headers(source)
    if found:
        check_headers(source, headers, found.headers, source)
    made = Plan(
        source,
        out,
        OTHER[kind],
        headers,
        stored.listed(headers),
        _documents(source, found),
        found.checksums if found else {},
        _check_out(source, out, OTHER[kind]),
    )
    if not made.complete:
        _check_staging(made)
    return made


def _check_is_hugging_face(source: pathlib.Path) -> None:
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise ValueError(
            f"folder {str(source)!r}: expected a Hugging Face folder (config.json and "
            "*.safetensors) or an orbax checkpoint of this command "
            f"({manifest_lib.NAME})"
        )


def check_headers(
    source: pathlib.Path,
    headers: Mapping[str, str],
    noted: Mapping[str, str],
    where: pathlib.Path,
) -> None:
    """Raise Damage for a weight file that is not the one noted in `where`."""
    names = sorted(headers.keys() | noted.keys())
    wrong = [name for name in names if headers.get(name) != noted.get(name)]
    if wrong:
        raise _differs(source / wrong[0], where)


def _differs(path: pathlib.Path, where: pathlib.Path) -> stored.Damage:
    return stored.Damage(
        f"{path}: differs from what {where / manifest_lib.NAME} says; remove that "
        "where the change is meant"
    )


def _documents(
    source: pathlib.Path, found: manifest_lib.Manifest | None
) -> dict[str, str]:
    """Return the checksums of what travels; compares those that a manifest has."""
    names = {path.name for pattern in DOCUMENTS for path in source.glob(pattern)}
    names = {n for n in names - {manifest_lib.NAME} if (source / n).is_file()}
    known = dict(found.documents) if found else {}
    for name, checksum in known.items():
        path = source / name
        if not path.is_file() or stored.file_checksum(path) != checksum:
            raise _differs(path, source)
    return {name: stored.file_checksum(source / name) for name in sorted(names)}


def _check_out(source: pathlib.Path, out: pathlib.Path, kind: str) -> bool:
    """Return whether `out` is complete; raises where it is something else."""
    if not out.parent.is_dir():
        raise ValueError(f"out {str(out)!r}: lies in no folder that exists")
    if out == source:
        raise ValueError(f"out {str(out)!r}: expected another place than the source")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if out.is_dir() and (out / manifest_lib.NAME).is_file():
        if manifest_lib.read(out).kind == kind:
            return True
    raise ValueError(
        f"out {str(out)!r}: is there and no {kind} folder of this command; expected a "
        "new name or an empty folder"
    )


def _check_staging(made: Plan) -> None:
    first, done = manifest_lib.peek(made.staging / JOURNAL)
    if first not in (None, made.identity):
        raise ValueError(
            f"{made.staging}: an unfinished conversion of another source; remove it or "
            "choose another out"
        )
    needed = sum(t.nbytes for t in made.tensors if t.key not in done)
    free = shutil.disk_usage(made.out.parent).free
    if needed > free:
        raise ValueError(
            f"out {str(made.out)!r}: needs {needed} bytes; its disk has {free} left"
        )
