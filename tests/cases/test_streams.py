"""Streams: readers that stop, leave, come back or are cut at any moment, and nobody who waits for them."""

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx2
import psutil
import pytest
from tests.cases.driving import INTERRUPT, Driven, Frame, Site, message, read_frames
from tests.conftest import connected

from perdure.testing.model_server import Gate, Reply, Text

STUCK = 50
BLOCKS, BLOCK_CHARS = 40, 512 * 1024
"""20 MB of text in one turn."""

CUT_S = 15.0
"""The server cuts a reader that takes nothing for 10 s."""

READER = """
import socket, sys
own = socket.socket(fileno=int(sys.argv[1]))
own.setblocking(True)
print("reading", flush=True)
try:
    while own.recv(65536):
        pass
except OSError:
    pass
print("ended", flush=True)
"""


def raw_request(site: Site, session: Driven, *, last_id: str = "", deltas: bool = True) -> bytes:
    """A GET of a session's stream."""
    query = "?event_deltas[]=agent.message" if deltas else ""
    fields = [f"GET {session.path}/events/stream{query} HTTP/1.1", "host: test", f"x-api-key: {site.server.api_key}"]
    fields += ["anthropic-version: 2026-10-21", *([f"last-event-id: {last_id}"] if last_id else []), "", ""]
    return "\r\n".join(fields).encode()


def address(site: Site) -> tuple[str, int]:
    """Where the server listens."""
    host, _, port = site.url.removeprefix("http://").partition(":")
    return host, int(port)


async def stick(site: Site, session: Driven) -> socket.socket:
    """A reader that reads the first bytes and then nothing, with as small a buffer as the kernel allows."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    own.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(own, address(site))
    await loop.sock_sendall(own, raw_request(site, session))
    await loop.sock_recv(own, 16)
    return own


def wait_cut(sockets: list[socket.socket]) -> list[int]:
    """Block until the peers of all are gone, without reading a byte; how many are left after the deadline."""
    poll = select.poll()
    for own in sockets:
        poll.register(own, select.POLLRDHUP)
    left = {own.fileno() for own in sockets}
    until = time.monotonic() + CUT_S
    while left and (rest := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(rest * 1000):
            poll.unregister(descriptor)
            left.discard(descriptor)
    return sorted(left)


def start_reader(descriptor: int) -> "subprocess.Popen[str]":
    """A process that reads from a connected socket until its end."""
    command = [sys.executable, "-c", READER, str(descriptor)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor], text=True)


async def long_turn(session: Driven, idles: int) -> float:
    """One turn of 20 MB; how long it took."""
    site = session.site
    texts = [Text(chr(ord("a") + n % 26) * BLOCK_CHARS) for n in range(BLOCKS)]
    site.script(Reply(*texts, chunk_chars=16 * 1024))
    began = time.monotonic()
    await session.send(message("say a lot"))
    assert await session.idle(idles, 60) == "end_turn"
    return time.monotonic() - began


@pytest.mark.case("B035")
async def test_readers_that_keep_the_connection_and_stop_reading(site: Site) -> None:
    """Elsewhere a suspended reader hung its sender for ever; here the turn, its healthy reader and memory don't notice, and it is cut."""
    alone = await site.open(deltas=True)
    undisturbed_s = await long_turn(alone, 1)
    session = await site.open(deltas=True)
    with ExitStack() as ends:
        stuck = [ends.enter_context(await stick(site, session)) for _ in range(STUCK)]
        descriptor = stuck[0].fileno()
        child = ends.enter_context(start_reader(descriptor))
        ends.callback(child.kill)
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "reading\n"
        os.kill(child.pid, signal.SIGSTOP)
        before_bytes = psutil.Process().memory_info().rss
        disturbed_s = await long_turn(session, 1)
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        assert disturbed_s < 2 * undisturbed_s + 1
        assert grown_bytes < (STUCK + 1) * 2 * 1024 * 1024 + 4 * BLOCKS * BLOCK_CHARS
        assert [len(text) for text in await session.texts()] == [BLOCK_CHARS] * BLOCKS
        await check_deltas(session)
        assert await asyncio.to_thread(wait_cut, stuck) == []
        os.kill(child.pid, signal.SIGCONT)
        assert await asyncio.to_thread(child.stdout.read) == "ended\n"
    await session.check(idles=1)
    site.check_provider()
    await (await site.open()).go_on(idles=1)


async def check_deltas(session: Driven) -> None:
    """What was previewed of a message is a prefix of it, and the message is the last frame of its id."""
    ended: set[str] = set()
    texts: dict[str, list[str]] = {}
    for frame in session.frames:
        if frame.type == "event_delta":
            assert frame.data["event_id"] not in ended
            texts.setdefault(frame.data["event_id"], []).append(frame.data["delta"]["content"]["text"])
        elif frame.type == "agent.message":
            ended.add(frame.data["id"])
            assert frame.data["content"][0]["text"].startswith("".join(texts.get(frame.data["id"], ())))
    assert texts


async def collect(session: Driven, count: int | None, last_id: str | None = None) -> list[Frame]:
    """The first `count` persisted frames of a new stream, or all up to an idle."""
    frames: list[Frame] = []
    headers = {"last-event-id": last_id} if last_id else {}
    async with asyncio.timeout(15), session.http.stream("GET", session.path + "/events/stream", headers=headers) as got:
        assert got.status_code == 200
        async for frame in read_frames(got):
            frames.append(frame)
            if len(frames) == count or (count is None and frame.type == "session.status_idle"):
                break
    return frames


@pytest.mark.case("B036")
async def test_events_between_disconnect_and_reconnect(site: Site) -> None:
    """Elsewhere a reconnected client missed what came in between; here its last id brings all of it once, in order."""
    session = await site.open()
    gate = Gate()
    site.script(Reply(Text("first"), Text("second"), gate=gate))
    early = asyncio.create_task(collect(session, 3, "1.0"))
    await session.send(message("speak"))
    seen = await early
    gate.open()
    assert await session.idle(1) == "end_turn"
    rest = await collect(session, None, seen[-1].id)
    whole = [f for f in session.frames if f.id]
    assert [f.id for f in (*seen, *rest)] == [f.id for f in whole]
    assert [f.data for f in (*seen, *rest)] == [f.data for f in whole]
    assert {f.data["id"] for f in (*seen, *rest)} == {e["id"] for e in await session.listed()}
    await session.go_on(idles=2)


@pytest.mark.case("B036")
async def test_without_an_id_the_list_closes_the_gap(site: Site) -> None:
    """A client that can't resume opens the stream first and lists then: it holds every event, and the right status."""
    session = await site.open()
    site.script(Reply(Text("while nobody looked")))
    await session.send(message("speak"))
    assert await session.idle(1) == "end_turn"
    async with session.http.stream("GET", session.path + "/events/stream") as response:
        assert response.status_code == 200
        listed = await session.listed()
    assert {e["id"] for e in listed} == {f.data["id"] for f in session.frames if f.id}
    assert listed[-1]["type"] == "session.status_idle"
    assert (await session.retrieve())["status"] == "idle"
    await session.go_on(idles=2)


@pytest.mark.case("B036")
async def test_five_hundred_races_of_reconnect_and_event(site: Site) -> None:
    """An event that commits while a stream opens is in the stream or in the list that is read after it, never in neither."""
    session = await site.open()
    [first] = await session.send(INTERRUPT)
    last = next(f.id for f in await collect(session, 1, "1.0"))
    assert first["processed_at"]
    for run in range(500):
        by_id = run % 2 == 0
        sent, found = await asyncio.gather(session.send(INTERRUPT), _reconnect(session, last if by_id else None))
        identity = sent[0]["id"]
        if by_id:
            assert [f.data["id"] for f in found] == [identity], run
            last = found[0].id
            await session.until(lambda frames, i=identity: frames[-1].data.get("id") == i)
        else:
            assert identity in {f.data["id"] for f in found}, run
            await session.until(lambda frames, i=identity: frames[-1].data.get("id") == i)
            last = session.frames[-1].id
    assert len(await session.listed("user.interrupt")) == 501
    await session.go_on(idles=1)


async def _reconnect(session: Driven, last_id: str | None) -> list[Frame]:
    """With an id: the next frame. Without: the latest events of a list read once the stream is open, or else the stream's next."""
    if last_id is not None:
        return await collect(session, 1, last_id)
    known = session.seen("user.interrupt")[-1]["id"]
    async with session.http.stream("GET", session.path + "/events/stream") as response:
        answered = await session.http.get(session.path + "/events?order=desc&limit=1")
        [latest] = answered.json()["data"]
        if latest["id"] != known:
            return [Frame(None, latest["type"], latest)]
        async with asyncio.timeout(5):
            return [await anext(read_frames(response))]


@pytest.mark.case("B037")
async def test_closing_the_tab_loses_nothing(site: Site) -> None:
    """Elsewhere the answer was kept by the response that the tab closed; here the turn goes on and is kept whole."""
    session = await site.open()
    await session.unfollow()
    text = "word " * 100
    site.script(Reply(Text(text), delay_ms=10, chunk_chars=5))
    path = session.path + "/events/stream?event_deltas[]=agent.message"
    async with session.http.stream("GET", path) as response:
        await session.send(message("speak"))
        deltas = 0
        async for frame in read_frames(response):
            deltas += frame.type == "event_delta"
            if deltas == 10:
                break
    await site.requests[0].ended.wait(10)
    assert not site.requests[0].cancelled
    await session.follow()
    if not await session.listed("session.status_idle"):
        await session.idle(1)
    assert await session.texts() == [text]
    [span] = await session.listed("span.model_request_end")
    assert span["model_usage"]["output_tokens"] > 0
    assert (await session.retrieve())["status"] == "idle"


@pytest.mark.case("B037")
async def test_another_tab_stops_the_turn(site: Site) -> None:
    """A stop from any client works; what had been said in full is kept, the rest is in no later history."""
    session = await site.open()
    gate = Gate()
    site.script(Reply(Text("said in full"), Text("never finished"), gate_after_blocks={1: gate}), Reply(Text("after")))
    await session.send(message("speak"))
    await gate.reached()
    async with site.client() as other:
        stream = await other.beta.sessions.events.stream(session.id)
        await other.beta.sessions.events.send(session.id, events=[{"type": "user.interrupt"}])
        async with asyncio.timeout(5):
            async for event in stream:
                if event.type == "session.status_idle":
                    break
        await stream.close()
    assert await session.texts() == ["said in full"]
    await session.send(message("go on"))
    assert await session.idle(2) == "end_turn"
    assert "never finished" not in str(site.requests[1].body["messages"])
    assert "said in full" in str(site.requests[1].body["messages"])
    await session.go_on(idles=3)


@pytest.mark.case("B037")
async def test_a_lost_answer_of_a_send(site: Site) -> None:
    """A send whose answer was lost gets the same answer when it is repeated with its key: one message, one turn."""
    session = await site.open()
    site.script(Reply(Text("once")))
    body = b'{"events":[{"type":"user.message","content":[{"type":"text","text":"once"}]}]}'
    head = (
        f"POST {session.path}/events HTTP/1.1\r\nhost: test\r\nx-api-key: {site.server.api_key}\r\n"
        f"anthropic-version: 2026-10-21\r\nidempotency-key: lost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address(site))
    writer.write(head.encode() + body)
    first = await session.frame("user.message")
    writer.transport.abort()
    del reader
    answered = await session.http.post(
        session.path + "/events",
        content=body,
        headers={"idempotency-key": "lost", "content-type": "application/json"},
    )
    assert answered.status_code == 200
    assert [e["id"] for e in answered.json()["data"]] == [first["id"]]
    assert await session.idle(1) == "end_turn"
    assert len(await session.listed("user.message")) == 1
    await session.go_on(idles=2)


@pytest.mark.case("B038")
async def test_streams_cut_at_random_times_leak_no_connection(site: Site) -> None:
    """Elsewhere each dropped stream kept a pooled connection; here two hundred leave the database as it was."""
    session = await site.open()
    site.script(Reply(Text("word " * 400), delay_ms=2, chunk_chars=5))
    await session.send(message("speak"))
    before = await connections(site)
    chance = random.Random(38)
    for _ in range(4):
        await asyncio.gather(*(cut_at_random(site, session, chance) for _ in range(50)))
    began = time.monotonic()
    assert await session.idle(1) == "end_turn"
    await session.go_on(idles=2)
    assert time.monotonic() - began < 8
    after = await connections(site)
    assert after.get("idle in transaction", 0) == 0
    assert sum(after.values()) <= sum(before.values()) + 1
    async with httpx2.AsyncClient(base_url=site.url) as plain:
        metrics = (await plain.get("/metrics")).text
    # The follower's own.
    assert "perdure_open_streams 1.0" in metrics


async def connections(site: Site) -> dict[str, int]:
    """The server's connections to its database, by state."""
    async with connected(site.server.database_url) as connection:
        rows = await connection.fetch(
            "select state, count(*) as count from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and state is not null group by state"
        )
    return {row["state"]: row["count"] for row in rows}


async def cut_at_random(site: Site, session: Driven, chance: random.Random) -> None:
    """Open a stream, mostly one that reads old events first, and cut it: at once, in its head, or somewhere in what it says."""
    reader, writer = await asyncio.open_connection(*address(site))
    last_id = "1.0" if chance.random() < 0.8 else ""
    writer.write(raw_request(site, session, last_id=last_id, deltas=chance.random() < 0.5))
    wanted = chance.choice((0, 0, 1, 200, chance.randrange(3000)))
    read = 0
    try:
        async with asyncio.timeout(1):
            while read < wanted and (piece := await reader.read(chance.randrange(1, 200))):
                read += len(piece)
    except TimeoutError:
        pass  # it has said all that there is
    writer.transport.abort()
