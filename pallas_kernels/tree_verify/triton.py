"""Tree verification as a Pallas Triton kernel for NVIDIA GPUs.

A program serves value heads of one key head, whose keys and queries it reads once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device, dots, gpu, refusals
from pallas_kernels.tree_verify import body, triton_solve
from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs

# A node pair takes registers in every program; beyond this they spill.
MOST_NODES = 128


def supports(spec: specs.Spec, platform: str, *, interpret: bool = False) -> str | None:
    """Return why the kernel cannot run this call, or None.

    `interpret` also accepts a CPU, where the kernel is interpreted.
    """
    return (
        refusals.device("gpu", platform, interpret=interpret)
        or refusals.not_power_of_two(spec, 16, "key_dim", "value_dim")
        or refusals.above(spec, MOST_NODES, "nodes")
        or specs.unsupported_dtype(spec)
    )


def tree_verify(
    q: Float[Array, "B n Hk Dk"],
    k: Float[Array, "B n Hk Dk"],
    v: Float[Array, "B n Hv Dv"],
    log_decay: Float[Array, "B n Hv"],
    beta: Float[Array, "B n Hv"],
    state: Float[Array, "B Hv Dv Dk"],
    ancestors: Bool[Array, "B n n"],
    sizes: Int[Array, " B"],
    sweeps: Int[Array, " B"],
    *,
    spec: specs.Spec,
    config: configs.Config | None = None,
) -> tuple[Float[Array, "B n Hv Dv"], Float[Array, "B n Hv Dv"]]:
    """Return outputs and float32 pseudo-values, 0 in rows from `sizes` on.

    Those rows are not read. `ancestors` is true at [t, i] for i = t and for the
    ancestors i of t, `sweeps` the depth of each row's tree. Interpreted where the
    target is a CPU.
    """
    platform, device_kind = device.target()
    config = configs.choose(spec, platform, device_kind, config)
    interpret = platform == "cpu"
    in_specs, value = block_specs(spec, config)
    output, pseudo_values = pl.pallas_call(
        functools.partial(_kernel, spec=spec, config=config),
        grid=(
            spec.value_dim // (config.block_v * config.blocks),
            spec.value_heads // config.heads,
            spec.batch,
        ),
        in_specs=in_specs,
        out_specs=[value, value],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, spec.output_dtype),
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
        ],
        interpret=interpret,
        compiler_params=None
        if interpret
        else gpu.compiler_params(config.num_warps, config.num_stages),
        cost_estimate=specs.cost_estimate(spec),
        name="tree_verify",
    )(q, k, v, log_decay, beta, state, ancestors, sizes, sweeps)
    return output, pseudo_values


def _kernel(
    q, k, v, log_decay, beta, state, ancestors, sizes, sweeps,
    output, pseudo_values, *, spec, config,
):  # fmt: skip
    split = body.splitter(spec)
    nodes, heads = q.shape[0], config.heads
    size = sizes[...]
    read = functools.partial(read_rows, nodes=spec.nodes, size=size)
    queries, keys = (split(read(x.at[...], x.shape)) for x in (q, k))
    related = read_square(ancestors, nodes=spec.nodes, size=size)
    gates = [read(x.at[:, :], (nodes, heads)) for x in (log_decay, beta)]

    def one_head(head, _):
        decays, strength = (
            triton_solve.column(x.astype(jnp.float32), head) for x in gates
        )
        decay, from_state = body.path_decay(jnp.swapaxes(decays, 0, 1), related)
        # The Grams again for each head: kept, they would cost half the programs that
        # fit on a multiprocessor.
        grams = dots.dot(keys, keys, 1, 1), dots.dot(queries, keys, 1, 1)
        system = body.system(*grams, decay, strength)
        solved = triton_solve.solver(
            *system, from_state, strength, sweeps[...], spec.depth, split
        )

        def one_block(i, _):
            lines = pl.ds(i * config.block_v, config.block_v)
            tile = split(gpu.load(state.at[head, lines, :]))
            block = (nodes, config.block_v)
            values = read(v.at[:, head, lines], block)
            # Rows beyond the array are not there to be written.
            there = gpu.row_mask(block, spec.nodes)
            reads = [
                functools.partial(triton_solve.read, x, tile, nodes)
                for x in (keys, queries)
            ]
            results = solved(*reads, values.astype(jnp.float32))
            for ref, result in zip((pseudo_values, output), results, strict=True):
                gpu.store(ref.at[:, head, lines], result, there)

        lax.fori_loop(0, config.blocks, one_block, None)

    lax.fori_loop(0, heads, one_head, None)


def read_rows(ref, shape, *, nodes, size):
    """Read rows up to `size`, else 0; rows from `nodes` on are not there to be read."""
    x = gpu.load(ref, gpu.row_mask(shape, nodes))
    return jnp.where(gpu.row_mask(shape, size), x, jnp.zeros_like(x))


def read_square(ref, *, nodes, size):
    """Read who is an ancestor of whom, among the first `size` nodes."""
    padded = ref.shape[0]
    related = gpu.load(ref.at[...], _square_mask(padded, nodes)) != 0
    return related & _square_mask(padded, size)


def _square_mask(nodes, size):
    square = (nodes, nodes)
    return gpu.row_mask(square, size) & gpu.row_mask(square, size, axis=1)


def block_specs(spec, config):
    """Return the blocks of the inputs, in the order of `_kernel`, and of an output."""
    nodes = gpu.power_of_two(spec.nodes)
    heads, lines = config.heads, config.block_v * config.blocks
    programs = spec.group // heads  # of one key head
    key = pl.BlockSpec(
        (None, nodes, None, spec.key_dim), lambda i, h, b: (b, 0, h // programs, 0)
    )
    value = pl.BlockSpec((None, nodes, heads, lines), lambda i, h, b: (b, 0, h, i))
    gate = pl.BlockSpec((None, nodes, heads), lambda i, h, b: (b, 0, h))
    tile = pl.BlockSpec(
        (None, heads, lines, spec.key_dim), lambda i, h, b: (b, h, i, 0)
    )
    square = pl.BlockSpec((None, nodes, nodes), lambda i, h, b: (b, 0, 0))
    scalar = pl.BlockSpec((None,), lambda i, h, b: (b,))
    return [key, key, value, gate, gate, tile, square, scalar, scalar], value
