"""Checkpoint folders that are broken: each fault is named, in one line."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import models
from models import checkpoints
from models.qwen3_5 import weights
from tests.models import test_checkpoints as good


def test_all_problems_at_once(tmp_path):
    config, tensors = good.golden("dense")
    norm = tensors.pop("model.norm.weight")
    tensors["model.final.weight"] = norm
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((64, 96), np.float32)
    del tensors["mtp.fc.weight"]
    with pytest.raises(ValueError) as error:
        models.load(good.write(tmp_path, config, tensors))
    message = str(error.value)
    assert str(tmp_path) in message and "\n" not in message
    assert "missing model.norm.weight" in message
    assert "missing mtp.fc.weight" in message
    assert "unexpected model.final.weight" in message
    up = "misshapen model.layers.1.mlp.up_proj.weight (64, 96), expected (96, 64)"
    assert up in message


def test_long_list_is_cut(tmp_path):
    config, tensors = good.golden("dense")
    layers = [key for key in tensors if ".layers." in key]
    for key in layers:
        del tensors[key]
    with pytest.raises(ValueError, match=f"; and {len(layers) - 20} more$") as error:
        models.load(good.write(tmp_path, config, tensors))
    assert str(error.value).count("missing ") == 20


def test_prefixes_are_not_mixed(tmp_path):
    config, tensors = good.golden("dense")
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    stray = r": unexpected model\.language_model\.norm\.weight$"
    with pytest.raises(ValueError, match=stray):
        models.load(good.write(tmp_path, config, tensors))


def test_a_wrong_depth_is_refused(tmp_path):
    config = checkpoints.read_config(good.GOLDEN / "dense")
    params = models.load(good.GOLDEN / "dense").params
    deeper = dataclasses.replace(config, num_hidden_layers=8)
    with pytest.raises(ValueError, match="params has 4 layers; the config says 8"):
        weights.save_checkpoint(params, deeper, tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_file_is_named(cut, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(good.GOLDEN / "moe" / "published", folder)
    name = "model.safetensors-00002-of-00002.safetensors"
    data = (folder / name).read_bytes()
    (folder / name).chmod(0o644)
    (folder / name).write_bytes(data[:cut])
    with pytest.raises(ValueError, match=f"{name}: truncated or damaged"):
        models.load(folder)


def test_missing_shard_is_named(tmp_path):
    folder = tmp_path / "copy"
    source = good.GOLDEN / "moe" / "published"
    skipped = shutil.ignore_patterns("*00002-of-00002*")
    shutil.copytree(source, folder, ignore=skipped)
    with pytest.raises(ValueError, match="absent: model.safetensors-00002-of-00002"):
        models.load(folder)


def test_tensor_in_two_files(tmp_path):
    folder = good.write(tmp_path, *good.golden("dense"))
    twice = {"model.norm.weight": np.zeros(64, np.float32)}
    safetensors_numpy.save_file(twice, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in another file"):
        models.load(folder)


def test_quantised_tensors_are_refused(tmp_path):
    config, tensors = good.golden("dense")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=f"{key} is F8_E4M3"):
        models.load(good.write(tmp_path, config, tensors))


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match="model 'huge': unknown, expected tiny, or"):
        models.load("huge")
    with pytest.raises(ValueError, match="no weights ship for it"):
        models.load("qwen3.5-35b-a3b")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="not a folder"):
        models.load(file)
    with pytest.raises(ValueError, match="model '': unknown"):
        models.load("")


def test_broken_folders(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        models.load(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        models.load(tmp_path)
    config.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        models.load(tmp_path)
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"config\.json: model_type 'llama'"):
        models.load(tmp_path)
    config.write_text(json.dumps(good.golden("dense")[0]))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        models.load(tmp_path)
    (tmp_path / checkpoints.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="weight_map is missing"):
        models.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        models.load(tmp_path)


def test_wrong_save_arguments(tmp_path):
    model = models.load(good.GOLDEN / "dense")
    save = (model.params, model.config, tmp_path / "new")
    with pytest.raises(ValueError, match="layout 'nested'"):
        weights.save_checkpoint(*save, layout="nested")
    with pytest.raises(ValueError, match="max_shard_bytes 0"):
        weights.save_checkpoint(*save, max_shard_bytes=0)
    assert not (tmp_path / "new").exists()
