"""Converts a checkpoint: a Hugging Face folder to orbax, or that back, bit for bit.

    python scripts/convert.py models/pretrained/tiny tiny-orbax
    python scripts/convert.py tiny-orbax tiny-again --json

The direction is given by what the first folder is. Tensors are copied part by part, so
memory does not grow with them; config, tokenizer and texts travel along. An interrupted
conversion goes on when the command is given again, and a finished one is verified:
source and result are compared with the SHA-256 of every tensor in conversion.json.
A folder without one has no checksums: damage from before goes unseen.

Exit status: 0; 2 for wrong input, with one line on stderr and nothing written; 1 where
a checksum differs or a disk fails on the way, with one line that names the tensor and
file, and 130 when interrupted: nothing stands at OUT then.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import tyro
from rich import console as rich_console
from rich import progress as rich_progress

from models.conversion import convert as convert_lib
from models.conversion import manifest as manifest_lib
from models.conversion import plan as plan_lib
from scripts import command

PROG = "convert.py"
TITLES = {manifest_lib.HUGGINGFACE: "Hugging Face", manifest_lib.ORBAX: "orbax"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to convert, and where to."""

    folder: Annotated[
        pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")
    ]
    """A Hugging Face folder, or an orbax checkpoint that this command made."""
    out: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """A new folder; a finished one of the same conversion is verified."""
    json: bool = False
    """Print the summary as JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        options = command.parse(Options, PROG, arguments)
        made = plan_lib.make(options.folder, options.out)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse(PROG, error)
    begin = time.perf_counter()
    try:
        with _bar(made) as advance:
            done = convert_lib.run(made, advance)
    except (ValueError, OSError) as error:
        command.refuse(PROG, error)
        return 1
    except KeyboardInterrupt:
        command.refuse(PROG, Exception("interrupted; give it again to go on"))
        return 130
    _show(_summary(made, done, time.perf_counter() - begin), options.json)
    return 0


def _summary(
    made: plan_lib.Plan, done: convert_lib.Summary, seconds: float
) -> dict[str, Any]:
    return {
        "source": str(made.source),
        "out": str(made.out),
        "kind": made.kind,
        "tensors": len(made.tensors),
        "bytes": made.nbytes,
        "files": len(made.headers),
        "documents": sorted(made.documents),
        "written": done.written,
        "reused": done.reused,
        "repaired": done.repaired,
        "verified_only": made.complete,
        "seconds": round(seconds, 3),
    }


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    size = f"{found['tensors']} tensors, {found['bytes'] / 2**20:.1f} MiB"
    verb = "verified" if found["verified_only"] else "written and verified"
    print(f"{found['out']}: {TITLES[found['kind']]}, {size}: {verb}")
    if found["reused"] and not found["verified_only"]:
        print(f"of an interrupted run: {found['reused']} tensors, checked again")
    for place in found["repaired"]:
        print(f"damaged since the interrupted run, written again: {place}")


@contextlib.contextmanager
def _bar(made: plan_lib.Plan) -> Iterator[Callable[[int], None]]:
    """Show the bytes of the source on stderr; silent where nobody looks."""
    place = rich_console.Console(stderr=True)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(binary_units=True),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(
        *columns, console=place, transient=True, disable=not place.is_terminal
    ) as bar:
        title = "verifying" if made.complete else f"to {TITLES[made.kind]}"
        task = bar.add_task(title, total=made.nbytes)
        yield lambda nbytes: bar.advance(task, nbytes)


if __name__ == "__main__":
    sys.exit(main())
