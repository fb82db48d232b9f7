"""A scripted model provider: a real HTTP server on loopback that speaks the Messages API, and refuses what the real one
refuses.

`ModelServer` runs in the caller's loop, `ModelServerThread` in a thread of its own, for tests with real processes.
Answers come from `enqueue`, first in first out, and after those from `respond_with`. A refused request uses up no
answer. Everything that arrived is in `requests`.
"""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from perdure.testing.messages_rules import (
    Json,
    Refused,
    SentThinking,
    check_headers,
    check_request,
    estimate_tokens,
    parse_body,
)
from perdure.testing.model_replies import (
    Call,
    Failure,
    Opaque,
    Redacted,
    Reply,
    Text,
    Thinking,
    events_of,
    message_of,
)
from perdure.testing.signals import Gate, Signal

__all__ = [
    "Call",
    "Failure",
    "Gate",
    "ModelServer",
    "ModelServerThread",
    "Opaque",
    "RecordedRequest",
    "Redacted",
    "Reply",
    "Text",
    "Thinking",
]

Responder: TypeAlias = "Callable[[RecordedRequest], Reply | Failure]"

# Twice what the provider takes: beyond it the server hangs up instead of reading on.
READ_BYTES_MAX: Final = 64 * 1024 * 1024

# The thread starts one listening socket; this only bounds a broken machine.
THREAD_START_DEADLINE_S: Final = 10

_REASONS: Final = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


@dataclass(eq=False)
class RecordedRequest:
    """One request as it arrived."""

    order: int
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    raw: bytes
    body: Json = field(default_factory=dict[str, Any])
    """Parsed; empty when it could not be."""
    refused: str | None = None
    """The rule it broke."""
    cancelled: bool = False
    """The client hung up before the answer was complete."""
    ended: Signal = field(default_factory=lambda: Signal("request ended"))
    """Set when the server is done with it, one way or another."""


class _HangUp(Exception):
    """The script says to close the socket here."""


class _Connection:
    """The HTTP/1.1 of one socket: reads requests, writes whole or chunked answers, notices when the peer goes away."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._pushed_back = b""

    async def read_request(self) -> tuple[str, str, dict[str, str], bytes] | None:
        """Method, path, headers and body; None when the peer closed, or sent what this server doesn't read."""
        try:
            head = self._pushed_back + await self._reader.readuntil(b"\r\n\r\n")
            self._pushed_back = b""
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ", 2)
            fields = (line.partition(":") for line in lines[1:] if line)
            headers = {name.strip().lower(): value.strip() for name, _, value in fields}
            length = int(headers.get("content-length", "0"))
            if length > READ_BYTES_MAX or "transfer-encoding" in headers:
                return None
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            return None
        return method, target.partition("?")[0], headers, body

    async def watch(self, answer: Coroutine[Any, Any, None]) -> bool:
        """Run `answer`; False when the peer went away first, and `answer` was cancelled."""
        answering = asyncio.ensure_future(answer)
        listening = asyncio.ensure_future(self._listen())
        try:
            await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and listening.done() and not listening.result():
                return False
            await answering
            return True
        except ConnectionError:
            return False
        finally:
            answering.cancel()
            listening.cancel()
            await asyncio.wait({answering, listening})

    async def _listen(self) -> bool:
        """False when the peer closed. A byte of its next request is kept for that."""
        try:
            byte = await self._reader.read(1)
        except ConnectionError:
            return False
        self._pushed_back += byte
        return bool(byte)

    async def send(self, status: int, content: Json, headers: dict[str, str]) -> None:
        """A whole JSON answer."""
        payload = json.dumps(content).encode()
        fields = {"content-type": "application/json", "content-length": str(len(payload)), **headers}
        self._writer.write(_head(status, fields) + payload)
        await self._writer.drain()

    async def open_stream(self, headers: dict[str, str]) -> None:
        """Begin an event stream."""
        fields = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked", **headers}
        self._writer.write(_head(200, fields))
        await self._writer.drain()

    async def send_event(self, event: Json, *, last: bool = False) -> None:
        """One event of the stream, and its end in the same write if it is the last."""
        payload = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        self._writer.write(b"%x\r\n%b\r\n" % (len(payload), payload) + (b"0\r\n\r\n" if last else b""))
        await self._writer.drain()

    async def close(self) -> None:
        """Close the socket after what was written."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass  # the peer was faster


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Scripted')}",
        *(f"{k}: {v}" for k, v in headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


class ModelServer:
    """The scripted provider in the caller's loop. `enqueue`, `respond_with` and `requests` are safe from any thread."""

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        """Calls of /v1/messages, in order of arrival."""
        self.token_counts: list[RecordedRequest] = []
        """Calls of /v1/messages/count_tokens."""
        self.sent_thinking = SentThinking()
        self.base_url = ""
        self._lock = threading.Lock()
        self._answers: deque[Reply | Failure] = deque()
        self._responder: Responder | None = None
        self._arrival = Signal("requests arrived")
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._closing = False

    @classmethod
    async def start(cls, *, port: int = 0) -> "ModelServer":
        """A listening server on a loopback port, a free one by default."""
        server = cls()
        server._server = await asyncio.start_server(server._serve, "127.0.0.1", port)
        server.base_url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        return server

    def enqueue(self, *answers: Reply | Failure) -> None:
        """Add answers for the next accepted requests, first in first out."""
        with self._lock:
            self._answers.extend(answers)

    def respond_with(self, responder: Responder) -> None:
        """Answer by `responder` whatever finds nothing enqueued."""
        self._responder = responder

    async def wait_for_requests(self, count: int, deadline_s: float = 5) -> list[RecordedRequest]:
        """The first `count` requests, once so many arrived."""
        due_at = time.monotonic() + deadline_s
        while (arrival := self._pending_arrival(count)) is not None:
            await arrival.wait(max(0, due_at - time.monotonic()))
        return self.requests[:count]

    def wait_for_requests_blocking(self, count: int, deadline_s: float = 5) -> list[RecordedRequest]:
        """`wait_for_requests` for a thread without a loop."""
        due_at = time.monotonic() + deadline_s
        while (arrival := self._pending_arrival(count)) is not None:
            arrival.wait_blocking(max(0, due_at - time.monotonic()))
        return self.requests[:count]

    async def close(self) -> None:
        """Hang up on everyone and stop listening. Repeatable."""
        if self._server is None:
            return
        self._closing = True
        self._server.close()
        # Each handler sees its socket die and ends by itself, wherever it waits.
        for writer in self._serving.values():
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _pending_arrival(self, count: int) -> Signal | None:
        with self._lock:
            return None if len(self.requests) >= count else self._arrival

    def _record(self, path: str, headers: dict[str, str], raw: bytes) -> RecordedRequest:
        with self._lock:
            calls = self.token_counts if path.endswith("/count_tokens") else self.requests
            request = RecordedRequest(order=len(calls), path=path, headers=headers, raw=raw)
            calls.append(request)
            arrival, self._arrival = self._arrival, Signal("requests arrived")
        arrival.set()
        return request

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        connection = _Connection(reader, writer)
        try:
            while (received := await connection.read_request()) is not None:
                if not await self._handle(connection, *received):
                    break
        finally:
            await connection.close()
            del self._serving[task]

    async def _handle(
        self, connection: _Connection, method: str, path: str, headers: dict[str, str], raw: bytes
    ) -> bool:
        """Answer one request; False when the socket must be closed after it."""
        if path not in ("/v1/messages", "/v1/messages/count_tokens"):
            await self._fail(connection, Failure(404, "not_found_error", f"{path}: no such route"))
            return True
        if method != "POST":
            await self._fail(connection, Failure(405, "invalid_request_error", f"{method}: method not allowed"))
            return True
        request = self._record(path, headers, raw)
        try:
            answered = await connection.watch(self._answer(connection, request))
            request.cancelled = not answered and not self._closing
        except _HangUp:
            return False
        finally:
            request.ended.set()
        return answered

    async def _answer(self, connection: _Connection, request: RecordedRequest) -> None:
        counting = request.path.endswith("/count_tokens")
        try:
            check_headers(request.headers)
            request.body = parse_body(request.raw)
            check_request(request.body, self.sent_thinking, counting=counting)
        except Refused as refused:
            request.refused = refused.message
            await self._fail(connection, Failure(refused.status, refused.error_type, refused.message))
            return
        if counting:
            await connection.send(200, {"input_tokens": estimate_tokens(request.body)}, {"request-id": "req_count"})
            return
        answer = self._next_answer(request)
        if isinstance(answer, Failure):
            await self._fail(connection, answer)
            return
        if answer.gate is not None:
            await answer.gate.pass_through()
        await self._reply(connection, request, answer)

    def _next_answer(self, request: RecordedRequest) -> Reply | Failure:
        with self._lock:
            if self._answers:
                return self._answers.popleft()
        if self._responder is not None:
            return self._responder(request)
        return Failure(
            400, "invalid_request_error", "The script of this model server is used up: enqueue another reply"
        )

    async def _fail(self, connection: _Connection, failure: Failure) -> None:
        headers = {"request-id": "req_scripted", **failure.headers}
        if failure.retry_after is not None:
            headers["retry-after"] = str(failure.retry_after)
        await connection.send(failure.status, failure.body(), headers)

    async def _reply(self, connection: _Connection, request: RecordedRequest, reply: Reply) -> None:
        naming = {
            "identity": f"msg_{request.order:024d}",
            "model": str(request.body["model"]),
        }
        input_tokens = estimate_tokens(request.body)
        headers = {"request-id": f"req_{request.order:024d}"}
        if not request.body.get("stream", False):
            for block in reply.blocks:
                self._remember(block)
            await connection.send(200, message_of(reply, **naming, input_tokens=input_tokens), headers)
            return
        await connection.open_stream(headers)
        deltas, blocks = 0, 0
        for event in events_of(reply, **naming, input_tokens=input_tokens):
            kind = event["type"]
            if kind not in ("message_start", "ping", "content_block_start"):
                await _break_off(reply, deltas)
            if kind == "content_block_delta":
                await asyncio.sleep(reply.delay_ms / 1000)
                deltas += 1
            if kind == "content_block_stop":
                self._remember(reply.blocks[blocks])
                blocks += 1
            await connection.send_event(event, last=kind in ("message_stop", "error"))
            if kind == "content_block_stop" and blocks in reply.gate_after_blocks:
                await reply.gate_after_blocks[blocks].pass_through()

    def _remember(self, block: object) -> None:
        """Note signed thinking that is about to be sent: it may come back."""
        if isinstance(block, Thinking) and block.signed():
            self.sent_thinking.add(block.thinking, block.signed())
        elif isinstance(block, Redacted):
            self.sent_thinking.add_redacted(block.data)


async def _break_off(reply: Reply, deltas: int) -> None:
    """Cut or stall here if the script says so."""
    if reply.cut_after is not None and deltas >= reply.cut_after:
        raise _HangUp
    if reply.stall_after is not None and deltas >= reply.stall_after:
        await asyncio.Event().wait()  # until the client hangs up or the server closes


class ModelServerThread:
    """`ModelServer` in a thread and loop of its own: `with ModelServerThread() as own: own.server.enqueue(...)`."""

    def __init__(self, *, port: int = 0) -> None:
        self._port = port
        self._ready = Signal("model server listens")
        self._stop = Signal("model server stops")
        self._server: ModelServer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="model-server", daemon=True)

    @property
    def server(self) -> ModelServer:
        """The server, once entered. Its coroutines belong to the thread, except `wait_for_requests`."""
        assert self._server is not None, "enter the context first"
        return self._server

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return self.server.base_url

    def __enter__(self) -> "ModelServerThread":
        self._thread.start()
        self._ready.wait_blocking(THREAD_START_DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(THREAD_START_DEADLINE_S)

    async def _run(self) -> None:
        self._server = await ModelServer.start(port=self._port)
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await self._server.close()
