"""Configurations: the published sizes, both layouts, legacy files, wrong files."""

import json
import pathlib

import pytest

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import published

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tiny"


def golden(variant: str) -> dict:
    return json.loads((GOLDEN / variant / "config.json").read_text())


def read(raw: dict, **changes) -> config_lib.Qwen3_5Config:
    return config_lib.Qwen3_5Config.from_hf({**raw, **changes})


def test_flat_dense():
    config = read(golden("dense"))
    assert not config.is_moe and config.tie_word_embeddings
    assert (config.num_blocks, config.gdn_per_block) == (1, 3)
    assert (config.rotary_dim, config.key_dim, config.value_dim) == (8, 32, 96)
    assert config.conv_dim == 160
    assert (config.rope_theta, config.rms_norm_eps) == (1e7, 1e-6)
    assert config.intermediate_size == 96 and config.eos_token_ids == ()


def test_nested_moe():
    config = read(golden("moe/published"))
    assert config.is_moe and not config.tie_word_embeddings
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.moe_intermediate_size == 16
    assert config.shared_expert_intermediate_size == 24
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_flat_and_nested_agree(variant):
    nested = read(golden(f"{variant}/published"))
    assert nested == read({**golden(variant), "dtype": "bfloat16"})
    assert hash(nested) == hash(read(golden(f"{variant}/published")))


@pytest.mark.parametrize("name", published.CONFIGS)
@pytest.mark.parametrize("layout", ["published", "flat"])
def test_round_trip(name, layout):
    config = published.get(name)
    raw = json.loads(json.dumps(config.to_hf(layout)))
    assert ("text_config" in raw) == (layout == "published")
    assert read(raw) == config


# Layers, recurrent state in MiB at 2 bytes, KV in GiB of 32K tokens at 2 bytes: the
# table of the design, whose 30 and 90 MiB are the paper's.
@pytest.mark.parametrize(
    "name, layers, state, kv",
    [
        ("qwen3.5-0.8b", 24, 9, 0.375),
        ("qwen3.5-4b", 32, 24, 1.0),
        ("qwen3.6-27b", 64, 72, 2.0),
        ("qwen3.5-35b-a3b", 40, 30, 0.625),
        ("qwen3.5-122b-a10b", 48, 72, 0.75),
        ("qwen3.5-397b-a17b", 60, 90, 0.9375),
        ("qwen3.8-2.4t-a95b", 92, 276, 2.875),
    ],
)
def test_published_bytes(name, layers, state, kv):
    config = published.get(name)
    per_layer = config.value_dim * config.linear_key_head_dim * 2
    assert config.num_hidden_layers == layers
    assert per_layer * config.gdn_per_block * config.num_blocks == state * 2**20
    row = 2 * config.num_key_value_heads * config.head_dim * 2
    assert row * config.num_blocks * 32768 == kv * 2**30


def test_published_names():
    assert published.get("Qwen3.5-0.8B").rotary_dim == 64
    with pytest.raises(ValueError, match=r"qwen9.*qwen3\.5-397b-a17b"):
        published.get("qwen9")


def test_legacy_fields():
    raw = golden("dense")
    for name in ("layer_types", "rope_parameters", "partial_rotary_factor"):
        del raw[name]
    legacy = read(raw, rope_theta=5e6, rope_scaling=None, torch_dtype="float32")
    assert legacy.full_attention_interval == 4 and legacy.num_blocks == 1
    assert legacy.rope_theta == 5e6 and legacy.partial_rotary_factor == 0.25
    assert legacy.dtype == "float32"


def test_interval_from_layer_types():
    types = ["linear_attention", "full_attention"] * 2
    assert read(golden("dense"), layer_types=types).full_attention_interval == 2


def test_interval_without_layer_types():
    raw = golden("dense")
    del raw["layer_types"]
    assert read(raw, full_attention_interval=2).num_blocks == 2


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_tie_flag_at_either_level(outer, inner):
    raw = golden("dense/published")
    raw["tie_word_embeddings"] = outer
    raw["text_config"]["tie_word_embeddings"] = inner
    expected = inner if outer is None else outer
    assert read(raw).tie_word_embeddings == bool(expected)


def test_eos_ids_are_united():
    raw = golden("dense/published")
    raw["text_config"]["eos_token_id"] = 7
    generation = {"eos_token_id": [9, 7, 3]}
    from_hf = config_lib.Qwen3_5Config.from_hf
    assert from_hf(raw).eos_token_ids == (7,)
    assert from_hf(raw, generation).eos_token_ids == (7, 9, 3)
    assert from_hf({**raw, "eos_token_id": [5]}, generation).eos_token_ids == (
        *(5, 7, 9, 3),
    )


@pytest.mark.parametrize("name", config_lib.REQUIRED)
def test_missing_field_is_named(name):
    raw = golden("dense")
    del raw[name]
    with pytest.raises(ValueError, match=f"field {name} is missing"):
        read(raw)


@pytest.mark.parametrize("name", config_lib.REQUIRED_MOE)
def test_missing_expert_field_is_named(name):
    raw = golden("moe")
    del raw[name]
    with pytest.raises(ValueError, match=f"field {name} is missing"):
        read(raw)


WRONG = {
    "interval": ({"num_hidden_layers": 6, "layer_types": None}, "num_hidden_layers 6"),
    "pattern": (
        {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2},
        r"layer_types\[3\] 'full_attention'",
    ),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, r"layer_types\[3\]"),
    "length": ({"layer_types": ["linear_attention"] * 3}, "layer_types: 3 entries"),
    "value heads": ({"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
    "query heads": ({"num_attention_heads": 3}, "num_attention_heads 3"),
    "type": ({"model_type": "llama"}, "model_type 'llama'"),
    "no type": ({"model_type": None}, "model_type"),
    "zero": ({"hidden_size": 0}, "hidden_size 0"),
    "text": ({"hidden_size": "64"}, "hidden_size '64'"),
    "fraction": ({"vocab_size": 1.5}, "vocab_size 1.5"),
    "bool": ({"head_dim": True}, "head_dim True"),
    "eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0"),
    "rotary": ({"head_dim": 20}, "partial_rotary_factor 0.25"),
    "theta": ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
    "eos": ({"eos_token_id": 256}, "eos_token_ids 256"),
    "eos kind": ({"eos_token_id": "a"}, "eos_token_ids 'a'"),
    "state": ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype 'int8'"),
    "step": ({"full_attention_interval": "4"}, "full_attention_interval '4'"),
}


@pytest.mark.parametrize("changes, message", WRONG.values(), ids=WRONG)
def test_wrong_fields(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read(golden("dense"), **changes)
    assert "\n" not in str(error.value)


UNSUPPORTED = {
    "sparse": {"model_type": "qwen3_next", "decoder_sparse_step": 2},
    "bias": {"attention_bias": True},
    "gate": {"attn_output_gate": False},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "heads": {"mtp_num_hidden_layers": 2},
}


@pytest.mark.parametrize("changes", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_fields(changes):
    with pytest.raises(NotImplementedError):
        read(golden("dense"), **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
    ],
)
def test_wrong_expert_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        read(golden("moe"), **changes)


def test_unknown_layout():
    with pytest.raises(ValueError, match="layout 'nested'"):
        published.get("qwen3.5-0.8b").to_hf("nested")
