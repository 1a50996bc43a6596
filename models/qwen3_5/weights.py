"""Parameters out of a checkpoint and into one, tensor by tensor (see stored.py)."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Shaped
from rich import console
from rich import progress as rich_progress

from models import checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import packed, sharding
from models.qwen3_5 import stored as stored_lib

PREFIXES = {"published": "model.language_model.", "flat": "model."}
SKIPPED = "model.visual."
# Always float32 in memory: decays are exponentials of exponentials of these.
KEEP_FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")
# The published bf16 checkpoints store these two, and not dt_bias, as float32.
STORE_FLOAT32 = ("A_log", "linear_attn.norm.weight")
SHOWN = 20

Path = sharding.Path
Array = Shaped[np.ndarray, "..."]


def load_weights(
    abstract_state: Any,
    reader: checkpoints.Reader,
    config: config_lib.Qwen3_5Config,
    dtype: Any = None,
    progress: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Return `abstract_state` filled with the tensors of `reader`, read one by one.

    On a mesh they are read in the parts that devices hold (models.qwen3_5.sharding).
    Accepts the published and the flat prefix, fused and per-expert expert tensors in
    any mix, Qwen3-Next's packed projections, and a head stored beside tied embeddings.
    Vision tensors are skipped.
    All names and shapes are compared before the first tensor is read.

    Args:
        abstract_state: state of `nnx.eval_shape` of the model, or its pure dict.
        dtype: of all weights in memory but the float32 ones (`KEEP_FLOAT32`);
            None keeps what is stored.
        progress: show a bar on stderr.
        mesh: where the parameters are spread (models.qwen3_5.sharding); None: nowhere.

    Raises:
        ValueError: names every missing, unexpected or misshapen tensor.
        NotImplementedError: quantised tensors.
    """
    dtype = checkpoints.memory_dtype(dtype)
    reader = packed.unpacked(reader, config)
    names = _names(reader)
    leaves, structure = stored_lib.flatten(abstract_state)
    sources = [
        [
            _source(slot, names)
            for slot in stored_lib.tensors(path, tuple(leaf.shape), config)
        ]
        for path, leaf in leaves
    ]
    every = list(itertools.chain.from_iterable(sources))
    _check_tensors(every, reader, names, config)
    with _bar(sum(len(source.tensors) for source in every), progress) as advance:
        filled = []
        for held, (path, leaf) in zip(sources, leaves, strict=True):
            shape = tuple(leaf.shape)
            read = functools.partial(_read_leaf, held, shape, reader, dtype)
            filled.append(
                jnp.asarray(read())
                if mesh is None
                else sharding.place(path, shape, read, config, mesh)
            )
            advance(sum(len(source.tensors) for source in held))
    return jax.tree.unflatten(structure, filled)


def stored_dtype(reader: checkpoints.Reader) -> np.dtype:
    """Return the dtype that `dtype=None` computes in: that of the embedding."""
    key = _names(reader).find("embed_tokens.weight")
    known = key in reader.keys() and reader.dtype(key) in checkpoints.FLOATS
    return jnp.dtype(reader.dtype(key) if known else jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Names:
    """Full names of the tensors in a checkpoint, by names without the prefix."""

    prefix: str
    full: dict[str, str]

    def find(self, short: str) -> str:
        """Return the full name, also of a tensor that is not there."""
        top = short.startswith("mtp.") or short == "lm_head.weight"
        return self.full.get(short, short if top else self.prefix + short)


def _names(reader: checkpoints.Reader) -> _Names:
    keys = [key for key in reader.keys() if not key.startswith(SKIPPED)]
    counts = {
        layout: sum(key.startswith(prefix) for key in keys)
        for layout, prefix in PREFIXES.items()
    }
    nested = 2 * counts["published"] > counts["flat"]  # "model." begins both
    prefix = PREFIXES["published" if nested else "flat"]
    return _Names(prefix, {key.removeprefix(prefix): key for key in keys})


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where one slot is read: (full name, shape) of its tensors, and their joining.

    Attributes:
        reads: returns the names of the tensors that hold a part of the parameter, and
            which part of each; None stands for all.
        fill: joins them.
    """

    slot: stored_lib.Slot
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    reads: Callable[[sharding.Part | None], list[tuple[str, sharding.Part | None]]]
    fill: Callable[[Array, Iterator[Array]], None]


def _source(slot: stored_lib.Slot, names: _Names) -> _Source:
    """Choose between the slot's own tensor and one tensor per expert."""
    if slot.rule.ours[:1] == ("experts",) and slot.key not in names.full:
        single = _expert_source(slot, names)
        if any(
            key.removeprefix(names.prefix) in names.full for key, _ in single.tensors
        ):
            return single

    name = names.find(slot.key)

    def reads(part):
        return [(name, None if part is None else slot.rule.part(part))]

    def fill(out: Array, tensors: Iterator[Array]) -> None:
        out[...] = slot.rule.load(next(tensors))

    return _Source(slot, ((name, slot.shape),), reads, fill)


def _expert_source(slot: stored_lib.Slot, names: _Names) -> _Source:
    """Experts stored one by one, gate and up apart, each [out, in]."""
    stem = slot.key.rpartition(".")[0]
    experts, rows, columns = slot.shape
    down = slot.path[-1] == "down_proj"
    parts = ("down_proj",) if down else ("gate_proj", "up_proj")
    shape = (rows // len(parts), columns)

    def keys(numbers):
        short = (f"{stem}.{i}.{part}.weight" for i in numbers for part in parts)
        return [names.find(key) for key in short]

    def reads(part):  # an expert is whole on its device
        numbers = range(experts) if part is None else range(experts)[part[0]]
        return [(key, None) for key in keys(numbers)]

    def fill(out: Array, tensors: Iterator[Array]) -> None:
        for expert in out:  # [in, out]: gate columns, then up columns
            for columns in np.split(expert, len(parts), axis=-1):
                columns[...] = stored_lib.swap(next(tensors))

    tensors = tuple((key, shape) for key in keys(range(experts)))
    return _Source(slot, tensors, reads, fill)


def _check_tensors(
    sources: list[_Source],
    reader: checkpoints.Reader,
    names: _Names,
    config: config_lib.Qwen3_5Config,
) -> None:
    """Compare names and shapes, from headers only, and report all problems at once."""
    present = set(names.full.values())
    _check_quantised(reader, present)
    wanted = dict(pair for source in sources for pair in source.tensors)
    problems = [f"missing {key}" for key in wanted.keys() - present]
    for key in wanted.keys() & present:
        found = tuple(reader.shape(key))
        if found != wanted[key]:
            problems.append(f"misshapen {key} {found}, expected {wanted[key]}")
    head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    problems += [f"unexpected {key}" for key in present - wanted.keys() - head]
    if problems:
        raise ValueError(f"checkpoint {reader.name}: {_summary(sorted(problems))}")
    if head & present:
        _check_tied(reader, names.find("embed_tokens.weight"))


def _summary(problems: list[str]) -> str:
    more = len(problems) - SHOWN
    text = "; ".join(problems[:SHOWN])
    return f"{text}; and {more} more" if more > 0 else text


def _check_quantised(reader: checkpoints.Reader, keys: set[str]) -> None:
    for key in sorted(keys):
        if reader.dtype(key) not in checkpoints.FLOATS:
            raise NotImplementedError(
                f"checkpoint {reader.name}: {key} is {reader.dtype(key)}; supported: "
                f"{', '.join(checkpoints.FLOATS)} (quantised releases are not)"
            )


def _check_tied(reader: checkpoints.Reader, embedding: str) -> None:
    """A head stored beside tied embeddings may be dropped only if it is a copy."""
    if not np.array_equal(reader.read("lm_head.weight"), reader.read(embedding)):
        raise ValueError(
            f"checkpoint {reader.name}: lm_head.weight differs from {embedding}, but "
            "the config says tie_word_embeddings"
        )


def _read_leaf(
    sources: Sequence[_Source],
    shape: tuple[int, ...],
    reader: checkpoints.Reader,
    dtype: np.dtype | None,
    part: sharding.Part | None = None,
) -> Array:
    """Read one parameter, or a part of it, into one array of its final dtype."""
    if sources[0].slot.key.endswith(KEEP_FLOAT32):
        dtype = jnp.dtype(jnp.float32)
    if dtype is None:
        keys = (key for source in sources for key, _ in source.tensors)
        dtype = jnp.result_type(*set(map(reader.dtype, keys)))

    if part is not None:
        ranges = [range(n)[s] for n, s in zip(shape, part, strict=True)]
        here = tuple(map(len, ranges))
        exact = tuple(slice(r.start, r.stop) for r in ranges)
        part, shape = (None if here == shape else exact), here
    out = np.empty(shape, dtype)
    for source in sources:
        place, own = _overlap(part, source.slot.index)
        if not out[place].size:
            continue
        pieces = (
            reader.read(key) if piece is None else reader.read(key, piece)
            for key, piece in source.reads(own)
        )
        source.fill(out[place], pieces)
    return out


def _overlap(
    part: sharding.Part | None, index: sharding.Part
) -> tuple[sharding.Part, sharding.Part | None]:
    """Return where the tensor at `index` lies in a part of a parameter, and what of it.

    None stands for all, and () for an index of all.
    """
    if part is None:
        return index, None
    if not index:
        return (), part
    places, own = [], []
    for wanted, whole in zip(part, index, strict=True):
        start, stop = whole.start or 0, whole.stop
        stop = wanted.stop if stop is None else stop
        first = max(wanted.start, start)
        last = max(first, min(wanted.stop, stop))
        places.append(slice(first - wanted.start, last - wanted.start))
        own.append(slice(first - start, last - start))
    return tuple(places), tuple(own)


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda count: None
        return
    stderr = console.Console(stderr=True)
    with rich_progress.Progress(console=stderr) as bar:
        task = bar.add_task("loading tensors", total=total)
        yield lambda count: bar.advance(task, count)


def save_checkpoint(
    params: Any,
    config: config_lib.Qwen3_5Config,
    folder: str | os.PathLike,
    max_shard_bytes: int = checkpoints.MAX_SHARD_BYTES,
    tokenizer: tokenizers.Tokenizer | str | os.PathLike | None = None,
    layout: str = "published",
    dtype: Any = jnp.bfloat16,
) -> None:
    """Write `params` as a Hugging Face folder that `models.load` reads back.

    Files take their places only when all of them are written. Other files of the
    folder stay, weight files of an earlier save do not.

    Args:
        params: nnx state of the model, or its pure dict.
        max_shard_bytes: of each weight file; a larger tensor gets a file of its own.
        tokenizer: written as tokenizer.json; a path is copied.
        layout: "published" (nested config, model.language_model.*) or "flat".
        dtype: of the stored tensors but `STORE_FLOAT32`; None stores as in memory.
    """
    leaves = dict(stored_lib.flatten(params)[0])
    _check_depth(leaves, config)
    _check_whole(leaves)
    dtype = None if dtype is None else jnp.dtype(dtype)
    name = (dtype or leaves["embed_tokens", "embedding"].dtype).name
    raw = dataclasses.replace(config, dtype=name).to_hf(layout)
    stored = {}
    every = (
        stored_lib.tensors(path, tuple(leaf.shape), config)
        for path, leaf in leaves.items()
    )
    found = itertools.chain.from_iterable(every)
    for slot in sorted(found, key=_reading_order):
        keep = slot.key.endswith(STORE_FLOAT32)
        target = jnp.dtype(jnp.float32) if keep else dtype
        stored[_stored_name(slot, layout)] = _Stored(slot, leaves[slot.path], target)
    documents: dict[str, Any] = {"config.json": raw}
    if config.eos_token_ids:
        ids = {"eos_token_id": list(config.eos_token_ids)}
        documents["generation_config.json"] = ids
    if isinstance(tokenizer, str | os.PathLike):
        documents["tokenizer.json"] = pathlib.Path(tokenizer).read_text("utf-8")
    elif tokenizer is not None:
        documents["tokenizer.json"] = tokenizer.to_str(pretty=True)
    checkpoints.write_folder(folder, stored, documents, max_shard_bytes)


def _check_depth(leaves: dict[Path, Any], config: config_lib.Qwen3_5Config) -> None:
    found = len({path[1] for path in leaves if path[0] == "layers"})
    if found != config.num_hidden_layers:
        raise ValueError(
            f"params has {found} layers; the config says {config.num_hidden_layers}"
        )


def _check_whole(leaves: dict[Path, Any]) -> None:
    """Refuse parameters that were rearranged for a mesh."""
    for path, leaf in leaves.items():
        devices = len(getattr(leaf[...], "sharding", jnp.zeros(0).sharding).device_set)
        if devices > 1:
            raise ValueError(
                f"params are spread over {devices} devices ({path[-2]}); parameters "
                "loaded without a mesh are allowed"
            )


@dataclasses.dataclass(frozen=True)
class _Stored:
    """One tensor to write, made when it is its turn."""

    slot: stored_lib.Slot
    leaf: Any
    dtype: np.dtype | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.slot.shape) * (self.dtype or self.leaf.dtype).itemsize

    def read(self) -> Array:
        array = self.slot.rule.save(np.asarray(self.leaf[...])[self.slot.index])
        return np.ascontiguousarray(array, self.dtype)


def _stored_name(slot: stored_lib.Slot, layout: str) -> str:
    top = slot.path[0] in ("mtp", "lm_head")
    return slot.key if top else PREFIXES[layout] + slot.key


def _reading_order(slot: stored_lib.Slot) -> tuple:
    """Embedding, layers in number order, final norm, head, MTP head."""
    parts = ("embed_tokens", "layers", "norm", "lm_head", "mtp")
    names = slot.key.split(".")
    numbered = [(int(n), "") if n.isdigit() else (-1, n) for n in names]
    return (parts.index(names[0]), numbered)
