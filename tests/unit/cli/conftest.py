"""A server, a client that does not wait between tries, and a screen that a test can read."""

import io
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest
from tests.unit.cli.answering import KEY, Answering, answering

from perdure.cli.client import Client
from perdure.cli.credentials import Target
from perdure.cli.screen import TextScreen


@dataclass
class Answers:
    """Somebody who says what a test wrote, and then nothing more. `KeyboardInterrupt` stands for Ctrl-C."""

    lines: list[str | type[BaseException]]
    is_interactive: bool = False
    questions: list[str] = field(default_factory=list[str])

    def ask(self, question: str) -> str | None:
        self.questions.append(question)
        if not self.lines:
            return None
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


@dataclass
class Terminal:
    """A screen and what is on it."""

    out: io.StringIO = field(default_factory=io.StringIO)
    err: io.StringIO = field(default_factory=io.StringIO)

    def screen(self) -> TextScreen:
        return TextScreen(self.out, self.err, colour=False)


@pytest.fixture
def server() -> Generator[Answering]:
    with answering() as state:
        yield state


@pytest.fixture
def client(server: Answering) -> Generator[Client]:
    made = Client(Target(server.url, KEY), sleep=lambda _: None)
    yield made
    made.close()


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()
