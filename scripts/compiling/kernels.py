"""How much each kernel may spill: nothing, unless a line here says how much and why."""

import dataclasses
from collections.abc import Mapping

import jax

# Which implementation is compiled for a platform, as XLA names it.
IMPLEMENTATION = {"cuda": "triton", "tpu": "mosaic_tpu"}

# Leaves for one generation of GPU, by target and op: compiled as well. They bring
# compilers of their own, which print no registers and refuse what does not fit.
ALSO = {
    ("H200", "tree_verify"): ("mosaic_gpu",),
    ("H200", "history_verify"): ("mosaic_gpu",),
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """The most bytes that a thread may spill on each GPU, and why that many.

    Spilled values go to local memory, so a rise shows in time before it shows in tests.

    Attributes:
      spill_bytes: by target, with JAX 0.11 and ptxas 13.0.
      reason: in a few words.
      newer: the same with JAX 0.12 and ptxas 13.5, where it differs.
    """

    spill_bytes: Mapping[str, int]
    reason: str
    newer: Mapping[str, int] | None = None

    def most(self, target: str) -> int:
        """Return what is allowed on a GPU with the compilers of this process."""
        newer = jax.__version_info__ >= (0, 12) and self.newer is not None
        return (self.newer if newer else self.spill_bytes)[target]


# By op and kind of case (scripts/workloads). A bound is the next multiple of 16 above
# what was measured: it holds the state of things, which is no aim. Lower it whenever
# the kernel gets better.
MAX_SPILL = {
    ("chunk_prefill", "bfloat16"): Bound(
        {"H200": 48, "B200": 16},
        "the walk holds the state, its operands and five gates: 40, 4",
    ),
    ("chunk_prefill", "float32"): Bound(
        {"H200": 384, "B200": 64},
        "operands in two parts: 380 in the walk, 60 in the inverse; 544, 200",
        newer={"H200": 544, "B200": 208},
    ),
    ("tree_attention", "bfloat16 D=256"): Bound(
        {"H200": 48, "B200": 128}, "64 rows of 256: 36, 128"
    ),
    ("tree_attention", "float32 D=256"): Bound(
        {"H200": 1088, "B200": 656},
        "as above in two parts: 1076, 648",
        newer={"H200": 1088, "B200": 896},
    ),
    ("tree_attention", "float32 D=128"): Bound(
        {"H200": 32, "B200": 0}, "64 rows of 128 in two parts: 32"
    ),
    ("store_all", "n=40"): Bound(
        {"H200": 48, "B200": 0}, "the path's states stay in registers: 40"
    ),
    ("tree_verify", "fast n<=64"): Bound(
        {"H200": 0, "B200": 0},
        "two heads a program; 13.5's ptxas keeps more alive: 304",
        newer={"H200": 304, "B200": 0},
    ),
    ("tree_verify", "high n<=64"): Bound(
        {"H200": 96, "B200": 0},
        "float32 state in two parts fills the registers: 84; 168",
        newer={"H200": 176, "B200": 0},
    ),
    ("tree_verify", "float32 rows n<=16"): Bound(
        {"H200": 464, "B200": 176}, "every operand in three parts: 460, 172"
    ),
    ("tree_verify", "float32 rows n<=64"): Bound(
        {"H200": 256, "B200": 704},
        "as above with matrices of 64 rows: 252, 704; 1552",
        newer={"H200": 1552, "B200": 704},
    ),
    ("tree_verify", "bfloat16 rows n<=64"): Bound(
        {"H200": 16, "B200": 0},
        "64 nodes, two heads, float32 state: 8; 340",
        newer={"H200": 352, "B200": 0},
    ),
    ("history_verify", "bfloat16 rows n<=16"): Bound(
        {"H200": 16, "B200": 120},
        "tree_verify, and the history's operands: 12, 116; 24, 20",
        newer={"H200": 32, "B200": 32},
    ),
    ("history_verify", "bfloat16 rows n<=64"): Bound(
        {"H200": 320, "B200": 208},
        "as above with matrices of 64 rows, float32 state: 312, 204; 772, 208",
        newer={"H200": 784, "B200": 208},
    ),
    ("history_verify", "float32 rows n<=16"): Bound(
        {"H200": 624, "B200": 480},
        "every operand in three parts: 612, 476; 36, 0",
        newer={"H200": 48, "B200": 0},
    ),
    ("history_verify", "float32 rows n<=64"): Bound(
        {"H200": 1376, "B200": 720},
        "as above with matrices of 64 rows: 1360, 708; 1388, 496",
        newer={"H200": 1392, "B200": 496},
    ),
}
NO_SPILL = Bound({"H200": 0, "B200": 0}, "fits in the registers")


def bound(op: str, kind: str) -> Bound:
    """Return the bound of a kind of case."""
    return MAX_SPILL.get((op, kind), NO_SPILL)
