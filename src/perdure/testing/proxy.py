"""A TCP proxy on loopback between a client and a server, that can lose answers, stall and hang up."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from perdure.testing.signals import Signal

CHUNK_BYTES: Final = 64 * 1024


class _Pipe:
    """One connection of a client, and the one to the server behind it."""

    def __init__(
        self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, client_reader: asyncio.StreamReader
    ) -> None:
        self.client = client
        self.server = server
        self.client_reader = client_reader

    def cut(self) -> None:
        """Reset both sides at once, with nothing delivered any more."""
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """Forwards every byte, until told otherwise. Use as an async context manager."""

    def __init__(self, target: str, *, buffer_bytes: int | None = None) -> None:
        """`buffer_bytes` bounds what the kernel takes from the server on our behalf: else it is tens of megabytes."""
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._buffer_bytes = buffer_bytes
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._losing: Callable[[bytes], bool] | None = None
        self._held: asyncio.Event | None = None
        self.lost = Signal("an answer was lost")
        self.url = ""
        self.connections = 0
        """How many were opened."""

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.resume()
        self.cut()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._server.wait_closed()

    def lose_answer(self, of: Callable[[bytes], bool] = lambda _: True) -> None:
        """Hang up instead of delivering the next answer whose first bytes `of` accepts; once."""
        self._losing = of
        self.lost = Signal("an answer was lost")

    def stall(self) -> None:
        """Read nothing more from the server, as a client does that takes nothing."""
        if self._held is None:
            self._held = asyncio.Event()

    def resume(self) -> None:
        """Go on after `stall`."""
        held, self._held = self._held, None
        if held is not None:
            held.set()

    def cut(self) -> None:
        """Reset every open connection."""
        for pipe in list(self._pipes):
            pipe.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self.connections += 1
        try:
            server_reader, server_writer = await self._connect()
            pipe = _Pipe(writer, server_writer, reader)
            self._pipes.add(pipe)
            try:
                await self._forward(pipe, server_reader)
            finally:
                self._pipes.discard(pipe)
                pipe.cut()
        except ConnectionError:
            writer.transport.abort()
        finally:
            self._running.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._buffer_bytes is None:
            return await asyncio.open_connection(*self._target)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Before it connects: the window is announced then.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._target)
        return await asyncio.open_connection(sock=connection)

    async def _forward(self, pipe: _Pipe, server_reader: asyncio.StreamReader) -> None:
        """Both directions, until one of them ends."""
        directions = {
            asyncio.ensure_future(self._upward(pipe)),
            asyncio.ensure_future(self._downward(pipe, server_reader)),
        }
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _upward(self, pipe: _Pipe) -> None:
        while data := await pipe.client_reader.read(CHUNK_BYTES):
            pipe.server.write(data)
            await pipe.server.drain()

    async def _downward(self, pipe: _Pipe, server_reader: asyncio.StreamReader) -> None:
        while data := await server_reader.read(CHUNK_BYTES):
            if self._losing is not None and self._losing(data):
                self._losing = None
                self.lost.set()
                return
            if self._held is not None:
                await self._held.wait()
            pipe.client.write(data)
            await pipe.client.drain()
        # What is buffered for the client still goes out before both sides are reset.
        await pipe.client.drain()
        if not pipe.client.is_closing():
            pipe.client.close()
            await pipe.client.wait_closed()
