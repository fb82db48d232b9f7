"""G8: answers to nothing, of the wrong kind, or twice. Each is refused once, and nothing is stored."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from tests.conformance.test_tools import ASK_BASH, CUSTOM, CUSTOM_USE, TOOL_USE

from perdure.testing.model_server import Call, Reply, Text
from perdure.testing.serving import Served, Told, confirm, message, result
from perdure.testing.trail import only

UNKNOWN = "sevt_" + "0" * 26


@asynccontextmanager
async def refused_once(told: Told, code: str | None = None) -> AsyncGenerator[None]:
    """The block's request is 400, sent once, and leaves the ledger as it was."""
    events, calls = await told.events(), len(told.script.requests)
    with pytest.raises(anthropic.BadRequestError) as caught:
        yield
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers.get("x-stainless-retry-count") == "0"
    if code is not None:
        assert caught.value.body["error"]["details"]["error_code"] == code
    assert await told.events() == events
    assert len(told.script.requests) == calls


async def parked(served: Served) -> tuple[Told, str, str]:
    """A session that waits for a custom result and for a confirmation; their ids."""
    told = await served.make_session(tools=[ASK_BASH, CUSTOM])
    told.script.enqueue(Reply(Call("lookup"), Call("bash", {"command": "true"})), Reply(Text("on")))
    await told.say("go")
    events = await told.until_idle()
    return told, only(events, CUSTOM_USE)[0]["id"], only(events, TOOL_USE)[0]["id"]


@pytest.mark.rule("MA-G8", "MA-C7.2", "MA-C7.3", "MA-A0.8", "MA-B1.8", "MA-B1.11")
async def test_each_bad_reference_is_refused_by_name_and_stores_nothing(served: Served) -> None:
    told, custom, ask = await parked(served)
    own_thread = (await told.served.ok("GET", f"{told.path}/threads"))["data"][0]["id"]
    bad: list[tuple[dict[str, Any], str | None]] = [
        (result(UNKNOWN), "unknown_action"),
        (result("sevt_nonsense"), "unknown_action"),
        (confirm(UNKNOWN), "unknown_action"),
        (confirm(custom), None),
        (result(ask), None),
        ({"type": "user.tool_result", "tool_use_id": ask}, None),
        ({"type": "user.tool_result", "tool_use_id": custom}, None),
        ({**result(custom), "session_thread_id": "sthr_" + "0" * 26}, "unknown_thread"),
        ({**confirm(ask), "result": "maybe"}, None),
        ({**result(custom), "id": custom}, None),
    ]
    for event, code in bad:
        async with refused_once(told, code):
            await told.send(event)
    await told.send({**result(custom), "session_thread_id": own_thread}, confirm(ask))
    await told.until_idle(2)


@pytest.mark.rule("MA-G8", "MA-C7.4")
async def test_a_second_answer_is_refused_claimed_or_resolved(served: Served) -> None:
    told, custom, ask = await parked(served)
    await told.send(result(custom, "first"))
    async with refused_once(told, "already_resolved"):
        await told.send(result(custom, "first"), message("m"))
    async with refused_once(told, "already_resolved"):
        await told.send(result(custom, "second"))
    await told.send(confirm(ask))
    await told.until_idle(3)
    for event in (result(custom, "late"), confirm(ask), confirm(ask, deny="late")):
        async with refused_once(told, "already_resolved"):
            await told.send(event)
    assert str(told.script.messages()).count("first") == 1


@pytest.mark.rule("MA-G8.1", "MA-A2.3", "MA-C7.8")
async def test_a_good_answer_beside_a_bad_one_claims_nothing(served: Served) -> None:
    told, custom, ask = await parked(served)
    for batch in (
        [result(custom), result(UNKNOWN)],
        [confirm(ask), confirm(custom)],
        [result(custom), result(custom)],
        [result(custom), confirm(ask), {"type": "session.status_idle"}],
    ):
        async with refused_once(told):
            await told.send(*batch)
    await told.send(result(custom), confirm(ask))
    await told.until_idle(2)


@pytest.mark.rule("MA-C7.4")
async def test_of_two_answers_at_the_same_time_exactly_one_counts(served: Served) -> None:
    for _ in range(5):
        told = await served.make_session(tools=[CUSTOM])
        told.script.enqueue(Reply(Call("lookup")), Reply(Text("on")))
        await told.say("go")
        (use,) = only(await told.until_idle(), CUSTOM_USE)
        sent = await asyncio.gather(
            *(told.send(result(use["id"], f"answer {n}")) for n in range(4)), return_exceptions=True
        )
        assert [type(s) for s in sent].count(anthropic.BadRequestError) == 3
        winner = next(n for n, s in enumerate(sent) if isinstance(s, list))
        listed = await told.until_idle(2)
        assert [e["content"][0]["text"] for e in only(listed, "user.custom_tool_result")] == [f"answer {winner}"]
        assert told.script.messages()[-1]["content"][0]["content"][0]["text"] == f"answer {winner}"


@pytest.mark.rule(
    "MA-A2.1", "MA-A2.4", "MA-A2.5", "MA-A0.9", "MA-A0.11", "MA-A0.10", "MA-B1.1", "MA-B1.9", "MA-B1.13", "MA-C7.9"
)
@pytest.mark.parametrize(
    ("events", "place"),
    [
        ([], "events"),
        ([{"type": "agent.message", "content": []}], "events.0.type"),
        ([{"type": "session.status_idle"}], "events.0.type"),
        ([{"type": "no.such"}], "events.0.type"),
        ([{**message("m"), "id": "sevt_1"}], "events.0.id"),
        ([{**message("m"), "processed_at": None}], "events.0.processed_at"),
        ([{"type": "user.message"}], "events.0.content"),
        ([{"type": "user.message", "content": None}], "events.0.content"),
        ([{"type": "user.message", "content": []}], "events.0.content"),
        ([{"type": "user.message", "content": [{"type": "redacted"}]}], "events.0.content.0.type"),
        ([{"type": "user.message", "content": [{"type": "tool_result"}]}], "events.0.content.0.type"),
        (
            [{"type": "user.message", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}],
            "events.0.content.0.source",
        ),
        ([message("a"), {"type": "system.message", "content": []}], "events.1.content"),
        (
            [message("a"), {"type": "system.message", "content": [{"type": "text", "text": "s"}] * 1001}],
            "events.1.content",
        ),
        ([{"type": "system.message", "content": [{"type": "text", "text": "s"}]}], "events.0"),
        (
            [message("a"), {"type": "system.message", "content": [{"type": "text", "text": "s"}]}, message("b")],
            "events.1",
        ),
        ([{"type": "user.interrupt", "session_thread_id": "sthr_" + "0" * 26}], "events.0.session_thread_id"),
        ([{"type": "user.define_outcome", "description": "d", "rubric": {}}], "events.0.type"),
    ],
)
async def test_invalid_events_are_refused_with_their_place(served: Served, events: list[Any], place: str) -> None:
    told = await served.make_session()
    with pytest.raises(anthropic.BadRequestError) as caught:
        await told.send(*events)
    assert caught.value.body["error"]["message"].startswith(place)
    assert await told.events() == []
