"""Kernels of other projects in PyTorch: how they are called, checked and timed.

A peer is a function of a dict of CUDA tensors that returns a call and a sentence on
what the call computes; scripts/bench_peers.py says what the dict holds. Calls are
captured into a CUDA graph that runs several of them in a row.
"""

import dataclasses
import importlib
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from scripts.benching import contenders, layer, timing
from scripts.workloads import base

# Replays that one sample of the host's clock is made of, at most.
MOST_REPLAYS = 20

Call = Callable[[], dict[str, Any]]
Prepare = Callable[[dict[str, Any]], tuple[Call, str]]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A named kernel; `takes` are the names of `layer.Work` it is asked for."""

    name: str
    prepare: Prepare
    takes: tuple[str, ...] = ("verify",)


def load(text: str) -> Peer:
    """Read NAME=MODULE:FUNCTION; ValueError where there is no such function."""
    name, _, place = text.partition("=")
    module, _, function = place.partition(":")
    if not (name and module and function):
        raise ValueError(f"peer is {text!r}; NAME=MODULE:FUNCTION is allowed")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"peer {name}: {error}") from None
    return Peer(name, found)


def torch_or_reason() -> tuple[types.ModuleType | None, str]:
    """Return PyTorch, or None and why peers cannot run here."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None, "PyTorch is not installed: no peer is timed"
    if not torch.cuda.is_available():
        return None, "PyTorch sees no GPU: no peer is timed"
    return torch, ""


def fla() -> tuple[list[Peer], str]:
    """Return the kernels of flash-linear-attention, or none and why."""
    try:
        ops = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        return [], f"flash-linear-attention cannot be imported ({error})"
    return [
        Peer(
            "fla fused_recurrent",
            lambda tensors: _fla(ops.fused_recurrent_gated_delta_rule, tensors, 1),
            ("verify", "decode"),
        ),
        Peer(
            "fla chunk",
            lambda tensors: _fla(ops.chunk_gated_delta_rule, tensors, 40),
            ("verify", "prefill"),
        ),
    ], ""


def _fla(function: Callable, tensors: dict[str, Any], least: int) -> tuple[Call, str]:
    """Adapt a function of fla: a chain; gates come computed, norms are in the kernel.

    Its state is [B, Hv, Dk, Dv]; key heads are repeated beforehand, untimed, where the
    chunked form is asked for.
    """
    tokens = tensors["q"].shape[1]
    chain = tensors["parent"].tolist() == list(range(-1, tokens - 1))
    if not chain:
        raise NotImplementedError("takes chains only")
    if tokens < least:
        raise NotImplementedError(f"is not asked for fewer than {least} tokens")
    q, k = tensors["q"], tensors["k"]
    if least > 1:
        group = tensors["v"].shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    state = tensors["state"].transpose(-1, -2).contiguous()

    def call() -> dict[str, Any]:
        output, last = function(
            q,
            k,
            tensors["v"],
            g=tensors["log_decay"],
            beta=tensors["beta"],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return {"output": output, "state": last.transpose(-1, -2)}

    return call, "outputs and the last state; norms in it, gates given"


def tensors_of(torch: types.ModuleType, arguments: tuple) -> dict[str, Any]:
    """Return the dict that a peer gets, from `layer.inputs`: copies of its own."""
    arrays = dict(zip(layer.NAMES, arguments[:8], strict=True))
    log_decay, beta = layer.exact_gates(
        *(np.asarray(arrays[x], np.float64) for x in ("a", "b", "A_log", "dt_bias"))
    )
    parent = np.asarray(arguments[8].parent)
    depth = np.zeros(len(parent), np.int32)
    for node, above in enumerate(parent):
        depth[node] = 0 if above < 0 else depth[above] + 1
    more = {
        "log_decay": log_decay.astype(np.float32),
        "beta": beta.astype(np.float32),
        "parent": parent.astype(np.int32),
        "depth": depth,
    }
    found = {x: torch.from_dlpack(array).clone() for x, array in arrays.items()}
    return found | {x: torch.from_numpy(array).cuda() for x, array in more.items()}


class Turn:
    """A peer's turns, like `contenders.Turn`: checked first, then timed."""

    def __init__(
        self,
        entrant: contenders.Contender,
        peer: Peer,
        torch: types.ModuleType,
        sets: Sequence[dict[str, Any]],
        exact: dict[str, np.ndarray],
        rows: Sequence[int],
    ):
        self.entrant, self.torch = entrant, torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other projects
            prepared = [peer.prepare(tensors) for tensors in sets]
            self.calls = [call for call, _ in prepared]
            self.computes = prepared[0][1]
            self.check(exact, rows)
            if entrant.problem is None:
                self.capture()

    def check(self, exact: dict[str, np.ndarray], rows: Sequence[int]) -> None:
        """Hold what the first call returns against float64; sets `errors`."""
        outputs = self.calls[0]()
        self.torch.cuda.synchronize()
        if "output" not in outputs:
            raise ValueError(f"returned {', '.join(outputs)}; output is needed")
        errors = []
        for name, want in exact.items():
            if outputs.get(name) is not None:
                got = outputs[name][list(rows)].float().cpu().numpy()
                errors.append(base.relative_error(got, want))
        self.entrant.errors = tuple(errors)
        if any(not error <= layer.BOUND for error in errors):
            found = ", ".join(f"{error:.1e}" for error in errors)
            self.entrant.problem = (
                f"wrong: relative errors {found}; allowed: {layer.BOUND:.1e}"
            )

    def capture(self) -> None:
        """Make a graph of `runs` calls, the input sets taking turns."""
        torch, runs = self.torch, self.entrant.chain.runs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and tunes before the capture
            for call in self.calls * 2:
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for run in range(runs):
                self.kept = self.calls[run % len(self.calls)]()
        self.number = max(1, min(MOST_REPLAYS, int(5e4 / self.events_us(1))))

    def launch(self) -> None:
        """Replay the graph and wait for it."""
        self.graph.replay()
        self.torch.cuda.synchronize()

    def events_us(self, number: int) -> float:
        """Return microseconds a replay, between two events of the device."""
        self.launch()
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(number):
            self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / number

    def take(self) -> None:
        """Time some replays between events, and their kernels by CUPTI."""
        entrant, runs = self.entrant, self.entrant.chain.runs
        entrant.in_jit_us.append(self.events_us(self.number) / runs)
        if jax.default_backend() != "gpu":
            return
        number = min(self.number, 5)
        calls = timing.kernels(self.launch, number)
        entrant.device_us += [sum(us for _, us in one) / runs for one in calls]
        entrant.kernels = timing.by_name(calls, runs)
