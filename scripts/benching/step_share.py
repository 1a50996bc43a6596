"""The share of one of several devices in a spread model, as a model of its own.

Where more devices are wanted than there are, a step of this model on one tells what one
of them would do in the step of the whole: its heads, experts and part of the
vocabulary, the hidden states in full width. What they exchange is left out, and of the
experts of a token each device is taken to have the same number, a whole one.
"""

import dataclasses

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import published

# What tensor=N spreads: models/qwen3_5/sharding.py.
DIVIDED = (
    "vocab_size",
    "num_attention_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "num_experts",
    "intermediate_size",
    "shared_expert_intermediate_size",
)


def parse(model: str) -> tuple[str, int]:
    """Return name and devices of "qwen3.5-397b-a17b/8"; other texts are one device's.

    >>> parse("qwen3.5-397b-a17b/8")
    ('qwen3.5-397b-a17b', 8)
    """
    name, slash, devices = model.rpartition("/")
    if slash and name.lower() in published.CONFIGS and devices.isdecimal():
        return name, int(devices)
    return model, 1


def of(config: config_lib.Qwen3_5Config, devices: int) -> config_lib.Qwen3_5Config:
    """Return the share of one of `devices`; key-value heads are at least one.

    Of k experts a token, round(k / devices) are here, at least one.

    Raises:
        ValueError: `devices` is below 1, or does not divide a size that is spread.
    """
    if devices < 1:
        raise ValueError(f"share is {devices}; 1 or more is allowed")
    sizes = {name: getattr(config, name) or 0 for name in DIVIDED}
    for name, size in sizes.items():
        if size % devices:
            raise ValueError(
                f"share is {devices}; {name} is {size}, and a divisor of it is allowed"
            )
    shares = {name: size // devices for name, size in sizes.items() if size}
    if config.num_experts:
        here = max(1, round(config.num_experts_per_tok / devices))
        shares["num_experts_per_tok"] = here
    shares["num_key_value_heads"] = max(1, config.num_key_value_heads // devices)
    # Its tokens are other ones: none of them ends a text.
    return dataclasses.replace(config, eos_token_ids=(), **shares)
