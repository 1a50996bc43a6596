"""Writes instruction text of six categories in chat format, the project's own work.

    python scripts/gen_tasks.py --out tasks_syn.txt --samples 60000 \
        --exclude scripts/data/prompts80.jsonl              # training text
    python scripts/gen_tasks.py --out prompts.jsonl --prompts 80 --seed 90001

A seed names a text. Held-out entities are never the subject of a training sample, and
the prompts are about them where they can be.
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator

import tyro

from scripts.tasks import arithmetic, conversation, questions

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
    lines = path.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["turns"][0] for line in lines}


def main(options: Options) -> None:
    if options.prompts:
        rows = prompts(options.prompts, options.seed)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        exclude = first_turns(options.exclude) if options.exclude else set()
        lines = training_text(options.samples, options.seed, exclude)
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(lines)


if __name__ == "__main__":
    main(tyro.cli(Options))
