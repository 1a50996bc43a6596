"""Where does the time of a decode step go, part by part?

    python scripts/bench_decode.py
    python scripts/bench_decode.py --models qwen3.5-27b --batch 32 --json decode.json
    python scripts/bench_decode.py --models qwen3.5-4b --blocks 2 --context 8192

The step is `treewy_jax.loop.step`, compiled with its state donated: draft, verify,
accept, commit. "tiny" and folders are whole models; a published size is cut to one
super-block (3 GDN layers and 1 of attention), with its embedding, output head and MTP
head, and random weights made on the device. Its drafts are accepted by chance only. The
prompt pass runs at most 64 tokens; a longer context repeats their keys and values.

Parts are the model's own methods on those weights, each compiled alone:
    projections   all of the mixers, with output norms and gates
    GDN front     conv along ancestors, head norms, gates
    GDN verify    the recurrence over the nodes of all GDN layers of a block
    attention     attention over prefix and tree
    MLP, MoE      feed-forward of all layers
    commit        states, conv windows and KV rows of the accepted path
    head, accept  logits of all nodes, argmax, the walk
    draft         proposing the tree and taking in what was accepted, draft logits too
"rest" is the step less their sum: embeddings, norms before layers, residuals, the
bookkeeping of trees, and copies. It may be less than nothing where XLA fuses parts.
"device" is the summed time of the kernels of a call (CUPTI), "wall" the host's clock
over calls that are sent without waiting. Byte floors: weights, states, filled KV slots
and inputs read once, results written once, at the rate of a large copy; of experts
those touched by uniform routes; of the draft head once a run, as each run waits for the
one before. Products of many rows are bound by flops instead.

Two more tables say what XLA adds: kernels that are neither ours nor products, and
instructions of the compiled step that only move floats (of 1 MiB at least; copies by
the copy engine are no kernels, and count in "wall" alone). On a CPU the clock is the
host's and says nothing of a GPU.

Exit status: 0; 1 where something could not be timed; 2 for wrong input, with one line
on stderr.
"""

import dataclasses
import gc
import pathlib
import sys
from collections.abc import Sequence

import jax

from scripts import command, reporting
from scripts.benching import rates, step_program, step_report

ROUNDS = 3
MODELS = ("tiny", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b")


@dataclasses.dataclass(frozen=True)
class Options:
    """Splits the time of a decode step by part."""

    models: tuple[str, ...] = MODELS
    """"tiny", folders, or published sizes, of which some super-blocks are taken."""
    batch: tuple[int, ...] = (1, 32)
    """Rows."""
    context: int = 1024
    """Tokens that the state covers."""
    tree: str = "3,3,3"
    """Widths of the draft tree; none verifies the root alone."""
    blocks: int = 1
    """Super-blocks of a published size."""
    dtype: str = "bfloat16"
    """Dtype of the weights."""
    state_dtype: str = "bfloat16"
    """Storage of the recurrent state."""
    quick: bool = False
    """One round of the host's clock in place of three."""
    copy_tb_s: float | None = None
    """Rate of a large copy, TB/s, read and written; by default measured."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    plot: pathlib.Path | None = None
    """Draw the parts into this file (needs matplotlib)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, "bench_decode.py", arguments)
        subjects = select(chosen)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse("bench_decode.py", error)
    rate = rates.copy(chosen.copy_tb_s)
    console = command.console()
    results = []
    with command.progress() as progress:
        for subject in progress.track(subjects, description="steps"):
            result = step_report.measure(subject, 1 if chosen.quick else ROUNDS)
            results.append(result)
            show(result, rate, console)
            if chosen.json is not None:  # what is done is kept if a later one fails
                write(chosen, results, rate)
            gc.collect()
    console.print(summary(rate, chosen.copy_tb_s is not None), soft_wrap=True)
    if chosen.plot is not None:
        step_report.draw(results).savefig(chosen.plot)
    return int(any(result.problems for result in results))


def select(chosen: Options) -> list[step_program.Subject]:
    """Return what is to be timed.

    Raises ValueError for unknown names, sizes out of range and files that cannot be.
    """
    command.check_files(chosen.json, chosen.plot)
    command.check_plot(chosen.plot)
    command.check_rate("copy_tb_s", chosen.copy_tb_s)
    for name in ("models", "batch"):
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
    return [
        step_program.subject(
            name,
            batch=batch,
            context=chosen.context,
            tree=chosen.tree,
            state_dtype=chosen.state_dtype,
            blocks=chosen.blocks,
            dtype=chosen.dtype,
        )
        for name in chosen.models
        for batch in chosen.batch
    ]


def show(result, rate: float, console) -> None:
    """Print the tables of one step."""
    console.print(step_report.title(result), markup=False, soft_wrap=True)
    console.print(step_report.table(result, rate))
    if result.whole.kernels:
        console.print(step_report.others_table(result))
    console.print(step_report.moves_table(result))
    for problem in result.problems:
        console.print(problem, markup=False, soft_wrap=True)


def summary(rate: float, given: bool) -> str:
    """Return whose clock the times are, and what the floors are made from."""
    clock = (
        "device: CUPTI; wall: the host's clock"
        if jax.default_backend() == "gpu"
        else "no GPU: the only clock is the host's"
    )
    return f"{reporting.device()}; {clock}. {rates.describe_copy(rate, given)}"


def write(chosen: Options, results: Sequence[step_report.Result], rate: float) -> None:
    """Write method, rate and every step as JSON."""
    fields = {
        "method": __doc__,
        "clock": "cupti" if jax.default_backend() == "gpu" else "host",
        "rounds": 1 if chosen.quick else ROUNDS,
        "tree": chosen.tree,
        "copy_bytes_per_s": rate,
        "steps": [step_report.record(result, rate) for result in results],
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
