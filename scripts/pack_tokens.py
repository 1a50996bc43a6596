"""Packs text files into one array of uint16 tokens, source after source.

    python scripts/pack_tokens.py --out pack --mix books.txt=100e6 tasks_syn.txt=20e6

A source is a text file with `<|endoftext|>` lines between its documents and the number
of bytes to take from it. Exit status: 0, or 2 for wrong input, with one line on stderr.
The pack folder, as scripts/train.py reads it:

    train.u16, val.u16   little-endian uint16; documents shuffled inside each source,
                         every one followed by <|endoftext|>
    meta.json            tokenizer, n_vocab, eot, train_tokens, val_tokens, sources:
                         of each start, tokens, val_start, val_tokens (its place in
                         the arrays), docs, bytes; so a trainer may weigh the sources
"""

import dataclasses
import hashlib
import json
import pathlib
import random
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from scripts import command, reporting

PROG = "pack_tokens.py"
END_OF_TEXT = "<|endoftext|>"
TOKENIZER = pathlib.Path(__file__).parent / "data" / "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to pack and how."""

    mix: tuple[str, ...]
    """FILE=BYTES, in the order of the pack."""
    out: pathlib.Path
    """The folder."""
    tokenizer: pathlib.Path = TOKENIZER
    """A tokenizer.json of at most 65,536 tokens."""
    seed: int = 0
    """Of the order of the documents."""
    piece: int = 12000
    """Longer documents are cut at paragraph borders to about this many characters."""
    validation: float = 0.004
    """Share of each source's documents that goes to val.u16."""


@dataclasses.dataclass
class Pack:
    """Token arrays of all documents so far, and what meta.json says of each source."""

    train: list[np.ndarray] = dataclasses.field(default_factory=list)
    val: list[np.ndarray] = dataclasses.field(default_factory=list)
    sources: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


def pieces(document: str, length: int) -> Iterator[str]:
    """Cuts a document at a blank line, else a line end, else anywhere."""
    while len(document) > 1.5 * length:
        cut = document.find("\n\n", length)
        if not 0 <= cut <= 1.4 * length:
            cut = document.find("\n", length)
        if not 0 <= cut <= 1.4 * length:
            cut = length
        yield document[:cut]
        document = document[cut:].lstrip("\n")
    yield document


def read_documents(path: pathlib.Path, length: int) -> list[str]:
    documents = path.read_text(encoding="utf-8").split(END_OF_TEXT + "\n")
    return [
        piece.strip("\n")
        for document in documents
        if document.strip()
        for piece in pieces(document.strip("\n"), length)
    ]


def take(documents: list[str], size: float) -> list[str]:
    """The first documents that reach `size` bytes of UTF-8."""
    taken, total = [], 0
    for document in documents:
        if total >= size:
            break
        taken.append(document)
        total += len(document.encode())
    return taken


def encode(
    tokenizer: tokenizers.Tokenizer, documents: list[str], end: int
) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [np.array([*encoding.ids, end], np.uint16) for encoding in encodings]


def length(arrays: list[np.ndarray]) -> int:
    return sum(map(len, arrays))


def add_source(pack: Pack, source: str, options: Options, tokenizer, rng) -> None:
    """Shuffles, splits, encodes and appends one FILE=BYTES."""
    path, size = parse_source(source)
    documents = read_documents(path, options.piece)
    if len(documents) < 2:
        raise ValueError(f"mix: {path} has {len(documents)} documents; 2 are needed")
    rng.shuffle(documents)
    held = max(1, int(len(documents) * options.validation))
    taken = take(documents[held:], size)
    end = tokenizer.token_to_id(END_OF_TEXT)
    train = encode(tokenizer, taken, end)
    val = encode(tokenizer, documents[:held], end)
    pack.sources[path.name] = {
        "start": length(pack.train),
        "val_start": length(pack.val),
        "bytes": sum(len(document.encode()) for document in taken),
        "docs": len(taken),
        "tokens": length(train),
        "val_tokens": length(val),
    }
    pack.train += train
    pack.val += val


def parse_source(source: str) -> tuple[pathlib.Path, float]:
    """Reads FILE=BYTES, or raises ValueError."""
    path, _, size = source.rpartition("=")
    try:
        parsed = pathlib.Path(path), float(size)
    except ValueError:
        parsed = None
    if not path or parsed is None or not parsed[0].is_file() or not parsed[1] > 0:
        raise ValueError(f"mix: {source!r} is not FILE=BYTES with an existing file")
    return parsed


def check(options: Options) -> tokenizers.Tokenizer:
    """Return the tokenizer; raises ValueError for what cannot be packed."""
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"out {options.out} is a file; a folder is allowed")
    if not 0 < options.validation < 1:
        raise ValueError(f"validation is {options.validation}; between 0 and 1 allowed")
    if options.piece < 1:
        raise ValueError(f"piece is {options.piece}; 1 or more is allowed")
    for source in options.mix:
        parse_source(source)
    return read_tokenizer(options.tokenizer)


def read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    """Return the tokenizer; raises ValueError for one whose tokens cannot be packed."""
    if not path.is_file():
        raise ValueError(f"tokenizer {path}: no such file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer {path}: no tokenizer.json ({error})") from None
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"tokenizer {path}: has more than 65536 tokens")
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"tokenizer {path}: has no {END_OF_TEXT}")
    return tokenizer


def write(pack: Pack, options: Options, tokenizer: tokenizers.Tokenizer) -> None:
    """Write the folder; meta.json, without which it is no pack, comes last."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name, arrays in {"train": pack.train, "val": pack.val}.items():
        tokens = np.concatenate(arrays).astype("<u2")
        reporting.replace(options.out / f"{name}.u16", tokens.tofile)
    meta = {
        "tokenizer": options.tokenizer.name,
        "tokenizer_sha256": hashlib.sha256(options.tokenizer.read_bytes()).hexdigest(),
        "n_vocab": tokenizer.get_vocab_size(),
        "eot": tokenizer.token_to_id(END_OF_TEXT),
        "train_tokens": length(pack.train),
        "val_tokens": length(pack.val),
        "sources": pack.sources,
    }
    text = json.dumps(meta, indent=1)
    reporting.replace(options.out / "meta.json", lambda path: path.write_text(text))


def make(options: Options) -> None:
    """Pack the sources, and say what was taken of each."""
    tokenizer = check(options)
    rng, pack = random.Random(options.seed), Pack()
    for source in options.mix:
        add_source(pack, source, options, tokenizer, rng)
        name, facts = list(pack.sources.items())[-1]
        print(name, facts, flush=True)
    write(pack, options, tokenizer)
    print("train", length(pack.train), "val", length(pack.val))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        make(command.parse(Options, PROG, arguments))
    except (ValueError, OSError) as error:
        return command.refuse(PROG, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
