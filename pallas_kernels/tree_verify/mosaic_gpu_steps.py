"""Steps of the Mosaic GPU kernel below Pallas, and what the interpreter runs instead.

Arrays here have the layout of a wgmma accumulator: a thread of a warpgroup holds pairs
of neighbours in the rows of a [64, n] array. The copy engine cannot reach single
elements a head apart nor rows of n bytes, so those take plain loads whose indices are
kept within the array.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

plgpu: Any = mosaic_gpu  # its types do not tell what its decorators return

TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)  # one number for each row of a tile
COLUMN = TILE.reduce(0)
ROWS_OF_128_BYTES = (plgpu.SwizzleTransform(128),)
THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
PAIR = plgpu.Layout.WG_STRIDED((2, 64), vec_size=1)


def multiply(
    pairs: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    start: jax.Array | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    """Return start + the sum of a @ b over pairs (a, b); a may be in registers."""
    if start is None:
        return multiply_each([pairs], [shape], interpret=interpret)[0]
    if interpret:
        return start + _interpreted(pairs)

    def run(total):
        for a, b in pairs:
            plgpu.wgmma(total, a, b)

    return pl.run_state(run)(plgpu.ACC.init(start))


def multiply_each(
    lists: Sequence[Sequence[tuple[Any, Any]]],
    shapes: Sequence[tuple[int, int]],
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Return the sum of a @ b over the pairs (a, b) of each list; all run together."""
    if interpret:
        return [_interpreted(pairs) for pairs in lists]

    def run(*totals):
        for total, pairs in zip(totals, lists, strict=True):
            for a, b in pairs:
                plgpu.wgmma(total, a, b)
        return [total[...] for total in totals]

    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _interpreted(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Do without wgmma: the interpreter knows none with an operand in registers."""
    total: Any = 0.0
    for a, b in pairs:
        a = a if isinstance(a, jax.Array) else a[...]
        total += lax.dot(a, b[...], preferred_element_type=jnp.float32)
    return total


def load(
    ref: Any,
    shape: tuple[int, ...],
    layout: Any,
    *,
    transposed: bool = False,
    count: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """Read global memory into registers; what lies beyond its end is arbitrary.

    `count` ends the first axis of `ref` earlier: no memory from there on is read. Nor
    are registers that lie beyond the end in all threads.
    """
    if interpret:
        found = ref[...].T if transposed else ref[...]
        room = zip(found.shape, shape, strict=True)
        return jnp.pad(found, [(0, wanted - size) for size, wanted in room])

    last = () if count is None else (lax.max(count, 1) - 1,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(plgpu.Layout.WG_SPLAT(()) for _ in last)),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def read(_, source, *last):
        last = [arith.index_cast(ir.IndexType.get(), x.registers.item()) for x in last]
        order = slice(None, None, -1 if transposed else 1)
        limits, wanted = ir.MemRefType(source.type).shape, shape[order]
        kind = layout.to_mgpu()
        registers = np.empty(kind.registers_shape(shape), dtype=object)
        places = zip(_places(shape, kind), np.ndindex(registers.shape), strict=True)
        for place, at in places:
            items = []
            for i in range(kind.vector_length):
                if any(map(operator.ge, place.static[order], limits)):
                    items.append(utils.c(0, ir.MemRefType(source.type).element_type))
                    continue
                index = zip(place.element(i)[order], limits, wanted, strict=True)
                within = [
                    x if size >= most else arith.minui(x, _index(size - 1))
                    for x, size, most in index
                ]
                for most in last:
                    within[0] = arith.minui(within[0], most)
                items.append(memref.load(source, within))
            vector_type = ir.VectorType.get((len(items),), items[0].type)
            registers[at] = vector.from_elements(vector_type, items)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=kind, _is_signed=utils.is_signed(ref.dtype)
        )

    return read(ref, *last)


def load_vectors(refs: Sequence[Any], *, interpret: bool) -> jax.Array:
    """Read two float32 vectors of at most 64 numbers, one number a thread: [2, 64]."""
    if interpret:
        return jnp.stack([jnp.pad(ref[...], (0, 64 - ref.shape[0])) for ref in refs])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((2, 64), jnp.float32, layout=PAIR),
    )
    def read(_, first, second):
        [size] = ir.MemRefType(first.type).shape
        thread = arith.remui(
            gpu.thread_id(gpu.Dimension.x), _index(utils.WARPGROUP_SIZE)
        )
        at = arith.minui(arith.remui(thread, _index(64)), _index(size - 1))
        # One load, of which nothing is made yet: its latency is hidden until then.
        places = [_pointer(x, at) for x in (first, second)]
        place = arith.select(_below(thread, 64), *places)
        item = llvm.load(ir.F32Type.get(), place)
        return _one_register(item, PAIR, is_signed=None)

    return read(*refs)


def _pointer(ref: ir.Value, index: ir.Value) -> ir.Value:
    """Return the address of an element of a vector with a stride."""
    kind = ir.MemRefType(ref.type)
    [stride], _ = kind.get_strides_and_offset()
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.index_cast(i64, arith.muli(index, _index(stride)))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], kind.element_type)


def load_bytes(
    ref: Any, row: Any, shape: tuple[int, int], *, interpret: bool
) -> jax.Array:
    """Read a square of booleans, of which nothing is made yet: no load is waited for.

    What lies beyond the end is 0.
    """
    if interpret:
        return load(ref.at[row], shape, TILE, interpret=True).astype(jnp.int8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int8, layout=TILE),
    )
    def read(_, source, number):
        i8, i64 = (ir.IntegerType.get_signless(size) for size in (8, 64))
        # The pointer of a slice would be off: it counts a boolean as a bit.
        pointer = utils.memref_ptr(source)
        [_, nodes, _] = ir.MemRefType(source.type).shape
        number = arith.index_cast(ir.IndexType.get(), number.registers.item())
        start = arith.muli(number, _index(nodes * nodes))
        registers = np.empty(TILE.to_mgpu().registers_shape(shape), dtype=object)
        places = _places(shape, TILE.to_mgpu())
        for place, at in zip(places, np.ndindex(registers.shape), strict=True):
            items = [arith.constant(i8, 0)] * 2
            for i in range(2):
                if place.static[1] >= nodes:
                    continue
                row, column = (
                    arith.minui(x, _index(nodes - 1)) for x in place.element(i)
                )
                offset = arith.addi(arith.muli(row, _index(nodes)), column)
                offset = arith.index_cast(i64, arith.addi(start, offset))
                items[i] = llvm.load(i8, utils.getelementptr(pointer, [offset], i8))
            registers[at] = vector.from_elements(ir.VectorType.get((2,), i8), items)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=TILE.to_mgpu(), _is_signed=True
        )

    return read(ref, row)


def pack(
    square: jax.Array, nodes: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Pack what `load_bytes` read, and it without the diagonal, for `unpack`."""
    if interpret:
        found = square.astype(bool)
        return found, found & ~jnp.eye(*square.shape, dtype=bool)

    word = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=THREAD)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=(word, word))
    def join(_, tile):
        i1, i32 = (ir.IntegerType.get_signless(size) for size in (1, 32))
        words = [arith.constant(i32, 0)] * 2
        places = _places(tile.shape, tile.layout)
        for i, (place, register) in enumerate(
            zip(places, tile.registers.flat, strict=True)
        ):
            for j in range(2):
                row, column = place.element(j)
                byte = vector.extract(
                    register, dynamic_position=[], static_position=[j]
                )
                inside = arith.andi(_below(row, nodes), _below(column, nodes))
                bit = arith.andi(arith.trunci(i1, byte), inside)
                other = arith.cmpi(arith.CmpIPredicate.ne, row, column)
                position = arith.constant(i32, 2 * i + j)
                for k, x in enumerate((bit, arith.andi(bit, other))):
                    x = arith.shli(arith.extui(i32, x), position)
                    words[k] = arith.ori(words[k], x)
        return tuple(_one_register(x, THREAD, is_signed=True) for x in words)

    return join(square)


def _one_register(item: ir.Value, layout: Any, is_signed: bool | None) -> Any:
    register = vector.from_elements(ir.VectorType.get((1,), item.type), [item])
    return mgpu.FragmentedArray(
        _registers=np.array([register], dtype=object),
        _layout=layout.to_mgpu(),
        _is_signed=is_signed,
    )


def barrier(*, interpret: bool) -> None:
    """Let the threads of a warpgroup see what the others wrote to shared memory."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        utils.warpgroup_barrier()

    wait()


def unpack(bits: jax.Array, shape: tuple[int, int], *, interpret: bool) -> jax.Array:
    """Return the mask of a tile that `pack` packed."""
    if interpret:
        return bits

    @plgpu.inline_mgpu(
        arg_types=(THREAD,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=TILE),
    )
    def spread(_, words):
        i32, i1 = (ir.IntegerType.get_signless(size) for size in (32, 1))
        word = vector.extract(
            words.registers.flat[0], dynamic_position=[], static_position=[0]
        )
        kind = TILE.to_mgpu()
        registers = np.empty(kind.registers_shape(shape), dtype=object)
        for i, at in enumerate(np.ndindex(registers.shape)):
            items = [
                arith.trunci(i1, arith.shrui(word, arith.constant(i32, 2 * i + j)))
                for j in range(2)
            ]
            registers[at] = vector.from_elements(ir.VectorType.get((2,), i1), items)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=kind, _is_signed=False
        )

    return spread(bits)


def store_transposed(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Write value[v, t] to global memory at ref[t, v], for every t and v of `ref`."""
    if interpret:
        nodes, lines = ref.shape
        ref[...] = value[:lines, :nodes].T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def write(_, target, tile):
        nodes, lines = ir.MemRefType(target.type).shape
        places = _places(tile.shape, tile.layout)
        for place, register in zip(places, tile.registers.flat, strict=True):
            if place.static[1] >= nodes:
                continue
            for i in range(tile.layout.vector_length):
                row, column = place.element(i)
                checks = []
                if place.static[1] + 8 > nodes:
                    checks.append(_below(column, nodes))
                if lines < tile.shape[0]:
                    checks.append(_below(row, lines))
                item = vector.extract(
                    register, dynamic_position=[], static_position=[i]
                )
                _store(item, target, [column, row], checks)

    write(ref, value)


def _store(item, target, indices, checks):
    if not checks:
        memref.store(item, target, indices)
        return
    with mgpu.when(checks[0] if len(checks) == 1 else arith.andi(*checks)):
        memref.store(item, target, indices)


def stage_transposed(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Write the float32 value[v, t] to shared memory at ref[v // 32, t, v % 32].

    The memory is permuted as the copy engine wants it for rows of 128 bytes: of the 16
    bytes number j of row t, the place is that of number j ^ (t % 8).
    """
    if interpret:
        for i in range(2):
            ref[i] = value[32 * i : 32 * i + 32].T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ROWS_OF_128_BYTES), TILE))
    def write(_, target, tile):
        i32 = ir.IntegerType.get_signless(32)
        number = functools.partial(arith.constant, i32)
        _, nodes, _ = ir.MemRefType(target.type).shape
        pointer = utils.memref_ptr(target)
        item_type = ir.F32Type.get()
        starts = {}
        places = _places(tile.shape, tile.layout)
        for place, register in zip(places, tile.registers.flat, strict=True):
            line, node = place.static
            for i in range(2):
                if (line, i) not in starts:
                    v, t = (arith.index_cast(i32, x) for x in place.thread)
                    v, t = arith.addi(v, number(line)), arith.addi(t, number(i))
                    half, v = arith.shrui(v, number(5)), arith.andi(v, number(31))
                    block = arith.xori(arith.shrui(v, number(2)), t)
                    offset = arith.muli(half, number(32 * nodes))
                    offset = arith.addi(offset, arith.muli(t, number(32)))
                    offset = arith.addi(offset, arith.shli(block, number(2)))
                    offset = arith.addi(offset, arith.andi(v, number(3)))
                    starts[line, i] = utils.getelementptr(pointer, [offset], item_type)
                item = vector.extract(
                    register, dynamic_position=[], static_position=[i]
                )
                at = utils.getelementptr(starts[line, i], [32 * node], item_type)
                llvm.store(item, at)

    write(ref, value)


class _Place(NamedTuple):
    """Where the first element of a register lies; `static` holds for all threads."""

    thread: tuple[ir.Value, ...]
    static: tuple[int, ...]

    def element(self, i: int) -> list[ir.Value]:
        """Return the indices of element i: the neighbours lie along the last axis."""
        offsets = (*self.static[:-1], self.static[-1] + i)
        both = zip(self.thread, offsets, strict=True)
        return [arith.addi(x, _index(offset)) for x, offset in both]


def _places(shape: tuple[int, ...], layout: Any) -> Iterator[_Place]:
    """Yield the place of each register of a thread, in their order."""
    pitch = 1024  # of an array in which no index carries into the next
    strides = layout.tiling.tile_strides((pitch, 1)[-len(shape) :])
    i32 = ir.IntegerType.get_signless(32)
    inner = [arith.constant(i32, x) for x in strides[-layout.tiled_tiling_rank :]]
    flat = arith.addi(
        utils.dyn_dot(layout.warp_indices(), inner),
        utils.dyn_dot(layout.lane_indices(), inner),
    )
    size = arith.constant(i32, pitch)
    thread = (arith.divui(flat, size), arith.remui(flat, size))[-len(shape) :]
    thread = tuple(arith.index_castui(ir.IndexType.get(), x) for x in thread)
    for register in np.ndindex(layout.registers_shape(shape)):
        offset = sum(i * stride for i, stride in zip(register, strides, strict=True))
        yield _Place(thread, divmod(offset, pitch)[-len(shape) :])


def _index(value: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), value)


def _below(index: ir.Value, limit: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, index, _index(limit))
