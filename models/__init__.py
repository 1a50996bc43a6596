"""Models that decode through `treewy_jax`: loaded by `load`, or of random weights."""

from models.checkpoints import load
from models.qwen3_5.random_weights import random

__all__ = ["load", "random"]
