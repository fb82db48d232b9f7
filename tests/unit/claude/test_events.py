"""Send and list: echoes, all or nothing, order, filters, pages."""

from typing import Any
from uuid import UUID

import pytest
from anthropic.types.beta.sessions import BetaManagedAgentsSessionEvent
from pydantic import TypeAdapter
from tests.unit.claude.face import Face, call_plan

from perdure.domain.submission import SubmissionKey
from perdure.http.claude.event_types import EVENT_TYPES

REST = ["session.thread_status_idle", "session.usage", "session.status_idle"]
RUNNING = ["session.status_running", "session.thread_status_running"]


def message(text: str = "hi") -> dict[str, Any]:
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


def submission(attempt: int) -> SubmissionKey:
    return SubmissionKey(digest=b"d", body_digest=b"b", explicit=False, attempt=attempt, request_id=UUID(int=5))


@pytest.mark.rule("MA-A2.2", "MA-B1.2", "MA-C2.2")
async def test_the_echo_has_the_sent_events_alone_in_their_order(face: Face) -> None:
    session = await face.session()
    sent = [message("one"), message("two"), {"type": "system.message", "content": [{"type": "text", "text": "s"}]}]
    echo = (await face.ok("POST", f"/v1/sessions/{session}/events", {"events": sent}))["data"]
    assert [{k: v for k, v in e.items() if k not in ("id", "processed_at")} for e in echo] == sent
    assert all(e["id"].startswith("sevt_") and e["processed_at"] is None for e in echo)
    assert (await face.types(session)) == [*(e["type"] for e in sent), *RUNNING]


@pytest.mark.rule("MA-G1", "MA-B3.2", "MA-B3.3", "MA-B3.4", "MA-B2.1", "MA-B2.6")
async def test_a_plain_turn_in_the_list(face: Face) -> None:
    session = await face.session()
    await face.turn(session, "hi", "hello")
    events = await face.events(session)
    assert [e["type"] for e in events] == [
        "user.message",
        *RUNNING,
        "span.model_request_start",
        "agent.message",
        "span.model_request_end",
        *REST,
    ]
    for event in events:
        TypeAdapter(BetaManagedAgentsSessionEvent).validate_python(event)
    assert len({e["id"] for e in events}) == len(events)
    assert events[0]["processed_at"] is not None
    assert events[4]["content"] == [{"type": "text", "text": "hello"}]
    assert events[5]["model_request_start_id"] == events[3]["id"]
    assert events[6]["stop_reason"] == events[8]["stop_reason"] == {"type": "end_turn"}
    assert events[7]["usage"]["output_tokens"] == 5


@pytest.mark.rule("MA-A2.3", "MA-G8", "MA-G8.1", "MA-C7.3")
async def test_one_bad_event_refuses_the_request(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    plans = [call_plan(0, "custom", "t"), call_plan(1, "ask")]
    await face.reply(session, await face.begin(session), calls=plans)
    before = await face.events(session)
    custom = next(e["id"] for e in before if e["type"] == "agent.custom_tool_use")
    asked = next(e["id"] for e in before if e["type"] == "agent.tool_use")
    good = {"type": "user.custom_tool_result", "custom_tool_use_id": custom}
    unknown = {"type": "user.custom_tool_result", "custom_tool_use_id": "sevt_" + "0" * 26}
    confirm = {"type": "user.tool_confirmation", "tool_use_id": custom, "result": "allow"}
    result = {"type": "user.custom_tool_result", "custom_tool_use_id": asked}
    for events, code, place in (
        ([good, unknown], "unknown_action", "events.1.custom_tool_use_id"),
        ([unknown | {"custom_tool_use_id": "toolu_1"}], "unknown_action", "events.0.custom_tool_use_id"),
        ([confirm], "wrong_action_kind", "events.0.tool_use_id"),
        ([message(), result], "wrong_action_kind", "events.1.custom_tool_use_id"),
        ([good, good], "already_resolved", "events.1.custom_tool_use_id"),
        ([{"type": "user.tool_result", "tool_use_id": asked}], None, "events.0.type"),
        ([message(), {"type": "system.message", "content": [{"type": "text", "text": "s"}]}], None, "events.1"),
        ([good | {"session_thread_id": "sthr_" + "0" * 26}], "unknown_thread", "events.0.session_thread_id"),
    ):
        error = await face.refused("POST", f"/v1/sessions/{session}/events", {"events": events})
        assert (error["status"], error["details"].get("error_code")) == (400, code)
        assert error["message"].startswith(place + ": ")
        assert error["details"]["param"] == place
    assert await face.events(session) == before
    (echo,) = (await face.ok("POST", f"/v1/sessions/{session}/events", {"events": [good]}))["data"]
    assert echo["processed_at"] is not None
    assert echo["content"] == []
    again = await face.refused("POST", f"/v1/sessions/{session}/events", {"events": [good]})
    assert again["details"]["error_code"] == "already_resolved"


@pytest.mark.rule("MA-G6", "MA-G6.1", "MA-G7", "MA-C7.5", "MA-B5.2", "MA-B1.4", "MA-B1.6")
async def test_a_mixed_round_with_a_denial(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    plans = [call_plan(0, "server"), call_plan(1, "custom", "t"), call_plan(2, "ask", "write")]
    performing = await face.reply(session, await face.begin(session), calls=plans)
    await face.tool(session, performing, is_error=True)  # pyright: ignore[reportArgumentType]
    events = await face.events(session)
    ran = next(e for e in events if e["type"] == "agent.tool_use" and e["name"] == "bash")
    asked = next(e for e in events if e["type"] == "agent.tool_use" and e["name"] == "write")
    custom = next(e for e in events if e["type"] == "agent.custom_tool_use")
    assert (ran["evaluated_permission"], ran["evaluation"]) == ("allow", {"type": "always_allow"})
    assert (asked["evaluated_permission"], asked["evaluation"]) == ("ask", {"type": "always_ask"})
    outcome = next(e for e in events if e["type"] == "agent.tool_result")
    assert (outcome["tool_use_id"], outcome["is_error"]) == (ran["id"], True)
    assert events[-1]["stop_reason"] == {"type": "requires_action", "event_ids": [custom["id"], asked["id"]]}
    order = [e["id"] for e in events]
    assert order.index(outcome["id"]) < order.index(custom["id"]), "what a client owes comes after what the server ran"

    denial = {"type": "user.tool_confirmation", "tool_use_id": asked["id"], "result": "deny", "deny_message": "no!"}
    (echo,) = (await face.ok("POST", f"/v1/sessions/{session}/events", {"events": [denial]}))["data"]
    assert (echo["processed_at"], echo["deny_message"]) == (None, "no!")
    assert (await face.events(session))[-1]["stop_reason"]["event_ids"] == [custom["id"]]
    given = {"type": "user.custom_tool_result", "custom_tool_use_id": custom["id"], "is_error": True}
    await face.ok("POST", f"/v1/sessions/{session}/events", {"events": [given]})
    await face.reply(session, await face.begin(session), "ok")
    events = await face.events(session)
    refusal = next(e for e in events if e["type"] == "agent.tool_result" and e["tool_use_id"] == asked["id"])
    assert refusal["is_error"] is True
    assert "no!" in refusal["content"][0]["text"]
    assert [e["type"] for e in events][-3:] == REST
    assert next(e for e in events if e["type"] == "user.tool_confirmation")["processed_at"] is not None
    for event in events:
        TypeAdapter(BetaManagedAgentsSessionEvent).validate_python(event)


@pytest.mark.rule("MA-B1.3", "MA-C8.8", "MA-G13")
async def test_an_interrupt_of_an_idle_session_is_listed_and_changes_nothing(face: Face) -> None:
    session = await face.session()
    threads = await face.ok("GET", f"/v1/sessions/{session}/threads")
    for thread in (None, threads["data"][0]["id"]):
        event = {"type": "user.interrupt", "session_thread_id": thread}
        (echo,) = (await face.ok("POST", f"/v1/sessions/{session}/events", {"events": [event]}))["data"]
        assert echo["processed_at"] is not None
    error = await face.refused(
        "POST",
        f"/v1/sessions/{session}/events",
        {"events": [{"type": "user.interrupt", "session_thread_id": "sthr_nonsense"}]},
    )
    assert (error["status"], error["details"]["error_code"]) == (400, "unknown_thread")
    assert await face.types(session) == ["user.interrupt", "user.interrupt"]


@pytest.mark.rule("MA-E1.1", "MA-E1.2", "MA-E1.5")
async def test_a_retry_of_the_sdk_gets_the_first_answer(face: Face) -> None:
    session = await face.session()
    path, sent = f"/v1/sessions/{session}/events", {"events": [message("a"), message("b")]}
    first = await face.ok("POST", path, sent, submission=submission(0))
    assert await face.ok("POST", path, sent, submission=submission(1)) == first
    assert (await face.types(session)).count("user.message") == 2
    await face.ok("POST", path, sent, submission=submission(0))
    assert (await face.types(session)).count("user.message") == 4


@pytest.mark.rule("MA-A2.14", "MA-A2.13", "MA-A2.1")
async def test_sends_that_store_nothing(face: Face) -> None:
    session = await face.session()
    path = f"/v1/sessions/{session}/events"
    for bad in ({}, {"events": []}, {"events": None}, {"events": [message()], "x": 1}, {"events": {}}):
        assert (await face.refused("POST", path, bad))["status"] == 400
    await face.ok("POST", f"/v1/sessions/{session}/archive")
    error = await face.refused("POST", path, {"events": [message()]})
    assert (error["status"], error["details"]["error_code"]) == (400, "session_archived")
    assert await face.types(session) == ["session.thread_status_terminated", "session.status_terminated"]
    await face.ok("DELETE", f"/v1/sessions/{session}")
    assert (await face.refused("POST", path, {"events": [message()]}))["status"] == 404


async def walk(face: Face, session: str, query: str) -> list[dict[str, Any]]:
    """Every event, page by page."""
    page = await face.ok("GET", f"/v1/sessions/{session}/events?{query}")
    found = page["data"]
    while page["next_page"] is not None:
        page = await face.ok("GET", f"/v1/sessions/{session}/events?{query}&page={page['next_page']}")
        found += page["data"]
    return found


@pytest.mark.rule("MA-A2.6", "MA-A2.7", "MA-A0.23", "MA-B8.1", "MA-B8.2")
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 1000])
async def test_pages_cut_rows_anywhere(face: Face, limit: int) -> None:
    session = await face.session()
    for number in range(3):
        await face.turn(session, f"m{number}", f"r{number}")
    whole = await face.events(session)
    assert len(whole) == 27
    assert await walk(face, session, f"limit={limit}") == whole
    assert await walk(face, session, f"limit={limit}&order=desc") == whole[::-1]


@pytest.mark.rule("MA-A2.8")
async def test_types_filter_rows_and_what_they_become(face: Face) -> None:
    session = await face.session()
    await face.turn(session, "a", "b")
    for kind in sorted(EVENT_TYPES):
        assert [e["type"] for e in await face.events(session, f"?types[]={kind}")] == [
            t for t in await face.types(session) if t == kind
        ]
    query = "types[]=session.usage&types[]=agent.message&types=user.message"
    assert [e["type"] for e in await walk(face, session, query + "&limit=1")] == [
        "user.message",
        "agent.message",
        "session.usage",
    ]
    error = await face.refused("GET", f"/v1/sessions/{session}/events?types[]=session.deleted")
    assert (error["status"], error["details"]["param"]) == (400, "types[]")


@pytest.mark.rule("MA-A2.9")
async def test_time_filters_compare_processed_at_and_drop_what_has_none(face: Face) -> None:
    session = await face.session()
    await face.say(session, "a")
    face.ledger.clock.advance(seconds=10)
    await face.reply(session, await face.begin(session), "r")
    await face.say(session, "waits")
    late = await face.events(session, "?created_at[gte]=2026-01-01T00:00:10Z")
    assert "waits" not in str(late)
    assert [e["type"] for e in late][:2] == ["user.message", "span.model_request_start"]
    early = await face.events(session, "?created_at[lt]=2026-01-01T00:00:10Z")
    assert [e["type"] for e in early] == RUNNING


@pytest.mark.rule("MA-A2.10", "MA-A0.24", "MA-F9")
async def test_misused_event_cursors_are_refused(face: Face) -> None:
    session, other = await face.session(), await face.session()
    await face.turn(session, "a", "b")
    page = (await face.ok("GET", f"/v1/sessions/{session}/events?limit=2"))["next_page"]
    for target in (
        f"{session}/events?order=desc&page={page}",
        f"{session}/events?types[]=agent.message&page={page}",
        f"{session}/events?created_at[gt]=2020-01-01T00:00:00Z&page={page}",
        f"{other}/events?page={page}",
        f"{session}/events?page={page[1:]}",
        f"{session}/events?page=nonsense",
        f"{session}/events?limit=1001",
        f"{session}/events?limit=0",
        f"{session}/events?order=newest",
        f"{session}/events?event_deltas[]=agent.message",
    ):
        assert (await face.refused("GET", "/v1/sessions/" + target))["status"] == 400
    assert len((await face.ok("GET", f"/v1/sessions/{session}/events?limit=1000&page={page}"))["data"]) == 7


@pytest.mark.rule("MA-C10.1", "MA-C10.3", "MA-B4.1", "MA-B4.2", "MA-B4.3", "MA-B4.4")
async def test_errors_name_their_kind_and_what_they_flushed(face: Face) -> None:
    session = await face.session()
    await face.say(session, "a")
    waiting = await face.say(session, "b")
    await face.fail(session, await face.begin(session), retryable=True)
    types = await face.types(session)
    place = types.index("session.error")
    assert types[place : place + 3] == [
        "session.error",
        "session.status_rescheduled",
        "session.thread_status_rescheduled",
    ]
    for _ in range(2):
        face.ledger.clock.advance(seconds=120)
        await face.fail(session, await face.begin(session), retryable=True)
    errors = [e for e in await face.events(session) if e["type"] == "session.error"]
    assert [e["error"]["retry_status"]["type"] for e in errors] == ["retrying", "retrying", "exhausted"]
    assert errors[0]["error"]["type"] == "model_overloaded_error"
    assert "flushed_event_ids" not in errors[0]
    assert errors[2]["flushed_event_ids"] == [waiting["id"]]
    listed = await face.events(session)
    assert [e["type"] for e in listed][-3:] == REST
    assert listed[-1]["stop_reason"] == {"type": "retries_exhausted"}
    assert all(e["processed_at"] is not None for e in listed)
    await face.say(session, "c")
    await face.fail(session, await face.begin(session), retryable=False, code="odd")
    events = await face.events(session)
    assert events[-1]["type"] == "session.status_terminated"
    last = [e for e in events if e["type"] == "session.error"][-1]
    assert (last["error"]["type"], last["error"]["retry_status"]) == ("unknown_error", {"type": "terminal"})
    for event in events:
        TypeAdapter(BetaManagedAgentsSessionEvent).validate_python(event)


@pytest.mark.rule("MA-B5.4", "MA-C10.7")
async def test_a_refusal_keeps_the_details_of_the_provider(face: Face) -> None:
    session = await face.session()
    await face.say(session, "a")
    details = {"type": "refusal", "category": "cyber", "explanation": "why"}
    await face.reply(session, await face.begin(session), stop_reason="refusal", stop_details=details)
    idle = (await face.events(session))[-1]
    assert (idle["stop_reason"], idle["stop_details"]) == ({"type": "refusal"}, details)


@pytest.mark.rule("MA-A3.5")
async def test_the_list_of_the_thread_is_the_same(face: Face) -> None:
    session = await face.session()
    await face.turn(session, "a", "b")
    thread = (await face.ok("GET", f"/v1/sessions/{session}/threads"))["data"][0]["id"]
    path = f"/v1/sessions/{session}/threads/{thread}/events"
    assert (await face.ok("GET", path))["data"] == await face.events(session)
    page = (await face.ok("GET", path + "?limit=4"))["next_page"]
    assert (await face.ok("GET", f"{path}?page={page}"))["data"] == (await face.events(session))[4:]
    assert (await face.refused("GET", f"/v1/sessions/{session}/events?page={page}"))["status"] == 400
