"""Writes instruction text of six categories in chat format, the project's own work.

    python scripts/gen_tasks.py --out tasks_syn.txt --samples 60000 \
        --exclude scripts/data/prompts80.jsonl              # training text
    python scripts/gen_tasks.py --out prompts.jsonl --prompts 80 --seed 90001

A seed names a text. Held-out entities are never the subject of a training sample, and
the prompts are about them where they can be. Exit status: 0, or 2 for wrong input, with
one line on stderr and nothing written.
"""

import dataclasses
import json
import pathlib
import random
import sys
from collections.abc import Iterator, Sequence

from scripts import command, reporting
from scripts.tasks import arithmetic, conversation, questions

PROG = "gen_tasks.py"
CATEGORIES = {
    "conversation": conversation.conversation,
    "translation": questions.translation,
    "summarization": questions.summarization,
    "qa": questions.qa,
    "math_reasoning": arithmetic.math_reasoning,
    "rag": questions.rag,
}
WEIGHTS = [5, 3, 3, 2, 4, 2]  # of the categories in training text


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write: training text, or prompts when `prompts` is given."""

    out: pathlib.Path
    """The file."""
    samples: int = 1000
    """Training samples to draw; those that meet `exclude` are left out."""
    prompts: int = 0
    """Write this many held-out prompts as JSON lines instead."""
    seed: int = 1
    exclude: pathlib.Path | None = None
    """JSON lines of prompts: no training sample asks one of their first turns."""


def render(turns: questions.Turns) -> str:
    """The chat format of the shipped model, one document."""
    parts = [
        f"<|im_start|>user\n{question}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        for question, answer in turns
    ]
    return "".join(parts) + "<|endoftext|>\n"


def training_text(samples: int, seed: int, exclude: set[str]) -> Iterator[str]:
    """Yields documents; categories are drawn by WEIGHTS."""
    rng = random.Random(seed)
    for _ in range(samples):
        (category,) = rng.choices(list(CATEGORIES), WEIGHTS)
        turns = CATEGORIES[category](rng, False)
        if not any(question in exclude for question, _ in turns):
            yield render(turns)


def prompts(count: int, seed: int) -> Iterator[dict]:
    """Yields prompts with reference answers, the categories in turn.

    Where the count is no multiple of six, the rest is conversation and summarization.
    """
    rng = random.Random(seed)
    names = list(CATEGORIES)
    whole = count // len(names) * len(names)
    for i in range(count):
        rest = ("conversation", "summarization")[i % 2]
        category = names[i % len(names)] if i < whole else rest
        asked, answers = zip(*CATEGORIES[category](rng, True), strict=True)
        yield {
            "question_id": i + 1,
            "category": category,
            "turns": asked,
            "reference": answers,
        }


def first_turns(path: pathlib.Path) -> set[str]:
    """Return the first turn of each prompt of a file that `--prompts` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return {json.loads(line)["turns"][0] for line in lines}
    except (ValueError, LookupError, TypeError):
        message = f'exclude {path}: JSON lines with "turns" are allowed'
        raise ValueError(message) from None


def check(options: Options) -> None:
    """Raise ValueError for what cannot be written; nothing is."""
    command.check_files(options.out)
    for name, least in (("samples", 1), ("prompts", 0)):
        if getattr(options, name) < least:
            raise ValueError(
                f"{name} is {getattr(options, name)}; {least} or more is allowed"
            )


def write(options: Options) -> None:
    """Write the file, whole or not at all."""
    if options.prompts:
        rows = prompts(options.prompts, options.seed)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        exclude = first_turns(options.exclude) if options.exclude else set()
        lines = training_text(options.samples, options.seed, exclude)

    def save(path: pathlib.Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)

    reporting.replace(options.out, save)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        options = command.parse(Options, PROG, arguments)
        check(options)
        write(options)
    except (ValueError, OSError) as error:
        return command.refuse(PROG, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
