"""Token ids as text: whole, token by token, and while they appear."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from scripts.decoding import progress

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids`, or the ids themselves without a tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def label(tokenizer: Any, token: int, limit: int = 24) -> str:
    """Return one token as a quoted text that fits in a line."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False)
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")


def printable(text: str) -> str:
    """Return text that cannot steer a terminal: control characters are escaped."""
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )


class Growing:
    """The text of one growing row; `push` returns what is certain and new.

    An incomplete UTF-8 character decodes to replacement characters at the end, which
    are held back until the tokens after them tell what they are.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._told = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that they complete."""
        self._ids += tokens
        return self._tell(decode(self._tokenizer, self._ids).rstrip(UNKNOWN))

    def rest(self) -> str:
        """Return what was held back: nothing follows."""
        return self._tell(decode(self._tokenizer, self._ids))

    def _tell(self, text: str) -> str:
        new = text[self._told :]
        self._told = max(self._told, len(text))
        return new


class Printer:
    """Prints a row to stdout as it grows; call it as `on_tokens` of `generate`."""

    def __init__(self, tokenizer: Any, spinner: progress.Spinner):
        self._growing = Growing(tokenizer)
        self._spinner = spinner
        self._held = ""
        self._calls = 0

    def __call__(self, row: int, tokens: list[int]) -> None:
        """Print what is new; the prompt's own token waits, as the loop compiles yet."""
        self._calls += 1
        self._held += self._growing.push(tokens)
        if self._calls > 1:
            self._flush()

    def finish(self) -> None:
        """Print what was held back and end the line."""
        self._held += self._growing.rest() + "\n"
        self._flush()

    def _flush(self) -> None:
        self._spinner.stop()
        print(printable(self._held), end="", flush=True)
        self._held = ""
