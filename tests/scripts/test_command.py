"""What commands share: wrong input is one line, whatever the terminal can draw."""

import dataclasses
import io
import sys

import pytest

from scripts import command

WRONG = {
    "": "Missing from x.py: --size INT How large. (required)",
    "--size many": "--size: 'many' is no integer",
    "--size 1 --nope": (
        "Unrecognized options: --nope; allowed are those that --help lists"
    ),
}


@dataclasses.dataclass
class Options:
    """What to do."""

    size: int
    """How large."""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_what_was_wrong_and_no_more(arguments, encoding, monkeypatch):
    """tyro draws its frames for the encoding of the output."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    with pytest.raises(ValueError) as refused:
        command.parse(Options, "x.py", arguments.split())
    assert str(refused.value) == WRONG[arguments]


def test_right_input_is_read():
    assert command.parse(Options, "x.py", ["--size", "3"]) == Options(3)
