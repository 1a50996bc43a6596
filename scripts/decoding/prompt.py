"""From prompt options to token ids: one row, or one a prompt of a file."""

import re
from typing import Any

from scripts.decoding import options as options_lib

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")


def texts(options: options_lib.Options) -> list[str] | None:
    """Return the prompts as text, None where ids are given.

    Raises:
        ValueError: an empty prompt, or a file that is not readable text.
    """
    if options.prompt_ids is not None:
        return None
    if options.prompt_file is not None:
        return _read(options.prompt_file)
    text = options_lib.DEFAULT_PROMPT if options.prompt is None else options.prompt
    if not text.strip():
        raise ValueError(f"prompt {text!r} is empty; some text is allowed")
    return [text]


def token_ids(
    prompts: list[str] | None, model: Any, options: options_lib.Options
) -> list[list[int]]:
    """Return a row of ids for each prompt, in the chat format unless it is raw.

    Raises:
        ValueError: `prompt_ids` is no list of ids, or a text meets no tokenizer.
    """
    if prompts is None:
        return [_parse_ids(options.prompt_ids)]
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"prompt: model {options.model!r} has no tokenizer.json; "
            "only --prompt-ids is allowed"
        )
    has_chat = all(tokenizer.token_to_id(token) is not None for token in CHAT_TOKENS)
    if has_chat and not options.raw:
        prompts = [CHAT.format(text) for text in prompts]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in prompts]


def _parse_ids(text: str) -> list[int]:
    ids = [piece.strip() for piece in text.split(",")]
    for number, piece in enumerate(ids, 1):
        if not re.fullmatch("-?[0-9]{1,18}", piece):
            raise ValueError(
                f"prompt-ids: number {number} is {piece[:20]!r}; allowed: token ids "
                "separated by commas, such as 1,2,3"
            )
    return [int(piece) for piece in ids]


def _read(path) -> list[str]:
    try:
        content = path.read_text("utf-8")
    except OSError as error:
        raise ValueError(
            f"prompt-file {path}: {error.strerror}; a readable file is allowed"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompt-file {path}: not UTF-8 at byte {error.start}; a UTF-8 text "
            "is allowed"
        ) from error
    pieces = re.split(r"^---[ \t]*$", content, flags=re.MULTILINE)
    for number, piece in enumerate(pieces, 1):
        if not piece.strip():
            raise ValueError(
                f"prompt-file {path}: prompt {number} of {len(pieces)} is empty; some "
                "text is allowed"
            )
    return [piece.strip("\n") for piece in pieces]
