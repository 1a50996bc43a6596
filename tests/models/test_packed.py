"""Qwen3-Next's packed projections: read as Qwen3.5's, whole and in parts."""

import json

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import models
from models import checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import packed
from tests.models import golden

FOLDER = golden.FOLDER / "moe"
ABSENT = ("layer_types", "mtp_num_hidden_layers")
NAMES = ("qkv", "z", "b", "a")


def config():
    """Return the golden configuration under the name of the other family."""
    raw = json.loads((FOLDER / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ABSENT}
    return raw | {"model_type": "qwen3_next", "norm_topk_prob": True}


def tensors():
    found = {}
    for path in FOLDER.glob("*.safetensors"):
        found |= safetensors_numpy.load_file(path)
    return found


def pack(found, raw, order="qkvz"):
    """Pack the projections of every layer, key head by key head."""
    heads, group = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    group //= heads
    keys, values = raw["linear_key_head_dim"], group * raw["linear_value_head_dim"]
    stems = {key.rpartition("in_proj_")[0] for key in found if "in_proj_a" in key}
    for stem in stems:
        qkv, z, b, a = (found.pop(f"{stem}in_proj_{name}.weight") for name in NAMES)
        q, k, v = np.split(qkv, [heads * keys, 2 * heads * keys])
        rows = {"q": (q, keys), "k": (k, keys), "v": (v, values), "z": (z, values)}
        rows |= {"b": (b, group), "a": (a, group)}
        for held in (order, "ba"):
            pieces = []
            for head in range(heads):
                for array, width in (rows[name] for name in held):
                    pieces.append(array[head * width : (head + 1) * width])
            name = "ba" if held == "ba" else "qkvz"
            found[f"{stem}in_proj_{name}.weight"] = np.concatenate(pieces)
    return found


def write(folder, found, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors_numpy.save_file(found, folder / "model.safetensors")
    return folder


def differing(one, other):
    same = jax.tree.map(np.array_equal, one, other)
    return not jax.tree.all(same)


def test_packed_weights_are_those_of_the_plain_model(tmp_path):
    raw, plain = config(), models.load(FOLDER)
    found = models.load(write(tmp_path, pack(tensors(), raw), raw))
    assert found.config == plain.config
    assert not differing(found.params, plain.params)


def test_values_and_gates_in_the_wrong_order_are_seen(tmp_path):
    """The broken twin: q, k, z, v of every head."""
    raw = config()
    folder = write(tmp_path, pack(tensors(), raw, "qkzv"), raw)
    assert differing(models.load(folder).params, models.load(FOLDER).params)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(30, 41), slice(3, 4)])
def test_parts_are_those_of_the_whole(tmp_path, rows):
    raw = config()
    folder = write(tmp_path, pack(tensors(), raw), raw)
    with checkpoints.open_folder(folder) as stored:
        read = config_lib.Qwen3_5Config.from_hf(raw)
        reader = packed.unpacked(stored, read)
        assert not any("in_proj_ba" in key for key in reader.keys())
        for key in (key for key in reader.keys() if "in_proj" in key):
            whole = reader.read(key)
            assert whole.shape == reader.shape(key)
            if rows.stop <= len(whole):
                part = reader.read(key, (rows, slice(1, 9)))
                np.testing.assert_array_equal(part, whole[rows, 1:9])


def test_what_is_missing_or_misshapen_is_named(tmp_path):
    raw, found = config(), pack(tensors(), config())
    key = "model.layers.1.linear_attn.in_proj_ba.weight"
    short = found | {key: found[key][:-1]}
    with pytest.raises(ValueError, match="misshapen .*layers.1.*in_proj_a"):
        models.load(write(tmp_path, short, raw))
    del found[key]
    with pytest.raises(ValueError, match="missing .*layers.1.*in_proj_a"):
        models.load(write(tmp_path, found, raw))


def test_a_plain_reader_stays_as_it_is():
    with checkpoints.open_folder(FOLDER) as stored:
        read = checkpoints.read_config(FOLDER)
        assert packed.unpacked(stored, read) is stored
