"""decode.py: every wrong input is one line on stderr, status 2, and nothing written."""

import json
import os
import shutil
import subprocess
import sys
from importlib import util

import pytest
from safetensors import numpy as safetensors_numpy

from scripts import decode
from tests.scripts import decode_runs
from tests.scripts.decode_runs import GOLDEN, ROOT, prepared, run

IDS = ["--prompt-ids", "1,2,3"]
LONG = ",".join(["1"] * 500)

# Arguments after --model, and words of the one line: argument, value, what is allowed.
WRONG = {
    "tree gap": ([*IDS, "--tree", "3,,3"], "tree '3,,3' allowed"),
    "tree zero": ([*IDS, "--tree", "0"], "tree '0' positive"),
    "tree letter": ([*IDS, "--tree", "3,x"], "tree '3,x' 'x' integers"),
    "tree deep": ([*IDS, "--tree", ",".join("1" * 200)], "tree '1,1,1 n_max 64"),
    "tree large": ([*IDS, "--tree", "4,4,4"], "tree '4,4,4' 85 64 allowed"),
    "tree and n_max": ([*IDS, "--tree", "2,2", "--n-max", "6"], "tree '2,2' 7 6"),
    "n_max": ([*IDS, "--tree", "none", "--n-max", "0"], "n_max 0 1 or more"),
    "prompt empty": (["--prompt", ""], "prompt '' some text is allowed"),
    "prompt blank": (["--prompt", " \n"], "prompt ' \\n' some text is allowed"),
    "ids empty": (["--prompt-ids", ""], "prompt-ids '' such as 1,2,3"),
    "ids letter": (["--prompt-ids", "1,x"], "prompt-ids 'x' such as 1,2,3"),
    "id too large": (["--prompt-ids", "1,256"], "prompt 256 0 to 255"),
    "id negative": (["--prompt-ids=-1,2"], "prompt -1 0 to 255"),
    "prompt long": (["--prompt-ids", LONG], "prompt 500 at most 512"),
    "budget long": ([*IDS, "--max-new-tokens", "510"], "max_new_tokens 510 512"),
    "budget 0": ([*IDS, "--max-new-tokens", "0"], "max_new_tokens 0 1 or more"),
    "budget -4": ([*IDS, "--max-new-tokens", "-4"], "max_new_tokens -4 1 or more"),
    "budget x": ([*IDS, "--max-new-tokens", "x"], "--max-new-tokens 'x' integer"),
    "two prompts": ([*IDS, "--prompt", "a"], "--prompt --prompt-ids only one"),
    "file and text": (
        ["--prompt-file", "p", "--prompt", "a"],
        "--prompt-file only one",
    ),
    "raw ids": ([*IDS, "--raw"], "--raw --prompt-ids"),
    "no file": (["--prompt-file", "no/p.txt"], "prompt-file no/p.txt readable"),
    "commit": ([*IDS, "--commit", "x"], "commit 'x' reconstruct, store-all"),
    "dtype": ([*IDS, "--dtype", "fp8"], "--dtype 'fp8' float32 bfloat16"),
    "state": ([*IDS, "--state-dtype", "int8"], "--state-dtype 'int8' bfloat16"),
    "impl": ([*IDS, "--impl", "x"], "impl 'x' auto triton reference"),
    "impl shape": ([*IDS, "--impl", "triton"], "impl 'triton' 24 power of two"),
    "drafter": ([*IDS, "--drafter", "x"], "--drafter 'x' mtp ngram"),
    "json": ([*IDS, "--json", "no/o.json"], "json no/o.json folder exists"),
    "plot": ([*IDS, "--plot", "no/o.png"], "plot no/o.png folder exists"),
    "plot kind": ([*IDS, "--plot", "o.xyz"], "plot o.xyz endings png"),
    "json folder": ([*IDS, "--json", "."], "json . file that can be written"),
    "option": ([*IDS, "--depth", "3"], "--depth --help"),
    "value": ([*IDS, "--tree"], "--tree 1 values"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return decode_runs.save_model(tmp_path_factory.mktemp("model"))


def assert_refused(arguments, words, folder):
    """One line on stderr with all words, nothing on stdout, status 2, no new file."""
    before = sorted(path.name for path in folder.iterdir())
    status, out, err = run(arguments)
    assert (status, out) == (2, "")
    assert err.startswith("decode.py: error: ") and err.count("\n") == 1
    assert err.endswith("\n")
    for word in words.split():
        assert word in err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, and a decode that must not happen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decode, "decode", None)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name, model, elsewhere):
    arguments, words = WRONG[name]
    files = [] if "--json" in arguments else ["--json", "written.json"]
    assert_refused(["--model", model, *arguments, *files], words, elsewhere)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("colossal", "model 'colossal' tiny folder with config.json"),
        ("", "model '' tiny folder with config.json"),
        ("empty", "model 'empty' no config.json"),
    ],
)
def test_unknown_model_is_one_line(name, words, elsewhere):
    (elsewhere / "empty").mkdir()
    assert_refused(["--model", name, *IDS, "--json", "o.json"], words, elsewhere)


def damage(name, path):
    """Damage a weight file; returns words of the error."""
    if name == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
        return "model.safetensors truncated"
    tensors = safetensors_numpy.load_file(path)
    key = "model.norm.weight"
    if name == "missing":
        del tensors[key]
    else:
        tensors[key] = tensors[key][:-1].copy()
    safetensors_numpy.save_file(tensors, path)
    return f"missing {key}" if name == "missing" else f"misshapen {key} (63,) (64,)"


@pytest.mark.parametrize("name", ["truncated", "missing", "misshapen"])
def test_damaged_checkpoint_is_one_line(name, model, elsewhere):
    shutil.copytree(model, elsewhere / "damaged")
    words = damage(name, elsewhere / "damaged/model.safetensors")
    assert_refused(["--model", "damaged", *IDS, "--json", "o.json"], words, elsewhere)


def test_text_without_a_tokenizer_is_one_line(elsewhere):
    words = "prompt no tokenizer.json --prompt-ids"
    assert_refused(["--model", GOLDEN, "--prompt", "a"], words, elsewhere)


def test_prompt_files_are_read_before_the_model(elsewhere):
    (elsewhere / "gap.txt").write_text("a\n---\n\n---\nb")
    words = "prompt-file gap.txt prompt 2 of 3 empty"
    assert_refused(["--prompt-file", "gap.txt", "--model", "x"], words, elsewhere)
    (elsewhere / "latin.txt").write_bytes(b"caf\xe9 au lait")
    words = "prompt-file latin.txt UTF-8 byte 3"
    assert_refused(["--prompt-file", "latin.txt", "--model", "x"], words, elsewhere)
    (elsewhere / "two.txt").write_text("a\n---\nb")
    arguments = ["--prompt-file", "two.txt", "--stream", "--model", "x"]
    assert_refused(arguments, "--stream 2 prompts one is allowed", elsewhere)


def test_plot_without_matplotlib_is_one_line(elsewhere, monkeypatch):
    found = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    arguments = ["--plot", "o.png", "--model", "x"]
    assert_refused(arguments, "plot o.png matplotlib", elsewhere)


def test_model_without_a_head_drafts_otherwise(model, elsewhere):
    shutil.copytree(model, elsewhere / "headless")
    path = elsewhere / "headless/config.json"
    config = json.loads(path.read_text()) | {"mtp_num_hidden_layers": 0}
    path.write_text(json.dumps(config))
    weights = elsewhere / "headless/model.safetensors"
    tensors = safetensors_numpy.load_file(weights)
    kept = {key: x for key, x in tensors.items() if not key.startswith("mtp.")}
    safetensors_numpy.save_file(kept, weights)
    words = "drafter 'mtp' no MTP head ngram tree none"
    assert_refused(["--model", "headless", *IDS], words, elsewhere)
    for other in (["--tree", "none"], ["--drafter", "ngram"]):
        prepared("--model", "headless", *IDS, *other)


def test_command_line_from_another_folder(tmp_path):
    command = [sys.executable, ROOT / "scripts/decode.py", "--tree", "3,,3"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("decode.py: error: tree '3,,3'")
    assert done.stderr.count("\n") == 1
