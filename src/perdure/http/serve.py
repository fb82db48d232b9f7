"""The server of one process: uvicorn on one listening socket, started and stopped by its owner, signals left to its owner."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Generator
from typing import Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from perdure.http.app import App
from perdure.http.asgi import ABORT, LOSS, PeerLoss

BACKLOG: Final = 4096
"""Connections that wait for an accept while the process is busy; a burst of agents opens some thousands at once."""

KEEP_ALIVE_S: Final = 75
"""Longer than the pools of the SDKs keep an idle connection: so it is the client that closes, and none of its requests meets a closed
socket."""

GRACE_S: Final = 10
UNACKNOWLEDGED_MS_MAX: Final = 20_000
"""The kernel gives up a peer that acknowledges nothing for this long: a stuck reader must not hold its buffer for a quarter of an hour."""

UNSENT_BYTES_MAX: Final = 128 * 1024
"""The kernel takes no more ahead of what it can send. Its own buffer of megabytes would hide that a steady slow reader gets on."""

_NO_LINGER: Final = struct.pack("ii", 1, 0)

START_DEADLINE_S: Final = 10.0
STOP_MARGIN_S: Final = 2.0


class _Protocol(HttpToolsProtocol):
    """Bounds how long a dead peer is kept, and how much is buffered for a slow one; tells the application when a peer is gone."""

    _loss: PeerLoss | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the kernel's own limits on the connection."""
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Let the application cut a connection: closing one whose peer reads nothing would wait for that peer."""
        super().on_message_begin()
        self.scope[ABORT] = self._abort  # type: ignore[typeddict-unknown-key]
        self._loss = PeerLoss()
        self.scope[LOSS] = self._loss  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is under way."""
        super().connection_lost(exc)
        if self._loss is not None:
            self._loss.happen()

    def _abort(self) -> None:
        """Without lingering, or the kernel would go on offering the peer what it does not read."""
        raw: socket.socket | None = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: who starts the process decides what ends it. Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises OSError when the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's delay off only for sockets that say they are TCP, and it costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class HttpServer:
    """Serves one application on one socket. `start`, then `stop`, each once."""

    def __init__(
        self, app: App, *, host: str = "127.0.0.1", port: int = 0, listener: socket.socket | None = None
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._listener = listener
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and serve; returns the port. When it returns, connections are answered."""
        assert self._serving is None, "a server starts once"
        listener = self._listener or listen(self._host, self._port)
        config = uvicorn.Config(
            self._app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            # Who connects is who connects: no header of a client may say otherwise.
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")
        listening = asyncio.create_task(self._server.listening.wait())
        done, _ = await asyncio.wait(
            (listening, self._serving), timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        listening.cancel()
        if listening not in done:
            self._serving.cancel()
            await self._serving
            raise RuntimeError("The HTTP server ended before it listened; its log says why.")
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Accept nothing more, end the streams, let requests in flight finish for `grace_s`, then cut them off. Repeatable."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._app.end_streams()
        server.should_exit = True
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await asyncio.shield(serving)
        except TimeoutError:
            server.force_exit = True
            await serving
