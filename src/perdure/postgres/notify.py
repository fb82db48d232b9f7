"""Hints between processes over LISTEN and NOTIFY, on a connection of its own and never inside the ledger's transactions.

Notifications carry ids only and are coalesced: many commits make one. A lost one costs a sweep's time.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from perdure.ports.bus import Hint, Preview
from perdure.postgres.pool import connect, is_lost

CHANNEL: Final = "perdure_hint"
COALESCE_S: Final = 0.002
"""Notifications leave at most this often: each is a commit for the database."""

HINTS_MAX: Final = 80
"""Hints in one payload: PostgreSQL takes 8,000 bytes, one hint needs at most 90."""

RECONNECT_S: Final = 0.5


class NotifyBus:
    """See `perdure.ports.bus.Bus`. Previews stay in this process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._origin = uuid4().hex
        self._hints: dict[tuple[UUID, UUID | None], bool] = {}
        self._pending = asyncio.Event()
        self._receivers: list[Callable[[Hint], None]] = []
        self._previews: list[Callable[[Preview], None]] = []
        self._gap: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.listening = asyncio.Event()

    def publish(self, hint: Hint) -> None:
        """Tell the other processes, within milliseconds; never waits."""
        key = (hint.session_id, hint.thread_id)
        self._hints[key] = self._hints.get(key, False) or hint.stop
        self._pending.set()

    def preview(self, preview: Preview) -> None:
        """Show a piece of text to this process's readers."""
        for receive in self._previews:
            receive(preview)

    def on_hint(self, receive: Callable[[Hint], None]) -> None:
        """Call `receive` for every hint of another process."""
        self._receivers.append(receive)

    def on_preview(self, receive: Callable[[Preview], None]) -> None:
        """Call `receive` for every preview."""
        self._previews.append(receive)

    def on_gap(self, call: Callable[[], None]) -> None:
        """Call after a reconnection: hints may have been lost."""
        self._gap.append(call)

    async def start(self) -> None:
        """Listen and send until `stop`."""
        self._task = asyncio.create_task(self._run(), name="notify")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        first = True
        while True:
            try:
                await self._serve(first=first)
            except Exception as error:
                if not is_lost(error):
                    raise
            first = False
            self.listening.clear()
            await asyncio.sleep(RECONNECT_S)

    async def _serve(self, *, first: bool) -> None:
        connection = await connect(self._url, application_name="perdure-notify", hot=True)
        try:
            await connection.add_listener(CHANNEL, self._receive)
            self.listening.set()
            if not first:
                for call in self._gap:
                    call()
            while True:
                if not self._pending.is_set() and connection.is_closed():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._pending.wait()
                await self._send(connection)
        finally:
            connection.terminate()

    async def _send(self, connection: Any) -> None:
        self._pending.clear()
        while self._hints:
            batch = [self._hints.popitem() for _ in range(min(HINTS_MAX, len(self._hints)))]
            body = [[s.hex, t.hex if t else "", int(stop)] for (s, t), stop in batch]
            payload = msgspec.json.encode([self._origin, body]).decode()
            await connection.execute("select pg_notify($1, $2)", CHANNEL, payload)
        await asyncio.sleep(COALESCE_S)

    def _receive(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        origin, body = msgspec.json.decode(payload, type=tuple[str, list[tuple[str, str, int]]])
        if origin == self._origin:
            return
        for session, thread, stop in body:
            hint = Hint(session_id=UUID(session), thread_id=UUID(thread) if thread else None, stop=bool(stop))
            for receive in self._receivers:
                receive(hint)
