"""One checkpoint to the other kind: copied tensor by tensor, then made whole."""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Mapping

from models.conversion import manifest as manifest_lib
from models.conversion import orbax_store, safetensors_store, stored
from models.conversion import plan as plan_lib


@dataclasses.dataclass
class Summary:
    """What a conversion did; `repaired` names what was damaged and written again."""

    written: int = 0
    reused: int = 0
    repaired: list[str] = dataclasses.field(default_factory=list)


def _store(folder: pathlib.Path, kind: str, made: plan_lib.Plan) -> stored.Store:
    if kind == manifest_lib.ORBAX:
        keys = tuple(tensor.key for tensor in made.tensors)
        return orbax_store.OrbaxStore(folder, keys)
    return safetensors_store.SafetensorsStore(folder, made.headers)


def run(made: plan_lib.Plan, advance: stored.Advance = lambda nbytes: None) -> Summary:
    """Carry out a plan, or go on where an earlier run was interrupted.

    Tensors that are complete are checked, not written again. `out` appears only when
    all of it is there; until then it lies beside it as .NAME.partial.

    Args:
        advance: gets the bytes of the source as they are read.

    Raises:
        Damage: names the tensor and file whose checksum is not the one noted.
        ValueError: another process converts to the same place.
    """
    if made.complete:
        verify(made, advance)
        return Summary(reused=len(made.tensors))
    made.staging.mkdir(exist_ok=True)
    journal = manifest_lib.Journal(made.staging / plan_lib.JOURNAL, made.identity)
    try:
        summary = _copy_tensors(made, journal, advance)
        checksums = {tensor.key: journal.done[tensor.key] for tensor in made.tensors}
        _complete(made, checksums)
    finally:
        journal.close()
    return summary


def _copy_tensors(
    made: plan_lib.Plan, journal: manifest_lib.Journal, advance: stored.Advance
) -> Summary:
    source = _store(made.source, plan_lib.OTHER[made.kind], made)
    target = _store(made.staging, made.kind, made)
    target.prepare()
    summary = Summary()
    for tensor in made.tensors:
        noted = journal.done.get(tensor.key)
        if noted is not None:
            _check_source(made, source, tensor, noted, advance)
            if _checksum_or_none(target, tensor) == noted:
                summary.reused += 1
                continue
            summary.repaired.append(target.where(tensor))
        checksum = stored.copy(source, target, tensor, advance)
        if checksum != made.expected.get(tensor.key, checksum):
            raise stored.Damage(f"{source.where(tensor)}: its checksum differs")
        journal.add(tensor.key, checksum)
        summary.written += 1
    return summary


def _check_source(
    made: plan_lib.Plan,
    source: stored.Store,
    tensor: stored.Tensor,
    noted: str,
    advance,
) -> None:
    """Raise Damage where the source is not what an earlier run has read."""
    if stored.checksum(source, tensor, advance) != noted:
        raise stored.Damage(
            f"{source.where(tensor)}: differs from what an earlier run has read; "
            f"remove {made.staging} where the change is meant"
        )


def _checksum_or_none(
    store: stored.Store,
    tensor: stored.Tensor,
    advance: stored.Advance = lambda nbytes: None,
) -> str | None:
    """Return the checksum of a tensor, None where it cannot be read whole."""
    try:
        return stored.checksum(store, tensor, advance)
    except stored.Damage:
        return None


def _complete(made: plan_lib.Plan, checksums: Mapping[str, str]) -> None:
    """Add what is no tensor, the manifest last, and let the folder take its place."""
    added = _store(made.staging, made.kind, made).finish()
    for name, checksum in made.documents.items():
        shutil.copyfile(made.source / name, made.staging / name)
        if stored.file_checksum(made.staging / name) != checksum:
            raise stored.Damage(f"{made.source / name}: changed as it was copied")
    documents = dict(made.documents)
    documents |= {name: stored.file_checksum(made.staging / name) for name in added}
    manifest_lib.write(
        made.staging,
        manifest_lib.Manifest(made.kind, made.headers, checksums, documents),
    )
    os.sync()  # or the new name could outlive a power cut that its files do not
    os.replace(made.staging, made.out)
    (made.out / plan_lib.JOURNAL).unlink()


def verify(made: plan_lib.Plan, advance: stored.Advance = lambda nbytes: None) -> None:
    """Compare source and `out` with the manifest of `out`.

    Raises:
        Damage: names all tensors and files that differ.
    """
    noted = manifest_lib.read(made.out)
    plan_lib.check_headers(made.source, made.headers, noted.headers, made.out)
    wrong = _wrong_documents(made, noted) + _wrong_tensors(made, noted, advance)
    if wrong:
        raise stored.Damage(f"{'; '.join(wrong)}: not what was converted")


def _wrong_documents(made: plan_lib.Plan, noted: manifest_lib.Manifest) -> list[str]:
    known = noted.documents
    pairs = [(made.source / name, known.get(name)) for name in made.documents]
    pairs += [(made.out / name, checksum) for name, checksum in known.items()]
    wrong = [
        str(path)
        for path, checksum in pairs
        if not path.is_file() or stored.file_checksum(path) != checksum
    ]
    if made.kind == manifest_lib.HUGGINGFACE:
        found = safetensors_store.read_headers(made.out)
        wrong += [str(made.out / n) for n in found if found[n] != made.headers.get(n)]
    return wrong


def _wrong_tensors(
    made: plan_lib.Plan, noted: manifest_lib.Manifest, advance: stored.Advance
) -> list[str]:
    source = _store(made.source, plan_lib.OTHER[made.kind], made)
    target = _store(made.out, made.kind, made)
    wrong = []
    for tensor in made.tensors:
        for store, moved in ((source, advance), (target, lambda nbytes: None)):
            if _checksum_or_none(store, tensor, moved) != noted.checksums[tensor.key]:
                wrong.append(store.where(tensor))
    return wrong
