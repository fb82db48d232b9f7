"""Submit once, the part that lives in one process: what a request is called, and whether its first answer went out.

The ledger keeps the record of an admitted request, in the commit that admits it. Whether the response was written, and whether its
connection was used again, is known only here and lost with the process; `domain.submission` decides with either.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Final, TypeAlias
from uuid import UUID, uuid4

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.submission import LOST_FLAG_S, WRITTEN_GRACE_S, SubmissionKey, Written, WrittenNote

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

    __slots__ = ("_left", "begun_s", "connection_reused", "digest", "previous", "repeats", "request_id", "written_s")

    def __init__(
        self, digest: bytes, request_id: UUID, begun_s: float, previous: "Attempt | None", *, repeats: bool
    ) -> None:
        self.digest = digest
        self.request_id = request_id
        self.begun_s = begun_s
        self.previous = previous
        self.repeats = repeats
        """Whether it may be the repeat of another one."""
        self.written_s: float | None = None
        """When its response had gone out in full."""
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

    def known(self, now_s: float) -> Written | None:
        """What is known of its response; None before it has gone out."""
        if self.written_s is None:
            return None
        return Written(self.request_id, timedelta(seconds=now_s - self.written_s), self.connection_reused)


class Submissions:
    """Names requests and remembers their responses."""

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        entries_max: int = ENTRIES_MAX,
        in_flight_wait_s: float = IN_FLIGHT_WAIT_S,
    ) -> None:
        self._now_s = now_s
        self._entries_max = entries_max
        self._in_flight_wait_s = in_flight_wait_s
        self._latest: OrderedDict[bytes, Attempt] = OrderedDict()
        self._last_on: OrderedDict[Connection, tuple[Attempt, UUID]] = OrderedDict()
        self._written: list[Attempt] = []

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
            request_id=uuid4(),
        )

    async def enter(self, key: SubmissionKey) -> tuple[Attempt, SubmissionKey]:
        """Begin a request, after the attempt that it may repeat is decided; with it what is known of the response before.

        A retry, and any request with an explicit key, waits for an equal one in flight. Equal requests that a client makes on
        purpose go side by side.
        """
        repeats = key.explicit or key.attempt > 0
        if repeats:
            await self._wait_for(key.digest)
        now_s = self._now_s()
        self._forget_old(now_s)
        previous = self._latest.get(key.digest)
        attempt = Attempt(key.digest, key.request_id, now_s, previous, repeats=repeats)
        self._latest[key.digest] = attempt
        self._latest.move_to_end(key.digest)
        return attempt, msgspec.structs.replace(key, known=previous.known(now_s) if previous is not None else None)

    async def _wait_for(self, digest: bytes) -> None:
        try:
            async with asyncio.timeout(self._in_flight_wait_s):
                while (first := self._latest.get(digest)) is not None and first.in_flight:
                    await first.wait_left()
        except TimeoutError:
            pass

    def leave(self, attempt: Attempt, *, stored: bool) -> None:
        """The request is decided. Unless it is known to be `stored`, the one before it counts again.

        If it was stored after all, the ledger names it, and what is known of the one before is not believed.
        """
        previous, attempt.previous = attempt.previous, None
        attempt.mark_left()
        if stored:
            return
        if previous is not None and not attempt.repeats:
            # The client made the request anew, so it was done with the one before: its retry is not of that.
            self._mark_read(previous)
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

    def written(self, attempt: Attempt, connection: Connection | None, key_id: UUID) -> None:
        """The response of a stored request went out in full, to who has this API key."""
        attempt.written_s = self._now_s()
        self._written.append(attempt)
        if connection is not None:
            self._last_on[connection] = attempt, key_id
            self._last_on.move_to_end(connection)
            if len(self._last_on) > self._entries_max:
                self._last_on.popitem(last=False)

    async def tell(self, write: Callable[[Sequence[WrittenNote]], Awaitable[None]]) -> None:
        """Have the ledger told of the responses written since the last call. What `write` raises passes; then they come again."""
        written, self._written = list(dict.fromkeys(self._written)), []
        if not written:
            return
        now_s = self._now_s()
        try:
            await write([WrittenNote(a.digest, known) for a in written if (known := a.known(now_s)) is not None])
        except BaseException:
            self._written = (written + self._written)[-self._entries_max :]
            raise

    def request_on(self, connection: Connection | None, key_id: UUID) -> None:
        """A request came in on a connection: whoever sent it has read the response before it.

        Behind a proxy that shares its connections that may be somebody else: only the same API key counts.
        """
        seen, owner = (None, None) if connection is None else self._last_on.get(connection, (None, None))
        if connection is not None and seen is not None and owner == key_id:
            del self._last_on[connection]
            self._mark_read(seen)

    def _mark_read(self, attempt: Attempt) -> None:
        if attempt.connection_reused:
            return
        attempt.connection_reused = True
        if attempt.written_s is not None and self._now_s() - attempt.written_s <= WRITTEN_GRACE_S:
            # The ledger may have been told already, and another process may be asked next.
            self._written.append(attempt)

    def _forget_old(self, now_s: float) -> None:
        oldest_s = now_s - REMEMBERED_S
        while self._latest:
            digest, attempt = next(iter(self._latest.items()))
            if attempt.begun_s >= oldest_s and len(self._latest) < self._entries_max:
                break
            del self._latest[digest]
        while self._last_on:
            connection, (attempt, _) = next(iter(self._last_on.items()))
            if attempt.begun_s >= oldest_s:
                break
            del self._last_on[connection]


def _count(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= RETRY_COUNT_DIGITS_MAX):
        return 0
    return int(text)
