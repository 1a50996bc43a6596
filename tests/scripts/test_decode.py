"""decode.py: what it writes, and that options reach the library."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from rich import console as rich_console

from scripts import reporting
from scripts.decoding import (
    compare,
    options,
    outputs,
    prompt,
    report,
    request,
    result,
    text,
)
from tests.scripts import decode_runs
from tests.scripts.decode_runs import CHAT, GOLDEN, prepared, run
from treewy_jax import commit, memory, pytree, sampling
from treewy_jax import generate as generation_lib

NEW = 8  # tokens written in all runs, so that they share their programs


@pytest.fixture(scope="module")
def tokenizer():
    return decode_runs.make_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return decode_runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "golden.npz") as arrays:
        return {name: arrays[name] for name in ("ids", "gen.ids", "gen.gap")}


@pytest.fixture(scope="module")
def arguments(model, golden):
    ids = ",".join(map(str, golden["ids"][0, :70]))
    common = ["--tree", "2", "--max-new-tokens", str(NEW)]
    return ["--model", str(model), "--prompt-ids", ids, *common]


@pytest.fixture(scope="module")
def ran(arguments, tmp_path_factory):
    """One run with everything: its stdout, its JSON, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("out")
    files = ["--json", folder / "o.json", "--plot", folder / "o.png"]
    status, out, err = run([*arguments, "--compare", *files])
    assert (status, err) == (0, "")
    return out, json.loads((folder / "o.json").read_text()), folder


# --- a run --------------------------------------------------------------------------


def test_json_tells_what_was_written(ran, golden, tokenizer):
    _, found, _ = ran
    ids = golden["gen.ids"][0, :NEW].tolist()
    assert found["token_ids"] == ids
    assert found["text"] == tokenizer.decode(ids)
    assert sum(found["accept_lengths"]) == NEW - 1
    assert found["steps"] == len(found["accept_lengths"])
    whole = found["accept_lengths"][: found["steps"] - found["cut"]]
    assert found["mean_accept_length"] == np.mean(whole)
    assert found["accept_length_histogram"] == {
        str(length): whole.count(length) for length in (1, 2)
    }
    assert found["tokens_per_second"] == pytest.approx(NEW / found["seconds"])
    assert found["tree"] == {"nodes": 3, "parents": [-1, 0, 0]}
    assert found["options"]["max_new_tokens"] == NEW
    assert found["versions"]["jax"] and found["device"]
    assert found["verify"].startswith("verify runs impl=")


def test_compare_finds_plain_decoding_equal(ran):
    out, found, _ = ran
    assert found["compare"]["equal"] and found["compare"]["differences"] == []
    assert found["compare"]["steps"] == NEW - 1
    assert f"equal: decoding without drafts writes the same {NEW} tokens" in out


def test_report_shows_everything(ran):
    out, found, _ = ran
    for wanted in (
        f"mean accept length {found['mean_accept_length']:.2f}",
        f"{NEW} tokens in",
        "compilation included",
        "decode state, 3 nodes",
        "last tree, accepted path ✓",
        "accepted, then the target's own",
        found["verify"][:30],
    ):
        assert wanted in out
    assert out.startswith(text.printable(found["text"]))


def test_files_are_complete_and_alone(ran):
    _, _, folder = ran
    assert sorted(path.name for path in folder.iterdir()) == ["o.json", "o.png"]
    assert (folder / "o.png").read_bytes().startswith(b"\x89PNG")


def test_stream_prints_the_same(ran, arguments):
    status, out, err = run([*arguments, "--stream"])
    assert (status, err) == (0, "")
    begin = "\n\ntokens a target pass"
    assert out.split(begin)[0] == ran[0].split(begin)[0]
    assert begin in out


def test_computed_bytes_are_those_that_store_all_allocates(ran, arguments):
    """The other scheme's records, from the shapes of its own program."""
    asked = prepared(*arguments, "--commit", "store_all")
    target = asked.model.builder(asked.lifecycle)
    tokens, lengths = jnp.zeros((1, 128), jnp.int32), jnp.asarray([70])

    def records(params):
        bound = target(params)
        return bound.verify(bound.prefill(tokens, lengths, 136)[1], asked.tree)[1]

    found = ran[1]["state_bytes"]
    assert set(found) == set(memory.SCHEMES) >= {"reconstruct", "store-all"}
    shapes = jax.eval_shape(records, asked.model.params)
    kept = (shapes.rows, shapes.key, shapes.value)  # the states are the ring itself
    assert found["store-all"]["records"] == pytree.nbytes(kept)
    ring = found["reconstruct"]["recurrent"] * 4 + 4 * 3 * asked.model.config.num_blocks
    assert found["store-all"]["recurrent"] == ring
    differing = {"recurrent": None, "records": None}
    others = [parts | differing for parts in found.values()]
    assert others[0] == others[1]
    assert "verify is not used" in asked.verify


# --- prompts and options ------------------------------------------------------------


def test_prompt_is_put_into_the_chat_format(model, tokenizer):
    told = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    asked = prepared("--model", model, "--prompt", "Hello.")
    assert asked.prompts == [tokenizer.encode(told).ids]
    assert asked.prompts[0][0] == tokenizer.token_to_id(CHAT[0])
    asked = prepared("--model", model, "--prompt", "Hello.", "--raw")
    assert asked.prompts == [tokenizer.encode("Hello.").ids]
    asked = prepared("--model", model)
    assert options.DEFAULT_PROMPT in tokenizer.decode(asked.prompts[0])


def test_prompt_needs_no_chat_tokens(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    plain.save(str(tmp_path / "model/tokenizer.json"))
    asked = prepared("--model", tmp_path / "model", "--prompt", "ab")
    assert asked.prompts == [[0, 1]]


def test_prompt_file_holds_a_batch(model, tokenizer, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("One -- \n--- no\n---\nTwo\n\nlines\n")
    asked = prepared("--model", model, "--prompt-file", path)
    texts = ["One -- \n--- no", "Two\n\nlines"]
    assert asked.prompts == [
        tokenizer.encode(prompt.CHAT.format(text)).ids for text in texts
    ]


def test_names_take_either_dash(model):
    for name in ("store-all", "store_all"):
        asked = prepared("--model", model, "--commit", name, "--state_dtype=bfloat16")
        assert asked.lifecycle == commit.StoreAll("bfloat16", "auto", nodes=40)
    for name in ("mosaic-tpu", "mosaic_tpu"):
        assert "mosaic_tpu" in prepared("--model", model, "--impl", name).verify


def test_state_dtype_is_that_of_the_config(model):
    asked = prepared("--model", model, "--dtype", "bfloat16")
    assert asked.state_dtype == asked.lifecycle.state_dtype == "float32"
    assert asked.model.params["embed_tokens"]["embedding"][...].dtype == jnp.bfloat16


def test_ngram_drafts_in_the_shape_that_is_reported(model):
    asked = prepared("--model", model, "--drafter", "ngram", "--tree", "2,3,1")
    parents = [-1, 0, 1, 2, 0, 4, 5]
    assert np.asarray(asked.tree.parent).tolist() == parents
    tokens, length = jnp.asarray([[5, 6, 5, 7, 5]]), jnp.asarray([5])
    state = asked.drafter.start(tokens, length, None, jnp.asarray([6]), 16)
    tree = asked.drafter.propose(state, jnp.asarray([6]), length)[0]
    assert np.asarray(tree.parent).tolist() == parents
    assert tree.depth_max == asked.tree.depth_max == 3


# --- options reach the library, results reach the reader --------------------------


def fake(rows, lengths, trees=None):
    """A generation made by hand, one list of accept lengths a row."""
    step = ([7, 8, 9], [-1, 0, 0], [0, 2])
    return generation_lib.Generation(
        token_ids=rows,
        accept_lengths=lengths,
        cut=[False] * len(rows),
        steps=max(map(len, lengths)),
        state_bytes={"recurrent": 10, "records": 20},
        last_tree=trees or [step] * len(rows),
    )


def test_options_reach_generate(model, monkeypatch):
    calls = []

    def generate(*positional, **options):
        calls.append(options)
        return fake([[1, 2]], [[1]])

    monkeypatch.setattr(generation_lib, "generate", generate)
    sample = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed", "3"]
    more = ["--compare", "--tree", "2", "--max-new-tokens", "9"]
    assert run(["--model", model, *sample, *more])[0] == 0
    assert [type(c["drafter"]).__name__ for c in calls] == ["MTPDrafter", "NoDrafter"]
    for call in calls:
        assert call["sampling"] == sampling.Sampling(0.7, 5, 0.9)
        assert (call["seed"], call["max_new_tokens"]) == (3, 9)
        assert call["commit"] == commit.Reconstruct("float32", "auto")


def test_unexpected_errors_keep_their_traceback(model, monkeypatch):
    def generate(*positional, **options):
        raise ValueError("a fault of the program")

    monkeypatch.setattr(generation_lib, "generate", generate)
    with pytest.raises(ValueError, match="a fault of the program"):
        run(["--model", model])


@pytest.fixture(scope="module")
def two_rows(model, tmp_path_factory):
    """Two prompts, and results of which the second differs from plain decoding."""
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("One\n---\nTwo")
    chosen = options.parse(["--model", str(model), "--prompt-file", str(path)])
    asked = request.prepare(chosen)
    none = ([], [], [])
    drafted = fake([[65, 66, 67], [65] * 5], [[2], [3, 1]], [none, ([9], [-1], [0])])
    plain = fake([[65, 66, 67], [65] * 3 + [66] * 2], [[1, 1], [1] * 4])
    difference = result.Difference(1, 3, 65, 66, 0.25)
    found = result.Result(drafted, 2.0, result.Plain(plain, 1.0, [difference]))
    return found, asked, chosen


def test_rows_of_several_prompts_are_lists(two_rows, tokenizer):
    found = outputs.as_json(*two_rows)
    assert found["token_ids"] == [[65, 66, 67], [65] * 5]
    assert found["text"] == [tokenizer.decode(ids) for ids in found["token_ids"]]
    assert found["accept_lengths"] == [[2], [3, 1]]
    assert found["accept_length_histogram"] == {1: 1, 2: 1, 3: 1, 4: 0}
    assert found["mean_accept_length"] == 2 and found["tokens_per_second"] == 4
    assert not found["compare"]["equal"]
    assert found["compare"]["differences"][0]["logit_gap"] == 0.25


def test_report_fits_80_columns(two_rows):
    out = io.StringIO()
    report.show(*two_rows, rich_console.Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert "different: prompt 2, new token 4 is" in told
    assert "top-2 logit gap 0.25: not a near tie" in told
    assert "last tree, prompt 2" in told
    counts = [line.split() for line in lines if "█" in line]
    assert [(row[0], row[-1]) for row in counts] == [("1", "1"), ("2", "1"), ("3", "1")]


def test_report_of_a_text_that_ended_at_once(two_rows):
    _, asked, chosen = two_rows
    out = io.StringIO()
    found = result.Result(fake([[65], [66]], [[], []], [([], [], [])] * 2), 1.0)
    report.show(found, asked, chosen, rich_console.Console(file=out, width=80))
    assert "no tree was verified" in out.getvalue()
    assert outputs.as_json(found, asked, chosen)["mean_accept_length"] is None


def test_logit_gap_is_that_of_the_golden_model(arguments, golden):
    asked = prepared(*arguments)
    ours = golden["gen.ids"][0, :NEW].tolist()
    theirs = [*ours[:5], (ours[5] + 1) % 256, *ours[6:]]
    assert compare.differences(asked, [ours], [ours]) == []
    (found,) = compare.differences(asked, [ours], [theirs])
    assert (found.row, found.index, found.token) == (0, 5, ours[5])
    assert found.plain_token == theirs[5]
    np.testing.assert_allclose(found.logit_gap, golden["gen.gap"][5], atol=1e-4)
    (found,) = compare.differences(asked, [ours[:3]], [ours])
    assert (found.index, found.token, found.plain_token) == (3, None, ours[3])


def test_growing_text_never_shows_half_a_character(tokenizer):
    whole = "é€😀 plain ñ"
    growing, shown = text.Growing(tokenizer), []
    for token in tokenizer.encode(whole).ids:
        shown.append(growing.push([token]))
        assert text.UNKNOWN not in shown[-1]
    assert "".join(shown) == whole and growing.rest() == ""


def test_growing_text_ends_as_the_whole_does(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 256, 12).tolist()
        growing = text.Growing(tokenizer)
        shown = "".join(growing.push([token]) for token in ids) + growing.rest()
        assert shown == text.decode(tokenizer, ids)
    growing = text.Growing(None)
    assert growing.push([1, 2]) + growing.push([3]) + growing.rest() == "1 2 3"


def test_printable_escapes_what_steers_a_terminal():
    assert text.printable("a\x1b[2J\n\tñ\u3000") == "a\\x1b[2J\n\tñ\u3000"


def test_bytes_in_the_unit_that_fits():
    shown = [report.size(n) for n in (0, 1023, 1024, 3 << 20, 5 << 29)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "2.5 GiB"]


def test_a_file_is_replaced_only_when_complete(tmp_path):
    path = tmp_path / "o.json"
    path.write_text("old")

    def fail(draft):
        draft.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        reporting.replace(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    reporting.replace(path, lambda draft: draft.write_text("new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
