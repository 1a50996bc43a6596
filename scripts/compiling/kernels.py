"""The kernels to compile and how much each may spill: a new kernel is one entry here.

An entry of `KERNELS` lists variants: sizes and dtypes that matter in use, each with the
function and the argument shapes to compile on a platform.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tree_verify import mosaic_tpu, spec, triton

Case = tuple[Callable, list[jax.ShapeDtypeStruct]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call a kernel.

    Attributes:
      label: sizes and dtypes, as the table shows them.
      kind: which bound of `MAX_SPILL` holds for it.
      case: from a platform (cuda, tpu) to the function and its argument shapes.
    """

    label: str
    kind: str
    case: Callable[[str], Case]


@dataclasses.dataclass(frozen=True)
class Bound:
    """The most bytes that a thread may spill on each GPU, and why that many.

    Spilled values go to local memory, so a rise shows in time before it shows in tests.
    """

    spill_bytes: Mapping[str, int]
    reason: str


# Of each kernel (the name that it is launched under) and kind of variant. Where a
# kernel spills, the bound is the next multiple of 16 above what is measured with JAX
# 0.11.2 and ptxas 13.0.88: it holds the state of things, which is no aim. Lower it
# whenever the kernel gets better.
MAX_SPILL = {
    ("tree_verify", "high n<=16"): Bound(
        {"H200": 160, "B200": 128},
        "float32 operands split in bfloat16 parts fill all 255 registers: 156, 124",
    ),
    ("tree_verify", "high n<=64"): Bound(
        {"H200": 960, "B200": 144},
        "as above with n x n matrices of 64 rows: 944, 132; float32 state 840, 132",
    ),
    ("tree_verify", "fast n<=16"): Bound(
        {"H200": 16, "B200": 0},
        "8 bytes with a bfloat16 state on the H200, though it takes 80 registers",
    ),
    ("tree_verify", "fast n<=64"): Bound(
        {"H200": 0, "B200": 0}, "bfloat16 operands fit in the registers"
    ),
}


def tree_verify() -> list[Variant]:
    """Verification at the head sizes of Qwen3.5 35B-A3B: 16 key and 32 value heads.

    `high` is what a float32 model calls, `fast` what a bfloat16 one does.
    """
    return [
        Variant(
            label=f"n={nodes} {precision} state={state_dtype}",
            kind=f"{precision} n<={16 if nodes <= 16 else 64}",
            case=functools.partial(
                _tree_verify_case,
                spec.make_spec(
                    batch=32,
                    nodes=nodes,
                    key_heads=16,
                    value_heads=32,
                    key_dim=128,
                    value_dim=128,
                    input_dtype="float32" if precision == "high" else "bfloat16",
                    state_dtype=state_dtype,
                    precision=precision,
                ),
            ),
        )
        for precision, state_dtype, nodes in itertools.product(
            ("high", "fast"), ("float32", "bfloat16"), (4, 15, 40, 64)
        )
    ]


KERNELS: dict[str, Callable[[], list[Variant]]] = {"tree_verify": tree_verify}


def _tree_verify_case(call: spec.Spec, platform: str) -> Case:
    module: Any = {"cuda": triton, "tpu": mosaic_tpu}[platform]
    keys = (call.batch, call.nodes, call.key_heads, call.key_dim)
    values = (call.batch, call.nodes, call.value_heads, call.value_dim)
    decays = (call.batch, call.value_heads, call.nodes)
    state = (call.batch, call.value_heads, call.value_dim, call.key_dim)
    shapes = [
        (keys, call.input_dtype),  # q
        (keys, call.input_dtype),  # k
        (values, call.input_dtype),  # v
        (decays, "float32"),  # high part of the log decay
        (decays, "float32"),  # low part
        (values[:3], "float32"),  # beta
        (state, call.state_dtype),
        ((call.batch, call.nodes, call.nodes), jnp.bool_),  # ancestors
        ((call.batch,), "int32"),  # sweeps
    ]
    return (
        functools.partial(module.tree_verify, spec=call),
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
    )
