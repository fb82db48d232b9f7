"""Feeds: one tail of the ledger for each watched session of a process, fanned out to its readers.

A feed accepts only the next sequence: what a commit hands over is taken when it fits, else the ledger is read again. So publication
is never the order. Nobody's execution waits for a reader: a reader that falls behind is cut off alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Unavailable
from perdure.domain.event import Event
from perdure.ports.bus import Hint, Preview, PreviewDelta, PreviewStarted
from perdure.ports.ledger import READ_ROWS_MAX, Committed, SeenEvent, is_full, stored_bytes

BACKLOG_ROWS_MAX: Final = 256
BACKLOG_BYTES_MAX: Final = 1024 * 1024
"""How far a reader may fall behind and be fed from memory. Beyond it, it reads the ledger; one commit alone can take it there."""

CATCH_UP_S: Final = 5.0
"""A reader that was fed from the ledger for so long, while more was committed, is too slow: it is cut off, and resumes by its last id."""

RECHECK_S: Final = 2.0
"""The heads of all watched sessions are read this often, in one query: a lost hint costs no more."""

RING_ROWS_MAX: Final = 256
RING_BYTES_MAX: Final = 1024 * 1024
"""Recent rows kept, so that a row that refers to one of them needs no read. Watched sessions are many: a large body is read again."""


class Row(msgspec.Struct, frozen=True):
    """A committed row, in order, without gaps."""

    seen: SeenEvent


class Gone(msgspec.Struct, frozen=True):
    """The session was deleted; nothing follows."""


class CutOff(msgspec.Struct, frozen=True):
    """The reader fell too far behind; nothing follows."""


FeedItem: TypeAlias = Row | Preview | Gone | CutOff


class FeedSource(Protocol):
    """What a feed reads."""

    async def read_feed(self, session_id: UUID, after_seq: int, limit: int) -> list[SeenEvent] | None:
        """Rows after a cursor, up to the bounds that `is_full` knows; None when the session is gone."""
        ...

    async def read_head(self, session_id: UUID) -> int | None:
        """The latest sequence; None when the session is gone."""
        ...

    async def read_heads(self, session_ids: Sequence[UUID]) -> dict[UUID, int]:
        """The latest sequences of many sessions; one that is gone is not among them."""
        ...


class Subscription:
    """One reader's place. Iterate with `next`; always `close`."""

    def __init__(self, feed: "_Feed", *, after_seq: int, previews: bool) -> None:
        self.start_seq = after_seq
        self._feed = feed
        self._previews = previews
        self._items: deque[tuple[FeedItem, int]] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._last_seq = after_seq
        self._started: set[UUID] = set()
        self._ended = False
        self._reading = False
        self._behind_s: float | None = None
        """Since when it reads the ledger because it fell behind."""

    async def next(self, timeout_s: float) -> FeedItem | None:
        """The next item, or None when nothing came in time. After `Gone` or `CutOff` the reader is done."""
        while not self._items:
            if self._ended:
                return None
            if self._last_seq < self._feed.head:
                await self._catch_up()
                continue
            self._ready.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return None
        item, size = self._items.popleft()
        self._bytes -= size
        return item

    async def _catch_up(self) -> None:
        """Read what the feed passed before this reader came, a page at a time, as fast as the reader takes it."""
        self._reading = True
        try:
            rows = await self._feed.source.read_feed(self._feed.session_id, self._last_seq, READ_ROWS_MAX)
        finally:
            self._reading = False
        if rows is None:
            self.end(Gone())
            return
        for seen in rows:
            self._last_seq = seen.event.seq
            self._push(Row(seen), seen.size_bytes)
        if self._last_seq >= self._feed.head:
            self._behind_s = None

    def close(self) -> None:
        """Stop reading. Repeatable."""
        self._ended = True
        self._feed.drop(self)

    def take(self, seen: SeenEvent, size: int) -> None:
        """Called by the feed with each row in order."""
        if self._ended or self._reading or seen.event.seq != self._last_seq + 1:
            self._check_pace()
            self._ready.set()
            return
        if self._is_full(size):
            # Not cut off: whoever commits this much at once would cut off every reader, however quick.
            self._behind_s = asyncio.get_running_loop().time()
            self._ready.set()
            return
        self._last_seq = seen.event.seq
        if seen.event.item_id is not None and seen.event.type == "item.closed":
            self._started.discard(seen.event.item_id)
        self._push(Row(seen), size)

    def _check_pace(self) -> None:
        if self._behind_s is not None and asyncio.get_running_loop().time() - self._behind_s > CATCH_UP_S:
            self.end(CutOff())

    def take_preview(self, preview: Preview) -> None:
        """Called by the feed with each preview. A reader that is behind misses it, and a delta whose start was missed is not shown."""
        size = len(preview.text) if isinstance(preview, PreviewDelta) else 0
        if self._ended or not self._previews or self._last_seq < self._feed.head or self._is_full(size):
            return
        if isinstance(preview, PreviewStarted):
            self._started.add(preview.item_id)
        elif preview.item_id not in self._started:
            return
        self._push(preview, size)

    def end(self, item: Gone | CutOff) -> None:
        """Called by the feed: say why, and nothing more."""
        if self._ended:
            return
        self._ended = True
        if isinstance(item, CutOff):
            self._items.clear()
            self._bytes = 0
        self._items.append((item, 0))
        self._ready.set()

    def _is_full(self, size: int) -> bool:
        return len(self._items) >= BACKLOG_ROWS_MAX or (self._bytes + size > BACKLOG_BYTES_MAX and bool(self._items))

    def _push(self, item: FeedItem, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size
        self._ready.set()


class _Feed:
    """The tail of one session."""

    def __init__(
        self,
        session_id: UUID,
        head: int,
        source: FeedSource,
        forget: Callable[[UUID], None],
        tell: Callable[[Exception], None],
    ) -> None:
        self.session_id = session_id
        self.head = head
        self.source = source
        self._forget = forget
        self._tell = tell
        self._readers: set[Subscription] = set()
        self._ring: dict[int, Event] = {}
        self._ring_bytes = 0
        self._closed_items: deque[UUID] = deque(maxlen=RING_ROWS_MAX)
        self._stale = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name=f"feed-{self.session_id}")

    def add(self, reader: Subscription) -> None:
        self._readers.add(reader)

    def drop(self, reader: Subscription) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._forget(self.session_id)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def mark_stale(self) -> None:
        self._stale.set()

    def offer(self, events: tuple[Event, ...]) -> None:
        """Rows of a commit of this process: taken when they are the next ones and complete, else read again."""
        for event in events:
            referred = None if event.ref_seq is None else self._ring.get(event.ref_seq)
            if event.seq != self.head + 1 or (event.ref_seq is not None and referred is None):
                if event.seq > self.head:
                    self._stale.set()
                return
            self._deliver(SeenEvent(event, referred))

    def preview(self, preview: Preview) -> None:
        if preview.item_id not in self._closed_items:
            for reader in tuple(self._readers):
                reader.take_preview(preview)

    def end(self, item: Gone | CutOff) -> None:
        for reader in tuple(self._readers):
            reader.end(item)

    def _deliver(self, seen: SeenEvent) -> None:
        event = seen.event
        self.head = event.seq
        self._keep(event)
        if event.type == "item.closed" and event.item_id is not None:
            self._closed_items.append(event.item_id)
        size = seen.size_bytes
        for reader in tuple(self._readers):
            reader.take(seen, size)

    def _keep(self, event: Event) -> None:
        size = stored_bytes(event)
        if size > RING_BYTES_MAX:
            return
        self._ring[event.seq] = event
        self._ring_bytes += size
        while len(self._ring) > RING_ROWS_MAX or self._ring_bytes > RING_BYTES_MAX:
            self._ring_bytes -= stored_bytes(self._ring.pop(next(iter(self._ring))))

    async def _follow(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                if not await self._catch_up():
                    self.end(Gone())
                    return
            except Exception as error:  # noqa: BLE001  its readers wait: the recheck marks it stale again
                self._tell(error)

    async def _catch_up(self) -> bool:
        while True:
            rows = await self.source.read_feed(self.session_id, self.head, READ_ROWS_MAX)
            if rows is None:
                return False
            for seen in rows:
                if seen.event.seq == self.head + 1:
                    self._deliver(seen)
            if not is_full(rows, READ_ROWS_MAX):
                return True


class Feeds:
    """The feeds of this process. Memory follows the readers: a session nobody watches costs nothing.

    `on_trouble` is told of errors that no outage explains; the read is made again all the same.
    """

    def __init__(self, source: FeedSource, *, on_trouble: Callable[[Exception], None] | None = None) -> None:
        self._source = source
        self._on_trouble = on_trouble
        self._feeds: dict[UUID, _Feed] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._rechecking: asyncio.Task[None] | None = None

    async def subscribe(
        self, session_id: UUID, *, after_seq: int | None, previews: bool = False
    ) -> Subscription | None:
        """Watch a session from now on, or from behind a row; None when it is gone.

        The starting point is read before this returns, so whatever commits afterwards is seen.
        """
        head = await self._source.read_head(session_id)
        if head is None:
            return None
        feed = self._feeds.get(session_id)
        if feed is None:
            feed = self._feeds[session_id] = _Feed(session_id, head, self._source, self._forget, self._tell)
            feed.start()
        if self._rechecking is None:
            self._rechecking = asyncio.create_task(self._recheck(), name="feeds-recheck")
        start = head if after_seq is None else min(after_seq, head)
        reader = Subscription(feed, after_seq=start, previews=previews)
        feed.add(reader)
        if start > feed.head:
            feed.mark_stale()
        return reader

    def committed(self, committed: Committed) -> None:
        """A commit of this process."""
        feed = self._feeds.get(committed.session_id)
        if feed is None:
            return
        feed.offer(committed.events)
        if committed.deleted:
            feed.mark_stale()

    def hinted(self, hint: Hint) -> None:
        """A commit of another process."""
        feed = self._feeds.get(hint.session_id)
        if feed is not None:
            feed.mark_stale()

    def preview(self, preview: Preview) -> None:
        """A piece of text, best effort."""
        feed = self._feeds.get(preview.session_id)
        if feed is not None:
            feed.preview(preview)

    def look_at_all(self) -> None:
        """Hints may have been lost: read every watched session again."""
        for feed in self._feeds.values():
            feed.mark_stale()

    async def _recheck(self) -> None:
        """One query for all watched sessions; those that moved without a word are read."""
        while True:
            await asyncio.sleep(RECHECK_S)
            if not self._feeds:
                continue
            try:
                heads = await self._source.read_heads(list(self._feeds))
            except Exception as error:  # noqa: BLE001  a supervised loop
                self._tell(error)
                continue
            for session_id, feed in self._feeds.items():
                if heads.get(session_id) != feed.head:
                    feed.mark_stale()

    def _tell(self, error: Exception) -> None:
        if self._on_trouble is not None and not isinstance(error, Unavailable):
            self._on_trouble(error)

    def _forget(self, session_id: UUID) -> None:
        feed = self._feeds.pop(session_id, None)
        if feed is not None:
            task = asyncio.create_task(feed.stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Cut every reader off."""
        if self._rechecking is not None:
            self._rechecking.cancel()
            await asyncio.gather(self._rechecking, return_exceptions=True)
        for feed in list(self._feeds.values()):
            feed.end(CutOff())
            await feed.stop()
        self._feeds.clear()
        await asyncio.gather(*self._closing)
