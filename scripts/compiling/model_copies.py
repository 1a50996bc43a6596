"""What a compiled step copies whole, and which kernels and collectives it has."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.benching import movement

LEAST = 2**18  # bytes of a move that is worth a line
HLO = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Of a TPU's memory on the chip: what is fetched there is no copy in the device's.
ON_CHIP = "S(1)"
PALLAS = re.compile(r'custom_call_target="[^"]*(?:triton|mosaic|tpu_custom_call)')
OP_NAME = re.compile(r'op_name="([^"]*)"')
GATHERED = "an all-gather"
GATHER = re.compile(r" = (.*?) all-gather(?:-start)?\(")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)


class Copy(NamedTuple):
    """Instructions that move as much as a whole array of some kinds.

    `kinds` are those that have arrays of the shape; `times` in a step, all together.
    """

    kinds: tuple[str, ...]
    shape: str
    nbytes: int
    times: int
    source: str


def whole(program: str, arrays: Mapping[str, Sequence[Any]]) -> list[Copy]:
    """Return the moves of optimised HLO that write a whole array, the largest first.

    Args:
        program: of one device.
        arrays: shapes and places by kind. A device's part is what counts; a move of
            the same dtype and sizes, in any order, is taken for one of the array.
    """
    kinds: dict[tuple, list[str]] = {}
    for kind, leaves in arrays.items():
        for key in {_key_of(leaf) for leaf in leaves}:
            kinds.setdefault(key, []).append(kind)
    found = [
        move
        for move in movement.moves(program, least=LEAST)
        if _key(move.shape) in kinds
    ]
    places = _places(program, {move.name for move in found})
    groups: dict[str, list[movement.Move]] = {}
    for move in found:
        if ON_CHIP not in places[move.name]:
            groups.setdefault(move.shape, []).append(move)
    return [
        Copy(
            kinds=tuple(kinds[_key(shape)]),
            shape=shape,
            nbytes=moves[0].nbytes,
            times=sum(move.times for move in moves),
            source=moves[0].source,
        )
        for shape, moves in groups.items()
    ]


def gathered(program: str, arrays: Mapping[str, Sequence[Any]]) -> list[Copy]:
    """Return the all-gathers that put a spread array together on every device.

    The arguments are those of `whole`; one found in a loop counts once.
    """
    kinds: dict[tuple, list[str]] = {}
    for kind, leaves in arrays.items():
        spread = [x for x in leaves if x.sharding.shard_shape(x.shape) != x.shape]
        for key in {_key_of(leaf, leaf.shape) for leaf in spread}:
            kinds.setdefault(key, []).append(kind)
    shapes = [
        shape.group()
        for line in GATHER.finditer(program)
        for shape in movement.ARRAY.finditer(line[1])
    ]
    large = [x for x in shapes if _key(x) in kinds and movement.nbytes(x) >= LEAST]
    counts = collections.Counter(large)
    return [
        Copy(tuple(kinds[_key(shape)]), shape, movement.nbytes(shape), times, GATHERED)
        for shape, times in counts.items()
    ]


def _key_of(leaf, shape=None) -> tuple:
    shape = shape or leaf.sharding.shard_shape(leaf.shape)
    return HLO.get(leaf.dtype.name, leaf.dtype.name), *sorted(n for n in shape if n > 1)


def _key(text: str) -> tuple:
    """Read the first array of a move, such as f32[64,32,128,128]."""
    dtype, _, sizes = text.split("]")[0].partition("[")
    return dtype, *sorted(n for n in map(int, sizes.split(",")) if n > 1)


def _places(program: str, names: set[str]) -> dict[str, str]:
    """Return shape and layout of these instructions, as written."""
    parts = map(movement.INSTRUCTION.match, program.splitlines())
    return {part[2]: part[3] for part in parts if part and part[2] in names}


def kernels(program: str) -> dict[str, int]:
    """Return how many Pallas kernels of each name optimised HLO holds."""
    lines = [line for line in program.splitlines() if PALLAS.search(line)]
    found = [OP_NAME.search(line) for line in lines]
    paths = [each[1].removesuffix("/pallas_call") if each else "?" for each in found]
    return dict(collections.Counter(path.rpartition("/")[2] for path in paths))


def collectives(program: str) -> dict[str, int]:
    """Return how many collectives of each kind optimised HLO holds."""
    return dict(collections.Counter(COLLECTIVE.findall(program)))
