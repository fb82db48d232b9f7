"""A stretch of network in front of a PostgreSQL that listens on a Unix socket: it can freeze without anybody hearing of it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

CHUNK_BYTES = 65_536


class Line:
    """One connection through the relay."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.frozen = False
        self.ends: list[asyncio.StreamWriter] = []

    def freeze(self) -> None:
        """Nothing passes any more, not even the news of an end."""
        self.frozen = True
        self.open.clear()


class Relay:
    """The lines of one relay. Those made while it is frozen are frozen from their start."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._socket = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._database = parts.path
        self._lines: list[Line] = []
        self._frozen = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    @property
    def frozen_count(self) -> int:
        """Lines frozen for good, whose PostgreSQL side is still open."""
        return sum(line.frozen for line in self._lines)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}{self._database}"

    def freeze(self) -> None:
        """From now on nothing passes, on the lines there are and on new ones."""
        self._frozen = True
        for line in self._lines:
            line.freeze()

    def thaw(self) -> None:
        """New lines work again; the frozen ones never do."""
        self._frozen = False

    async def drop_frozen(self) -> None:
        """PostgreSQL, at last, notices."""
        for line in [line for line in self._lines if line.frozen]:
            self._lines.remove(line)
            await self._close(line)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in self._lines:
            await self._close(line)
        await self._server.wait_closed()

    async def _close(self, line: Line) -> None:
        for end in line.ends:
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = Line()
        line.ends.append(writer)
        self._lines.append(line)
        if self._frozen:
            line.freeze()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await line.open.wait()
            there_reader, there_writer = await asyncio.open_unix_connection(self._socket)
            line.ends.append(there_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(line, reader, there_writer))
                both.create_task(self._pass(line, there_reader, writer))

    async def _pass(self, line: Line, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                await line.open.wait()
                target.write(data)
                await target.drain()
            await line.open.wait()
            target.close()


@asynccontextmanager
async def relayed(url: str) -> AsyncGenerator[Relay]:
    """A relay to the server of this URL."""
    relay = Relay(url)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.close()
