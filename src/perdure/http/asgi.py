"""The bytes of a request and of its answer: headers, the body within its limits, whole answers and streams."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl

from perdure.http.requests import JSON_HEADERS, Response

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""MA-F1."""

BODY_SILENCE_S: Final = 15.0
"""A sender that gives no byte for so long is stuck, or holds the connection on purpose."""

BODY_DEADLINE_S: Final = 120.0
"""The whole body: 32 MB at 2.2 Mbit/s."""

WRITE_DEADLINE_S: Final = 10.0
"""A reader that takes nothing for so long has lost its stream and resumes it: keepalives come more often than this is long."""

WRITE_BYTES: Final = 64 * 1024
"""Handed to the connection at a time: what the deadline is for. A large event may take a steady reader as long as it needs."""

ABORT: Final = "perdure.abort"
"""In the scope of a request: ends its connection at once, whatever its peer has not read."""

LOSS: Final = "perdure.loss"
"""In the scope of a request: a `PeerLoss`."""

QUERY_FIELDS_MAX: Final = 1_000
"""Far above the longest list of a filter; bounds the work before a key is checked."""

BodyFault: TypeAlias = Literal["too_large", "too_slow", "gone"]


class PeerLoss:
    """Whether the peer of a request is gone, and what is to be called when it goes."""

    __slots__ = ("call", "happened")

    def __init__(self) -> None:
        self.happened = False
        self.call: Callable[[], object] | None = None

    def happen(self) -> None:
        """The connection is gone."""
        self.happened = True
        if self.call is not None:
            self.call()


def read_headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; a name sent twice has both values, as one list."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def read_query(scope: Scope) -> list[tuple[str, str]] | None:
    """The query without `beta`, which older clients send and nothing depends on; None when it has too many fields."""
    raw: bytes = scope["query_string"]
    if not raw:
        return []
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        return None
    return [(name, value) for name, value in pairs if name != "beta"]


async def read_body(
    receive: Receive,
    headers: dict[str, str],
    *,
    silence_s: float = BODY_SILENCE_S,
    deadline_s: float = BODY_DEADLINE_S,
) -> bytes | BodyFault:
    """The body, or why it was not read to its end. An announced length over the limit is refused before a byte is read."""
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > BODY_BYTES_MAX:
        return "too_large"
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + deadline_s
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout_at(min(loop.time() + silence_s, ends_s)):
                message = await receive()
        except TimeoutError:
            return "too_slow"
        if message["type"] == "http.disconnect":
            return "gone"
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES_MAX:
            return "too_large"
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _raw(headers: dict[str, str], request_id: str) -> list[tuple[bytes, bytes]]:
    own = request_id.encode()
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return [*raw, (b"request-id", own), (b"x-request-id", own)]


async def send_response(send: Send, response: Response, request_id: str) -> None:
    """A whole answer; returns when its last byte was handed to the connection."""
    headers = response.headers if "content-type" in response.headers else {**JSON_HEADERS, **response.headers}
    raw = [*_raw(headers, request_id), (b"content-length", str(len(response.body)).encode())]
    await send({"type": "http.response.start", "status": response.status, "headers": raw})
    await send({"type": "http.response.body", "body": response.body})


class AsgiStream:
    """An answer written piece by piece (`requests.SendStream`)."""

    def __init__(
        self,
        send: Send,
        request_id: str,
        *,
        abort: Callable[[], None] | None = None,
        write_deadline_s: float = WRITE_DEADLINE_S,
    ) -> None:
        self._send = send
        self._abort = abort
        self._request_id = request_id
        self._write_deadline_s = write_deadline_s
        self._gone = asyncio.Event()
        self._in_piece = False
        """A part of a piece went out, and not the whole yet."""
        self.started = False

    async def start(self, headers: dict[str, str]) -> None:
        """Status 200 and the headers."""
        assert not self.started, "a stream starts once"
        self.started = True
        await self._hand_over(
            {"type": "http.response.start", "status": 200, "headers": _raw(headers, self._request_id)}
        )

    async def write(self, data: bytes) -> None:
        """One piece. Raises ConnectionError when the peer is gone or takes nothing."""
        for start in range(0, len(data), WRITE_BYTES):
            self._in_piece = start > 0
            part = data[start : start + WRITE_BYTES]
            await self._hand_over({"type": "http.response.body", "body": part, "more_body": True})
        self._in_piece = False

    async def finish(self) -> None:
        """The end, when the peer is there to see it. One that has half a piece is cut off, so that it takes nothing for whole."""
        if self._in_piece:
            self._cut_off()
        if self.started and not self._gone.is_set():
            await self._hand_over({"type": "http.response.body", "body": b""})

    async def _hand_over(self, message: Message) -> None:
        if self._gone.is_set():
            raise ConnectionResetError("the peer is gone")
        try:
            async with asyncio.timeout(self._write_deadline_s):
                await self._send(message)
        except TimeoutError:
            self._cut_off()
            raise ConnectionAbortedError(f"the peer took nothing for {self._write_deadline_s:g} s") from None

    def _cut_off(self) -> None:
        self._gone.set()
        if self._abort is not None:
            self._abort()

    def lose(self) -> None:
        """The peer is gone."""
        self._gone.set()

    async def closed(self) -> None:
        """Return once the peer is gone."""
        await self._gone.wait()
