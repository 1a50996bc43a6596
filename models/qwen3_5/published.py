"""The published Qwen3.5, 3.6 and 3.8 sizes by name, as plain configurations.

Sizes are facts of the released `config.json` files. Tying of the 2B, 122B, 397B and
2.4T models is inferred, the rest is documented (see `UNVERIFIED`).
"""

from models.qwen3_5 import config as config_lib

UNVERIFIED = {
    "tie_word_embeddings": (
        "qwen3.5-2b",
        "qwen3.5-122b-a10b",
        "qwen3.5-397b-a17b",
        "qwen3.8-2.4t-a95b",
    )
}

COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "eos_token_ids": (248044,),
}


def _dense(layers, hidden, intermediate, heads, value_heads, tied=False):
    """`heads` is (query, key-value); `value_heads` are those of GDN."""
    return config_lib.Qwen3_5Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=value_heads,
        tie_word_embeddings=tied,
        **COMMON,
    )


def _experts(layers, hidden, heads, value_heads, experts, per_token, intermediate):
    """As `_dense`; routed and shared experts have one `intermediate` size."""
    return config_lib.Qwen3_5Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=value_heads,
        num_experts=experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=intermediate,
        shared_expert_intermediate_size=intermediate,
        **COMMON,
    )


_27B = _dense(64, 5120, 17408, (24, 4), 48)
_35B = _experts(40, 2048, (16, 2), 32, 256, 8, 512)

CONFIGS = {
    "qwen3.5-0.8b": _dense(24, 1024, 3584, (8, 2), 16, tied=True),
    "qwen3.5-2b": _dense(24, 2048, 6144, (8, 2), 16, tied=True),
    "qwen3.5-4b": _dense(32, 2560, 9216, (16, 4), 32, tied=True),
    "qwen3.5-9b": _dense(32, 4096, 12288, (16, 4), 32),
    "qwen3.5-27b": _27B,
    "qwen3.5-35b-a3b": _35B,
    "qwen3.5-122b-a10b": _experts(48, 3072, (32, 2), 64, 256, 8, 1024),
    "qwen3.5-397b-a17b": _experts(60, 4096, (32, 2), 64, 512, 10, 1024),
    "qwen3.6-27b": _27B,
    "qwen3.6-35b-a3b": _35B,
    "qwen3.8-27b": _27B,
    "qwen3.8-2.4t-a95b": _experts(92, 8192, (64, 4), 128, 512, 10, 2048),
}


def get(name: str) -> config_lib.Qwen3_5Config:
    """Return the configuration of a published size; names ignore case.

    >>> get("qwen3.5-35b-a3b").num_blocks
    10

    Raises:
        ValueError: no such size; the message lists all of them.
    """
    if name.lower() not in CONFIGS:
        raise ValueError(f"model {name!r}: expected one of {', '.join(CONFIGS)}")
    return CONFIGS[name.lower()]
