"""Sampling through decode.py and generate(): options, seeds, rules of acceptance."""

import contextlib
import io
import json
import pathlib

import numpy as np
import pytest

import models
from scripts import decode
from scripts.decoding import options, request
from treewy_jax import drafters
from treewy_jax import generate as generation_lib
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

GOLDEN = pathlib.Path(__file__).parent.parent / "golden/tiny/dense"
NEW = 9  # tokens written in all runs, so that they share their programs
FLAGS = {
    "--temperature": 0.9,
    "--top-k": 200,
    "--top-p": 0.99,
    "--min-p": 0.001,
    "--repetition-penalty": 1.1,
    "--presence-penalty": 0.25,
}
SAMPLING = sampling_lib.Sampling(*FLAGS.values())
SAMPLE = [word for pair in FLAGS.items() for word in pair]


@pytest.fixture(scope="module")
def prompt():
    with np.load(GOLDEN / "golden.npz") as arrays:
        return arrays["ids"][0, :70].tolist()


@pytest.fixture(scope="module")
def greedy():
    """The golden text after the prompt."""
    with np.load(GOLDEN / "golden.npz") as arrays:
        return arrays["gen.ids"][0, :NEW].tolist()


def run(*arguments):
    """Run the command; returns status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    arguments = ("--model", GOLDEN, *arguments)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = decode.main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def written(prompt, folder, *arguments):
    """Return the JSON of a run."""
    file, ids = folder / "o.json", ",".join(map(str, prompt))
    common = ("--prompt-ids", ids, "--tree", 2, "--max-new-tokens", NEW)
    status, _, err = run(*common, *arguments, "--json", file)
    assert (status, err) == (0, "")
    return json.loads(file.read_text())


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal", "block"])
def test_options_reach_generate(rule, monkeypatch):
    calls = []

    def generate(*positional, **given):
        calls.append(given)
        raise ValueError("seen enough")

    monkeypatch.setattr(generation_lib, "generate", generate)
    more = ("--accept", rule, "--seed", 3, "--tree", "1,1")
    with pytest.raises(ValueError, match="seen enough"):
        run("--prompt-ids", "1,2,3", *SAMPLE, *more)
    (call,) = calls
    assert call["sampling"] == SAMPLING
    assert (call["accept"], call["seed"]) == (rule, 3)
    # The rules that need to know what drafts were drawn from get drawn ones.
    assert call["drafter"].sampled == (rule != "match")


def test_defaults_leave_everything_as_it_is():
    chosen = options.parse(["--model", str(GOLDEN), "--prompt-ids", "1,2,3"])
    asked = request.prepare(chosen)
    assert asked.sampling == sampling_lib.Sampling() and not asked.sampling.penalised
    assert chosen.accept == "match" and not asked.drafter.sampled


IDS = ("--prompt-ids", "1,2,3")
WARM = ("--temperature", 0.7)
WRONG = {
    "temperature": (("--temperature", -1), "temperature -1 0 or more"),
    "warm": (("--temperature", "warm"), "--temperature 'warm' number"),
    "nan": (("--temperature", "nan"), "temperature nan 0 or more"),
    "top-p": (("--top-p", 1.5), "top_p 1.5 (0, 1]"),
    "top-k": (("--top-k", -2), "top_k -2 0 (all) or more"),
    "seed": (("--seed", -1), "seed -1 2**32"),
    "min-p below": (("--min-p", -0.1), "min_p -0.1 [0, 1]"),
    "min-p above": (("--min-p", 1.5), "min_p 1.5 [0, 1]"),
    "min-p x": (("--min-p", "x"), "--min-p 'x' number"),
    "repetition 0": (("--repetition-penalty", 0), "repetition_penalty 0 above 0"),
    "repetition nan": (("--repetition-penalty", "nan"), "repetition_penalty nan"),
    "presence inf": (("--presence-penalty", "inf"), "presence_penalty inf finite"),
    "accept": (("--accept", "best"), "--accept 'best' match greedy rejection"),
    "block": (("--accept", "block", "--tree", "2,2"), "'block' 7 nodes depth 2 chains"),
    "greedy": (("--accept", "greedy", *WARM), "'greedy' temperature 0.7 only 0"),
    "ngram": (
        ("--accept", "rejection", "--drafter", "ngram", "--tree", "2"),
        "'rejection' NgramDrafter no draft distribution match",
    ),
    "compare": (
        ("--accept", "traversal", *WARM, "--compare"),
        "--compare --accept traversal distribution match temperature 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "decode", None)  # must not be reached
    arguments, words = WRONG[name]
    file = tmp_path / "o.json"
    status, out, err = run(*IDS, *arguments, "--json", file)
    assert (status, out) == (2, "") and not file.exists()
    assert err.startswith("decode.py: error: ") and err.count("\n") == 1
    for word in words.split():
        assert word in err


# --- texts --------------------------------------------------------------------------


def test_a_penalty_keeps_every_token_from_coming_again(prompt, greedy, tmp_path):
    """Those of the prompt too; without it the greedy text says some of them."""
    assert set(greedy) & set(prompt) or len(set(greedy)) < NEW
    kept = written(prompt, tmp_path, "--presence-penalty", 1000)["token_ids"]
    assert not set(kept) & set(prompt) and len(set(kept)) == NEW


def test_a_text_belongs_to_its_seed(prompt, tmp_path):
    same = (*SAMPLE, "--accept", "rejection", "--seed")
    found = [written(prompt, tmp_path, *same, seed) for seed in (3, 3, 4)]
    texts = [one["token_ids"] for one in found]
    assert texts[0] == texts[1] != texts[2]
    for name in ("accept", "min_p", "repetition_penalty", "presence_penalty", "seed"):
        assert name in found[0]["options"]
    assert found[0]["options"]["accept"] == "rejection"


@pytest.fixture(scope="module")
def model():
    return models.load(GOLDEN)


@pytest.fixture(scope="module")
def write(model):
    def write(prompts, seed, rule="rejection", n_max=None):
        tree = tree_lib.DraftTree.from_widths((2,), n_max=n_max)
        drafter = drafters.MTPDrafter.from_tree(tree, sampled=True)
        options = dict(max_new_tokens=NEW, sampling=SAMPLING, accept=rule, seed=seed)
        found = generation_lib.generate(
            model, prompts, tree=tree, drafter=drafter, eos_token_ids=(), **options
        )
        return found.token_ids, found.accept_lengths

    return write


def test_a_row_with_its_seed_is_that_row_alone(prompt, write):
    """Alone, in a batch of 8 and in another envelope the draws are the same."""
    prompts = [prompt[first : 35 + 2 * first] for first in range(8)]
    seeds = [11, 5, 2**32 - 1, 5, 0, 7, 8, 9]
    texts, lengths = write(prompts, seeds)
    for row in (0, 2, 3, 7):
        alone = write(prompts[row], [seeds[row]], n_max=6)
        assert alone == ([texts[row]], [lengths[row]])
    # A seed that is no list is that of the row 0.
    assert write(prompts[1], 5, n_max=6) == ([texts[1]], [lengths[1]])
    assert len(set(map(tuple, texts))) == 8
    swapped, _ = write(prompts[::-1], seeds[::-1])
    assert swapped == texts[::-1]
    assert write([prompts[1]] * 8, [5] * 8)[0] == [texts[1]] * 8


def test_seeds_that_do_not_fit_are_refused(prompt, write):
    prompts = [prompt[:5], prompt[:7]]
    for seed, words in (
        ([1], "seed has 1 entries; .* 2 prompts"),
        ([1, 2, 3], "seed has 3 entries"),
        ([1, -1], r"seed -1: ints in \[0, 2\*\*32\)"),
        ([1, 2**32], "seed 4294967296: ints"),
    ):
        with pytest.raises(ValueError, match=words):
            write(prompts, seed)
