"""The stream: frames, both sightings, previews, resumption, keepalive, and its ends."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from anthropic._streaming import SSEDecoder
from anthropic.types.beta.sessions import BetaManagedAgentsStreamSessionEvents
from pydantic import TypeAdapter
from tests.unit.claude.face import Face, Stream, call_plan

from perdure.domain.ids import primary_thread
from perdure.http.claude import stream as stream_module
from perdure.http.claude.wire import SESSION, from_wire_id
from perdure.ports.bus import PreviewDelta, PreviewStarted


def path(session: str) -> str:
    return f"/v1/sessions/{session}/events/stream"


def ids(session: str) -> tuple[UUID, UUID]:
    session_id = from_wire_id(SESSION, session)
    assert session_id is not None
    return session_id, primary_thread(session_id)


@pytest.mark.rule("MA-B7.1", "MA-B7.2", "MA-B7.3", "MA-A2.11", "MA-G1.1", "MA-B7.7")
async def test_a_turn_on_the_stream(face: Face) -> None:
    session = await face.session()
    await face.turn(session, "before", "unseen")
    opened = await face.open(path(session), headers={"accept": "application/json"})
    assert opened.frames.headers is not None
    assert opened.frames.headers["content-type"].startswith("text/event-stream")
    assert opened.frames.data.startswith(b": ")
    echo = await face.say(session, "hi")
    await face.reply(session, await face.begin(session), "hello", thinking=True)
    events = await opened.until("session.status_idle")
    assert [e["type"] for e in events] == [
        "user.message",
        "session.status_running",
        "session.thread_status_running",
        "span.model_request_start",
        "agent.thinking",
        "agent.message",
        "span.model_request_end",
        "user.message",
        "session.thread_status_idle",
        "session.usage",
        "session.status_idle",
    ]
    for raw, event in zip(opened.frames.raw(), events, strict=True):
        assert raw["event"] == event["type"]
        TypeAdapter(BetaManagedAgentsStreamSessionEvents).validate_python(event)
    first, second = events[0], events[7]
    assert first == echo
    assert second["processed_at"] is not None
    assert second | {"processed_at": None} == first
    listed = await face.events(session)
    assert {e["id"]: e for e in events} == {e["id"]: e for e in listed[-10:]}
    await opened.close()


@pytest.mark.rule("MA-B7.8", "MA-B1.6")
async def test_stream_and_list_hold_the_same_events(face: Face) -> None:
    session = await face.session()
    opened = await face.open(path(session))
    await face.say(session, "hi")
    plans = [call_plan(0, "server"), call_plan(1, "custom", "t"), call_plan(2, "ask", "write")]
    performing: Any = await face.reply(session, await face.begin(session), "text", calls=plans)
    await face.tool(session, performing)
    events = await face.events(session)
    custom = next(e["id"] for e in events if e["type"] == "agent.custom_tool_use")
    asked = next(e["id"] for e in events if e["type"] == "agent.tool_use" and e["name"] == "write")
    answers = [
        {"type": "user.custom_tool_result", "custom_tool_use_id": custom, "content": [{"type": "text", "text": ""}]},
        {"type": "user.tool_confirmation", "tool_use_id": asked, "result": "allow"},
    ]
    await face.ok("POST", f"/v1/sessions/{session}/events", {"events": answers})
    performing = await face.begin(session)
    await face.reply(session, await face.tool(session, performing), "end")  # pyright: ignore[reportArgumentType]
    seen = await opened.until("session.status_idle", 2)
    listed = await face.events(session)
    assert {e["id"]: e for e in seen} == {e["id"]: e for e in listed}
    sightings = [e["id"] for e in seen if e["type"].startswith("user.")]
    assert len(sightings) == len(set(sightings)) + 2, "the message and the confirmation wait; the result does not"
    await opened.close()


@pytest.mark.rule("MA-B7.4", "MA-G15.1")
@pytest.mark.parametrize("place", range(12))
async def test_resuming_anywhere_has_no_gap_and_no_repeat(face: Face, place: int) -> None:
    session = await face.session()
    whole = await face.open(path(session))
    await face.turn(session, "a", "b")
    await face.say(session, "c")
    await whole.until("session.status_running", 2)
    frames = whole.frames.raw()
    resumed = await face.open(path(session), headers={"last-event-id": frames[place]["id"]})
    await face.reply(session, await face.begin(session), "d")
    await whole.until("session.status_idle", 2)
    rest = whole.frames.raw()[place + 1 :]
    await resumed.frames.until(lambda f: len(f.raw()) >= len(rest))
    assert resumed.frames.raw() == rest
    await whole.close()
    await resumed.close()


@pytest.mark.rule("MA-B7.5")
@pytest.mark.parametrize("bad", ["x", "1", "0.0", "1.2.3", "-1.0", "1.x", "999.0", "1.3", "9" * 30 + ".0", "٣.0"])
async def test_an_id_of_no_stream_is_refused(face: Face, bad: str) -> None:
    session = await face.session()
    await face.turn(session, "a", "b")
    refused = await (await face.open(path(session), headers={"last-event-id": bad})).task
    assert refused is not None
    assert (refused.kind, refused.param) == ("invalid", "Last-Event-ID")
    assert refused.message.startswith("Last-Event-ID: ")


async def test_an_id_just_ahead_of_the_session_is_refused(face: Face) -> None:
    session = await face.session()
    await face.turn(session, "a", "b")
    head = await face.ledger.read_head(ids(session)[0])
    assert head is not None
    ahead = await (await face.open(path(session), headers={"last-event-id": f"{head + 1}.0"})).task
    assert ahead is not None
    latest = await face.open(path(session), headers={"last-event-id": f"{head}.2"})
    await face.say(session, "c")
    events = await latest.until("session.thread_status_running")
    assert [e["type"] for e in events] == ["user.message", "session.status_running", "session.thread_status_running"]
    await latest.close()


@pytest.mark.rule("MA-B7.1", "MA-B7.2")
async def test_the_decoder_of_the_sdk_reads_the_frames(face: Face) -> None:
    session = await face.session()
    opened = await face.open(path(session))
    await face.turn(session, "line\nline\u2028\u0085line", "é\r\n")
    await opened.until("session.status_idle")
    read = list(SSEDecoder().iter_bytes(iter([opened.frames.data])))
    assert [s.event for s in read if s.data] == opened.frames.types()
    assert [s.json() for s in read if s.data] == opened.frames.events()
    # Other clients split decoded text wherever Unicode knows a line break.
    lines = opened.frames.data.decode().splitlines()
    assert all(not line or line[0] == ":" or line.split(":")[0] in ("event", "id", "data") for line in lines)
    await opened.close()


def text(item: UUID, offset: int, piece: str, session: str) -> PreviewDelta:
    session_id, thread_id = ids(session)
    return PreviewDelta(session_id=session_id, thread_id=thread_id, item_id=item, offset=offset, text=piece)


def start(item: UUID, kind: Any, session: str) -> PreviewStarted:
    session_id, thread_id = ids(session)
    return PreviewStarted(session_id=session_id, thread_id=thread_id, item_id=item, kind=kind)


async def previewed(face: Face, session: str, query: str) -> tuple[Stream, list[dict[str, Any]]]:
    """A stream on which a thinking and a message preview were played, one piece of it lost."""
    opened = await face.open(path(session) + query)
    message, thinking = UUID(int=101), UUID(int=102)
    for preview in (
        start(thinking, "thinking", session),
        text(thinking, 0, "secret", session),
        start(message, "message", session),
        start(message, "message", session),
        text(message, 0, "héllo ", session),
        text(message, 6, "wor", session),
        text(message, 11, "!", session),
        text(UUID(int=103), 0, "of no start", session),
    ):
        face.feeds.preview(preview)
    await face.say(session, "hi")
    return opened, await opened.until("session.thread_status_running")


@pytest.mark.rule("MA-B7.9", "MA-B7.10")
async def test_previews_are_a_prefix_and_come_only_when_asked(face: Face) -> None:
    session = await face.session()
    both, events = await previewed(face, session, "?event_deltas[]=agent.message&event_deltas[]=agent.thinking")
    previews = [e for e in events if e["type"].startswith("event_")]
    assert [e["type"] for e in previews] == ["event_start", "event_start", "event_delta", "event_delta"]
    for event in previews:
        TypeAdapter(BetaManagedAgentsStreamSessionEvents).validate_python(event)
        assert "id" not in event
    assert "".join(e["delta"]["content"]["text"] for e in previews[2:]) == "héllo wor"
    assert {e["event_id"] for e in previews[2:]} == {previews[1]["event"]["id"]}
    assert all("id" not in raw for raw in both.frames.raw() if raw["event"].startswith("event_"))
    await both.close()
    only, events = await previewed(face, await face.session(), "?event_deltas[]=agent.thinking")
    assert [e["event"]["type"] for e in events if e["type"].startswith("event_")] == ["agent.thinking"]
    await only.close()
    none, events = await previewed(face, await face.session(), "")
    assert not [e for e in events if e["type"].startswith("event_")]
    await none.close()


@pytest.mark.rule("MA-A2.12", "MA-F8")
@pytest.mark.parametrize(
    "query", ["?event_deltas[]=agent.tool_use", "?x=1", "?" + "&".join(["event_deltas[]=agent.message"] * 101)]
)
async def test_bad_stream_queries(face: Face, query: str) -> None:
    refused = await (await face.open(path(await face.session()) + query)).task
    assert refused is not None
    assert refused.kind == "invalid"


@pytest.mark.rule("MA-G14.1", "MA-B7.13", "MA-B3.8", "MA-C11.3", "MA-A2.13")
async def test_archive_and_deletion_end_on_the_stream(face: Face) -> None:
    session = await face.session()
    opened = await face.open(path(session))
    await face.ok("POST", f"/v1/sessions/{session}/archive")
    await opened.until("session.status_terminated")
    await face.ok("DELETE", f"/v1/sessions/{session}")
    events = await opened.until("session.deleted")
    async with asyncio.timeout(5):
        assert await opened.task is None
    assert events[-1]["type"] == "session.deleted"
    TypeAdapter(BetaManagedAgentsStreamSessionEvents).validate_python(events[-1])
    refused = await (await face.open(path(session))).task
    assert refused is not None
    assert refused.kind == "not_found"


async def test_a_peer_that_is_gone_ends_the_handler_and_frees_its_feed(face: Face) -> None:
    session = await face.session()
    broken = await face.open(path(session), broken=True)
    async with asyncio.timeout(5):
        assert await broken.task is None
    assert face.feeds._feeds == {}  # pyright: ignore[reportPrivateUsage]


@pytest.mark.rule("MA-B7.2")
async def test_silence_is_broken_by_comments(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream_module.KEEPALIVE_S < 15
    monkeypatch.setattr(stream_module, "KEEPALIVE_S", 0.02)
    opened = await face.open(path(await face.session()))
    await opened.frames.until(lambda f: f.data.count(stream_module.KEEPALIVE) >= 2)
    assert opened.frames.events() == []
    await opened.close()


@pytest.mark.rule("MA-A3.6", "MA-A3.4")
async def test_the_stream_of_the_thread(face: Face) -> None:
    session = await face.session()
    thread = (await face.ok("GET", f"/v1/sessions/{session}/threads"))["data"][0]["id"]
    own = await face.open(f"/v1/sessions/{session}/threads/{thread}/stream")
    whole = await face.open(path(session))
    await face.turn(session, "a", "b")
    await whole.until("session.status_idle")
    await own.until("session.status_idle")
    assert own.frames.raw() == whole.frames.raw()
    await own.close()
    await whole.close()
    other = await face.session()
    refused = await (await face.open(f"/v1/sessions/{other}/threads/{thread}/stream")).task
    assert refused is not None
    assert refused.kind == "not_found"
