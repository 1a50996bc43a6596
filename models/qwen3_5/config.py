"""What a Qwen3.5 model is: its sizes, read from and written to `config.json`."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
NEXT = "qwen3_next"  # a mixture of experts of the same layers, with packed projections
DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYER_TYPES = ("linear_attention", "full_attention")

# Only what the architecture cannot do without: everything else has one meaning when
# it is missing, see `from_hf`.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)
REQUIRED_MOE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)

# Switches of the format with one supported setting each, the same in every release.
FIXED = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "hidden_act": ("silu",),
    "mtp_use_dedicated_embeddings": (False,),
    "output_gate_type": ("swish", "silu"),
    "quantization_config": (),
}
# The same of Qwen3-Next alone.
FIXED_NEXT = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "norm_topk_prob": (True,),
}


@dataclasses.dataclass(frozen=True)
class Qwen3_5Config:
    """Sizes of one Qwen3.5 text model, dense or mixture of experts; hashable.

    Field names follow `config.json`. Layer i is full attention where
    `(i + 1) % full_attention_interval == 0` and GDN elsewhere.

    Raises:
        ValueError: a size that no model can have, naming the field.
        NotImplementedError: more than one MTP layer.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    full_attention_interval: int = 4
    intermediate_size: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 1
    eos_token_ids: tuple[int, ...] = ()
    mamba_ssm_dtype: str = "float32"
    dtype: str = "bfloat16"

    def __post_init__(self):
        _check_types(vars(self))
        _check_layout(self)
        _check_experts(self)

    @property
    def num_blocks(self) -> int:
        """Super-blocks of `gdn_per_block` GDN layers and one attention layer."""
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def gdn_per_block(self) -> int:
        return self.full_attention_interval - 1

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of every layer, as the published configurations name it."""
        block = ("linear_attention",) * self.gdn_per_block + ("full_attention",)
        return block * self.num_blocks

    @property
    def rotary_dim(self) -> int:
        """Channels of each attention head that are rotated: the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN conv: all q heads, all k heads, all v heads."""
        return 2 * self.key_dim + self.value_dim

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "Qwen3_5Config":
        """Read `config.json` (flat, or nested under text_config; current or legacy).

        EOS ids are those of the config followed by those of `generation`
        (generation_config.json) that it does not name.

        Raises:
            ValueError: a missing field, an unknown model_type, sizes that do not fit.
            NotImplementedError: a model of the family that this code does not compute.
        """
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config {text!r}: expected an object of fields")
        moe = _check_model_type(raw, text)
        _check_supported(raw, text)
        fields: dict[str, Any] = {name: _require(text, name) for name in REQUIRED}
        names = REQUIRED_MOE if moe else ("intermediate_size",)
        fields |= {name: _require(text, name) for name in names}
        fields |= _rope_fields(text)
        fields["full_attention_interval"] = _interval(text)
        fields["rms_norm_eps"] = text.get("rms_norm_eps", 1e-6)
        # Qwen3-Next has a head that its config does not tell of.
        heads = int(text.get("model_type") == NEXT)
        fields["mtp_num_hidden_layers"] = text.get("mtp_num_hidden_layers", heads)
        fields["mamba_ssm_dtype"] = text.get("mamba_ssm_dtype", "float32")
        fields["dtype"] = (
            _first(text, raw, names=("dtype", "torch_dtype")) or "bfloat16"
        )
        # The outer flag is the one that the multimodal classes tie by.
        fields["tie_word_embeddings"] = bool(
            _first(raw, text, names=("tie_word_embeddings",))
        )
        fields["eos_token_ids"] = _eos_ids(raw, text, generation or {})
        _check_types(fields)
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            fields[name] = float(fields[name])  # often written as integers
        return cls(**fields)

    def to_hf(self, layout: str = "published") -> dict[str, Any]:
        """Return the `config.json`: nested ("published") or "flat"."""
        if layout not in ("published", "flat"):
            raise ValueError(f"layout {layout!r}: expected 'published' or 'flat'")
        family, stem = ("_moe", "Qwen3_5Moe") if self.is_moe else ("", "Qwen3_5")
        text = _text_fields(self) | {"model_type": f"qwen3_5{family}_text"}
        if layout == "flat":
            return {"architectures": [f"{stem}ForCausalLM"], **text}
        return {
            "architectures": [f"{stem}ForConditionalGeneration"],
            "model_type": f"qwen3_5{family}",
            "text_config": text,
            "tie_word_embeddings": self.tie_word_embeddings,
        }


def _text_fields(config: Qwen3_5Config) -> dict[str, Any]:
    """The fields of the text model, with those that readers expect beside them."""
    text = dataclasses.asdict(config)
    for name in ("rope_theta", "partial_rotary_factor", "eos_token_ids"):
        del text[name]
    for name in ("intermediate_size",) if config.is_moe else REQUIRED_MOE:
        del text[name]
    half = config.rotary_dim // 2
    text |= {name: allowed[0] for name, allowed in FIXED.items() if allowed}
    return text | {
        "eos_token_id": list(config.eos_token_ids) or None,
        "layer_types": list(config.layer_types),
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": [(half + 2 - axis) // 3 for axis in range(3)],
        },
    }


def _check_model_type(raw: Mapping, text: Mapping) -> bool:
    """Return whether the model has experts; refuse what is not Qwen3.5."""
    named = [level["model_type"] for level in (raw, text) if "model_type" in level]
    if not named:
        raise ValueError(f"config: field model_type is missing, expected {MODEL_TYPES}")
    for name in named:
        if name not in (*MODEL_TYPES, NEXT):
            allowed = (*MODEL_TYPES, NEXT)
            raise ValueError(f"model_type {name!r}: expected one of {allowed}")
    return any("moe" in name or name == NEXT for name in named)


def _check_supported(raw: Mapping, text: Mapping) -> None:
    for name, allowed in (FIXED | FIXED_NEXT).items():
        value = _first(text, raw, names=(name,))
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "none"
            raise NotImplementedError(f"config {name} {value!r}: supported: {wanted}")


def _rope_fields(text: Mapping) -> dict[str, Any]:
    """Read theta and the rotated share from rope_parameters or the legacy fields."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise NotImplementedError(f"config rope_type {kind!r}: supported: 'default'")
    theta = _first(rope, text, names=("rope_theta",))
    if theta is None:
        raise ValueError("config: field rope_parameters.rope_theta is missing")
    share = _first(rope, text, names=("partial_rotary_factor",))
    return {
        "rope_theta": theta,
        "partial_rotary_factor": 0.25 if share is None else share,
    }


def _interval(text: Mapping) -> int:
    """Return the super-block length; layer_types must repeat GDN ..., attention."""
    types = text.get("layer_types")
    interval = text.get("full_attention_interval")
    if interval is not None and (type(interval) is not int or interval < 2):
        raise ValueError(f"full_attention_interval {interval!r}: expected an int >= 2")
    if types is None:
        return 4 if interval is None else interval
    if interval is None:
        interval = (
            list(types).index(LAYER_TYPES[1]) + 1 if LAYER_TYPES[1] in types else 4
        )
    count = text["num_hidden_layers"]
    if len(types) != count:
        raise ValueError(
            f"layer_types: {len(types)} entries, num_hidden_layers {count}"
        )
    for i, name in enumerate(types):
        expected = LAYER_TYPES[(i + 1) % interval == 0]
        if name != expected:
            raise ValueError(
                f"layer_types[{i}] {name!r}: expected {expected!r}, every "
                f"{interval}th layer is full attention"
            )
    return interval


def _eos_ids(raw: Mapping, text: Mapping, generation: Mapping) -> tuple:
    ids = []
    for level in (raw, text, generation):
        value = level.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, Iterable) else [value]
    return tuple(dict.fromkeys(ids))


def _require(text: Mapping, name: str) -> Any:
    if text.get(name) is None:
        raise ValueError(f"config: field {name} is missing")
    return text[name]


def _first(*levels: Mapping, names: tuple[str, ...]) -> Any:
    """Return the first value that is set, level by level."""
    values = (level.get(name) for level in levels for name in names)
    return next((value for value in values if value is not None), None)


def _check_types(values: Mapping[str, Any]) -> None:
    """Every size is a whole number above 0 (0 where a part may be absent)."""
    may_be_zero = (*REQUIRED_MOE, "mtp_num_hidden_layers")
    for field in dataclasses.fields(Qwen3_5Config):
        if field.name not in values:
            continue
        value = values[field.name]
        if field.type in (int, int | None) and value is not None:
            low = 0 if field.name in may_be_zero else 1
            if type(value) is not int or value < low:
                raise ValueError(
                    f"{field.name} {value!r}: expected an integer >= {low}"
                )
        if field.type is str and value not in DTYPES:
            raise ValueError(f"{field.name} {value!r}: expected one of {DTYPES}")
        if field.type is bool and type(value) is not bool:
            raise ValueError(f"{field.name} {value!r}: expected true or false")
        if field.type is float:
            _check_positive(field.name, value)
    for token in values["eos_token_ids"]:
        if type(token) is not int or not 0 <= token < values["vocab_size"]:
            limit = values["vocab_size"]
            raise ValueError(f"eos_token_ids {token!r}: expected ids in [0, {limit})")


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name} {value!r}: expected a number > 0")


def _check_layout(config: Qwen3_5Config) -> None:
    multiples = (
        ("num_hidden_layers", "full_attention_interval"),
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    )
    for whole, part in multiples:
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(
                f"{whole} {getattr(config, whole)}: expected a multiple of {part} "
                f"{getattr(config, part)}"
            )
    if config.full_attention_interval < 2:
        raise ValueError("full_attention_interval 1: expected >= 2 (GDN and attention)")
    rotary = config.rotary_dim
    if rotary % 2 or not 0 < rotary <= config.head_dim:
        raise ValueError(
            f"partial_rotary_factor {config.partial_rotary_factor}: {rotary} of "
            f"head_dim {config.head_dim} channels rotate, expected an even count"
        )
    if config.mtp_num_hidden_layers > 1:
        raise NotImplementedError(
            f"mtp_num_hidden_layers {config.mtp_num_hidden_layers}: supported: 0 or 1, "
            "the published heads have one layer"
        )


def _check_experts(config: Qwen3_5Config) -> None:
    if not config.is_moe:
        if config.intermediate_size is None:
            raise ValueError(
                "intermediate_size None: expected a size, or num_experts > 0"
            )
        return
    for name in REQUIRED_MOE:
        if getattr(config, name) == 0:
            raise ValueError(f"{name} 0: expected > 0, num_experts is set")
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"num_experts_per_tok {config.num_experts_per_tok}: expected at most "
            f"num_experts {config.num_experts}"
        )
