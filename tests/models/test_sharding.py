"""Models on meshes of eight devices, each file of tests in a process of its own."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

import models
from models.qwen3_5 import sharding
from scripts import decode
from tests import eight_devices
from tests.models import golden
from treewy_jax import generate, mesh

CONFIG = golden.model("dense").config
FILES = ("sharded_models", "sharded_lifecycles", "sharded_loading")
ROWS = ([5, 9, 2, 7], [8, 1, 3])


@pytest.mark.timeout(900)  # some minutes on one core, mostly of compilation
@pytest.mark.parametrize("file", FILES)
def test_models_on_eight_devices(file):
    eight_devices.run(f"models/{file}.py")


def abstract_mesh(**sizes):
    return jax.sharding.AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in mesh.AXES), mesh.AXES
    )


@pytest.mark.parametrize("letter", ["C", "joint"])
def test_channels_go_with_their_heads(letter):
    """Each half has q, k, v, and b, a, z beside them, of half of the heads."""
    widths = {"q": 32, "k": 32, "v": 96, "b": 4, "a": 4, "z": 96}
    if letter == "C":
        widths = {name: widths[name] for name in "qkv"}
    stored = [(name, i) for name, width in widths.items() for i in range(width)]
    for number in range(2):
        found = sharding.pieces(CONFIG, letter, 2, number)
        assert [channel for piece in found for channel in stored[piece]] == [
            (name, number * width // 2 + i)
            for name, width in widths.items()
            for i in range(width // 2)
        ]


@pytest.mark.parametrize(
    ("devices", "copies"), [(1, 1), (2, 1), (4, 2), (8, 1), (3, 1)]
)
def test_key_heads_are_there_once_for_each_device(devices, copies):
    """4 query heads on 2 key heads; 8 and 3 devices do not divide the query heads."""
    assert sharding.kv_copies(CONFIG, abstract_mesh(tensor=devices)) == copies


def test_published_sizes_divide_on_eight_devices():
    config = models.qwen3_5.published.get("qwen3.5-397b-a17b")
    axes = sharding.axes(config, abstract_mesh(tensor=8))
    assert sharding.kv_copies(config, abstract_mesh(tensor=8)) == 4
    assert all(axes[letter] == ("tensor",) for letter in ("Hv", "heads", "E", "I", "V"))


def two_processes(module, *arguments):
    """Run a module twice, on two devices each; ADDRESS and NUMBER are replaced.

    Returns what the two print.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = []
    for number in "01":
        replaced = [
            text.replace("ADDRESS", address).replace("NUMBER", number)
            for text in arguments
        ]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *replaced],
                env=os.environ | eight_devices.environment(2),
                cwd=eight_devices.ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        found = [process.communicate(timeout=250) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, found, strict=True):
        assert process.returncode == 0, err[-4000:]
    return [out for out, _ in found]


def test_two_processes_write_what_one_does():
    """Each process has two devices; the mesh spans both (jax.distributed)."""
    one = generate.generate(
        golden.model("dense"), ROWS, tree="2", max_new_tokens=6, eos_token_ids=()
    )
    module = "tests.models.one_of_processes"
    for out in two_processes(module, "ADDRESS", "2", "NUMBER", json.dumps(ROWS)):
        assert json.loads(out.splitlines()[-1]) == one.token_ids


def test_two_processes_of_the_command_write_one_file(tmp_path):
    """The first prints and writes, the other says nothing."""
    one = generate.generate(
        golden.model("dense"), ROWS[0], tree="none", max_new_tokens=6
    )
    folder, ids = golden.FOLDER / "dense", ",".join(map(str, ROWS[0]))
    first, second = two_processes(
        "scripts.decode",
        *("--distributed", "ADDRESS,2,NUMBER", "--mesh", "tensor=4"),
        *("--model", str(folder), "--prompt-ids", ids, "--tree", "none"),
        *("--max-new-tokens", "6", "--json", str(tmp_path / "NUMBER.json")),
    )
    assert "device: cpu" in first
    assert all(line.startswith("[Gloo]") for line in second.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    written = json.loads((tmp_path / "0.json").read_text())
    assert written["token_ids"] == one.token_ids[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host,2,0", "allowed are HOST:PORT,PROCESSES,NUMBER and auto"),
        ("host:1,2", "allowed are HOST:PORT,PROCESSES,NUMBER and auto"),
        ("host:1,2,2", "process 2 of 2; numbers from 0 and below that"),
    ],
)
def test_wrong_texts_join_nothing(text, message):
    with pytest.raises(ValueError, match=message):
        mesh.join(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--distributed: needs --mesh"),
        (["--mesh", "tensor=2", "--stream"], "--distributed and --stream"),
        (["--mesh", "tensor=2"], "distributed 'x': allowed are"),
    ],
)
def test_the_command_joins_with_a_mesh_only(arguments, message, capsys):
    assert decode.main(["--distributed", "x", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
