"""Bytes of the decode state by formula, a sequence at a time; nothing is allocated.

With s, a and f the bytes of a state element, of an activation and of what the solve
accumulates in (4, or 8 in float64), L GDN layers, C = 2 Hk Dk + Hv Dv conv channels,
J = C + 2 Hv + Hv Dv columns that a layer makes of a row (those, gates, output gate),
and n nodes verified (root and drafts):

    state      S = L Hv Dv Dk s; store-all: (n + 1) S + 4 L, a ring of states and where
               in it the committed one lies
    history    L (m (Hk Dk min(a, r) + Hv Dv r + Hv f) + 4)   m records of r bytes a
               number, and how many there are; fused: m = depth + 1, deferred: m = its
               horizon
    conv       L (W - 1) C a
    kv         attention layers * 2 * kv heads * head_dim * a, for each token
    records    what verification leaves until commit, for each node:
                 all but store-all   L (Hk Dk a + Hv Dv f + Hv f)   key, pseudo-value,
                                                                    decay
                 all                 L J a + kv                     raw row, KV

    logits     n V 4 bytes, V the vocabulary: the scores of all nodes, float32; they are
               needed at once and no part of the state

A state that verification writes (all but reconstruct) takes the memory of the one it
got, as nothing reads that any more.

All sizes are in bytes (1 MiB = 2**20), and are those of the arrays that
`Generation.state_bytes` reports. Qwen3.5 configurations ask for float32 states;
figures published for its memory are often those of bfloat16, so say which.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from treewy_jax import tree as tree_lib
from treewy_jax import typing

SCHEMES = ("store-all", "reconstruct", "fused", "deferred")
DEFERRING = ("fused", "deferred")
HORIZON = 16
RECORD_DTYPE = "float32"
STATE_DTYPES = ("bfloat16", "float32")
ACTIVATION = "bfloat16"
COUNT = 4  # bytes of an int32

# Where a configuration keeps the sizes that are copied as they are.
_ATTRIBUTES = {
    "value_heads": "linear_num_value_heads",
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mtp_layers": "mtp_num_hidden_layers",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a hybrid model that its decode state depends on.

    Attributes:
        gdn_layers: layers with a recurrent state and a conv window.
        value_heads: Hv, each with a state of value_dim x key_dim.
        key_heads: Hk.
        key_dim: Dk.
        value_dim: Dv.
        conv_width: W, taps of the conv.
        attention_layers: layers with a KV cache.
        kv_heads: key-value heads of one of them.
        head_dim: width of such a head.
        mtp_layers: attention layers of the draft head.

    Raises:
        ValueError: a size is negative or no int.
    """

    gdn_layers: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    attention_layers: int
    kv_heads: int
    head_dim: int
    mtp_layers: int = 1

    def __post_init__(self):
        for name, size in vars(self).items():
            _check_count(name, size)

    @classmethod
    def from_config(cls, config: Any) -> "Shape":
        """Read the sizes of a configuration whose attributes are named as in Qwen3.5's.

        Raises ValueError naming an attribute that it lacks.
        """
        wanted = ("num_hidden_layers", "full_attention_interval", *_ATTRIBUTES.values())
        for name in wanted:
            if not hasattr(config, name):
                raise ValueError(
                    f"config is a {type(config).__name__} without {name}; one with the "
                    "attributes of a Qwen3.5 configuration is allowed"
                )
        attention = config.num_hidden_layers // config.full_attention_interval
        return cls(
            gdn_layers=config.num_hidden_layers - attention,
            attention_layers=attention,
            **{field: getattr(config, name) for field, name in _ATTRIBUTES.items()},
        )

    @property
    def conv_channels(self) -> int:
        """C, the q, k and v rows of a GDN layer side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def joint_columns(self) -> int:
        """J, a raw row of a GDN layer, which is kept as the projection wrote it."""
        return self.conv_channels + self.value_heads * (2 + self.value_dim)


class Blocks(NamedTuple):
    """How many whole states a scheme holds for one sequence while it verifies.

    Attributes:
        counted: as the paper counts, one a node for store-all, the root included.
        allocated: as arrays. Padding nodes have states too, and store-all has the
            committed one beside those of the nodes.
    """

    counted: int
    allocated: int


class Row(NamedTuple):
    """One line of `table`: what one scheme holds for one sequence, in bytes.

    Attributes:
        counted: the states as the paper counts them, without anything else.
        allocated: the states that are arrays.
        records: of the rest, what grows with the tree: keys, pseudo-values, decays,
            raw rows and KV of the nodes.
    """

    model: str
    state_dtype: str
    nodes: int
    scheme: str
    blocks: Blocks
    counted: int
    allocated: int
    records: int


def state_bytes(shape: Shape, dtype: DTypeLike) -> int:
    """Return S, the recurrent states of all layers: L Hv Dv Dk s bytes a sequence.

    30 layers of 32 heads of 128 x 128 (Qwen3.5-35B-A3B) are 30 MiB in bfloat16.
    """
    elements = shape.value_heads * shape.value_dim * shape.key_dim
    return shape.gdn_layers * elements * _size("dtype", dtype)


def history_bytes(
    shape: Shape,
    records: int,
    dtype: DTypeLike = RECORD_DTYPE,
    key_dtype: DTypeLike = ACTIVATION,
) -> int:
    """Return a history with room for so many records, in bytes a sequence.

    A record holds a key, in `key_dtype` where that is narrower, a pseudo-value and, in
    float32 or more, a log decay of each layer; how many there are is an int32 of each
    layer.
    """
    _check_count("records", records)
    size = _size("record_dtype", dtype)
    decay = max(size, 4)
    key = min(size, _size("key_dtype", key_dtype))
    record = shape.key_heads * shape.key_dim * key
    record += shape.value_heads * (shape.value_dim * size + decay)
    return shape.gdn_layers * (records * record + COUNT)


def conv_bytes(shape: Shape, dtype: DTypeLike = ACTIVATION) -> int:
    """Return the conv windows of all layers: L (W - 1) C a bytes a sequence."""
    row = shape.gdn_layers * shape.conv_channels * _size("activation_dtype", dtype)
    return (shape.conv_width - 1) * row


def kv_bytes(shape: Shape, tokens: int, dtype: DTypeLike = ACTIVATION) -> int:
    """Return keys and values of all attention layers for `tokens` slots, in bytes."""
    return shape.attention_layers * _kv_layer_bytes(shape, tokens, dtype)


def mtp_kv_bytes(shape: Shape, tokens: int, dtype: DTypeLike = ACTIVATION) -> int:
    """Return keys and values of the draft head for `tokens` slots, in bytes."""
    return shape.mtp_layers * _kv_layer_bytes(shape, tokens, dtype)


def logits_bytes(vocabulary: int, nodes: int) -> int:
    """Return the bytes of the float32 scores of one sequence's nodes."""
    return vocabulary * nodes * 4


def record_bytes(
    shape: Shape,
    n: int,
    scheme: str = "reconstruct",
    *,
    state_dtype: DTypeLike = "float32",
    activation_dtype: DTypeLike = ACTIVATION,
) -> int:
    """Return what verifying n nodes leaves until commit, in bytes a sequence.

    The formula stands at the top of the module.

    Raises:
        ValueError: unknown scheme, negative n, or a dtype that is no float.
    """
    _check_count("n", n)
    size = _size("activation_dtype", activation_dtype)
    node = shape.gdn_layers * shape.joint_columns * size
    node += kv_bytes(shape, 1, activation_dtype)
    if _scheme(scheme) != "store-all":
        node += _factor_bytes(shape, state_dtype, activation_dtype)
    return n * node


def blocks(tree: tree_lib.DraftTree | Sequence[int], scheme: str) -> Blocks:
    """Return how many whole states a sequence holds while `tree` is verified.

    `tree` is a `DraftTree`, whose largest row counts, or widths.

    >>> blocks((3, 3, 3), "store-all")
    Blocks(counted=40, allocated=41)
    >>> blocks((3, 3, 3), "reconstruct")
    Blocks(counted=1, allocated=1)
    """
    real, envelope = _nodes(tree)
    if _scheme(scheme) != "store-all":
        return Blocks(counted=1, allocated=1)
    return Blocks(counted=real, allocated=envelope + 1)


def per_sequence(
    shape: Shape,
    scheme: str,
    tree: tree_lib.DraftTree | Sequence[int],
    dtype: DTypeLike,
    *,
    tokens: int = 0,
    activation_dtype: DTypeLike = ACTIVATION,
    horizon: int = HORIZON,
    record_dtype: DTypeLike = RECORD_DTYPE,
) -> dict[str, int]:
    """Return the bytes of every part of one sequence's decode state, as allocated.

    The parts are those of `Generation.state_bytes`, which adds up the batch.

    Args:
        scheme: one of `SCHEMES` (`-` and `_` are the same).
        tree: a `DraftTree`, padding included, or widths.
        dtype: storage of the recurrent state.
        tokens: KV slots, used or not.
        activation_dtype: of the weights, hence of conv rows, keys and KV.
        horizon: records that "deferred" has room for.
        record_dtype: of the records of "fused" and "deferred".
    """
    n = _nodes(tree)[1]
    records = record_bytes(
        shape, n, scheme, state_dtype=dtype, activation_dtype=activation_dtype
    )
    drafts = n > 1  # the root alone needs no draft head
    recurrent = state_bytes(shape, dtype)
    if _scheme(scheme) == "store-all":
        recurrent = _ring_bytes(shape, n, dtype)
    if _scheme(scheme) in DEFERRING:
        room = horizon if _scheme(scheme) == "deferred" else _depth(tree) + 1
        recurrent += history_bytes(shape, room, record_dtype, activation_dtype)
    return {
        "recurrent": recurrent,
        "conv": conv_bytes(shape, activation_dtype),
        "kv": kv_bytes(shape, tokens, activation_dtype),
        "mtp_kv": drafts * mtp_kv_bytes(shape, tokens, activation_dtype),
        "records": records,
    }


def table(
    shapes: Mapping[str, Shape],
    trees: Sequence[tree_lib.DraftTree | Sequence[int]],
    dtypes: Sequence[str] = STATE_DTYPES,
    schemes: Sequence[str] = SCHEMES,
) -> list[Row]:
    """Return a row for each model, state dtype, tree and scheme, in this order."""
    return [
        _row(name, shape, dtype, tree, scheme)
        for name, shape in shapes.items()
        for dtype in dtypes
        for tree in trees
        for scheme in schemes
    ]


def _row(name, shape, dtype, tree, scheme) -> Row:
    held, one = blocks(tree, scheme), state_bytes(shape, dtype)
    parts = per_sequence(shape, scheme, tree, dtype)
    return Row(
        model=name,
        state_dtype=jnp.dtype(dtype).name,
        nodes=_nodes(tree)[0],
        scheme=_scheme(scheme),
        blocks=held,
        counted=held.counted * one,
        allocated=held.allocated * one,
        records=parts["recurrent"] + parts["records"] - held.allocated * one,
    )


def _ring_bytes(shape, n, dtype) -> int:
    """States of n nodes and the committed one, and its slot in each layer."""
    return (n + 1) * state_bytes(shape, dtype) + shape.gdn_layers * COUNT


def _factor_bytes(shape, state_dtype, activation_dtype) -> int:
    """Key, pseudo-value and log decay of one node, all layers."""
    accumulated = _size(
        "dtype", typing.accumulation_dtype(state_dtype, activation_dtype)
    )
    key = shape.key_heads * shape.key_dim * _size("activation_dtype", activation_dtype)
    written = shape.value_heads * (shape.value_dim + 1) * accumulated
    return shape.gdn_layers * (key + written)


def _kv_layer_bytes(shape, tokens, dtype) -> int:
    _check_count("tokens", tokens)
    return 2 * tokens * shape.kv_heads * shape.head_dim * _size("dtype", dtype)


def _nodes(tree) -> tuple[int, int]:
    """Return the real nodes of the largest row and those of the envelope."""
    if not isinstance(tree, tree_lib.DraftTree):
        tree = tree_lib.DraftTree.from_widths(tree)
    return int(tree.size.max()), tree.n_max


def _depth(tree) -> int:
    return tree.depth_max if isinstance(tree, tree_lib.DraftTree) else len(tree)


def _scheme(scheme: str) -> str:
    name = scheme.replace("_", "-")
    if name not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; allowed: {', '.join(SCHEMES)}")
    return name


def _size(name: str, dtype: DTypeLike) -> int:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} is {dtype}; a float dtype is allowed")
    return jnp.dtype(dtype).itemsize


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"{name} is {count!r}; a non-negative int is allowed")
