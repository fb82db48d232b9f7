"""How much a run measures, and what every admission benchmark does first."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from bench import floor, load, subject
from bench.api import Api
from bench.pairs import PAIRS_MIN

MODEL: Final = "scripted/echo"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long and how often."""

    pairs: int
    slice_s: float
    latency_posts: int
    messages: int
    turns: int
    starts: int
    kills: int

    @property
    def pairs_max(self) -> int:
        """Pairs tried before a moving disk ends it."""
        return 3 * self.pairs if self.pairs > 1 else 1


FULL: Final = Size(pairs=PAIRS_MIN, slice_s=3.0, latency_posts=250, messages=10_000, turns=50, starts=5, kills=20)
QUICK: Final = Size(pairs=1, slice_s=1.0, latency_posts=40, messages=3_000, turns=5, starts=1, kills=1)
"""A smoke: shows that it runs; its figures say nothing."""


@dataclass(frozen=True)
class Bench:
    """A server that admits and runs no turns, beside the floor's tables in the same PostgreSQL."""

    subject: subject.Subject
    api: Api
    parts: dict[str, str]

    def sessions(self, count: int) -> list[str]:
        """New ones."""
        return self.api.make_sessions(self.parts, count)

    @property
    def watched(self) -> load.Watched:
        """Whose processor time a load is to note."""
        return load.Watched(pid=self.subject.pid, data=str(self.subject.data))

    def disk_ms(self) -> float:
        """The raw write, now."""
        return floor.fdatasync_ms(self.subject.data)


@contextmanager
def admitting() -> Generator[Bench]:
    """Set one up: hints stay in the process, as in a server that is alone."""
    with subject.running(worker=False, settings={"bus": "inprocess"}) as server:
        floor.make_schema(server.database_url)
        api = Api(server.url, server.api_key)
        yield Bench(server, api, api.make_agent(MODEL))
        api.close()
