"""A small model with a tokenizer, and prompts, for scripts that decode text."""

import json
import pathlib
import shutil

import tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/tiny/dense"


def write(folder: pathlib.Path) -> pathlib.Path:
    """Write the golden model with a token a byte, the tokens of the chat, prompts."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - {"þ", "ÿ"}
    vocabulary = {c: i for i, c in enumerate(sorted(alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = [
        {"turns": [text], "category": text[:1], "source": "made"}
        for text in ("apple pie", "a bee", "bread")
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder
