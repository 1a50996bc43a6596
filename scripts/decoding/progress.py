"""A spinner on stderr that says what one waits for; silent where nobody looks."""

from rich import console as rich_console
from rich import status


class Spinner:
    """Shows the newest message until `stop` or the end of the `with` block."""

    def __init__(self):
        self._console = rich_console.Console(stderr=True)
        self._status: status.Status | None = None

    def __enter__(self) -> "Spinner":
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def say(self, message: str) -> None:
        """Show `message` in place of what is shown."""
        self.stop()
        if self._console.is_terminal:
            self._status = self._console.status(f"{message} ...")
            self._status.start()

    def stop(self) -> None:
        """Show nothing more."""
        if self._status is not None:
            self._status.stop()
            self._status = None
