"""Is there room for a model with random weights? Asked before it is made.

A system that runs out of memory ends a process without a word.
"""

import os
from typing import Any

import jax

from models import checkpoints
from models.qwen3_5 import random_weights, sharding
from scripts.benching import step_mesh


def check(name: str, config: Any, dtype: str, mesh: jax.sharding.Mesh | None) -> None:
    """Raise ValueError where the weights alone are more than the memory."""
    needed, there = weight_bytes(config, dtype, mesh), memory_bytes()
    if there is not None and needed > there:
        needed, there = (f"{count / 2**30:.1f} GiB" for count in (needed, there))
        raise ValueError(
            f"model {name!r}: its weights in {dtype} take {needed}; {there} are there"
        )


def weight_bytes(config: Any, dtype: str, mesh: jax.sharding.Mesh | None) -> int:
    """Return the bytes that one memory has to hold.

    That is a device's, or a host's where its devices are made of a CPU.
    """
    _, params = random_weights.graph(config, checkpoints.memory_dtype(dtype))
    if mesh is None:
        return step_mesh.nbytes(params)
    one = step_mesh.nbytes(sharding.abstract(params, config, mesh))
    shared = jax.default_backend() == "cpu"
    return one * len(mesh.local_devices) if shared else one


def memory_bytes() -> int | None:
    """Return the bytes of a device, of a CPU those of its host; None if unknown."""
    told = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if told is None and jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return told
