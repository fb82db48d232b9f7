"""G15 and the rest about streams: reconnects, previews, keepalives, slow readers, revoked keys."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2
import pytest
from tests.conformance.test_tools import CUSTOM, CUSTOM_USE, TOOLSET

from perdure.core import feed
from perdure.http.asgi import AsgiStream
from perdure.http.claude import stream as stream_module
from perdure.testing.model_server import Call, Gate, Reply, Text, Thinking
from perdure.testing.proxy import Proxy
from perdure.testing.serving import READ_S, Served, Told, message, result
from perdure.testing.trail import RUNNING, Frame, call, frames_of, idle, kinds_of, merged, only, says, trail_of

THREE_TOOLS = (
    Reply(Text("first"), Call("bash", {"command": "echo 1"})),
    Reply(Text("second"), Call("bash", {"command": "echo 2"}), Call("bash", {"command": "false"})),
    Reply(Text("last words of some length")),
)


async def read_some(told: Told, most: int, **options: Any) -> list[Frame]:
    """Up to `most` frames of a new connection, or all up to the last idle; then the connection is dropped."""
    frames: list[Frame] = []
    async with told.stream(**options) as response:
        async for frame in frames_of(response):
            frames.append(frame)
            if len(frames) >= most or frame.name == "session.status_idle":
                break
    return frames


@pytest.mark.rule("MA-G15", "SDK:sessions.events.stream", "SDK:sessions.events.list")
async def test_reconnect_list_and_remove_double_ids(served: Served) -> None:
    """The documented pattern, with the SDK alone."""
    random = Random(15)
    events_of = served.client.beta.sessions.events
    for _ in range(6):
        told = await served.make_session(*THREE_TOOLS, tools=[TOOLSET])
        seen: list[dict[str, Any]] = []
        sent = False
        while "session.status_idle" not in kinds_of(seen):
            async with await events_of.stream(told.id) as opened:
                if not sent:
                    await told.say("go")
                    sent = True
                seen = merged(seen, [e.to_dict(mode="json") async for e in events_of.list(told.id)])
                if "session.status_idle" in kinds_of(seen):
                    break
                left = random.randrange(1, 6)
                async for event in opened:
                    seen = merged(seen, [event.to_dict(mode="json")])
                    left -= 1
                    if event.type == "session.status_idle" or not left:
                        break
        final = [e.to_dict(mode="json") async for e in events_of.list(told.id)]
        assert {e["id"]: e for e in merged(seen, final)} == {e["id"]: e for e in final}
        assert {e["id"] for e in seen} <= {e["id"] for e in final}
        assert {e["id"]: e for e in seen} == {e["id"]: e for e in final}


@pytest.mark.rule("MA-G15.1", "MA-B7.4", "MA-B7.6", "MA-B7.3")
async def test_resume_by_last_event_id_has_no_gap_and_no_repeat(served: Served) -> None:
    """500 reconnects on running turns, each resuming at the last id it saw."""
    random = Random(151)
    reconnects = 0

    async def follow() -> int:
        told = await served.make_session(*(Reply(Text(f"reply {n}")) for n in range(12)))
        async with told.stream() as first:
            sending = asyncio.ensure_future(told.say(*(f"m{n}" for n in range(12))))
            frames = [await anext(frames_of(first))]
        count = 0
        while frames[-1].name != "session.status_idle":
            more = await read_some(told, random.randrange(1, 4), last_id=frames[-1].id)
            frames += more
            count += 1
        await sending
        whole = await read_some(told, 10_000, last_id=frames[0].id)
        assert [(f.id, f.name, f.data) for f in frames] == [(f.id, f.name, f.data) for f in (frames[0], *whole)]
        ids = [f.id for f in frames]
        assert len(set(ids)) == len(ids)
        assert {f.data["id"]: f.data for f in frames} == {e["id"]: e for e in await told.events()}
        return count

    while reconnects < 500:
        reconnects += sum(await asyncio.gather(*(follow() for _ in range(4))))


@pytest.mark.rule("MA-B7.5")
@pytest.mark.parametrize("last_id", ["x", "1", "1.9", "-1.0", "99999999.0", "1.0.0", "0.0"])
async def test_a_foreign_last_event_id_is_refused(served: Served, last_id: str) -> None:
    told = await served.make_session()
    response = await served.call("GET", f"{told.path}/events/stream", headers={"last-event-id": last_id})
    assert response.status_code == 400
    assert "Last-Event-ID" in response.json()["error"]["message"]


@pytest.mark.rule("MA-B7.3", "MA-G15")
async def test_a_stream_opened_in_mid_turn_shows_later_events_only(served: Served) -> None:
    gate = Gate()
    told = await served.make_session(Reply(Text("late"), gate=gate))
    await told.say("go")
    await gate.reached()
    async with told.stream() as response:
        gate.open()
        frames = [f.data async for f in _until_idle(response)]
    assert trail_of(frames) == [*call(says("late"))[1:], trail_of(only(frames, "user.message"))[0], *idle()]


async def _until_idle(response: httpx2.Response) -> AsyncGenerator[Frame]:
    async for frame in frames_of(response):
        yield frame
        if frame.name == "session.status_idle":
            return


@pytest.mark.rule("MA-B7.9", "MA-B7.10", "MA-A2.12", "MA-B2.3", "MA-C5.3")
async def test_previews_are_a_prefix_and_the_event_comes_last(served: Served) -> None:
    texts = ["A first text of several chunks, long enough.", "And the second one, also not short."]
    told = await served.make_session(
        Reply(Thinking("thinking about it at length"), Text(texts[0]), delay_ms=1),
        Reply(Text(texts[1]), delay_ms=1),
    )
    async with await served.client.beta.sessions.events.stream(
        told.id, event_deltas=["agent.message", "agent.thinking"]
    ) as opened:
        await told.say("a", "b")
        seen = []
        async for event in opened:
            seen.append(event)
            if event.type == "session.status_idle":
                break
    starts = [e.event for e in seen if e.type == "event_start"]
    assert [s.type for s in starts] == ["agent.thinking", "agent.message", "agent.message"]
    assert len({s.id for s in starts}) == 3
    for start in starts:
        deltas = "".join(e.delta.content.text for e in seen if e.type == "event_delta" and e.event_id == start.id)
        places = [n for n, e in enumerate(seen) if start.id in (getattr(e, "id", None), getattr(e, "event_id", None))]
        final = seen[places[-1]]
        assert final.id == start.id
        assert final.type == start.type
        if start.type == "agent.message":
            assert deltas
            assert final.content[0].text.startswith(deltas)
        else:
            assert deltas == ""
            assert final.to_dict().keys() == {"id", "type", "processed_at"}
    listed = await told.events()
    assert not {"event_start", "event_delta"} & set(kinds_of(listed))
    assert "thinking about" not in json.dumps(listed)
    signed = told.script.messages(1)[1]["content"][0]
    assert signed == {"type": "thinking", "thinking": "thinking about it at length", "signature": signed["signature"]}


@pytest.mark.rule("MA-B7.10", "MA-A2.12", "MA-F8")
async def test_previews_come_for_the_asked_types_only(served: Served) -> None:
    told = await served.make_session(Reply(Thinking("hm hm"), Text("text of an answer"), delay_ms=1))
    async with told.stream() as plain, told.stream(deltas=["agent.thinking"]) as thinking:
        await told.say("go")
        seen = [[f async for f in _until_idle(r)] for r in (plain, thinking)]
    assert [f.name for f in seen[0] if f.name.startswith("event_")] == []
    previews = [f.data for f in seen[1] if f.name.startswith("event_")]
    assert [p["event"]["type"] for p in previews] == ["agent.thinking"]
    stream = f"{told.path}/events/stream"
    for query in ({"event_deltas[]": "user.message"}, {"event_deltas[]": ["agent.message"] * 101}, {"other": "1"}):
        assert (await served.call("GET", stream, params=query)).status_code == 400


@pytest.mark.rule("MA-B7.11", "MA-C8.4")
async def test_a_preview_of_a_cancelled_call_has_no_final_event(served: Served) -> None:
    told = await served.make_session(Reply(Text("words that never end in this reply"), stall_after=2))
    async with told.stream(deltas=["agent.message"]) as response:
        await told.say("go")
        frames = []
        async for frame in frames_of(response):
            frames.append(frame)
            if frame.name == "event_delta":
                await told.interrupt()
            if frame.name == "session.status_idle":
                break
    names = [f.name for f in frames]
    assert "agent.message" not in names
    assert names.index("event_delta") < names.index("span.model_request_end")


@pytest.mark.rule("MA-G15.2", "MA-B7.2")
async def test_silence_is_filled_with_comments_that_the_sdk_ignores(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stream_module.KEEPALIVE_S < 15
    monkeypatch.setattr(stream_module, "KEEPALIVE_S", 0.05)
    gate = Gate()
    told = await served.make_session(Reply(Text("at last"), gate=gate))
    async with told.stream() as raw, await served.client.beta.sessions.events.stream(told.id) as sdk:
        lines = raw.aiter_lines()
        assert await anext(lines) == ": open"
        await told.say("go")
        comments = 0
        async for line in lines:
            comments += line == ": keepalive"
            if comments == 3:
                gate.open()
            if line == "event: session.status_idle":
                break
        kinds = []
        async for event in sdk:
            kinds.append(event.type)
            if event.type == "session.status_idle":
                break
    assert comments >= 3
    assert len(kinds) == len([*RUNNING, *call(says("")), *idle()]) + 2


@asynccontextmanager
async def raw_reader(url: str, told: Told, key: str) -> AsyncGenerator[asyncio.StreamReader]:
    """A connection that reads nothing by itself."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
    head = f"GET {told.path}/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    await reader.readuntil(b": open\n\n")
    try:
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.rule("MA-B7.12", "MA-F11")
async def test_a_slow_reader_is_cut_off_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AsgiStream.__init__.__kwdefaults__, "write_deadline_s", 1.0)
    blocks, size = 14, 1_000_000
    told = await served.make_session(Reply(*[Text("x" * size)] * blocks, chunk_chars=size), Reply(Text("end")))
    async with (
        Proxy(served.url, buffer_bytes=64 * 1024) as proxy,
        raw_reader(proxy.url, told, served.api_key) as slow,
    ):
        proxy.stall()
        async with told.stream() as quick:
            await told.say("go")
            frames = [f async for f in _until_idle(quick)]
        assert len([f for f in frames if f.name == "agent.message"]) == blocks
        await _until_no_stream_is_open(served, told)
        proxy.resume()
        async with asyncio.timeout(READ_S):
            got = b""
            while data := await slow.read(1 << 20):
                got += data
    assert got.count(b"event: agent.message\n") < blocks
    assert b"event: error" not in got
    complete = got[: got.rindex(b"\n\n")]
    last = [line for line in complete.split(b"\n") if line.startswith(b"id: ")][-1].removeprefix(b"id: ").decode()
    rest = await read_some(told, 10_000, last_id=last)
    everything = [f.id for f in frames]
    assert [f.id for f in rest] == everything[everything.index(last) + 1 :]


async def _until_no_stream_is_open(served: Served, told: Told) -> None:
    """Return once the server has given up the last one."""
    async with asyncio.timeout(READ_S):
        while "\nperdure_open_streams 0.0\n" not in (await served.call("GET", "/metrics")).text:
            await told.status()


@pytest.mark.rule("MA-B7.12", "MA-F11", "MA-B7.3")
async def test_one_large_commit_cuts_off_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and bytes of one commit beyond what a reader may be behind: a reader that takes them gets them all."""
    monkeypatch.setattr(feed, "BACKLOG_ROWS_MAX", 16)
    many, large = await served.make_session(), await served.make_session()
    for told in (many, large):
        told.script.respond_with(lambda _: Reply(Text("k")))
    large.script.enqueue(Reply(*[Text("x" * 200_000)] * 12, chunk_chars=200_000))
    async with many.stream() as first, large.stream() as second:
        await many.say(*(f"m{n}" for n in range(25)))
        await large.say("go")
        seen = [[f.data async for f in _until_idle(r)] for r in (first, second)]
    for told, frames in zip((many, large), seen, strict=True):
        assert {e["id"]: e for e in merged([], frames)} == {e["id"]: e for e in await told.events()}


@pytest.mark.rule("MA-E2.3", "MA-A0.2")
async def test_a_revoked_key_ends_its_streams_within_two_seconds(served: Served) -> None:
    key, key_id = await served.add_key()
    told = await served.make_session()
    clock = asyncio.get_running_loop().time
    async with (
        httpx2.AsyncClient(base_url=served.url, headers=served.signed(key.secret), timeout=READ_S) as other,
        other.stream("GET", f"{told.path}/events/stream") as theirs,
        told.stream() as ours,
    ):
        assert theirs.status_code == 200
        began = clock()
        await served.revoke_key(key_id)
        assert [f async for f in frames_of(theirs)] == []
        assert clock() - began < 2
        refused = await other.get(told.path)
        assert refused.status_code == 401
        assert key.secret not in refused.text
        told.script.enqueue(Reply(Text("still here")))
        await told.say("go")
        assert [f.name async for f in _until_idle(ours)][-1] == "session.status_idle"


@pytest.mark.rule("MA-A2.11")
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "*/*", "image/png"])
async def test_a_stream_does_not_look_at_accept(served: Served, accept: str) -> None:
    told = await served.make_session()
    async with served.http.stream("GET", f"{told.path}/events/stream", headers={"accept": accept}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["request-id"]


@pytest.mark.rule("MA-A2.15", "SDK:sessions.events.tool_runner")
async def test_the_tool_runner_of_the_sdk_answers_custom_tools(served: Served) -> None:
    told, calls = await _tool_session(served)
    runner = served.client.beta.sessions.events.tool_runner(told.id, tools=[calls.tool], max_idle=0.2)
    await told.say("go")
    async with asyncio.timeout(READ_S):
        done = [c.event.name async for c in runner]
    assert done == ["lookup"] * 3
    await _assert_answered(told, calls)


@pytest.mark.rule("MA-A2.15")
async def test_the_tool_runner_survives_dropped_streams(served: Served) -> None:
    async with Proxy(served.url) as proxy:
        told, calls = await _tool_session(served)
        client = served.sdk(base_url=proxy.url)
        calls.on_call = proxy.cut
        await told.say("go")
        async with asyncio.timeout(READ_S):
            runner = client.beta.sessions.events.tool_runner(told.id, tools=[calls.tool], max_idle=0.2)
            done = [c.event.name async for c in runner]
        await client.close()
        assert proxy.connections > 2
    assert done == ["lookup"] * 3
    await _assert_answered(told, calls)


class _Calls:
    """A custom tool as users of the SDK write one, and what it was called with."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.on_call = lambda: None

        @anthropic.beta_async_tool
        async def lookup(key: str) -> str:
            """Looks something up.

            Args:
                key: What.
            """
            self.keys.append(key)
            self.on_call()
            return f"value of {key}"

        self.tool = lookup


async def _tool_session(served: Served) -> tuple[Told, _Calls]:
    calls = _Calls()
    definition = calls.tool.to_dict()
    told = await served.make_session(
        Reply(Call("lookup", {"key": "a"}), Call("lookup", {"key": "b"})),
        Reply(Call("lookup", {"key": "c"})),
        Reply(Text("All found.")),
        tools=[{"type": "custom", **{k: definition[k] for k in ("name", "description", "input_schema")}}],
    )
    return told, calls


async def _assert_answered(told: Told, calls: _Calls) -> None:
    listed = await told.events()
    assert sorted(calls.keys) == ["a", "b", "c"]
    assert len(only(listed, CUSTOM_USE)) == len(only(listed, "user.custom_tool_result")) == 3
    assert trail_of(listed)[-3:] == idle()
    assert [b["content"][0]["text"] for b in told.script.messages()[-1]["content"]] == ["value of c"]


@pytest.mark.rule("MA-C7.12")
async def test_a_parked_session_waits_while_others_work(served: Served) -> None:
    told = await served.make_session(Reply(Call("lookup")), Reply(Text("on")), tools=[CUSTOM])
    await told.say("go")
    parked = await told.until_idle()
    other = await served.make_session(Reply(Text("x")), initial_events=[message("y")])
    await other.until_idle()
    await told.send(result(only(parked, CUSTOM_USE)[0]["id"]))
    await told.until_idle(2)


@pytest.mark.rule("MA-B7.8", "MA-B7.1", "SDK:sessions.events.stream")
async def test_the_sdk_without_a_loop_reads_what_ends_lines_elsewhere(served: Served) -> None:
    """Line separators of Unicode in a text, through the synchronous SDK in a thread of its own."""
    text = "one\u2028two\u2029three\x85four\r\nfive\x1c\U0001f600"
    told = await served.make_session(Reply(Text(text)))

    def follow() -> list[Any]:
        with served.sync_sdk() as client:
            events = client.beta.sessions.events
            with events.stream(told.id) as opened:
                events.send(told.id, events=[message(text)])
                seen = []
                for event in opened:
                    seen.append(event)
                    if event.type == "session.status_idle":
                        return seen
        raise AssertionError("the stream ended before the turn")

    seen = await asyncio.to_thread(follow)
    assert [e.content[0].text for e in seen if e.type in ("user.message", "agent.message")] == [text] * 3
    assert {e.id for e in seen} == {e["id"] for e in await told.events()}
