"""The kernel of `jax_triton`, in Triton's language; imported where Triton is there.

Arrays are transposed, nodes along the second axis: a dot then has the rows of the state
on its large side, and leaves U^T in registers where the next sweep takes it.
"""

import inspect
from typing import Any

import triton
import triton.language as tl


def jit(function: Any) -> Any:
    """Compile a function as it stands here, without what type checks wrap around it."""
    return triton.jit(inspect.unwrap(function))


@jit
def rest(x):
    """Return what bfloat16 leaves of an array."""
    x = x.to(tl.float32)
    return x - x.to(tl.bfloat16).to(tl.float32)


@jit
def product(a, b, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr):
    """Return a @ b from at most three bfloat16 parts of each, the smallest first.

    As in pallas_kernels.dots, products of small parts with small parts are left out.
    """
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    if A_PARTS == 3:
        total = tl.dot(rest(rest(a)).to(tl.bfloat16), b_high, total)
    if A_PARTS == 3 and B_PARTS > 1 or A_PARTS == 2 and B_PARTS == 3:
        total = tl.dot(rest(a).to(tl.bfloat16), rest(b).to(tl.bfloat16), total)
    if B_PARTS == 3:
        total = tl.dot(a_high, rest(rest(b)).to(tl.bfloat16), total)
    if A_PARTS > 1:
        total = tl.dot(rest(a).to(tl.bfloat16), b_high, total)
    if B_PARTS > 1:
        total = tl.dot(a_high, rest(b).to(tl.bfloat16), total)
    return tl.dot(a_high, b_high, total)


@jit
def tree_verify_kernel(
    q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, state_ptr, ancestors_ptr, sizes_ptr,
    sweeps_ptr, output_ptr, pseudo_values_ptr,
    NODES: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    KEY_PARTS: tl.constexpr, STATE_PARTS: tl.constexpr, PARTS: tl.constexpr,
    STRONGEST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Verify HEADS value heads of one key head, BLOCKS blocks of Dv each."""
    part, turn, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row.to(tl.int64)
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    size, count = tl.load(sizes_ptr + row), tl.load(sweeps_ptr + row)
    node = tl.arange(0, PADDED)
    there = node < size
    column = tl.arange(0, KEY_DIM)

    key_head = turn * HEADS // group
    at = (row * NODES + node) * KEY_HEADS + key_head
    at = at[:, None] * KEY_DIM + column[None, :]
    queries = tl.load(q_ptr + at, mask=there[:, None], other=0.0)
    keys = tl.load(k_ptr + at, mask=there[:, None], other=0.0)
    key_gram = product(keys, tl.trans(keys), KEY_PARTS, KEY_PARTS)
    query_gram = product(keys, tl.trans(queries), KEY_PARTS, KEY_PARTS)

    # related[i, t] and its transpose, so that sums over i come along either axis.
    pair = row * NODES * NODES + node[:, None] + node[None, :] * NODES
    both = there[:, None] & there[None, :]
    related = tl.load(ancestors_ptr + pair, mask=both, other=0) != 0
    pair = row * NODES * NODES + node[:, None] * NODES + node[None, :]
    turned = tl.load(ancestors_ptr + pair, mask=both, other=0) != 0
    strict = related & (node[:, None] != node[None, :])

    for i in range(HEADS):
        head = turn * HEADS + i
        gate = (row * NODES + node) * VALUE_HEADS + head
        decays = tl.load(log_decay_ptr + gate, mask=there, other=0.0).to(tl.float32)
        strength = tl.load(beta_ptr + gate, mask=there, other=0.0).to(tl.float32)
        decays = tl.maximum(decays, STRONGEST)
        high = tl.floor(decays * 16 + 0.5) / 16
        low = decays - high
        high_t = tl.sum(tl.where(related, high[:, None], 0.0), axis=0)
        low_t = tl.sum(tl.where(related, low[:, None], 0.0), axis=0)
        high_i = tl.sum(tl.where(turned, high[None, :], 0.0), axis=1)
        low_i = tl.sum(tl.where(turned, low[None, :], 0.0), axis=1)
        difference = high_t[None, :] - high_i[:, None]
        difference += low_t[None, :] - low_i[:, None]
        decay = tl.exp(tl.minimum(difference, 0.0))
        from_state = tl.exp(high_t + low_t)[None, :]
        matrix = tl.where(strict, -strength[None, :] * (decay * key_gram), 0.0)
        weights = tl.where(related, decay * query_gram, 0.0)

        for block in tl.range(BLOCKS, num_stages=STAGES):
            line = (part * BLOCKS + block) * BLOCK_V + tl.arange(0, BLOCK_V)
            tile = (row * VALUE_HEADS + head) * VALUE_DIM + line
            tile = state_ptr + tile[:, None] * KEY_DIM + column[None, :]
            state = tl.load(tile)
            value = gate[None, :] * VALUE_DIM + line[:, None]
            wanted = tl.load(v_ptr + value, mask=there[None, :], other=0.0)
            known = product(state, tl.trans(keys), STATE_PARTS, KEY_PARTS)
            right = strength[None, :] * (wanted.to(tl.float32) - from_state * known)
            solved = right
            for _ in range(count):
                solved = right + product(solved, matrix, PARTS, PARTS)
            seen = product(state, tl.trans(queries), STATE_PARTS, KEY_PARTS)
            seen = from_state * seen + product(solved, weights, PARTS, PARTS)
            inside = (node < NODES)[None, :]
            seen = seen.to(output_ptr.dtype.element_ty)
            tl.store(output_ptr + value, seen, mask=inside)
            tl.store(pseudo_values_ptr + value, solved, mask=inside)
