"""Training tokens in the pack format, and a sampler that is a function of the step.

A pack (written by scripts/pack_tokens.py) is a folder of `train.u16[.xz]` and
`val.u16[.xz]`, little-endian uint16 tokens source after source, and `meta.json` with
each source's start and length. Documents end with the end-of-text token `eot`.
"""

import dataclasses
import json
import lzma
import pathlib

import numpy as np
from jaxtyping import Int

# Sources in chat format: windows begin at a document, so prompts are seen whole.
TASKS = "tasks_"
# Sources that make up `TAIL_SHARE` of the batches at the end of the schedule.
TAIL_SOURCES = ("tasks_syn", "tasks_gsm", "tasks_python")
TAIL_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Source:
    """One source's place in the training and in the validation tokens."""

    name: str
    start: int
    tokens: int
    val_start: int
    val_tokens: int


@dataclasses.dataclass(frozen=True)
class Pack:
    """All tokens of a pack folder, in host memory."""

    train: Int[np.ndarray, " N"]
    val: Int[np.ndarray, " M"]
    sources: tuple[Source, ...]
    vocab_size: int
    eot: int


def read_pack(folder: pathlib.Path) -> Pack:
    """Read a pack folder.

    Raises:
        ValueError: a file is missing, or meta.json does not describe the tokens.
    """
    path = pathlib.Path(folder) / "meta.json"
    if not path.is_file():
        raise ValueError(f"data {str(folder)!r} has no meta.json: not a pack folder")
    meta = json.loads(path.read_text())
    sources = tuple(
        Source(
            pathlib.PurePath(name).stem,
            *(entry[key] for key in ("start", "tokens", "val_start", "val_tokens")),
        )
        for name, entry in meta["sources"].items()
    )
    train, val = (_read_tokens(path.parent, part) for part in ("train", "val"))
    for part, tokens in (("train", train), ("val", val)):
        if len(tokens) != meta[f"{part}_tokens"]:
            raise ValueError(
                f"{part}.u16 has {len(tokens)} tokens; meta.json says "
                f"{meta[f'{part}_tokens']}"
            )
    return Pack(train, val, sources, meta["n_vocab"], meta["eot"])


def _read_tokens(folder: pathlib.Path, part: str) -> np.ndarray:
    plain, packed = folder / f"{part}.u16", folder / f"{part}.u16.xz"
    if plain.is_file():
        return np.fromfile(plain, "<u2")
    if packed.is_file():
        return np.frombuffer(lzma.decompress(packed.read_bytes()), "<u2")
    raise ValueError(f"data {str(folder)!r} has neither {plain.name} nor {packed.name}")


class Sampler:
    """Draw training windows; `batch(step)` depends on the seed and the step alone."""

    def __init__(self, pack: Pack, *, batch: int, window: int, seed: int):
        self._pack, self._batch, self._seed = pack, batch, seed
        self._window = window
        self._starts = [_document_starts(pack, s, window) for s in pack.sources]
        fits = [self._choices(i) > 0 for i in range(len(pack.sources))]
        if not any(fits):
            raise ValueError(f"data: no source holds a window of {window} tokens")
        size = np.array([s.tokens for s in pack.sources], np.float64) * fits
        late = np.array([s.name in TAIL_SOURCES for s in pack.sources]) & fits
        self._natural = size / size.sum()
        self._tail = _reweighted(size, late)

    def batch(self, step: int, *, tail: bool) -> Int[np.ndarray, "B W"]:
        """Return int32 windows of step `step`, mixed by size or for the tail."""
        random = np.random.default_rng((self._seed, step))
        weights = self._tail if tail else self._natural
        chosen = random.choice(len(weights), self._batch, p=weights)
        rows = [self._start(int(i), float(random.random())) for i in chosen]
        index = np.array(rows)[:, None] + np.arange(self._window)
        return self._pack.train[index].astype(np.int32)

    def _choices(self, i: int) -> int:
        """Number of places where a window of source i can begin."""
        starts = self._starts[i]
        if starts is not None:
            return len(starts)
        return max(0, self._pack.sources[i].tokens - self._window + 1)

    def _start(self, i: int, fraction: float) -> int:
        place = int(fraction * self._choices(i))
        starts = self._starts[i]
        return self._pack.sources[i].start + (
            place if starts is None else int(starts[place])
        )


def _document_starts(pack: Pack, source: Source, window: int) -> np.ndarray | None:
    """Offsets of a task source's documents that leave room for a window."""
    if not source.name.startswith(TASKS):
        return None
    tokens = pack.train[source.start : source.start + source.tokens]
    starts = np.concatenate([[0], np.flatnonzero(tokens == pack.eot) + 1])
    return starts[starts + window <= source.tokens]


def _reweighted(size: np.ndarray, late: np.ndarray) -> np.ndarray:
    """Give `late` sources TAIL_SHARE of the weight, shared by size in both groups."""
    if not late.any() or late.all():
        return size / size.sum()
    inside, outside = size * late, size * ~late
    share = TAIL_SHARE * inside / inside.sum()
    return share + (1 - TAIL_SHARE) * outside / outside.sum()


def validation_windows(
    pack: Pack, window: int, limit: int
) -> dict[str, Int[np.ndarray, "N W"]]:
    """Cut each source's validation tokens into at most `limit` windows, in order.

    Windows do not overlap; sources without one whole window are left out.
    """
    found = {}
    for source in pack.sources:
        count = min(limit, source.val_tokens // window)
        if count:
            first = source.val_start
            rows = pack.val[first : first + count * window]
            found[source.name] = rows.reshape(count, window).astype(np.int32)
    return found
