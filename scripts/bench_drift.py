"""How far does the recurrent state drift from float64 over thousands of tokens?

    python scripts/bench_drift.py
    python scripts/bench_drift.py --tokens 32768 --source synthetic --heads 2
    python scripts/bench_drift.py --lifecycles deferred --horizons 16 --plot drift.png

Every lifecycle, state dtype, record dtype and horizon commits the same tokens. A step
verifies a tree and accepts a node drawn at random, another in each row, so that rows
fold at different times; the other nodes read tokens from elsewhere. All states start
at 0 and are compared at checkpoints with the recurrence run a token at a time on the
same inputs in float64, and with the same in float32.

Inputs: "model" are q, k, v and gates of every GDN layer of the shipped model, float32,
recorded while it reads instruction text of the kind it was trained on, texts of 2,048
tokens laid end to end without clearing the state. "synthetic" are keys with a mean
cosine of 0.8 and gates drawn by token and head: log decay log-uniform in four ranges,
next to none (-1e-4 to -1e-6), slow (-1e-2 to -1e-4), all kinds (-10 to -1e-5), strong
(-10 to -0.1); beta the sigmoid of a normal of mean 0 and deviation 2. A fifth stream
has next to no decay and weak writes, mean -4: what lasts longest.

An error is the norm of the difference over the norm of the float64 state, the RMS over
heads; a bfloat16 state is compared as it is stored. A line of the table is a setting
and a kind of inputs. "largest error" names the stream with the largest "at end", the
RMS over the last quarter of the checkpoints; "slope" is its least-squares slope of log
error against log tokens after the first eighth. "x float32" is the largest "at end" of
any stream over that of sequential float32, "at most" the largest ratio at a checkpoint
of the second half. A stream is marked "inexact" where that "x float32" is above 2, and
"drifts" where its slope is above 0.3 besides (or above 0.3 and 0.3 above that of
sequential float32): an error that is merely large stays, one that drifts gets worse
with the text. A file of results has all streams.

On a CPU the implementation is "reference", which forms the state before the tree in
every step: with float32 records all horizons then give the same bits. Kernels read the
history beside the state; measure them with --impl where they run.

Exit status: 0; 2 for wrong input, with one line on stderr.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from scripts import command, reporting
from scripts.drifting import figures, replay, streams
from treewy_jax import commit
from treewy_jax import tree as tree_lib

QUICK = 1024
WIDTH = 128
DTYPES = ("float32", "bfloat16")
Source = Literal["model", "synthetic"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures how far states drift from float64."""

    tokens: int = 8192
    """Tokens to commit in each row."""
    source: tuple[Source, ...] = ("model", "synthetic")
    """Where inputs come from."""
    lifecycles: tuple[str, ...] = tuple(commit.LIFECYCLES)
    """Lifecycles to measure."""
    state_dtypes: tuple[str, ...] = DTYPES
    """Dtypes of the state."""
    record_dtypes: tuple[str, ...] = DTYPES
    """Dtypes of the records of fused and deferred."""
    horizons: tuple[int, ...] = (8, 16, 32)
    """Horizons of deferred."""
    tree: str = "2,1,1"
    """Widths of the tree of every step."""
    heads: int = 2
    """Value heads of a row, two for each key head; a layer of the model has 4."""
    width: int = WIDTH
    """Width of keys and values; another than 128 for synthetic inputs only."""
    checkpoints: int = 16
    """How many times states are compared."""
    seed: int = 0
    """Of synthetic inputs and of the accepted nodes."""
    impl: str | None = None
    """Implementation of verification and commit; by default the best that runs."""
    quick: bool = False
    """Commit 1,024 tokens at most."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    plot: pathlib.Path | None = None
    """Draw errors against tokens into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_drift.py", arguments)
        if chosen.quick:
            chosen = dataclasses.replace(chosen, tokens=min(chosen.tokens, QUICK))
        check(chosen)
        tree = tree_lib.DraftTree.from_widths(tree_lib.parse_widths(chosen.tree))
        owners = dict(settings(chosen, tree))
    except (ValueError, OSError) as error:
        return command.refuse("bench_drift.py", error)
    with command.progress() as progress:
        task = progress.add_task("recording inputs", total=len(owners) + 2)

        def after(text: str) -> None:
            progress.update(task, advance=1, description=text)
            command.note(text)

        found, base, reached = measure(owners, draw(chosen), tree, chosen, after)
    console = command.console()
    console.print(figures.table(found))
    console.print(summary(chosen, tree, found), soft_wrap=True)
    if chosen.json is not None:
        write(chosen, found, base, reached)
    if chosen.plot is not None:
        figures.draw(found, reached, base).savefig(chosen.plot)
    return 0


def check(chosen: Options) -> None:
    """Raise ValueError for what cannot be measured."""
    command.check_files(chosen.json, chosen.plot)
    command.check_plot(chosen.plot)
    for name in ("source", "lifecycles", "state_dtypes", "record_dtypes", "horizons"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    for name in ("state_dtypes", "record_dtypes"):
        for dtype in getattr(chosen, name):
            if dtype not in DTYPES:
                raise ValueError(f"{name}: {dtype!r}; allowed are {', '.join(DTYPES)}")
    if chosen.checkpoints < 4:
        raise ValueError(f"checkpoints is {chosen.checkpoints}; 4 or more are allowed")
    if chosen.tokens < 8 * chosen.checkpoints:
        least = 8 * chosen.checkpoints
        raise ValueError(f"tokens is {chosen.tokens}; {least} or more are allowed")
    for name in ("heads", "width"):
        if getattr(chosen, name) < 1:
            raise ValueError(f"{name} is {getattr(chosen, name)}; 1 or more is allowed")
    if chosen.heads > 1 and chosen.heads % 2:
        raise ValueError(f"heads is {chosen.heads}; 1 or an even number is allowed")
    if "model" in chosen.source and (chosen.width != WIDTH or chosen.heads > 4):
        raise ValueError(
            f"heads is {chosen.heads} and width {chosen.width}; the model allows up to "
            f"4 and {WIDTH} (others: --source synthetic)"
        )


def settings(
    chosen: Options, tree: tree_lib.DraftTree
) -> Iterator[tuple[figures.Setting, commit.Lifecycle]]:
    """Yield every setting with its lifecycle; ValueError where one cannot be."""
    names = [name.replace("_", "-") for name in chosen.lifecycles]
    for name, dtype in itertools.product(names, chosen.state_dtypes):
        records = chosen.record_dtypes if name in ("fused", "deferred") else (None,)
        horizons = chosen.horizons if name == "deferred" else (None,)
        for record, horizon in itertools.product(records, horizons):
            setting = figures.Setting(name, dtype, record, horizon)
            sizes = dict(depth=tree.depth_max, nodes=tree.n_max)
            options = setting.options | sizes | dict(impl=chosen.impl)
            owner = commit.by_name(name, **options)
            owner.check(**sizes)
            yield setting, owner


def draw(chosen: Options) -> streams.Streams:
    """Return the inputs of all rows."""
    sizes = (chosen.tokens, chosen.heads)
    parts = []
    if "model" in chosen.source:
        parts.append(streams.recorded(*sizes))
    if "synthetic" in chosen.source:
        parts.append(streams.synthetic(*sizes, chosen.width, chosen.seed))
    return streams.join(parts)


def measure(
    owners: Mapping[figures.Setting, commit.Lifecycle],
    drawn: streams.Streams,
    tree: tree_lib.DraftTree,
    chosen: Options,
    after: Callable[[str], None] = lambda text: None,
) -> tuple[list[figures.Row], dict[str, list[float]], list[int]]:
    """Run all settings over the streams.

    Returns their rows, the errors of sequential float32 by stream, and the tokens
    committed at each checkpoint.
    """
    names, inputs = drawn
    sizes = (chosen.tokens, chosen.checkpoints, len(names), chosen.seed)
    steps = replay.plan(tree, *sizes)
    exact = replay.sequential(inputs, steps.reached, "float64")
    after("sequential float64")
    sequential = replay.sequential(inputs, steps.reached, "float32")
    after("sequential float32")
    found: list[figures.Row] = []
    for setting, owner in owners.items():
        states = replay.states(owner, inputs, steps, tree)
        arrays = (steps.reached, states, exact, sequential)
        found += figures.rows(setting, names, *arrays)
        after(" ".join(map(str, filter(None, vars(setting).values()))))
    errors = np.vectorize(figures.short)(figures.errors(sequential, exact).T)
    base = dict(zip(names, errors.tolist(), strict=True))
    return found, base, steps.reached.tolist()


def summary(
    chosen: Options, tree: tree_lib.DraftTree, found: Sequence[figures.Row]
) -> str:
    """Return what was run, and the worst ratio with float32 alone."""
    exact = [row for row in found if row.setting.float32]
    line = (
        f"{reporting.device()}; {chosen.tokens} tokens a row, tree {chosen.tree} "
        f"({tree.n_max} nodes), {chosen.heads} heads of {chosen.width}."
    )
    if not exact:
        return line
    worst = max(exact, key=lambda row: row.ratio)
    return (
        f"{line} States and records in float32: at most {worst.ratio:.3g} times the "
        f"error of sequential float32 at the end ({worst.name}), "
        f"{max(row.worst_ratio for row in exact):.3g} at any checkpoint of the "
        "second half."
    )


def write(
    chosen: Options,
    found: Sequence[figures.Row],
    base: dict[str, list[float]],
    reached: Sequence[int],
) -> None:
    """Write method, options and every row as JSON."""
    files = {
        name: path and path.name
        for name, path in (("json", chosen.json), ("plot", chosen.plot))
    }
    fields = {
        "method": __doc__,
        "options": dataclasses.asdict(chosen) | files,
        "limits": {"ratio": figures.RATIO, "slope": figures.SLOPE},
        "tokens": list(reached),
        "sequential_float32": base,
        "rows": [figures.record(row) for row in found],
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
