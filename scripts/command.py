"""What commands share: options in, one line for wrong input, where tables go."""

import contextlib
import importlib.util
import io
import pathlib
import re
import sys
import time
from collections.abc import Sequence

import rich.text
import tyro
from rich import console as rich_console
from rich import progress as rich_progress

# Of tables where no terminal sets the width: nothing is cut short in a log.
LOG_WIDTH = 160
BEGIN = time.perf_counter()
# Messages of the parser, and what is said in their place.
PLAINER = {
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is no integer",
    r"could not convert string to float: (.*)": r"\1 is no number",
    r"(Unrecognized options: .*)": r"\1; allowed are those that --help lists",
}


def parse[T](options: type[T], prog: str, arguments: Sequence[str] | None) -> T:
    """Read a command line into a dataclass; `--help` prints and exits.

    Raises ValueError, with one line, for an unknown option or a wrong value.
    """
    printed = io.StringIO()
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(options, args=arguments, prog=prog, config=config)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ValueError(_one_line(printed.getvalue())) from None


def check_files(*paths: pathlib.Path | None) -> None:
    """Raise ValueError for a path that is a folder or lies in none."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path} is no file in a folder that exists")


def check_plot(path: pathlib.Path | None) -> None:
    """Raise ValueError where a figure is asked for and matplotlib is missing."""
    if path is not None and not importlib.util.find_spec("matplotlib"):
        raise ValueError("plot needs matplotlib: pip install matplotlib")


def check_rate(name: str, rate: float | None) -> None:
    """Raise ValueError for a rate that is given and not above 0."""
    if rate is not None and not rate > 0:
        raise ValueError(f"{name} is {rate}; a number above 0 is allowed")


def refuse(prog: str, error: Exception) -> int:
    """Print one line on stderr; returns the exit status of wrong input."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def console() -> rich_console.Console:
    """Return where tables go: wide enough to be whole in a log."""
    found = rich_console.Console(highlight=False)
    if not found.is_terminal:
        found.width = LOG_WIDTH
    return found


def note(text: str) -> None:
    """Print a line with the seconds so far on stderr, where no bar is shown."""
    if not sys.stderr.isatty():
        print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", file=sys.stderr)


def progress() -> rich_progress.Progress:
    """Return a progress bar on stderr; silent where nobody looks."""
    place = rich_console.Console(stderr=True)
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        console=place,
        transient=True,
        disable=not place.is_terminal,
    )


def _one_line(box: str) -> str:
    """Return what a framed error of tyro says, without its title and its advice.

    Where the terminal's encoding has no lines to draw, rules are hyphens, and one
    stands below the title.
    """
    lines = rich.text.Text.from_ansi(box).plain.splitlines()
    lines = [line.strip("│| \t") for line in lines if not line.startswith("╰")]
    rules = [i for i, line in enumerate(lines) if line and set(line) <= set("─-")]
    if lines and lines[0].startswith("╭"):
        lines, rules = lines[1:], [i - 1 for i in rules]
    elif rules[:1] == [1]:
        lines, rules = lines[2:], [i - 2 for i in rules[1:]]
    message = " ".join(filter(None, lines[: rules[0] if rules else None]))
    message = message.removeprefix("Error parsing ")
    for pattern, plainer in PLAINER.items():
        message = re.sub(pattern, plainer, message)
    return message
