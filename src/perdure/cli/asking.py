"""Asking the person at the terminal, and what Ctrl-C means while nobody is asked."""

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Final, Protocol, TextIO, cast

from perdure.cli.exits import REFUSED, CommandFailed, Left
from perdure.cli.text import harmless

AGAIN_S: Final = 2.0
"""A second Ctrl-C within this time leaves."""

JOIN_S: Final = 2.0
"""An interrupt that was sent is answered by then; one that was not is not waited for."""


class Asker(Protocol):
    """Gets a line from somebody."""

    @property
    def is_interactive(self) -> bool:
        """Whether a person answers."""
        ...

    def ask(self, question: str) -> str | None:
        """One line without its end, or None when no more will come."""
        ...


class TerminalAsker:
    """A person at a terminal, with line editing."""

    is_interactive = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            # Importing it is what gives `input` its line editing.
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]

    def ask(self, question: str) -> str | None:
        """See `Asker`. Raises KeyboardInterrupt."""
        try:
            return input(harmless(question))
        except EOFError:
            print()
            return None


class LineAsker:
    """Lines of a file or a pipe. Questions go to standard error, so that standard output has the replies alone."""

    is_interactive = False

    def __init__(self, lines: TextIO, err: TextIO) -> None:
        self._lines = lines
        self._err = err

    def ask(self, question: str) -> str | None:
        """See `Asker`."""
        if question.strip(" >"):
            self._err.write(harmless(question) + "\n")
            self._err.flush()
        line = self._lines.readline()
        return line.rstrip("\r\n") if line else None


def make_asker() -> Asker:
    """For the standard input of this process."""
    if cast(TextIO | None, sys.stdin) is None:
        # Closed by whoever started us.
        return LineAsker(io.StringIO(), sys.stderr)
    return TerminalAsker() if sys.stdin.isatty() and sys.stdout.isatty() else LineAsker(sys.stdin, sys.stderr)


def check_message(message: str | None) -> None:
    """Refuse a message without text, before anything is made for it. None means that there is a chat instead."""
    if message is not None and not message.strip():
        raise CommandFailed("The message is empty: say something, or leave it out to chat.", code=REFUSED)


def first_line(asker: Asker) -> str | None:
    """The first line with text of a file or a pipe, read before anything is made for it. None for a person, who may take his time."""
    if asker.is_interactive:
        return None
    while (line := asker.ask("")) is not None:
        if line.strip():
            return line
    raise CommandFailed("Standard input has no line to send: give a MESSAGE, or lines to send.", code=REFUSED)


class CtrlC:
    """While it is entered, Ctrl-C interrupts the running turn, and a second one within two seconds leaves (`Left`)."""

    def __init__(self, interrupt: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interrupt = interrupt
        self._clock = clock
        self._pressed_s: float | None = None
        self._before: Any = None
        self._threads: list[threading.Thread] = []
        self._is_ours = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "CtrlC":
        if self._is_ours:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._before)
        for thread in self._threads:
            thread.join(JOIN_S)

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """While somebody is asked, Ctrl-C ends the question (KeyboardInterrupt)."""
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            if self._is_ours:
                signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        now_s = self._clock()
        if self._pressed_s is not None and now_s - self._pressed_s <= AGAIN_S:
            raise Left
        self._pressed_s = now_s
        # In a thread, because the main one may be in the middle of reading or writing.
        thread = threading.Thread(target=self._interrupt, name="interrupt", daemon=True)
        self._threads.append(thread)
        thread.start()
