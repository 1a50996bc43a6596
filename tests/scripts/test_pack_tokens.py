"""The pack format: what goes in comes out, in the places that meta.json names."""

import json

import numpy as np
import pytest
import tokenizers

from scripts import pack_tokens


@pytest.fixture
def pack(tmp_path):
    """A pack of two small sources and its folder."""
    for name, count in {"a": 40, "b": 30}.items():
        documents = [f"Source {name}, text {i}.\nEnd." for i in range(count)]
        text = "".join(f"{text}\n<|endoftext|>\n" for text in documents)
        (tmp_path / f"{name}.txt").write_text(text)
    mix = (f"{tmp_path / 'a.txt'}=1e6", f"{tmp_path / 'b.txt'}=200")
    out = tmp_path / "pack"
    options = ["--mix", *mix, "--out", str(out), "--validation", "0.1"]
    assert pack_tokens.main(options) == 0
    return out


def documents(folder, part, source):
    """Decodes the documents of one source from where meta.json says they lie."""
    meta = json.loads((folder / "meta.json").read_text())
    facts, prefix = meta["sources"][source], "" if part == "train" else "val_"
    start = facts[f"{prefix}start"]
    stop = start + facts[f"{prefix}tokens"]
    ids = np.fromfile(folder / f"{part}.u16", "<u2")[start:stop]
    assert ids[-1] == meta["eot"]
    ends = np.flatnonzero(ids == meta["eot"])
    tokenizer = tokenizers.Tokenizer.from_file(str(pack_tokens.TOKENIZER))
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]


def test_every_document_is_in_one_part(pack):
    train = documents(pack, "train", "a.txt")
    val = documents(pack, "val", "a.txt")
    assert len(val) == 4
    expected = sorted(f"Source a, text {i}.\nEnd." for i in range(40))
    assert sorted(train + val) == expected


def test_bytes_limit_a_source(pack):
    taken = documents(pack, "train", "b.txt")
    size = sum(map(len, taken))
    assert 200 <= size < 200 + len(taken[-1])


def test_totals_are_the_sums(pack):
    meta = json.loads((pack / "meta.json").read_text())
    sources = meta["sources"].values()
    train = np.fromfile(pack / "train.u16", "<u2")
    val = np.fromfile(pack / "val.u16", "<u2")
    assert len(train) == meta["train_tokens"] == sum(s["tokens"] for s in sources)
    assert len(val) == meta["val_tokens"] == sum(s["val_tokens"] for s in sources)
    assert train.max() < meta["n_vocab"] == 8192


def test_long_documents_are_cut_without_loss():
    text = "\n\n".join("x" * 30 for _ in range(50))
    cut = list(pack_tokens.pieces(text, 100))
    assert "\n\n".join(cut) == text
    assert len(cut) > 1 and all(len(piece) <= 150 for piece in cut)


@pytest.mark.parametrize(
    "source", ["a.txt", "=5", "missing.txt=5", "a.txt=many", "a.txt=0"]
)
def test_wrong_sources_are_named(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="mix: "):
        pack_tokens.parse_source(source)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a.txt has 1 documents; 2 are needed"),
        (["--mix", "a.txt"], "mix: 'a.txt' is not FILE=BYTES"),
        (["--validation", "1"], "validation is 1.0"),
        (["--piece", "0"], "piece is 0; 1 or more is allowed"),
        (["--tokenizer", "missing.json"], "tokenizer missing.json: no such file"),
        (["--tokenizer", "a.txt"], "tokenizer a.txt: no tokenizer.json"),
        (["--out", "a.txt"], "out a.txt is a file"),
        (["--seed", "x"], "'x' is no integer"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert pack_tokens.main(["--mix", "a.txt=5", "--out", "pack", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    with pytest.raises(ValueError, match=r"has no <\|endoftext\|>"):
        pack_tokens.read_tokenizer(path)
