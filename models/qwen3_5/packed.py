"""Qwen3-Next's packed projections, read as the tensors that Qwen3.5 has instead.

Qwen3-Next stores two tensors of a GDN layer by key head: of each head's rows
`in_proj_qkvz` has q, k, and v, z of the value heads that read it, `in_proj_ba` b and a
of those. Qwen3.5 has the rows of all heads side by side:

    in_proj_qkv: q | k | v     in_proj_z: z     in_proj_b: b     in_proj_a: a
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from models import checkpoints
from models.qwen3_5 import config as config_lib

# Packed tensor -> what it holds of a key head, in order.
PACKED = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
PLAIN = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}


def unpacked(
    reader: checkpoints.Reader, config: config_lib.Qwen3_5Config
) -> checkpoints.Reader:
    """Return a reader of Qwen3.5's tensors; one that has no packed ones as it is."""
    sources = {}
    for key in reader.keys():
        stem, _, name = key.removesuffix(".weight").rpartition(".")
        for part in _parts(name):
            sources[f"{stem}.{part}.weight"] = (key, part)
    return Reader(reader, sources, _rows(config)) if sources else reader


def _parts(packed: str) -> list[str]:
    """Return the tensors that Qwen3.5 has in place of a packed one."""
    inside = set(PACKED.get(packed, ""))
    return [part for part, held in PLAIN.items() if set(held) <= inside]


def _rows(config: config_lib.Qwen3_5Config) -> dict[str, Int[np.ndarray, " rows"]]:
    """Return where each row of Qwen3.5's tensors is in the packed one."""
    heads = config.linear_num_key_heads
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    widths = {"q": config.linear_key_head_dim, "k": config.linear_key_head_dim}
    widths |= {"v": values, "z": values, "b": group, "a": group}
    places = {}
    for held in PACKED.values():
        size = sum(widths[name] for name in held)
        packed = np.arange(heads * size).reshape(heads, size)
        ends = np.cumsum([widths[name] for name in held])
        pieces = np.split(packed, ends[:-1], axis=1)
        places |= {n: x.reshape(-1) for n, x in zip(held, pieces, strict=True)}
    return {
        part: np.concatenate([places[name] for name in held])
        for part, held in PLAIN.items()
    }


@dataclasses.dataclass(frozen=True)
class Reader:
    """`checkpoints.Reader` of another, with other tensors in place of the packed ones.

    Attributes:
        sources: the packed tensor, and which rows of it (by `rows`), of each other one.
    """

    reader: Any
    sources: Mapping[str, tuple[str, str]]
    rows: Mapping[str, Int[np.ndarray, " rows"]]

    @property
    def name(self) -> str:
        return self.reader.name

    def keys(self) -> list[str]:
        packed = {key for key, _ in self.sources.values()}
        return [k for k in self.reader.keys() if k not in packed] + list(self.sources)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape; where the packed one does not fit, that one's."""
        if key not in self.sources:
            return self.reader.shape(key)
        source, part = self.sources[key]
        rows, *rest = self.reader.shape(source)
        parts = _parts(source.split(".")[-2])
        if rows != sum(len(self.rows[other]) for other in parts):
            return rows, *rest
        return len(self.rows[part]), *rest

    def dtype(self, key: str) -> str:
        return self.reader.dtype(self.sources.get(key, (key,))[0])

    def read(
        self, key: str, part: tuple[slice, ...] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """Return a tensor, or a part of it; rows between those wanted are read too."""
        if key not in self.sources:
            plain = self.reader.read
            return plain(key) if part is None else plain(key, part)
        source, name = self.sources[key]
        if part is None:
            return self.reader.read(source)[self.rows[name]]
        wanted = self.rows[name][part[0]]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        found = self.reader.read(source, (slice(first, last), *part[1:]))
        return found[wanted - first]
