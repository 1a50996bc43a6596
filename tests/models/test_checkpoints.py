"""Checkpoint folders: every accepted layout, and the way back."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from flax import nnx
from safetensors import numpy as safetensors_numpy

import models
from models import checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import model as model_lib
from models.qwen3_5 import published, stored, weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
VARIANTS = ("dense", "moe")


def raw_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Read all tensors of a folder, by the library alone."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors_numpy.load_file(path)
    return found


def write(folder: pathlib.Path, config: dict, tensors: dict) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    safetensors_numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def golden(variant: str) -> tuple[dict, dict[str, np.ndarray]]:
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    return config, raw_tensors(GOLDEN / variant)


def flat(params) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def assert_equal_params(first, second):
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for path, array in first.items():
        assert array.dtype == second[path].dtype, path
        np.testing.assert_array_equal(array, second[path], err_msg=str(path))


def abstract(config: config_lib.Qwen3_5Config, dtype=jnp.float32):
    make = nnx.eval_shape(
        lambda: model_lib.Qwen3_5(config, rngs=nnx.Rngs(0), dtype=dtype)
    )
    return nnx.split(make)[1]


def random_params(config: config_lib.Qwen3_5Config, seed: int = 0):
    """Distinct numbers in every tensor, exact in bfloat16."""
    rng = np.random.default_rng(seed)
    state = abstract(config)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.integers(-128, 128, leaf.shape), jnp.float32),
        state,
    )


def test_flat_dense_tensors():
    params = flat(models.load(GOLDEN / "dense").params)
    stored = golden("dense")[1]
    layer = "model.layers.2.linear_attn."
    mixer = ("layers", 2, "linear_attn")
    names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
    joined = np.concatenate([stored[f"{layer}{name}.weight"] for name in names])
    np.testing.assert_array_equal(params[*mixer, "in_proj", "kernel"], joined.T)
    out_proj = stored[f"{layer}out_proj.weight"]
    np.testing.assert_array_equal(params[*mixer, "out_proj", "kernel"], out_proj.T)
    conv = stored[f"{layer}conv1d.weight"][:, 0, :]
    np.testing.assert_array_equal(params[*mixer, "conv1d", "weight"], conv)
    for name in ("A_log", "dt_bias"):
        np.testing.assert_array_equal(params[*mixer, name], stored[layer + name])
    attention = params["layers", 3, "self_attn", "q_proj", "kernel"]
    q_proj = stored["model.layers.3.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(attention, q_proj.T)
    embedding = params["embed_tokens", "embedding"]
    np.testing.assert_array_equal(embedding, stored["model.embed_tokens.weight"])
    fc = params["mtp", "fc", "kernel"]
    np.testing.assert_array_equal(fc, stored["mtp.fc.weight"].T)
    assert ("lm_head", "kernel") not in params


def test_flat_moe_tensors():
    params = flat(models.load(GOLDEN / "moe").params)
    stored = golden("moe")[1]
    for ours, theirs in (
        (("layers", 1), "model.layers.1"),
        (("mtp", "layers", 0), "mtp.layers.0"),
    ):
        gate_up = params[*ours, "mlp", "experts", "gate_up_proj"]
        down = params[*ours, "mlp", "experts", "down_proj"]
        for expert in range(8):
            name = f"{theirs}.mlp.experts."
            stored_gate_up = stored[f"{name}gate_up_proj"][expert]
            np.testing.assert_array_equal(gate_up[expert], stored_gate_up.T)
            stored_down = stored[f"{name}down_proj"][expert]
            np.testing.assert_array_equal(down[expert], stored_down.T)
    head = params["lm_head", "kernel"]
    np.testing.assert_array_equal(head, stored["lm_head.weight"].T)


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_is_flat_rounded(variant):
    """Both golden layouts hold one model; the published one is rounded to bfloat16."""
    exact = flat(models.load(GOLDEN / variant).params)
    rounded = flat(models.load(GOLDEN / variant / "published").params)
    assert exact.keys() == rounded.keys()
    for path, array in exact.items():
        kept = path[-1] == "A_log" or path[-3:-1] == ("linear_attn", "norm")
        expected = array if kept else array.astype(jnp.bfloat16)
        np.testing.assert_array_equal(rounded[path], expected, err_msg=str(path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_dtypes(variant):
    folder = GOLDEN / variant / "published"
    kept = flat(models.load(folder).params)
    for dtype in (None, jnp.bfloat16, "float32", np.float16):
        stored = jnp.bfloat16 if dtype is None else jnp.dtype(dtype)
        for path, array in flat(models.load(folder, dtype).params).items():
            gate = path[-1] in ("A_log", "dt_bias")
            gate |= path[-3:-1] == ("linear_attn", "norm")
            assert array.dtype == (jnp.float32 if gate else stored), path
            np.testing.assert_array_equal(array, kept[path].astype(array.dtype))


def test_float64_needs_x64():
    with pytest.raises(ValueError, match="'float64': expected jax_enable_x64"):
        models.load(GOLDEN / "dense", "float64")
    with jax.enable_x64(True):
        params = models.load(GOLDEN / "dense", "float64").params
        assert params["norm"]["weight"][...].dtype == jnp.float64


@pytest.mark.parametrize("dtype", ["int8", "float31", jnp.int32])
def test_wrong_dtype(dtype):
    with pytest.raises(ValueError, match=r"dtype '.*': expected one of bfloat16"):
        models.load(GOLDEN / "dense", dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_round_trip_is_bit_equal(variant, tmp_path):
    folder = GOLDEN / variant / "published"
    model = models.load(folder)
    weights.save_checkpoint(model.params, model.config, tmp_path)
    stored, saved = raw_tensors(folder), raw_tensors(tmp_path)
    stored = {k: v for k, v in stored.items() if not k.startswith("model.visual.")}
    assert stored.keys() == saved.keys()
    for key, array in stored.items():
        assert array.dtype == saved[key].dtype, key
        np.testing.assert_array_equal(array, saved[key], err_msg=key)
    assert models.load(tmp_path).config == model.config


@pytest.mark.parametrize("variant", VARIANTS)
def test_flat_round_trip_is_bit_equal(variant, tmp_path):
    model = models.load(GOLDEN / variant)
    weights.save_checkpoint(
        model.params, model.config, tmp_path, layout="flat", dtype=None
    )
    stored, saved = golden(variant)[1], raw_tensors(tmp_path)
    assert stored.keys() == saved.keys()
    for key, array in stored.items():
        np.testing.assert_array_equal(array, saved[key], err_msg=key)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" not in config and config["dtype"] == "float32"


def test_layers_are_numbered_as_in_the_model(tmp_path):
    config = config_lib.Qwen3_5Config.from_hf(golden("moe")[0] | {"layer_types": None})
    config = dataclasses.replace(config, num_hidden_layers=12)
    params = random_params(config)
    weights.save_checkpoint(params, config, tmp_path, max_shard_bytes=200_000)
    saved, ours = raw_tensors(tmp_path), flat(params)
    for layer in (1, 6, 10):  # two digits come behind one
        prefix = f"model.language_model.layers.{layer}."
        joined = ours["layers", layer, "linear_attn", "in_proj", "kernel"]
        a = joined[:, -config.value_dim - config.linear_num_value_heads :]
        a = a[:, : config.linear_num_value_heads]
        name = f"{prefix}linear_attn.in_proj_a.weight"
        np.testing.assert_array_equal(saved[name].astype(np.float32), a.T)
        down = ours["layers", layer, "mlp", "experts", "down_proj"]
        name = f"{prefix}mlp.experts.down_proj"
        swapped = np.swapaxes(down, 1, 2)
        np.testing.assert_array_equal(saved[name].astype(np.float32), swapped)
    assert_equal_params(models.load(tmp_path, "float32").params, params)


def test_shards_and_index(tmp_path):
    model = models.load(GOLDEN / "dense" / "published")
    limit = 64 * 1024
    save = (model.params, model.config, tmp_path)
    weights.save_checkpoint(*save, max_shard_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert all(path.stat().st_size <= limit for path in files)
    index = json.loads((tmp_path / checkpoints.INDEX).read_text())
    total = 0
    for path in files:
        tensors = safetensors_numpy.load_file(path)
        total += sum(array.nbytes for array in tensors.values())
        assert all(index["weight_map"][key] == path.name for key in tensors)
    assert index["metadata"]["total_size"] == total
    first = next(iter(index["weight_map"]))
    assert first == "model.language_model.embed_tokens.weight"

    (tmp_path / "README.md").write_text("kept")
    weights.save_checkpoint(*save)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    assert (tmp_path / "README.md").read_text() == "kept"
    assert_equal_params(models.load(tmp_path).params, model.params)


def test_large_tensor_gets_its_own_file(tmp_path):
    model = models.load(GOLDEN / "dense" / "published")
    weights.save_checkpoint(model.params, model.config, tmp_path, max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(golden("dense")[1])
    assert_equal_params(models.load(tmp_path).params, model.params)


def test_failed_save_changes_nothing(tmp_path, monkeypatch):
    model = models.load(GOLDEN / "dense" / "published")
    weights.save_checkpoint(model.params, model.config, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save_file, calls = safetensors_numpy.save_file, []

    def full_disk(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise OSError("no space left")
        save_file(*arguments)

    monkeypatch.setattr(safetensors_numpy, "save_file", full_disk)
    other = jax.tree.map(lambda leaf: leaf + 1, model.params)
    with pytest.raises(OSError, match="no space left"):
        weights.save_checkpoint(other, model.config, tmp_path, max_shard_bytes=100_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tokenizer_and_eos_are_saved(tmp_path):
    model = models.load(GOLDEN / "dense" / "published")
    config = dataclasses.replace(model.config, eos_token_ids=(7, 9))
    vocabulary = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(vocabulary)
    weights.save_checkpoint(model.params, config, tmp_path, tokenizer=tokenizer)
    loaded = models.load(tmp_path)
    assert loaded.tokenizer.get_vocab() == {"a": 0, "b": 1}
    assert loaded.config == config
    assert model.tokenizer is None

    again = tmp_path / "again"
    path = tmp_path / "tokenizer.json"
    weights.save_checkpoint(model.params, config, again, tokenizer=path)
    assert (again / "tokenizer.json").read_text() == path.read_text()


@pytest.mark.parametrize("where", ["model.", "mtp.", ""])
def test_per_expert_layout(where, tmp_path):
    """Experts one by one in the layers, in the MTP head, or in both."""
    config, tensors = golden("moe")
    split = {}
    for key, array in tensors.items():
        stem, _, kind = key.rpartition(".")
        if not key.startswith(where) or not stem.endswith("experts"):
            split[key] = array
            continue
        for expert, matrix in enumerate(array):
            if kind == "down_proj":
                split[f"{stem}.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix[:16], matrix[16:]
                split[f"{stem}.{expert}.gate_proj.weight"] = gate
                split[f"{stem}.{expert}.up_proj.weight"] = up
    assert len(split) > len(tensors)
    folder = write(tmp_path, config, split)
    assert_equal_params(models.load(folder).params, models.load(GOLDEN / "moe").params)

    missing = next(key for key in split if ".experts.5.up_proj" in key)
    del split[missing]
    with pytest.raises(ValueError, match=f"missing {missing}"):
        models.load(write(tmp_path, config, split))


def test_head_beside_tied_embeddings(tmp_path):
    config, tensors = golden("dense")
    embedding = tensors["model.embed_tokens.weight"]
    folder = write(tmp_path, config, {**tensors, "lm_head.weight": embedding})
    assert "lm_head" not in models.load(folder).params
    folder = write(tmp_path, config, {**tensors, "lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model\.embed"):
        models.load(folder)


def test_legacy_config_loads(tmp_path):
    config, tensors = golden("dense")
    del config["layer_types"], config["rope_parameters"]
    folder = write(tmp_path, config | {"rope_theta": 10000000}, tensors)
    reference = models.load(GOLDEN / "dense")
    assert models.load(folder).config == reference.config
    assert_equal_params(models.load(folder).params, reference.params)


def test_no_mtp_head(tmp_path):
    config, tensors = golden("dense")
    body = {key: v for key, v in tensors.items() if not key.startswith("mtp.")}
    folder = write(tmp_path, config | {"mtp_num_hidden_layers": 0}, body)
    assert "mtp" not in models.load(folder).params
    with pytest.raises(ValueError, match=r"missing mtp\.fc\.weight"):
        models.load(write(tmp_path, config, body))


class CountingReader:
    """Passes calls on and counts the tensors in flight."""

    def __init__(self, reader):
        self.reader, self.name, self.log = reader, reader.name, []
        self.keys, self.shape, self.dtype = reader.keys, reader.shape, reader.dtype

    def read(self, key: str) -> np.ndarray:
        self.log.append(key)
        return self.reader.read(key)


def test_tensors_are_read_once_and_after_the_checks():
    config = checkpoints.read_config(GOLDEN / "moe")
    with checkpoints.open_folder(GOLDEN / "moe") as folder:
        reader = CountingReader(folder)
        wide = dataclasses.replace(config, vocab_size=300)
        with pytest.raises(ValueError, match="embed_tokens"):
            weights.load_weights(abstract(wide), reader, wide)
        assert reader.log == []
        weights.load_weights(abstract(config), reader, config)
        assert sorted(reader.log) == sorted(folder.keys())


def test_state_may_be_a_pure_dict():
    config = checkpoints.read_config(GOLDEN / "moe")
    pure = nnx.to_pure_dict(abstract(config))
    with checkpoints.open_folder(GOLDEN / "moe") as reader:
        params = weights.load_weights(pure, reader, config)
    reference = models.load(GOLDEN / "moe").params
    assert jax.tree.all(
        jax.tree.map(np.array_equal, params, nnx.to_pure_dict(reference))
    )


def test_shipped_name(tmp_path, monkeypatch):
    """The name stands for models/pretrained/tiny of the installed package."""
    shutil.copytree(GOLDEN / "dense", tmp_path / "pretrained" / "tiny")
    monkeypatch.setattr(checkpoints.importlib.resources, "files", lambda _: tmp_path)
    model = models.load("tiny")
    assert model.name == "tiny" and model.config.vocab_size == 256


@pytest.mark.parametrize("shown", [True, False])
def test_progress_on_stderr(shown, capfd):
    models.load(GOLDEN / "dense", progress=shown)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("100%" in err) == shown


# Parameters in billions, from the sizes' table of the design (counted there with
# Hugging Face's own classes), of the text model and of the MTP head.
@pytest.mark.parametrize(
    "name, text, mtp",
    [
        ("qwen3.5-0.8b", 0.752, 0.020),
        ("qwen3.5-27b", 26.90, 0.425),
        ("qwen3.5-35b-a3b", 34.66, 0.845),
        ("qwen3.5-397b-a17b", 396.3, 6.60),
    ],
)
def test_published_parameter_counts(name, text, mtp):
    config = published.get(name)
    slots = stored.slots(abstract(config, jnp.bfloat16))
    keys = [slot.key for slot in slots]
    assert len(set(keys)) == len(keys)
    size = {slot.key: float(np.prod(slot.shape)) / 1e9 for slot in slots}
    head = sum(n for key, n in size.items() if key.startswith("mtp."))
    assert head == pytest.approx(mtp, rel=0.03)
    assert sum(size.values()) - head == pytest.approx(text, rel=1e-3)


def test_saved_files_open_elsewhere(tmp_path):
    """Other readers look for the framework tag and for plain sizes in the header."""
    model = models.load(GOLDEN / "dense" / "published")
    weights.save_checkpoint(model.params, model.config, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
