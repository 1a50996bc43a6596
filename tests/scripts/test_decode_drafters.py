"""decode.py with each drafter: what it writes, and which options go with it."""

import contextlib
import io
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers

from models import checkpoints
from scripts import decode
from scripts.decoding import options, request
from treewy_jax import drafters

GOLDEN = pathlib.Path(__file__).parent.parent / "golden/tiny/dense"
NEW = 9


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "golden.npz") as arrays:
        return arrays["ids"][0, :70].tolist(), arrays["gen.ids"][0, :NEW].tolist()


def run(*arguments):
    """Run the command; returns status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = decode.main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def prepared(*arguments):
    arguments = ("--model", GOLDEN, "--prompt-ids", "1,2,3", *arguments)
    return request.prepare(options.parse([str(a) for a in arguments]))


EXTERNAL = ("--drafter", "external", "--draft-model", GOLDEN)


def test_dynamic_trees_write_the_golden_text(golden, tmp_path):
    prompt, expected = golden
    file, ids = tmp_path / "o.json", ",".join(map(str, prompt))
    common = ("--model", GOLDEN, "--prompt-ids", ids, "--max-new-tokens", NEW)
    draft = ("--drafter", "dynamic", "--tree", "chain3", "--nodes", 8)
    status, out, err = run(*common, *draft, "--json", file)
    assert (status, err) == (0, "")
    found = json.loads(file.read_text())
    assert found["token_ids"] == expected
    # Parents change from step to step.
    assert found["tree"] == {"nodes": 8, "parents": None}
    assert "decode state, 8 nodes" in out


def test_the_shipped_model_drafting_for_itself_accepts_everything(tmp_path):
    file = tmp_path / "o.json"
    draft = ("--drafter", "external", "--draft-model", "tiny", "--tree", "chain3+leaf")
    status, _, err = run("--max-new-tokens", 13, *draft, "--json", file)
    assert (status, err) == (0, "")
    found = json.loads(file.read_text())
    assert found["accept_lengths"] == [4] * 3
    assert found["tree"] == {"nodes": 5, "parents": [-1, 0, 1, 2, 0]}


def test_size_and_depth_are_those_of_the_tree():
    asked = prepared("--drafter", "dynamic", "--tree", "2,2,1")
    assert asked.drafter == drafters.DynamicDrafter.of_size(11, 3)
    asked = prepared("--drafter", "dynamic", "--tree", "chain5", "--nodes", "16")
    assert asked.drafter == drafters.DynamicDrafter.of_size(16, 5)
    asked = prepared("--drafter", "suffix", "--tree", "chain5", "--nodes", "33")
    assert (asked.drafter.n_max, asked.drafter.depth_max) == (33, 5)
    assert (asked.tree.n_max, asked.tree.depth_max) == (33, 5)
    for name in ("dynamic", "suffix"):
        asked = prepared("--drafter", name, "--tree", "none")
        assert isinstance(asked.drafter, drafters.NoDrafter)


def test_an_external_model_draws_where_the_rule_asks_for_it():
    asked = prepared(*EXTERNAL, "--tree", "1,1", "--accept", "block")
    assert asked.drafter.sampled and asked.drafter.depth_max == 2
    assert not prepared(*EXTERNAL, "--tree", "1,1").drafter.sampled


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--nodes", 8), "--nodes: only allowed with --drafter dynamic or suffix"),
        (("--drafter", "suffix", "--nodes", 1), "--nodes 1: must lie between 2 and"),
        (("--drafter", "dynamic", "--nodes", 65), "--nodes 65: must lie between 2"),
        (("--draft-model", "tiny"), "--draft-model: only allowed with --drafter ext"),
        (("--drafter", "external"), "--drafter external: needs --draft-model, tiny or"),
        (("--drafter", "medusa"), "invalid choice 'medusa'"),
        (
            ("--drafter", "external", "--draft-model", "tiny"),
            "draft_model 'tiny': a vocabulary of 8192 tokens; that of the model, 256,",
        ),
        (
            ("--drafter", "external", "--draft-model", "nowhere"),
            "model 'nowhere': unknown, expected tiny, or a folder",
        ),
        (
            ("--drafter", "dynamic", "--accept", "block"),
            "accept 'block': DynamicDrafter hands out no draft distribution",
        ),
        (
            (*EXTERNAL, "--accept", "block", "--tree", "2,2"),
            "accept 'block': the tree has 7 nodes and depth 2; only chains",
        ),
        (("--tree", "chain3+twig"), "tree 'chain3+twig': of chains, names such as"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_one_line(arguments, message):
    status, out, err = run("--model", GOLDEN, "--prompt-ids", "1,2,3", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("decode.py: error: ") and err.count("\n") == 1
    assert message in err


def folder(path, tokens=None, **config):
    """Copy the golden model with another config or another tokenizer."""
    shutil.copytree(GOLDEN, path, ignore=shutil.ignore_patterns("*.npz", "published"))
    known = json.loads((path / "config.json").read_text())
    known.get("text_config", known).update(config)
    (path / "config.json").write_text(json.dumps(known))
    if tokens:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        made.save(str(path / "tokenizer.json"))
    return path


def test_a_draft_model_has_the_same_tokens(tmp_path):
    one, other = folder(tmp_path / "one", "abc"), folder(tmp_path / "other", "acb")
    common = ("--model", one, "--prompt-ids", "1,2,3", "--drafter", "external")
    status, _, err = run(*common, "--draft-model", other)
    assert status == 2 and "its tokenizer has other tokens than the model's" in err
    asked = options.parse([str(a) for a in (*common, "--draft-model", one)])
    assert isinstance(request.prepare(asked).drafter, drafters.ExternalDrafter)


def test_a_draft_model_has_room_for_the_text(tmp_path):
    short = folder(tmp_path / "short", max_position_embeddings=16)
    common = ("--model", GOLDEN, "--prompt-ids", "1,2,3", "--max-new-tokens", 14)
    status, _, err = run(*common, "--drafter", "external", "--draft-model", short)
    assert status == 2 and "draft_model" in err
    assert "prompt of 3 tokens and max_new_tokens=14: together at most 16" in err


def test_a_model_without_a_head_has_no_dynamic_trees(monkeypatch):
    load = checkpoints.load

    def without(*args, **kwargs):
        model = load(*args, **kwargs)
        config = model.config.__class__(
            **{**vars(model.config), "mtp_num_hidden_layers": 0}
        )
        return model.__class__(**{**vars(model), "config": config})

    monkeypatch.setattr("models.load", without)
    common = ("--model", GOLDEN, "--prompt-ids", "1,2,3")
    status, _, err = run(*common, "--drafter", "dynamic")
    assert status == 2 and "drafter 'dynamic': the model has no MTP head" in err
