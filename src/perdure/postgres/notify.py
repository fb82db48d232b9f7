"""The bus between processes: `LISTEN` and `NOTIFY` on a connection of its own, never inside a transaction of the ledger.

Only ids travel. What gets lost is made good by whoever receives `on_gap`, and by the sweep: it costs latency, never a fact.
"""

import asyncio
import base64
from collections.abc import Callable, Iterable
from typing import Any, Final
from uuid import UUID, uuid4

from perdure import telemetry
from perdure.ports.bus import Hint, Preview
from perdure.postgres.pool import connect, is_busy, is_lost

CHANNEL: Final = "perdure"
COALESCE_S: Final = 0.002
"""At most one `NOTIFY` in this time: each takes a lock that the whole server shares."""

PAYLOAD_BYTES_MAX: Final = 7_900
"""PostgreSQL refuses 8,000 and more."""

PENDING_MAX: Final = 10_000
"""Hints kept for sending. Beyond it, the others are told to look at everything."""

BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
LAST_WORDS_S: Final = 0.5
"""What a process that stops gives to hints not yet sent."""

HEARTBEAT_S: Final = 5.0
"""A connection on which nothing happened for this long is asked whether it is still one."""

_VERSION: Final = "1"
_EVERYTHING: Final = "*"
_TOKEN_CHARS: Final = 22


class _Lost(Exception):
    """The connection is gone."""


def _token(identity: UUID) -> str:
    return base64.urlsafe_b64encode(identity.bytes).decode("ascii").rstrip("=")


def _identity(token: str) -> UUID:
    if len(token) != _TOKEN_CHARS:
        raise ValueError(token)
    return UUID(bytes=base64.urlsafe_b64decode(token + "=="))


def encode_hint(hint: Hint) -> str:
    """A hint in a few dozen characters: session, thread, and `!` for a stop, with dots between."""
    thread = "" if hint.thread_id is None else _token(hint.thread_id)
    return f"{_token(hint.session_id)}.{thread}.{'!' if hint.stop else ''}"


def decode_hint(text: str) -> Hint:
    """The hint behind the text; `ValueError` when it is none."""
    session, thread, stop = text.split(".")
    return Hint(session_id=_identity(session), thread_id=_identity(thread) if thread else None, stop=stop == "!")


def payloads(process: UUID, hints: Iterable[Hint]) -> list[str]:
    """As few payloads as these hints fit into."""
    head = f"{_VERSION} {_token(process)}"
    out: list[str] = []
    current = head
    for text in map(encode_hint, hints):
        if len(current) + 1 + len(text) > PAYLOAD_BYTES_MAX:
            out.append(current)
            current = head
        current += f" {text}"
    if current != head:
        out.append(current)
    return out


class NotifyBus:
    """See `perdure.ports.bus.Bus`. Previews stay in the process."""

    def __init__(self, url: str, *, process: UUID | None = None) -> None:
        self._url = url
        self._process = process or uuid4()
        self._hint_receivers: list[Callable[[Hint], None]] = []
        self._preview_receivers: list[Callable[[Preview], None]] = []
        self._gap_receivers: list[Callable[[], None]] = []
        self._pending: dict[Hint, None] = {}
        self._everything = False
        self._stirred = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._log = telemetry.logger("bus")

    # ------------------------------------------------------------------------------------------------------------ port

    def publish(self, hint: Hint) -> None:
        """Tell the other processes, within a few milliseconds; never waits."""
        if len(self._pending) < PENDING_MAX:
            self._pending[hint] = None
        else:
            self._everything = True
        self._stirred.set()

    def preview(self, preview: Preview) -> None:
        """Show a piece of text to whoever watches in this process."""
        for receive in self._preview_receivers:
            receive(preview)

    def on_hint(self, receive: Callable[[Hint], None]) -> None:
        """Call `receive` for every hint of another process."""
        self._hint_receivers.append(receive)

    def on_preview(self, receive: Callable[[Preview], None]) -> None:
        """Call `receive` for every preview."""
        self._preview_receivers.append(receive)

    def on_gap(self, receive: Callable[[], None]) -> None:
        """Call `receive` when hints may have been missed, of any session: after a reconnect, or when others sent too many."""
        self._gap_receivers.append(receive)

    # ------------------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Begin to listen and to send; returns once the first try to connect is over. A database that is away is waited for."""
        self._task = asyncio.create_task(self._run(), name="notify-bus")
        await self._tried.wait()

    async def stop(self) -> None:
        """Send what is pending if that is possible now, and end. Repeatable."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._stopping = True
        self._stirred.set()
        await asyncio.wait({task}, timeout=LAST_WORDS_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        """A supervised loop: connect, serve until the connection is lost, again."""
        failures = 0
        gap = False
        while True:
            connection: Any = None
            try:
                connection = await self._connected()
                failures = 0
                if gap:
                    self._tell_gap()
                self._tried.set()
                await self._serve(connection)
                return
            except Exception as error:  # noqa: BLE001
                if not (isinstance(error, _Lost) or is_lost(error) or is_busy(error)):
                    self._log.error("bus_failed", error=f"{type(error).__name__}: {error}")
            finally:
                if connection is not None:
                    connection.terminate()
            gap = True
            self._tried.set()
            if self._stopping:
                return
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    async def _connected(self) -> Any:
        connection = await connect(self._url, application_name="perdure-bus", hot=True)
        try:
            connection.add_termination_listener(self._on_closed)
            # A hint that a crash of the server loses is no loss.
            await connection.execute("set synchronous_commit = off")
            await connection.add_listener(CHANNEL, self._on_notify)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _on_closed(self, _connection: Any) -> None:
        self._stirred.set()

    async def _serve(self, connection: Any) -> None:
        """Send what is pending, never more often than the coalescing time, until the connection breaks or we are to stop."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._stirred.wait()
            except TimeoutError:
                await connection.execute("select 1")
                continue
            self._stirred.clear()
            if connection.is_closed():
                raise _Lost
            await self._send(connection)
            if self._stopping:
                return
            await asyncio.sleep(COALESCE_S)

    async def _send(self, connection: Any) -> None:
        hints, self._pending = self._pending, {}
        everything, self._everything = self._everything, False
        if everything:
            messages = [f"{_VERSION} {_token(self._process)} {_EVERYTHING}"]
        else:
            messages = payloads(self._process, hints)
        if not messages:
            return
        try:
            await connection.execute("select pg_notify($1, m) from unnest($2::text[]) as m", CHANNEL, messages)
        except BaseException:
            # Sent twice is harmless, lost is not.
            self._pending = hints | self._pending
            self._everything = self._everything or everything or len(self._pending) > PENDING_MAX
            self._stirred.set()
            raise

    # ------------------------------------------------------------------------------------------------------- receiving

    def _on_notify(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        version, _, rest = str(payload).partition(" ")
        sender, _, body = rest.partition(" ")
        if version == _VERSION and sender == _token(self._process):
            return
        try:
            hints = None if version != _VERSION or body == _EVERYTHING else [decode_hint(t) for t in body.split(" ")]
        except ValueError:
            self._log.warning("bus_payload_unreadable", payload=str(payload)[:100])
            hints = None
        if hints is None:
            # Also what a process of another release says: what it means is unknown, that something changed is not.
            self._tell_gap()
            return
        for hint in hints:
            for receive in self._hint_receivers:
                receive(hint)

    def _tell_gap(self) -> None:
        for receive in self._gap_receivers:
            receive()
