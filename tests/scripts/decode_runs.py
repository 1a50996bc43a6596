"""Runs of decode.py in this process, on the golden model with a tokenizer."""

import contextlib
import io
import pathlib
import shutil

import tokenizers

from scripts import decode
from scripts.decoding import options, request

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests/golden/tiny/dense"
CHAT = ("<|im_start|>", "<|im_end|>")


def make_tokenizer():
    """A token a byte, but two that UTF-8 never uses: those are the chat's tokens."""
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - {"þ", "ÿ"}
    vocabulary = {c: i for i, c in enumerate(sorted(alphabet))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(CHAT))
    assert made.get_vocab_size() == 256
    return made


def save_model(folder):
    """Put the golden model and the tokenizer into a folder; returns the folder."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def run(arguments):
    """Run the command; returns status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = decode.main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def prepared(*arguments):
    return request.prepare(options.parse([str(a) for a in arguments]))
