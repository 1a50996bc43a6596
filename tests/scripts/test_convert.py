"""The command: what it prints, what it refuses, and what it leaves behind."""

import json
import os
import pathlib
import shutil

import pytest

from models.conversion import convert as convert_lib
from models.conversion import manifest, orbax_store
from models.conversion import plan as plan_lib
from scripts import convert

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
KEY = "model.language_model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def source(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN / "dense/published", tmp_path / "hf"))


def call(*arguments):
    return convert.main([str(argument) for argument in arguments])


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_there_and_back(source, tmp_path, capsys):
    assert call(source, tmp_path / "orbax") == 0
    assert "orbax, 74 tensors, 0.5 MiB: written and verified" in capsys.readouterr().out
    assert call(tmp_path / "orbax", tmp_path / "back", "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == ""
    assert found["out"] == str(tmp_path / "back")
    assert (found["kind"], found["tensors"], found["files"]) == ("huggingface", 74, 2)
    assert (found["written"], found["reused"], found["repaired"]) == (74, 0, [])
    assert found["documents"] == ["config.json", "model.safetensors.index.json"]
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_again_is_a_verification(source, tmp_path, capsys):
    assert call(source, tmp_path / "out") == call(source, tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("MiB: verified")
    flip(tmp_path / "out" / orbax_store.PARAMS / KEY / "0.0")
    before = listing(tmp_path)
    assert call(source, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert KEY in error and error.count("\n") == 1
    assert listing(tmp_path) == before


def test_a_result_of_another_source_is_kept(source, tmp_path, capsys):
    assert call(GOLDEN / "moe", tmp_path / "out") == 0
    before = listing(tmp_path)
    assert call(source, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "differs from what" in error and error.count("\n") == 1
    assert listing(tmp_path) == before


def test_damage_on_the_way_is_named_and_leaves_no_result(source, tmp_path, capsys):
    call(source, tmp_path / "orbax")
    flip(tmp_path / "orbax" / orbax_store.PARAMS / KEY / "0.0")
    capsys.readouterr()
    assert call(tmp_path / "orbax", tmp_path / "back") == 1
    printed = capsys.readouterr()
    assert KEY in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert not (tmp_path / "back").exists()


def test_an_interruption_goes_on(source, tmp_path, capsys, monkeypatch):
    run = convert_lib.run

    def interrupted(made, advance):
        seen = []

        def stop(nbytes):
            seen.append(nbytes)
            if len(seen) == 31:
                raise KeyboardInterrupt

        return run(made, stop)

    with monkeypatch.context() as patch:
        patch.setattr(convert_lib, "run", interrupted)
        assert call(source, tmp_path / "out") == 130
    printed = capsys.readouterr()
    assert "give it again" in printed.err and printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    staged = tmp_path / ".out.partial"
    key = sorted(manifest.peek(staged / plan_lib.JOURNAL)[1])[0]
    flip(next((staged / orbax_store.PARAMS / key).glob("[0-9]*")))
    assert call(source, tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "of an interrupted run: 29 tensors" in lines[1]
    assert lines[2].startswith("damaged") and lines[2].endswith(f"tensor {key}")
    assert not staged.exists()


def missing(source):
    return [source.with_name("nowhere"), source.with_name("out")], "nowhere"


def no_weights(source):
    for path in source.glob("*.safetensors"):
        path.unlink()
    return [source, source.with_name("out")], "expected a Hugging Face folder"


def no_config(source):
    (source / "config.json").unlink()
    return [source, source.with_name("out")], "expected a Hugging Face folder"


def absent_file(source):
    sorted(source.glob("*.safetensors"))[0].unlink()
    return [source, source.with_name("out")], "names files that are absent"


def truncated(source):
    path = sorted(source.glob("*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 1)
    return [source, source.with_name("out")], f"{path}: truncated or damaged"


def unknown_dtype(source):
    path = sorted(source.glob("*.safetensors"))[0]
    header = b'{"a.scale":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    return [source, source.with_name("out")], "a.scale is F8_E8M0"


def unsafe_name(source):
    path = sorted(source.glob("*.safetensors"))[0]
    header = b'{"../a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    return [source, source.with_name("out")], "'../a' is no name"


def out_in_use(source):
    (source.with_name("out")).mkdir()
    (source.with_name("out") / "mine").touch()
    return [source, source.with_name("out")], "expected a new name or an empty folder"


def out_is_the_source(source):
    return [source, source], "another place"


def out_lies_nowhere(source):
    return [source, source.with_name("no") / "out"], "lies in no folder"


def other_unfinished(source):
    made = plan_lib.make(GOLDEN / "moe", source.with_name("out"))
    made.staging.mkdir()
    manifest.Journal(made.staging / plan_lib.JOURNAL, made.identity).close()
    return [source, source.with_name("out")], "unfinished conversion of another"


def no_out(source):
    return [source], "OUT"


def unknown_option(source):
    return [source, source.with_name("out"), "--fast"], "--fast"


@pytest.mark.parametrize(
    "spoil",
    [
        missing,
        no_weights,
        no_config,
        absent_file,
        truncated,
        unknown_dtype,
        unsafe_name,
        out_in_use,
        out_is_the_source,
        out_lies_nowhere,
        other_unfinished,
        no_out,
        unknown_option,
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(spoil, source, capsys):
    arguments, message = spoil(source)
    capsys.readouterr()
    before = listing(source.parent)
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == "" and listing(source.parent) == before


def test_a_full_disk_is_seen_before(source, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert call(source, tmp_path / "out") == 2
    assert "its disk has 1000 left" in capsys.readouterr().err
    assert listing(tmp_path) == [
        "hf",
        *(f"hf/{p.name}" for p in sorted(source.iterdir())),
    ]
