"""Submit once, the part that lives in one process: what a request is called, and whether its first answer went out.

The ledger keeps the record of an admitted request, in the commit that admits it. Whether the response was written, and whether its
connection was used again, is known only here and lost with the process; `domain.submission` decides with either.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.submission import LOST_FLAG_S, SubmissionKey, Written, WrittenNote

IDEMPOTENCY_KEY_BYTES_MAX: Final = 256
IN_FLIGHT_WAIT_S: Final = 30.0
"""A retry waits this long for its first attempt. Longer than any commit takes; after it the ledger's own order decides."""

REMEMBERED_S: Final = LOST_FLAG_S + 60
"""A written response is remembered as long as the ledger would otherwise take its record for one that a crash left unanswered."""

ENTRIES_MAX: Final = 100_000
"""About 30 MB. Beyond it the oldest are forgotten: their retries are then judged as after a crash."""

RETRY_COUNT_DIGITS_MAX: Final = 4

Connection: TypeAlias = tuple[str, int]
"""The peer's address: names a connection while it is open."""


class Attempt:
    """One request on its way. Made by `enter`; the caller tells it how it went."""

    __slots__ = ("_left", "begun_at", "connection_reused", "digest", "number", "previous", "written_at")

    def __init__(self, digest: bytes, number: int, begun_at: datetime, previous: "Attempt | None") -> None:
        self.digest = digest
        self.number = number
        """The retry count that it came with."""
        self.begun_at = begun_at
        self.previous = previous
        self.written_at: datetime | None = None
        self.connection_reused = False
        self._left: asyncio.Event | None = asyncio.Event()

    @property
    def in_flight(self) -> bool:
        """Whether it has not been decided yet."""
        return self._left is not None

    async def wait_left(self) -> None:
        """Return once it is decided."""
        if self._left is not None:
            await self._left.wait()

    def mark_left(self) -> None:
        """It is decided."""
        if self._left is not None:
            self._left.set()
            self._left = None


class Submissions:
    """Names requests and remembers their responses."""

    def __init__(
        self,
        process: UUID,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        entries_max: int = ENTRIES_MAX,
        in_flight_wait_s: float = IN_FLIGHT_WAIT_S,
    ) -> None:
        self.process = process
        self._now = now
        self._entries_max = entries_max
        self._in_flight_wait_s = in_flight_wait_s
        self._latest: OrderedDict[bytes, Attempt] = OrderedDict()
        self._last_on: OrderedDict[Connection, Attempt] = OrderedDict()
        self._written: list[Attempt] = []
        self._notes: list[WrittenNote] = []

    @property
    def remembered_count(self) -> int:
        """How many requests are remembered now."""
        return len(self._latest)

    def identify(
        self,
        *,
        key_id: UUID,
        method: str,
        route: str,
        body: bytes,
        idempotency_key: str | None,
        retry_count: str | None,
    ) -> SubmissionKey | Refused:
        """What a request is called. `route` is its path without a forced prefix; a retry count that is no number counts as 0.

        MA-E1.6: the API key is part of the name, so requests of two keys never match. Header values come decoded as Latin-1, a
        character for each byte.
        """
        body_digest = sha256(body).digest()
        name = body_digest
        if idempotency_key is not None:
            name = idempotency_key.encode("latin-1")
            if not 1 <= len(name) <= IDEMPOTENCY_KEY_BYTES_MAX:
                return Refused(
                    "invalid",
                    "invalid_request_error",
                    f"Idempotency-Key: must have 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes, not {len(name)}.",
                    "Idempotency-Key",
                )
        kind = b"key" if idempotency_key is not None else b"body"
        digest = sha256(msgspec.msgpack.encode((key_id.bytes, method, route, kind, name))).digest()
        return SubmissionKey(
            digest=digest,
            body_digest=body_digest,
            explicit=idempotency_key is not None,
            attempt=_count(retry_count),
            process=self.process,
        )

    async def enter(self, key: SubmissionKey) -> tuple[Attempt, SubmissionKey]:
        """Begin a request, after the attempt that it may repeat is decided; with it what is known of the first response.

        A retry, and any request with an explicit key, waits for an equal one in flight. Equal requests that a client makes on
        purpose go side by side.
        """
        repeats = key.explicit or key.attempt > 0
        if repeats:
            await self._wait_for(key.digest)
        now = self._now()
        self._forget_old(now)
        previous = self._latest.get(key.digest)
        if previous is not None and not repeats:
            # The client makes the request anew, so it is done with the one before: a later retry is not of that.
            previous.connection_reused = True
        attempt = Attempt(key.digest, key.attempt, now, previous)
        self._latest[key.digest] = attempt
        self._latest.move_to_end(key.digest)
        return attempt, msgspec.structs.replace(key, first_response=_first_response(previous))

    async def _wait_for(self, digest: bytes) -> None:
        try:
            async with asyncio.timeout(self._in_flight_wait_s):
                while (first := self._latest.get(digest)) is not None and first.in_flight:
                    await first.wait_left()
        except TimeoutError:
            pass

    def leave(self, attempt: Attempt, *, stored: bool) -> None:
        """The request is decided. `stored` unless it is certain that nothing of it was; then the one before it counts again."""
        previous, attempt.previous = attempt.previous, None
        attempt.mark_left()
        if stored:
            return
        latest = self._latest.get(attempt.digest)
        if latest is attempt:
            if previous is None:
                del self._latest[attempt.digest]
            else:
                self._latest[attempt.digest] = previous
            return
        while latest is not None:
            if latest.previous is attempt:
                latest.previous = previous
            latest = latest.previous

    def written(self, attempt: Attempt, connection: Connection | None) -> None:
        """The response of a stored request went out in full."""
        attempt.written_at = self._now()
        self._written.append(attempt)
        if connection is not None:
            self._last_on[connection] = attempt
            self._last_on.move_to_end(connection)
            if len(self._last_on) > self._entries_max:
                self._last_on.popitem(last=False)

    def take_notes(self) -> list[WrittenNote]:
        """Responses written since the last call, for the ledger."""
        written, self._written = self._written, []
        notes, self._notes = self._notes, []
        return notes + [
            WrittenNote(a.digest, a.number, a.written_at, a.connection_reused)
            for a in written
            if a.written_at is not None
        ]

    def give_back_notes(self, notes: list[WrittenNote]) -> None:
        """The ledger could not take them: they come again with the next ones."""
        self._notes = notes[-self._entries_max :]

    def request_on(self, connection: Connection | None) -> None:
        """A request came in on a connection: whoever sent it has read the response before it."""
        if connection is None:
            return
        seen = self._last_on.pop(connection, None)
        if seen is not None:
            seen.connection_reused = True

    def _forget_old(self, now: datetime) -> None:
        oldest = now - timedelta(seconds=REMEMBERED_S)
        while self._latest:
            digest, attempt = next(iter(self._latest.items()))
            if attempt.begun_at >= oldest and len(self._latest) < self._entries_max:
                break
            del self._latest[digest]
        while self._last_on:
            connection, attempt = next(iter(self._last_on.items()))
            if attempt.begun_at >= oldest:
                break
            del self._last_on[connection]


def _first_response(previous: Attempt | None) -> Written | None:
    if previous is None or previous.written_at is None:
        return None
    return Written(previous.written_at, previous.connection_reused)


def _count(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= RETRY_COUNT_DIGITS_MAX):
        return 0
    return int(text)
