"""Sessions whose events are large, through the front door, on a database that nothing ever analysed."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.cases.driving import VERSION, Json, message, read_frames

from perdure import bootstrap, settings
from perdure.http.claude.events import PAGE_BYTES_MAX
from perdure.ports.ledger import READ_BYTES_MAX, READ_ROWS_MAX, EventQuery, SeenEvent
from perdure.postgres.ledger import PostgresLedger

MESSAGES, TEXT_CHARS = 40, 1_000_000


class Reads:
    """The sizes of the rows of each read of events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[list[int]] = []
        read_events, read_feed = PostgresLedger.read_events, PostgresLedger.read_feed

        async def noted_events(ledger: PostgresLedger, query: EventQuery) -> list[SeenEvent]:
            return self._note(await read_events(ledger, query))

        async def noted_feed(ledger: PostgresLedger, *place: Any) -> list[SeenEvent] | None:
            read = await read_feed(ledger, *place)
            return None if read is None else self._note(read)

        monkeypatch.setattr(PostgresLedger, "read_events", noted_events)
        monkeypatch.setattr(PostgresLedger, "read_feed", noted_feed)

    def _note(self, read: list[SeenEvent]) -> list[SeenEvent]:
        self.made.append([seen.size_bytes for seen in read])
        return read

    def check(self, *, at_least: int) -> None:
        """There were so many, and each kept its bounds; then they are forgotten."""
        assert len(self.made) >= at_least
        for sizes in self.made:
            assert len(sizes) <= READ_ROWS_MAX
            assert sum(sizes[:-1]) < READ_BYTES_MAX
        self.made.clear()


@asynccontextmanager
async def open_api(database_url: str, data: Path) -> AsyncGenerator[httpx2.AsyncClient]:
    """A server without a worker: what is sent waits."""
    # Nothing is ever asked there; with an address, its models count as set up.
    flags: Json = {"data": data, "port": 0, "database_url": database_url, "anthropic_base_url": "http://127.0.0.1:9"}
    async with bootstrap.open_server(settings.load(flags, {}), api=True, worker=False) as server:
        assert server.url is not None
        headers = {"x-api-key": str(server.api_key), **VERSION}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
            yield http


async def make(http: httpx2.AsyncClient, path: str, body: Json) -> Json:
    """A POST that must succeed."""
    answered = await http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    return answered.json()


async def large_session(http: httpx2.AsyncClient) -> str:
    """The path of a session with large messages."""
    environment = await make(http, "/v1/environments", {"name": "large"})
    agent = await make(http, "/v1/agents", {"name": "Agent", "model": "claude-opus-5"})
    session = await make(http, "/v1/sessions", {"agent": agent["id"], "environment_id": environment["id"]})
    path = f"/v1/sessions/{session['id']}"
    for number in range(MESSAGES):
        await make(http, path + "/events", {"events": [message(f"{number:02}" * (TEXT_CHARS // 2))]})
    return path


@pytest.mark.rule("MA-A2.7", "MA-F9", "MA-B7.4", "MA-B7.8")
async def test_a_list_and_a_stream_of_forty_megabytes(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read took the bodies of 200 rows, and each once more for every other row: from some size on, 503 for ever.

    Every suite had missed it, since none had a session larger than a page.
    """
    reads = Reads(monkeypatch)
    async with open_api(database_url, tmp_path) as http:
        path = await large_session(http)
        reads.made.clear()
        listed: list[Json] = []
        page: Json = {"next_page": ""}
        sizes: list[int] = []
        while page["next_page"] is not None:
            answered = await http.get(path + "/events", params={"page": page["next_page"]} if page["next_page"] else {})
            assert answered.status_code == 200, answered.text
            sizes.append(len(answered.content))
            page = answered.json()
            listed += page["data"]
        assert [e["content"][0]["text"][:2] for e in listed if e["type"] == "user.message"] == [
            f"{number:02}" for number in range(MESSAGES)
        ]
        assert len(sizes) == 2
        assert PAGE_BYTES_MAX - 2 * TEXT_CHARS < sizes[0] < PAGE_BYTES_MAX + TEXT_CHARS
        reads.check(at_least=MESSAGES // 2)

        ids: list[str] = []
        async with http.stream("GET", path + "/events/stream", headers={"last-event-id": "1.0"}) as response:
            async for frame in read_frames(response):
                ids.append(frame.data["id"])
                if frame.data["id"] == listed[-1]["id"]:
                    break
        assert ids == [e["id"] for e in listed]
        reads.check(at_least=MESSAGES // 2)
