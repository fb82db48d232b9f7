"""Feeds of sessions with large bodies: memory is bounded by bytes, and no event is missed or doubled where a read ends by bytes."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from tests.unit.claude.face import Face, rows_of

from perdure.core import feed as feed_module
from perdure.core.feed import BACKLOG_BYTES_MAX, RING_BYTES_MAX, RING_ROWS_MAX, Feeds, Row, Subscription
from perdure.http.claude import events as events_module
from perdure.http.claude.wire import SESSION, from_wire_id
from perdure.ports.bus import Hint
from perdure.ports.ledger import READ_BYTES_MAX, READ_ROWS_MAX, SeenEvent, stored_bytes
from perdure.testing.oracle import OracleLedger

LARGE = 300_000
"""Of these, four reach the bytes of a read."""

WAIT_S = 5.0


class CountingSource:
    """A ledger that notes the size of each read of a feed."""

    def __init__(self, ledger: OracleLedger) -> None:
        self._ledger = ledger
        self.reads: list[list[int]] = []

    async def read_feed(self, session_id: UUID, after_seq: int, limit: int) -> list[SeenEvent] | None:
        read = await self._ledger.read_feed(session_id, after_seq, limit)
        self.reads.append([seen.size_bytes for seen in read or ()])
        return read

    async def read_head(self, session_id: UUID) -> int | None:
        return await self._ledger.read_head(session_id)

    async def read_heads(self, session_ids: Sequence[UUID]) -> dict[UUID, int]:
        return await self._ledger.read_heads(session_ids)


class Watched:
    """A session, a feed of its own, and what its reads were."""

    def __init__(self, face: Face, session: str) -> None:
        found = from_wire_id(SESSION, session)
        assert found is not None
        self.session_id = found
        self.source = CountingSource(face.ledger)
        self.feeds = Feeds(self.source)

    async def subscribe(self, after_seq: int | None) -> Subscription:
        reader = await self.feeds.subscribe(self.session_id, after_seq=after_seq)
        assert reader is not None
        return reader

    @property
    def ring(self) -> dict[int, Any]:
        return self.feeds._feeds[self.session_id]._ring

    @property
    def ring_bytes(self) -> int:
        """What the feed believes its ring to take."""
        return self.feeds._feeds[self.session_id]._ring_bytes


async def take(reader: Subscription, head: int) -> list[SeenEvent]:
    """The rows up to `head`; what waits for the reader stays within its bounds all the while."""
    rows: list[SeenEvent] = []
    while not rows or rows[-1].event.seq < head:
        item = await reader.next(WAIT_S)
        assert isinstance(item, Row), item
        rows.append(item.seen)
        waiting = [kept.seen.size_bytes for kept, _ in reader._items if isinstance(kept, Row)]
        assert reader._bytes == sum(waiting) <= max(BACKLOG_BYTES_MAX, READ_BYTES_MAX) + LARGE
    return rows


async def head_of(face: Face, watched: Watched) -> int:
    head = await face.ledger.read_head(watched.session_id)
    assert head is not None
    return head


@pytest.mark.rule("MA-B7.4", "MA-F11")
async def test_a_resume_over_a_large_history_takes_several_reads_and_each_row_once(face: Face) -> None:
    session = await face.session()
    for number in range(8):
        await face.turn(session, f"{number}" * LARGE, "short")
    watched = Watched(face, session)
    reader = await watched.subscribe(0)
    rows = await take(reader, await head_of(face, watched))
    assert rows == rows_of(face, session)
    reads = watched.source.reads
    assert all(sum(read[:-1]) < READ_BYTES_MAX and len(read) <= READ_ROWS_MAX for read in reads)
    assert len(reads) > 4
    reader.close()
    await watched.feeds.close()


@pytest.mark.rule("MA-B7.4", "MA-B7.6")
async def test_what_commits_during_a_resume_comes_once_and_in_order(face: Face) -> None:
    """Commits land before, at and behind every place where a read of the ledger ended."""
    session = await face.session()
    for number in range(6):
        await face.say(session, f"{number}" * LARGE)
    watched = Watched(face, session)
    reader = await watched.subscribe(0)
    face.ledger.on_commit = watched.feeds.committed
    rows: list[SeenEvent] = []
    for number in range(12):
        rows += await take(reader, (rows[-1].event.seq if rows else 0) + 1)
        await face.say(session, chr(ord("a") + number) * (LARGE if number % 2 else 10))
    rows += await take(reader, await head_of(face, watched))
    assert rows == rows_of(face, session)
    reader.close()
    await watched.feeds.close()


@pytest.mark.rule("MA-B7.3", "MA-B7.6")
async def test_large_commits_of_another_process_come_without_a_second_hint(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "RECHECK_S", 1_000.0)
    session = await face.session()
    watched = Watched(face, session)
    reader = await watched.subscribe(None)
    for number in range(12):
        await face.say(session, f"{number:02}" * (LARGE // 2))
    watched.feeds.hinted(Hint(session_id=watched.session_id))
    rows = await take(reader, await head_of(face, watched))
    assert rows == rows_of(face, session)[-len(rows) :]
    assert sum(r.event.type == "input.received" for r in rows) == 12
    reader.close()
    await watched.feeds.close()


async def test_a_small_history_takes_one_read(face: Face) -> None:
    session = await face.session()
    for _ in range(3):
        await face.turn(session, "hi", "hello")
    watched = Watched(face, session)
    reader = await watched.subscribe(0)
    rows = await take(reader, await head_of(face, watched))
    assert [len(read) for read in watched.source.reads] == [len(rows)]
    reader.close()
    await watched.feeds.close()


async def test_the_ring_keeps_few_bytes_and_few_rows(face: Face) -> None:
    session = await face.session()
    watched = Watched(face, session)
    reader = await watched.subscribe(0)
    face.ledger.on_commit = watched.feeds.committed
    for size in (*[LARGE] * 8, RING_BYTES_MAX + 1, 10, LARGE, *[10] * (RING_ROWS_MAX + 10)):
        await face.say(session, "x" * size)
        kept = list(watched.ring.values())
        assert watched.ring_bytes == sum(stored_bytes(e) for e in kept) <= RING_BYTES_MAX
        assert len(kept) <= RING_ROWS_MAX
        assert kept[-1].seq == await head_of(face, watched) or size > RING_BYTES_MAX
    assert len(watched.ring) == RING_ROWS_MAX
    reader.close()
    await watched.feeds.close()


@pytest.mark.parametrize("size", [10, RING_BYTES_MAX + 1])
async def test_a_row_whose_input_the_ring_does_not_keep_comes_whole(face: Face, size: int) -> None:
    session = await face.session()
    watched = Watched(face, session)
    reader = await watched.subscribe(None)
    face.ledger.on_commit = watched.feeds.committed
    await face.turn(session, "x" * size, "short")
    rows: list[SeenEvent] = []
    while not rows or rows[-1].event.seq < await head_of(face, watched):
        item = await reader.next(WAIT_S)
        assert isinstance(item, Row), item
        rows.append(item.seen)
    wanted = rows_of(face, session)[-len(rows) :]
    assert [_content(r) for r in rows] == [_content(r) for r in wanted]
    assert "input.settled" in {r.event.type for r in rows}
    assert bool(watched.source.reads) == (size > RING_BYTES_MAX)
    reader.close()
    await watched.feeds.close()


def _content(row: SeenEvent) -> tuple[Any, ...]:
    """All but the processed stamp, which a row gets later."""
    referred = row.referred
    return row.event.seq, row.event.body, None if referred is None else (referred.seq, referred.body)


def path(session: str) -> str:
    return f"/v1/sessions/{session}/events/stream"


@pytest.mark.rule("MA-B7.4", "MA-G15.1")
async def test_resuming_behind_any_frame_of_a_large_history(face: Face) -> None:
    session = await face.session()
    whole = await face.open(path(session))
    for number in range(4):
        await face.turn(session, f"{number}" * LARGE, "short")
    await whole.until("session.status_idle", 4)
    frames = whole.frames.raw()
    for place, frame in enumerate(frames[:-1]):
        resumed = await face.open(path(session), headers={"last-event-id": frame["id"]})
        await resumed.until(
            "session.status_idle", sum(f["event"] == "session.status_idle" for f in frames[place + 1 :])
        )
        assert resumed.frames.raw() == frames[place + 1 :]
        await resumed.close()
    await whole.close()


@pytest.mark.rule("MA-A2.6", "MA-A2.7", "MA-A0.23")
@pytest.mark.parametrize("limit", [1, 4, 1000])
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_of_large_events_cut_anywhere(
    face: Face, monkeypatch: pytest.MonkeyPatch, limit: int, order: str
) -> None:
    """A page ends by its own bytes or number, in the middle of a read or over several."""
    session = await face.session()
    for number in range(4):
        await face.turn(session, f"{number}" * LARGE, f"{number}" * LARGE)
    whole = await face.events(session)
    monkeypatch.setattr(events_module, "PAGE_BYTES_MAX", 5 * LARGE // 2 * 2)
    found: list[dict[str, Any]] = []
    lengths: list[int] = []
    page: dict[str, Any] = {"next_page": ""}
    while page["next_page"] is not None:
        cursor = f"&page={page['next_page']}" if page["next_page"] else ""
        page = await face.ok("GET", f"/v1/sessions/{session}/events?limit={limit}&order={order}{cursor}")
        found += page["data"]
        lengths.append(len(page["data"]))
    assert found == (whole if order == "asc" else whole[::-1])
    assert max(lengths) <= limit
    assert (limit < 1000) == (lengths[0] == limit)


async def test_error_of_a_read_is_told_and_its_readers_get_the_rows_all_the_same(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No outage, but a row that nobody foresaw: whatever it was, the next recheck reads again."""
    monkeypatch.setattr(feed_module, "RECHECK_S", 0.01)
    session = await face.session()
    watched = Watched(face, session)
    told: list[Exception] = []
    watched.feeds = Feeds(watched.source, on_trouble=told.append)
    head = await head_of(face, watched)
    reader = await watched.subscribe(None)
    read_feed, read_heads = watched.source.read_feed, watched.source.read_heads
    failing: list[str] = ["feed", "heads", "feed"]

    async def bad_feed(*asked: Any) -> list[SeenEvent] | None:
        if failing and failing[0] == "feed":
            raise ValueError(failing.pop(0))
        return await read_feed(*asked)

    async def bad_heads(asked: Sequence[UUID]) -> dict[UUID, int]:
        if failing and failing[0] == "heads":
            raise ValueError(failing.pop(0))
        return await read_heads(asked)

    monkeypatch.setattr(watched.source, "read_feed", bad_feed)
    monkeypatch.setattr(watched.source, "read_heads", bad_heads)
    await face.say(session, "hello")
    rows = await take(reader, await head_of(face, watched))
    assert [r.event.seq for r in rows] == list(range(head + 1, head + 1 + len(rows)))
    assert [str(e) for e in told] == ["feed", "heads", "feed"]
    reader.close()
    await watched.feeds.close()
