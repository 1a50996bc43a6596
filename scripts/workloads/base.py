"""What a workload is: one call of an op at sizes that matter in use.

The benchmarks, the tuner, the compile check and the memory check all read the same
list, so a new kernel is one module here and one line in `scripts.workloads.all`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import implementations


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op, how to check it and what it must at least cost.

    Attributes:
      op: name of the folder in pallas_kernels/.
      label: sizes and dtypes, as tables show them, e.g. "n=40 B=256 S=bfloat16 fast".
      kind: which spill bound of scripts/compiling/kernels.py holds for it.
      spec: the op's Spec; its `bytes_moved` and `flops` are the floors.
      inputs: from a key to fresh random arguments, on the device.
      call: from the name of an implementation and a Config (None: the tuned one) to
        the function of those arguments.
      exact: from arguments and row numbers to the outputs of these rows (of axis 0),
        computed in float64 on the host.
      bounds: largest relative error ||out - exact|| / ||exact|| of each output.
      configs: configurations that the tuner tries.
      match: fields of the spec that an entry of the tuned table matches on.
      donate: positions of arguments that an output may overwrite.
      tags: which scripts use it. "bench", "tune": bench_kernels.py, autotune.py;
        "compile": compile_check.py, with "compile-cuda" and "compile-tpu" for one
        kind of device only; "small": odd sizes, small enough to be interpreted on a
        CPU and to run under a memory checker.
      table: module that holds the op's `IMPLEMENTATIONS`; by default its op.py.
      kernels: what the names of its kernels begin with; by default the op's name.
      group: cases of one group, of any op, are timed in the same rounds.
    """

    op: str
    label: str
    kind: str
    spec: Any
    inputs: Callable[[jax.Array], tuple]
    call: Callable[[str, Any], Callable]
    exact: Callable[[tuple, Sequence[int]], tuple[np.ndarray, ...]]
    bounds: tuple[float, ...]
    configs: tuple[Any, ...] = ()
    match: tuple[str, ...] = ()
    donate: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset({"bench", "tune", "compile"})
    table: str = ""
    kernels: tuple[str, ...] = ()
    group: str = ""

    @property
    def implementations(self) -> implementations.Implementations:
        """The op's implementations."""
        name = self.table or f"pallas_kernels.{self.op}.op"
        return importlib.import_module(name).IMPLEMENTATIONS

    def shapes(self) -> tuple:
        """Return what `inputs` makes, as jax.ShapeDtypeStruct; nothing is computed."""
        return jax.eval_shape(self.inputs, jax.random.key(0))


def relative_error(got: Any, want: np.ndarray) -> float:
    """Return ||got - want|| / ||want|| in float64; a NaN anywhere gives NaN."""
    got = np.asarray(jax.device_get(got), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(case: Case, inputs: tuple, outputs: Any, rows: Sequence[int]) -> list[float]:
    """Return the relative error of each output of `rows` against `case.exact`."""
    leaves = jax.tree.leaves(outputs)
    exact = case.exact(inputs, rows)
    picked = [leaf[np.asarray(rows)] for leaf in leaves]
    return [relative_error(*pair) for pair in zip(picked, exact, strict=True)]
