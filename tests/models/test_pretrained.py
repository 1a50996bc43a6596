"""The model that ships: its size, its layout, its texts."""

import json
import pathlib

import jax
import pytest

import models
from models import checkpoints
from treewy_jax import generate

FOLDER = pathlib.Path(checkpoints.__file__).parent / "pretrained" / "tiny"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    "Tell me a story about a rabbit who has a lantern and lives near the river.",
    "What is the capital of Norway?",
    "Why does ice float on water?",
)


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny", dtype="float32")


def test_size_and_layout(tiny):
    count = sum(leaf.size for leaf in jax.tree.leaves(tiny.params))
    assert 10e6 <= count <= 15e6
    assert tiny.config.linear_key_head_dim == tiny.config.linear_value_head_dim == 128
    assert tiny.config.eos_token_ids == (8190, 8188)
    assert tiny.tokenizer.token_to_id("<|im_end|>") == 8190
    sizes = [path.stat().st_size for path in FOLDER.glob("*.safetensors")]
    assert sizes and max(sizes) <= 15 * 2**20
    keys = json.loads((FOLDER / checkpoints.INDEX).read_text())["weight_map"]
    assert any(key.startswith("model.language_model.layers.") for key in keys)
    assert any(key.startswith("mtp.") for key in keys)


def test_trees_of_40_nodes_write_what_plain_decoding_writes(tiny):
    ids = [tiny.tokenizer.encode(CHAT.format(text)).ids for text in PROMPTS]
    drafted, plain = (
        generate.generate(tiny, ids, tree=tree, max_new_tokens=96)
        for tree in ("3,3,3", "none")
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.mean_accept_length > 2.5
    assert drafted.steps < plain.steps / 2
    story, answer, _ = (tiny.tokenizer.decode(row) for row in drafted.token_ids)
    assert "lantern" in story and "Oslo" in answer
    assert drafted.token_ids[1][-1] == 8190, "an answer ends with <|im_end|>"
