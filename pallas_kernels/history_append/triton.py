"""Appending to a history as one Pallas Triton kernel for NVIDIA GPUs, for all layers.

A pure copy: a program has one row of one layer and asks for records before it writes
any. It alone reads the count of its row, so the new one takes its place in memory;
where a loop carries histories, an array of its own would be copied in every layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, gpu, refusals
from pallas_kernels.history_append import config as configs
from pallas_kernels.history_append import spec as specs

# Each layer has eleven pointers, of which a launch takes 4 KB; and code of its own.
LAYERS = 32


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return refusals.device("gpu", platform, interpret=interpret) or specs.unsupported(
        spec
    )


def append_layers(
    pasts: Sequence[specs.Past],
    nodes: Sequence[specs.Nodes],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> list[specs.Past]:
    """Return the histories, in the memory of the arguments."""
    platform, device_kind = device.target()
    config = configs.choose(spec, device_kind, config)
    launch = functools.partial(
        _launch, path, count, spec=spec, config=config, interpret=platform == "cpu"
    )
    size = pl.cdiv(spec.layers, pl.cdiv(spec.layers, LAYERS))
    return [
        past
        for i in range(0, spec.layers, size)
        for past in launch(pasts[i : i + size], nodes[i : i + size])
    ]


def _launch(path, count, pasts, nodes, *, spec, config, interpret):
    """Run over the rows of some layers."""
    spec = dataclasses.replace(spec, layers=len(pasts))
    # A record is one line of memory, whatever its heads.
    rows = [_lines(x) for tree in nodes for x in tree]
    old = [_lines(x) for past in pasts for x in past]
    first = 2 + len(rows)
    written = pl.pallas_call(
        functools.partial(
            _kernel, spec=spec, records=config.records, barrier=not interpret
        ),
        grid=(spec.layers * spec.batch,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old],
        input_output_aliases={first + i: i for i in range(len(old))},
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops, bytes_accessed=spec.bytes_moved, transcendentals=0
        ),
        name="history_append",
    )(path, count, *rows, *old)
    written = iter(written)
    return [
        specs.Past(*(next(written).reshape(x.shape) for x in past)) for past in pasts
    ]


def _lines(x: Array) -> Array:
    """Join heads and dimensions."""
    return x.reshape(*x.shape[:2], -1) if x.ndim > 2 else x


class _Layer(NamedTuple):
    """References of a layer."""

    nodes: Sequence[Any]
    past: Sequence[Any]
    count: Any


def _kernel(path, count, *refs, spec, records, barrier):
    layers = spec.layers
    rows, new = refs[: 3 * layers], refs[-4 * layers :]  # the old ones are the new ones
    found = [
        _Layer(rows[3 * i : 3 * i + 3], new[4 * i : 4 * i + 3], new[4 * i + 3])
        for i in range(layers)
    ]
    layer = lax.div(pl.program_id(0), jnp.int32(spec.batch))
    row = lax.rem(pl.program_id(0), jnp.int32(spec.batch))
    steps = gpu.load(count.at[row])

    def append(i):
        before = gpu.load(found[i].count.at[row])
        base = specs.base(before, spec)
        _copy(found[i], path, row, steps, base, spec, records)
        if barrier:  # no thread may write the count before all have read it
            _barrier()
        gpu.store(found[i].count.at[row], specs.behind(base, steps, spec))

    _choose(layer, range(layers), append)


def _choose(number: Int[Array, ""], among: range, action: Callable[[int], None]):
    """Do something for the number of a range that is met, by halves."""
    if len(among) == 1:
        return action(among[0])
    half = len(among) // 2
    lax.cond(
        number < among[half],
        lambda: _choose(number, among[:half], action),
        lambda: _choose(number, among[half:], action),
    )
    return None


def _copy(layer, path, row, steps, base, spec, records):
    """Copy the records of a row's path, some at a time."""

    def some(turn, _):
        first = turn * records
        position = first + lax.broadcasted_iota(jnp.int32, (records,), 0)
        node = gpu.load(path.at[row, pl.ds(first, records)], position < spec.path)
        node = jnp.clip(node, 0, spec.nodes - 1)
        most = jnp.minimum(specs.clipped(steps, spec), spec.horizon - base)
        masks = [_mask(rows, records, most - first) for rows in layer.nodes]
        read = [
            # The interpreter takes slices or arrays, not both.
            gpu.load(rows.at[row, node[:, None], _column(mask)], mask)
            for rows, mask in zip(layer.nodes, masks, strict=True)
        ]
        slots = pl.ds(base + first, records)
        for past, x, mask in zip(layer.past, read, masks, strict=True):
            gpu.store(past.at[row, slots, _columns(past)], x, mask)

    turns = pl.cdiv(spec.path, records)
    if turns == 1:
        some(0, None)  # branches without a loop become one for all layers
    else:
        lax.fori_loop(0, turns, some, None)


def _barrier() -> None:
    from jax.experimental.pallas import triton as pallas_triton

    pallas_triton.debug_barrier()


def _columns(ref: Float[Any, "B S D"]) -> pl.Slice:
    """Return the columns of a line, padded."""
    return pl.ds(0, gpu.power_of_two(ref.shape[-1], least=1))


def _column(mask: Bool[Array, "records D"]) -> Int[Array, "1 D"]:
    return lax.broadcasted_iota(jnp.int32, (1, mask.shape[1]), 1)


def _mask(ref: Float[Any, "B S D"], records: int, there: Int[Array, ""]) -> Array:
    """Return which elements of padded lines exist, where `there` is their number."""
    width = ref.shape[-1]
    shape = (records, gpu.power_of_two(width, least=1))
    mask = gpu.row_mask(shape, there)
    return mask if shape[1] == width else mask & gpu.row_mask(shape, width, axis=1)
