"""How a command ends: its exit codes, and the one exception that carries a message for the person at the terminal."""

from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The command was understood and did not succeed."""

REFUSED: Final = 2
"""Wrong usage, a setting that can't be used, or a start that was refused. Nothing was done."""


class CommandFailed(Exception):
    """Ends a command. The message says what is wrong and what to do."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class Left(Exception):
    """The person at the terminal left: by Ctrl-C, by Ctrl-D, or because there is no more input to read."""
