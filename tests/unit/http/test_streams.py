"""Streams on the wire: what ends one, and that its clean-up always runs."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.http.serving import Serving, serve

from perdure.domain.errors import Refused
from perdure.http.asgi import WRITE_BYTES, AsgiStream
from perdure.http.requests import Request, SendStream, StreamRoute
from perdure.http.services import Services
from perdure.testing.signals import Signal

DEADLINE_S = 5


class Source:
    """A handler that greets, then waits until it is ended."""

    def __init__(self) -> None:
        self.ended = Signal("the handler ended")

    async def __call__(self, services: Services, request: Request, stream: SendStream) -> Refused | None:
        if request.query == [("mode", "refuse")]:
            return Refused("not_found", "session_not_found", "Session not found.")
        if request.query == [("mode", "fail")]:
            raise KeyError("private")
        try:
            await stream.start({"content-type": "text/event-stream"})
            await stream.write(b": hello\n\n")
            if request.query == [("mode", "short")]:
                return None
            await asyncio.Event().wait()
            return None
        finally:
            self.ended.set()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def streaming(source: Source) -> AsyncIterator[Serving]:
    async with serve([StreamRoute(method="GET", template="/v1/s", handler=source, sdk_method="s")]) as running:
        yield running


async def test_a_stream_carries_ids_and_ends_with_its_handler(streaming: Serving) -> None:
    async with streaming.http() as http:
        answer = await http.get("/v1/s?mode=short", headers=streaming.signed())
    assert (answer.status_code, answer.text) == (200, ": hello\n\n")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(("mode", "status"), [("refuse", 404), ("fail", 500)])
async def test_before_its_start_a_stream_is_refused_like_any_request(
    streaming: Serving, mode: str, status: int
) -> None:
    async with streaming.http() as http:
        answer = await http.get(f"/v1/s?mode={mode}", headers=streaming.signed())
    assert answer.status_code == status and answer.json()["type"] == "error"
    assert "private" not in answer.text


async def test_a_client_that_goes_ends_its_handler(streaming: Serving, source: Source) -> None:
    async with streaming.http() as http, http.stream("GET", "/v1/s", headers=streaming.signed()) as answer:
        assert await anext(answer.aiter_bytes()) == b": hello\n\n"
        assert open_streams(streaming) == 1
    await source.ended.wait(DEADLINE_S)


def open_streams(serving: Serving) -> Any:
    return serving.metrics.registry.get_sample_value("perdure_open_streams")


@pytest.mark.rule("MA-E2.3")
async def test_revoking_a_key_ends_its_streams(streaming: Serving, source: Source) -> None:
    async with streaming.http() as http, http.stream("GET", "/v1/s", headers=streaming.signed()) as answer:
        parts = answer.aiter_bytes()
        await anext(parts)
        await streaming.catalog.revoke_key(streaming.key_id)
        async with asyncio.timeout(DEADLINE_S):
            assert [part async for part in parts] == []
    await source.ended.wait(DEADLINE_S)


async def test_stopping_the_server_ends_streams_at_once(streaming: Serving, source: Source) -> None:
    async with streaming.http() as http, http.stream("GET", "/v1/s", headers=streaming.signed()) as answer:
        parts = answer.aiter_bytes()
        await anext(parts)
        async with asyncio.timeout(DEADLINE_S):
            stopping = asyncio.create_task(streaming.server.stop(3))
            assert [part async for part in parts] == []
            await source.ended.wait()
    await stopping


@pytest.mark.rule("MA-B7.12")
async def test_a_steady_slow_reader_gets_an_event_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for each piece, not for the whole: this one takes a minute."""
    loop, passed_s, taken = asyncio.get_running_loop(), 0.0, b""
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)

    async def slow(message: Any) -> None:
        nonlocal passed_s, taken
        part = message.get("body", b"")
        passed_s += len(part) / WRITE_BYTES * 6
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        taken += part

    stream = AsgiStream(slow, "req_1", write_deadline_s=10)
    await stream.start({})
    event = bytes(range(256)) * 2600
    await stream.write(event)
    assert taken == event and passed_s > 60


async def test_an_end_within_an_event_cuts_the_stream_off() -> None:
    """Half an event that ended in order would be taken for a whole one."""
    sent, aborted, stuck = list[Any](), list[str](), Signal("the second part waits")

    async def take_one(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            stuck.set()
            await asyncio.Event().wait()

    stream = AsgiStream(take_one, "req_1", abort=lambda: aborted.append("aborted"))
    await stream.start({})
    writing = asyncio.create_task(stream.write(b"x" * (WRITE_BYTES + 1)))
    await stuck.wait(DEADLINE_S)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await stream.finish()
    assert (len(sent), aborted) == (3, ["aborted"])
    await stream.closed()


@pytest.mark.rule("MA-B7.12")
async def test_little_is_buffered_for_a_slow_reader() -> None:
    """Else what it takes would not show for seconds, and it would be given up as one that takes nothing."""
    handed, size, ahead_max = 0, 8 * 1024 * 1024, 1024 * 1024

    async def write(services: Services, request: Request, stream: SendStream) -> None:
        nonlocal handed
        await stream.start({"content-type": "text/event-stream"})
        while handed < size:
            await stream.write(b"x" * WRITE_BYTES)
            handed += WRITE_BYTES

    route = StreamRoute(method="GET", template="/v1/s", handler=write, sdk_method="s")
    async with serve([route]) as running, asyncio.timeout(DEADLINE_S):
        host, _, port = running.url.removeprefix("http://").partition(":")
        own = socket.create_connection((host, int(port)))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        own.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=own, limit=1024)
        writer.write(
            f"GET /v1/s HTTP/1.1\r\nhost: x\r\nauthorization: {running.signed()['authorization']}\r\n\r\n".encode()
        )
        read = 0
        try:
            while read < size:
                read += len(await reader.read(WRITE_BYTES))
                assert handed - read <= ahead_max
        finally:
            writer.transport.abort()


async def test_a_peer_that_takes_nothing_is_given_up() -> None:
    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = AsgiStream(stuck, "req_1", write_deadline_s=0.01)
    await stream.start({})
    with pytest.raises(ConnectionError, match="took nothing"):
        await stream.write(b"x")
    with pytest.raises(ConnectionError):
        await stream.write(b"x")
    async with asyncio.timeout(DEADLINE_S):
        await stream.closed()
        await stream.finish()
