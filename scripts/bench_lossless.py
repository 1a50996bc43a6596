"""Do the rules of acceptance leave the target's distribution as it is?

    python scripts/bench_lossless.py
    python scripts/bench_lossless.py --samples 200000 --rules rejection --json o.json
    python scripts/bench_lossless.py --json o.json --resume

A target of eight tokens, whose logits depend on the two newest ones, writes short texts
through the library's own loop: the first token is certain, and the joint distribution
of the three after it, 512 texts, is known exactly. Every rule of acceptance writes
millions of them with every drafter that goes with it, row b with a seed of its own, and
"TVD" is the total variation distance of their frequencies from the exact ones.

Drafts are tabulated (the best of the draft's distribution), drawn from it, or read from
the text. The draft is "near" the target, "unlike" it (drawn independently), or
"adversarial": next to impossible are for it the tokens that the target likes, and the
other way about. "1,1,1", "2,2,1", "3,3" are
trees of these widths, "runner-up" a chain of three with a second child of the root,
"by row" another part of 3,3 in every row and step, "external" a second model, "dynamic"
the best 8 nodes by the head's probabilities.

"exact" is the mean TVD of 200 exact samplers with as many draws, "sigmas" how many of
their standard deviations the TVD lies above. A row passes below 5 sigmas and below
0.01; the latter is asked for where there are samples enough that an exact sampler meets
it. A rule at temperature 0 has to write the one text that there is; it writes one chunk
of them. "accepted" are drafts accepted at the first step, of the two before the last
token that is counted.

The last rows are twins, rules with a fault: a draft is accepted where the target gives
it probability 0, or what was not drawn yet is not renormalised. They have to FAIL, and
write 262,144 texts at most, or one chunk.

Programs are traced one after the other, compile in threads, and run one at a time. The
file of --json is written after every row; --resume keeps its rows that the same code
wrote with the same seed and samples. On a CPU a row of 4 million samples takes minutes
and all of them many hours; --samples 200000 is quick.

Exit status: 0; 1 when a row does not pass; 2 for wrong input, with one line on stderr.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich import table as rich_table

from scripts import command, reporting
from scripts.benching import code
from scripts.sampling_checks import cases, drafts, exact, lossless_rows, measure
from treewy_jax import accept

NAME = "bench_lossless.py"
ALLOWED = {
    "rules": tuple(accept.RULES),
    "drafters": drafts.NAMES,
    "settings": tuple(cases.SETTINGS),
    "drafts": tuple(cases.FAR),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures how far texts are from the target's distribution."""

    samples: int = 2**22
    """Texts to write a row, rounded up to whole chunks."""
    chunk: int | None = None
    """Texts that are written at once; by default 2**16 on a CPU and 2**19 elsewhere."""
    seed: int = 0
    """Of all texts: number b has this one folded with b."""
    rules: tuple[str, ...] = ALLOWED["rules"]
    """Rules of acceptance."""
    drafters: tuple[str, ...] = ALLOWED["drafters"]
    """Drafters and shapes of their trees."""
    settings: tuple[str, ...] = ALLOWED["settings"]
    """Settings of sampling, by the names of the table."""
    drafts: tuple[str, ...] = ALLOWED["drafts"]
    """How far the draft is from the target."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    resume: bool = False
    """Keep what the file has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = command.parse(Options, NAME, arguments)
        check(chosen)
        found = lossless_rows.kept(chosen.json, about(chosen)) if chosen.resume else {}
    except ValueError as error:
        return command.refuse(NAME, error)
    names = (chosen.rules, chosen.drafters, chosen.settings, chosen.drafts)
    wanted = [case for case in cases.choose(*names) if case not in found]
    with command.progress() as progress:
        task = progress.add_task("compiling", total=len(wanted))
        rows = min(chosen.chunk or default_chunk(), chosen.samples)
        for one in measure.measure(wanted, chosen.samples, rows, chosen.seed):
            found[one.case] = one
            text = f"{describe(one)}: {state(one)}"
            progress.update(task, advance=1, description=text)
            command.note(text)
            if chosen.json is not None:
                write(chosen, in_order(found))
    console = command.console()
    console.print(table(in_order(found)))
    console.print(summary(in_order(found)), soft_wrap=True)
    return 0 if all(one.passed for one in found.values()) else 1


def default_chunk() -> int:
    """Return the texts to write at once: as many as caches hold, or fill a GPU."""
    return 2**16 if jax.default_backend() == "cpu" else 2**19


def in_order(found: Mapping[cases.Case, measure.Found]) -> list[measure.Found]:
    """Return what was found in the order of the whole table."""
    order = {case: n for n, case in enumerate(cases.choose(*ALLOWED.values()))}
    return sorted(found.values(), key=lambda one: order.get(one.case, len(order)))


def about(chosen: Options) -> dict[str, Any]:
    """Return what a row depends on beside its case."""
    sources = ("treewy_jax", "scripts/sampling_checks")
    asked = {"samples": chosen.samples, "seed": chosen.seed}
    return asked | {"code": code.digest(*sources)}


def check(chosen: Options) -> None:
    """Raise ValueError for what cannot be measured."""
    command.check_files(chosen.json)
    if chosen.resume and chosen.json is None:
        raise ValueError("resume is True; with --json FILE alone it is allowed")
    for name in ("samples", "chunk"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; 1 or more is allowed")
    most = 2**31 - 1  # numbers of texts are int32
    if chosen.samples + (chosen.chunk or default_chunk()) > most:
        raise ValueError(f"samples is {chosen.samples}; less than 2**31 is allowed")
    if not 0 <= chosen.seed < 2**32:
        raise ValueError(f"seed is {chosen.seed}; 0 to 2**32 - 1 are allowed")
    for name, allowed in ALLOWED.items():
        if not getattr(chosen, name):
            raise ValueError(f"{name} is empty; one or more are allowed")
        for value in getattr(chosen, name):
            if value not in allowed:
                raise ValueError(
                    f"{name}: {value!r}; allowed are {', '.join(map(repr, allowed))}"
                )


def describe(found: measure.Found) -> str:
    """Return rule, drafter and setting in a line."""
    case = found.case
    words = (case.rule, case.fault, case.drafter, kind(case), case.draft, case.setting)
    return " | ".join(filter(None, words))


def kind(case: cases.Case) -> str:
    """Return where the drafts come from."""
    if case.drafter in drafts.FROM_TEXT:
        return "text"
    return "drawn" if case.sampled else "tabulated"


def state(found: measure.Found) -> str:
    """Return the verdict; a twin has to FAIL."""
    if found.case.fault is None:
        return "pass" if found.passed else "FAIL"
    return "FAIL, as it has to" if found.passed else "pass: the fault is NOT SEEN"


def table(found: Sequence[measure.Found]) -> rich_table.Table:
    """Return a line a case."""
    drawn = rich_table.Table()
    for name in ("rule", "drafter", "drafts", "of a draft", "setting"):
        drawn.add_column(name, no_wrap=True)
    for name in ("samples", "accepted", "TVD", "exact", "sigmas"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("")
    for one in found:
        case, sigmas = one.case, one.yardstick.sigmas(one.distance)
        rule = case.rule if case.fault is None else f"{case.rule}, {case.fault}"
        drawn.add_row(
            rule,
            case.drafter,
            kind(case),
            "-" if case.drafter in drafts.FROM_TEXT else case.draft,
            case.setting,
            f"{one.samples:,}",
            f"{one.accepted:.2f}",
            f"{one.distance:.4f}",
            f"{one.yardstick.mean:.4f}",
            f"{sigmas:.1f}",
            state(one),
        )
    return drawn


def summary(found: Sequence[measure.Found]) -> str:
    """Return the worst of the rules, and how far the twins are off."""
    right = [one for one in found if one.case.fault is None]
    twins = [one for one in found if one.case.fault is not None]
    parts = [f"{reporting.device()}."]
    if right:
        worst = max(right, key=lambda one: one.distance)
        sigmas = max(one.yardstick.sigmas(one.distance) for one in right)
        parts.append(
            f"{sum(one.passed for one in right)} of {len(right)} rows are lossless: "
            f"TVD at most {worst.distance:.4f} ({describe(worst)}; an exact sampler "
            f"{worst.yardstick.mean:.4f}), at most {sigmas:.1f} sigmas above exact."
        )
    if twins:
        least = min(one.distance for one in twins)
        seen = sum(one.passed for one in twins)
        parts.append(f"{seen} of {len(twins)} faults seen: TVD at least {least:.4f}.")
    return " ".join(parts)


def write(chosen: Options, found: Sequence[measure.Found]) -> None:
    """Write method, options and every row as JSON."""
    fields = {
        "method": __doc__,
        "about": about(chosen),
        "options": dataclasses.asdict(chosen)
        | {"json": chosen.json and chosen.json.name},
        "limits": {"tvd": measure.LIMIT, "sigmas": measure.SIGMAS},
        "settings": {
            name: dataclasses.asdict(sampling)
            for name, sampling in cases.SETTINGS.items()
        },
        "exact_samplers": exact.EXACT_DRAWS,
        "rows": [lossless_rows.record(one) for one in found],
    }
    reporting.write_result(chosen.json, fields)


if __name__ == "__main__":
    sys.exit(main())
