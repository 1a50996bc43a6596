"""The generated tasks: fixed by the seed, held-out entities stay out."""

import hashlib
import json
import random
import re

import pytest

from scripts import gen_tasks
from scripts.tasks import lexicon

TEXT_SHA256 = "dce8357724ce1561160e4e7d7173c564a241322a9fe96852edb51b516448ebd4"
PROMPTS_SHA256 = "1c4ac6a6c786a63cab8c557bac1fbe88db542bb50558168918a4cdc28a565f37"


def test_seed_names_a_text(tmp_path):
    text = tmp_path / "text"
    assert gen_tasks.main(["--out", str(text), "--samples", "300", "--seed", "3"]) == 0
    assert hashlib.sha256(text.read_bytes()).hexdigest() == TEXT_SHA256
    assert gen_tasks.main(["--out", str(text), "--prompts", "20", "--seed", "5"]) == 0
    assert hashlib.sha256(text.read_bytes()).hexdigest() == PROMPTS_SHA256


@pytest.mark.parametrize("category", gen_tasks.CATEGORIES)
def test_training_turns_are_never_about_held_out_entities(category):
    rng = random.Random(0)
    held_out = re.compile(r"\b(" + "|".join(lexicon.HELD_OUT) + r")\b")
    for _ in range(200):
        for turn in gen_tasks.CATEGORIES[category](rng, False):
            assert not held_out.search(" ".join(turn)), turn


def test_math_answers_follow_from_their_steps():
    rng = random.Random(0)
    for _ in range(300):
        ((_, answer),) = gen_tasks.CATEGORIES["math_reasoning"](rng, False)
        equations = re.findall(r"(\d+) ([+*/-]) (\d+) = (\d+)", answer)
        for a, sign, b, result in equations:
            value = {"+": int(a) + int(b), "-": int(a) - int(b)}
            value |= {"*": int(a) * int(b), "/": int(a) / int(b)}
            assert value[sign] == int(result), answer
        result = answer.rsplit("#### ", 1)[1]
        assert re.search(rf"\b{result}\b", answer.rsplit("\n", 1)[0]), answer


def test_excluded_questions_do_not_occur(tmp_path):
    (first,) = gen_tasks.training_text(1, seed=7, exclude=set())
    question = first.split("user\n", 1)[1].split("<|im_end|>", 1)[0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": [question]}) + "\n")
    exclude = gen_tasks.first_turns(prompts)
    assert list(gen_tasks.training_text(1, seed=7, exclude=exclude)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "samples is 0; 1 or more is allowed"),
        (["--samples", "many"], "'many' is no integer"),
        (["--prompts", "-1"], "prompts is -1; 0 or more is allowed"),
        (["--exclude", "nowhere"], "nowhere"),
        (["--exclude", __file__], 'JSON lines with "turns" are allowed'),
        (["--many"], "Unrecognized options: --many"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, capsys):
    out = tmp_path / "text"
    assert gen_tasks.main(["--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert list(tmp_path.iterdir()) == []
