"""How fast are our kernels beside those of other projects, on the same inputs?

    python scripts/bench_peers.py --json peers.json
    PYTHONPATH=FOLDER python scripts/bench_peers.py --peer weaver=adapters:weaver

One layer of Qwen3.5 35B-A3B (16 key and 32 value heads, d = 128) from raw rows: q and k
before their norms, gates before their activations, all bfloat16. Ours is one jitted
program of norms, gates and kernel. Verification of a chain of 4 and 40 nodes, of trees
of 15 and 40; decoding of one token; prefill of 1x4096 and 8x4096 tokens with 32 key
heads. Peers are those of flash-linear-attention (its `fused_recurrent_gated_delta_rule`
and `chunk_gated_delta_rule`: chains only, no record of a node but the LAST state, gates
given and not timed), where PyTorch and fla can be imported, and those of `--peer`.

Everyone gets the same numbers and is held against float64 first. Then all take turns.
"kernels us" is the device's time of the kernels (CUPTI), "in a row us" the time of many
calls one after another, launches included but no host: ours inside one jit, peers in a
CUDA graph between events. The least and the median of all turns are written.

An adapter for --peer NAME=MODULE:FUNCTION is FUNCTION(tensors) -> (call, computes):
    tensors  dict of CUDA tensors, its own to change and keep:
             q, k [B, n, Hk, Dk], v [B, n, Hv, Dv], a, b [B, n, Hv] bfloat16, raw;
             A_log, dt_bias [Hv], log_decay, beta [B, n, Hv] float32, the last two being
             the gates of a and b; state [B, Hv, Dv, Dk] float32 or bfloat16;
             parent, depth int32 [n], node 0 the root with parent -1, preorder
    call     function without arguments that a CUDA graph can capture; returns a dict
             of "output" [B, n, Hv, Dv] of every node, and "state" [B, Hv, Dv, Dk] after
             the path to the last node where that is computed too
    computes a few words on what is part of the call
It raises NotImplementedError with a reason for work that it does not take.

Exit status: 0; 1 where one is wrong or fails; 2 for wrong input, with one line on
stderr. A missing PyTorch or fla is said, and is no failure.
"""

import dataclasses
import gc
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # PyTorch needs memory beside JAX
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")

import jax
from rich import markup
from rich import table as rich_table

from scripts import command, reporting
from scripts.benching import contenders, layer, peers, tables, timing
from scripts.compiling import targets
from treewy_jax import tree as tree_lib

ROUNDS = 5
PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core")
KINDS = ("verify", "decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Options:
    """Times our kernels beside those of other projects."""

    kinds: tuple[str, ...] = KINDS
    """Which of verify, decode and prefill."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Rows, of verify and decode."""
    state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """In which the state is stored, of verify and decode."""
    peer: tuple[str, ...] = ()
    """NAME=MODULE:FUNCTION of adapters, see the top of this file."""
    cases: tuple[str, ...] = ()
    """Only comparisons whose label has one of these in it."""
    quick: bool = False
    """Two rounds in place of five."""
    json: pathlib.Path | None = None
    """Write the result to this file."""


@dataclasses.dataclass
class Entry:
    """Who took part in a comparison, and what it computes."""

    work: layer.Work
    entrant: contenders.Contender
    computes: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_peers.py", arguments)
        works, others = select(chosen)
    except (ValueError, OSError) as error:
        return command.refuse("bench_peers.py", error)
    torch, missing = peers.torch_or_reason()
    if torch is not None:
        found, missing = peers.fla()
        others = [*found, *others]
    entries: list[Entry] = []
    with command.progress() as progress:
        for work in progress.track(works, description="comparing"):
            entries += compare(work, others, torch, 2 if chosen.quick else ROUNDS)
            gc.collect()
            command.note(work.label)
            if chosen.json is not None:  # a run that is ended early leaves what it has
                write(chosen, entries, missing)
    console = command.console()
    console.print(table(entries))
    if missing:
        console.print(markup.escape(missing), soft_wrap=True)
    return int(any(entry.entrant.problem for entry in entries))


def select(chosen: Options) -> tuple[list[layer.Work], list[peers.Peer]]:
    """Return comparisons and adapters.

    Raises ValueError for unknown names and empty selections.
    """
    command.check_files(chosen.json)
    for name, allowed in (("kinds", KINDS), ("state_dtypes", ("float32", "bfloat16"))):
        for value in getattr(chosen, name):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    if any(batch < 1 for batch in chosen.batches):
        raise ValueError(f"batches is {chosen.batches}; positive numbers are allowed")
    works = [
        work
        for work in comparisons(chosen)
        if not chosen.cases or any(text in work.label for text in chosen.cases)
    ]
    if not works:
        raise ValueError("nothing is selected; see kinds, batches, cases")
    return works, [peers.load(text) for text in chosen.peer]


def comparisons(chosen: Options) -> list[layer.Work]:
    """Return all comparisons of the options; on a CPU, where nothing is fast, tiny."""
    tiny = jax.default_backend() != "gpu"
    sizes = dict(key_heads=1, value_heads=2, dim=16) if tiny else {}
    shapes = {
        "verify": [
            tuple(range(-1, 3)),
            widths((2, 2, 2)),
            tuple(range(-1, 39)),
            widths((3, 3, 3)),
        ],
        "decode": [(-1,)],
    }
    found = [
        layer.Work(kind, batch, parents, state_dtype=dtype, **sizes)
        for kind in chosen.kinds
        if kind in shapes
        for dtype in chosen.state_dtypes
        for parents in shapes[kind]
        for batch in chosen.batches
    ]
    if "prefill" in chosen.kinds:
        tokens = tuple(range(-1, 69 if tiny else 4095))
        heads = sizes | {"key_heads": 2 if tiny else 32}
        found += [layer.Work("prefill", batch, tokens, **heads) for batch in (1, 8)]
    return found


def widths(each: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parents of a tree by widths."""
    return tuple(int(x) for x in tree_lib.DraftTree.from_widths(each).parent)


def compare(
    work: layer.Work, others: Sequence[peers.Peer], torch: Any, rounds: int
) -> list[Entry]:
    """Check everyone on one comparison, then time them turn by turn."""
    exact = layer.remembered(work)
    ours = [contenders.Contender(case, "ours") for case in layer.cases(work, exact)]
    contenders.build(ours)
    entries = [Entry(work, entrant, entrant.case.op) for entrant in ours]
    turns: dict[contenders.Contender, Any] = {}
    asked = [peer for peer in others if work.name in peer.takes]
    if torch is not None and asked:
        invited = [
            Entry(work, contenders.Contender(ours[0].case, peer.name), "")
            for peer in asked
        ]
        entries += invited
        begin_peers(invited, asked, torch, turns, exact)
    for entrant in ours:
        entrant.attempt(lambda e=entrant: begin(e, turns))
    for _ in range(rounds):
        for entrant, turn in turns.items():
            entrant.attempt(turn.take)
    return entries


def begin(entrant: contenders.Contender, turns: dict) -> None:
    """Check one of ours and let it take turns."""
    data = contenders.Data(entrant.case, entrant.chain, entrant.inputs)
    contenders.check(entrant, data)
    if entrant.runs:
        turns[entrant] = contenders.Turn(entrant, data)


def begin_peers(
    entries: Sequence[Entry],
    asked: Sequence[peers.Peer],
    torch: Any,
    turns: dict,
    exact: layer.Exact,
) -> None:
    """Check the peers, on copies of our inputs, and let them take turns."""
    case = entries[0].entrant.case
    chain = contenders.plan(case, "ours")
    data = contenders.Data(case, chain)
    sets = [peers.tensors_of(torch, data.arguments(i)) for i in range(chain.sets)]
    found = exact(data.arguments(0), data.rows)
    wanted = dict(zip(("output", "state"), found, strict=True))

    def join(entry: Entry, peer: peers.Peer) -> None:
        try:
            turn = peers.Turn(entry.entrant, peer, torch, sets, wanted, data.rows)
        except NotImplementedError as reason:
            entry.entrant.absent = str(reason)
            return
        entry.computes = turn.computes
        if entry.entrant.runs:
            turns[entry.entrant] = turn

    for entry, peer in zip(entries, asked, strict=True):
        entry.entrant.chain = chain
        entry.entrant.attempt(lambda e=entry, p=peer: join(e, p))


def table(entries: Sequence[Entry]) -> rich_table.Table:
    """Return errors and times of everyone, and how many times faster ours is."""
    drawn = rich_table.Table()
    for name in ("comparison", "who"):
        drawn.add_column(name, no_wrap=True)
    drawn.add_column("computes")
    for name in ("error", "kernels us", "in a row us", "over ours"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("state")
    for work in dict.fromkeys(entry.work for entry in entries):
        mine = [entry for entry in entries if entry.work == work]
        ours = in_a_row(mine[0].entrant)
        for entry in mine:
            entrant, us = entry.entrant, in_a_row(entry.entrant)
            device = entrant.device_us and timing.times(entrant.device_us).median
            drawn.add_row(
                markup.escape(work.label),
                entrant.impl,
                markup.escape(entry.computes),
                f"{max(entrant.errors):.1e}" if entrant.errors else "-",
                tables.number(device),
                tables.number(us),
                f"{us / ours:.2f}" if us and ours else "-",
                markup.escape(tables.state(entrant)),
            )
        drawn.add_section()
    return drawn


def in_a_row(entrant: contenders.Contender) -> float | None:
    """Return the median microseconds of one of many calls in a row, or None."""
    samples = entrant.in_jit_us
    return timing.times(samples).median if samples else None


def write(chosen: Options, entries: Sequence[Entry], missing: str) -> None:
    """Write method, versions and everyone's figures as JSON."""
    rows = [
        {"comparison": dataclasses.asdict(entry.work) | {"label": entry.work.label}}
        | {"who": entry.entrant.impl, "computes": entry.computes}
        | {
            "state": tables.state(entry.entrant),
            "errors": [tables.finite(error) for error in entry.entrant.errors],
            "kernels_us": entry.entrant.kernels,
        }
        | {
            name: timing.times(samples)._asdict() if samples else None
            for name, samples in (
                ("device_us", entry.entrant.device_us),
                ("in_a_row_us", entry.entrant.in_jit_us),
            )
        }
        for entry in entries
    ]
    fields = {
        "method": __doc__,
        "options": dataclasses.asdict(chosen) | {"json": chosen.json.name},
        "peers": {name: targets.version(name) for name in PACKAGES},
        "missing": missing,
        "rows": rows,
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
