"""Golden JSON: what each kind of row becomes, to the last field. A change here is a change of the wire."""

import json
from datetime import UTC, datetime
from typing import Any, get_args
from uuid import UUID

import msgspec
import pytest
from anthropic.types.beta.sessions import BetaManagedAgentsStreamSessionEvents
from pydantic import TypeAdapter

from perdure.domain.event import (
    EMPTY_SNAP,
    ErrorSnap,
    Event,
    EventType,
    InputSnap,
    ItemSnap,
    PhaseName,
    PhaseSnap,
    StepSnap,
    UsageSnap,
    encode,
)
from perdure.domain.ids import derived, token
from perdure.http.claude.event_codec import to_wire, to_wire_deleted, to_wire_delta, to_wire_start
from perdure.http.claude.event_types import EVENT_TYPES, ROWS
from perdure.ports.bus import PreviewDelta, PreviewStarted
from perdure.ports.ledger import SeenEvent

SESSION = UUID(int=1)
THREAD = UUID(int=2)
ITEM = UUID(int=3)
AT = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
LATER = datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
TIME = "2026-03-01T12:00:00.000005Z"
LATER_TIME = "2026-03-01T12:01:00.000000Z"


def sevt(identity: UUID) -> str:
    return "sevt_" + token(identity)


def row(kind_of: EventType, kind: str = "", snap: msgspec.Struct | None = None, **fields: Any) -> Event:
    made: dict[str, Any] = {
        "session_id": SESSION,
        "seq": 7,
        "id": UUID(int=70),
        "thread_id": THREAD,
        "type": kind_of,
        "kind": kind,
        "at": AT,
        "turn_id": None,
        "item_id": ITEM if kind_of.startswith("item.") else None,
        "step_id": None,
        "ref_seq": None,
        "out_index": None,
        "snap": EMPTY_SNAP if snap is None else encode(snap),
        "body": None,
        "processed_seq": None,
        "processed_at": None,
    }
    return Event(**(made | fields))


def shown(event: Event, referred: Event | None = None, sighting: Any = "list") -> list[dict[str, Any]]:
    wires = to_wire(SeenEvent(event, referred), sighting=sighting, agent_name="helper")
    for place, wire in enumerate(wires):
        value = json.loads(wire.data)
        TypeAdapter(BetaManagedAgentsStreamSessionEvents).validate_python(value)
        assert (wire.seq, wire.place, wire.id, wire.type) == (event.seq, place, value["id"], value["type"])
    return [json.loads(w.data) for w in wires]


TEXT = [{"type": "text", "text": "hi"}]
OWN = sevt(UUID(int=70))
USAGE = UsageSnap(
    input_tokens=1,
    output_tokens=2,
    cache_read_tokens=3,
    cache_creation_5m_tokens=4,
    cache_creation_1h_tokens=5,
    active_ms=1500,
)
STATUS = {"session_thread_id": "sthr_" + token(THREAD), "agent_name": "helper", "processed_at": TIME}


@pytest.mark.rule("MA-B7.7", "MA-B8.2", "MA-B1.2")
@pytest.mark.parametrize(
    ("kind", "snap", "body", "expected"),
    [
        ("message", InputSnap(), {"content": TEXT}, {"type": "user.message", "content": TEXT}),
        ("system", InputSnap(), {"content": TEXT}, {"type": "system.message", "content": TEXT}),
        ("interrupt", InputSnap(), {}, {"type": "user.interrupt"}),
        (
            "confirmation",
            InputSnap(action_id=ITEM),
            {"result": "deny", "deny_message": "no"},
            {"type": "user.tool_confirmation", "tool_use_id": sevt(ITEM), "result": "deny", "deny_message": "no"},
        ),
        (
            "custom_result",
            InputSnap(action_id=ITEM),
            {"content": TEXT, "is_error": True},
            {"type": "user.custom_tool_result", "custom_tool_use_id": sevt(ITEM), "content": TEXT, "is_error": True},
        ),
    ],
)
def test_inputs_at_both_sightings(kind: str, snap: InputSnap, body: dict[str, Any], expected: dict[str, Any]) -> None:
    waiting = row("input.received", kind, snap, body=encode(body))
    stamped = msgspec.structs.replace(waiting, processed_seq=9, processed_at=LATER)
    on_receipt = msgspec.structs.replace(waiting, processed_seq=7, processed_at=AT)
    first = {"id": OWN, **expected, "processed_at": None}
    assert shown(waiting) == shown(waiting, sighting="stream") == [first]
    assert shown(stamped) == [first | {"processed_at": LATER_TIME}]
    assert shown(stamped, sighting="stream") == [first], "a replayed first sighting looks as it did"
    assert shown(on_receipt, sighting="stream") == [first | {"processed_at": TIME}]
    settled = row("input.settled", kind, seq=9, id=UUID(int=90), at=LATER)
    assert shown(settled, waiting) == []
    assert shown(settled, stamped, "stream") == [first | {"processed_at": LATER_TIME}]
    assert shown(settled, waiting, "stream") == [first | {"processed_at": LATER_TIME}], "the stamp may not be seen yet"
    assert shown(settled, on_receipt, "stream") == []


def test_items() -> None:
    done, open_ = ItemSnap(state="completed"), ItemSnap()
    spoken = row("item.closed", "message", done, body=encode({"content": TEXT}))
    assert shown(spoken) == [{"id": sevt(ITEM), "type": "agent.message", "content": TEXT, "processed_at": TIME}]
    assert shown(row("item.closed", "thinking", done, body=b"{}")) == [
        {"id": sevt(ITEM), "type": "agent.thinking", "processed_at": TIME}
    ]
    cut = ItemSnap(state="incomplete")
    for kind in ("message", "thinking"):
        assert shown(row("item.opened", kind, open_)) == []
        assert shown(row("item.closed", kind, cut, body=encode({"content": TEXT}))) == []


@pytest.mark.rule("MA-B2.4", "MA-B2.5", "MA-D2.1", "MA-D1.2")
def test_calls() -> None:
    call = encode({"name": "bash", "input": {"command": "ls", "big": 18446744073709551615}})
    body = {"name": "bash", "input": {"command": "ls", "big": 18446744073709551615}, "processed_at": TIME}
    use = {"id": sevt(ITEM), "type": "agent.tool_use"} | body
    allowed = row("item.opened", "tool", ItemSnap(permission="allow", policy="always_allow"), body=call)
    assert shown(allowed) == [use | {"evaluated_permission": "allow", "evaluation": {"type": "always_allow"}}]
    denied = row("item.opened", "tool", ItemSnap(permission="deny"), body=call)
    assert shown(denied) == [use | {"evaluated_permission": "deny"}]
    held = row("item.held", "tool", body=call, seq=5, id=UUID(int=50))
    assert shown(held) == []
    asked = row("item.opened", "tool", ItemSnap(permission="ask", policy="always_ask"), ref_seq=5)
    assert shown(asked, held) == [use | {"evaluated_permission": "ask", "evaluation": {"type": "always_ask"}}]
    custom = row("item.opened", "custom", ItemSnap(policy="always_ask"), ref_seq=5)
    assert shown(custom, held) == [{"id": sevt(ITEM), "type": "agent.custom_tool_use"} | body]


@pytest.mark.rule("MA-D2.4")
def test_results() -> None:
    result = row("item.closed", "tool", ItemSnap(state="failed"), body=encode({"content": TEXT, "is_error": True}))
    base = {"id": OWN, "type": "agent.tool_result", "tool_use_id": sevt(ITEM), "processed_at": TIME, "is_error": True}
    assert shown(result) == [base | {"content": TEXT}]
    answer = row("input.received", "confirmation", body=encode({"result": "deny", "deny_message": "not now"}))
    denial = row("item.closed", "tool", ItemSnap(state="failed", permission="deny"), ref_seq=7)
    said = [{"type": "text", "text": "The user denied this call: not now"}]
    assert shown(denial, answer) == [base | {"content": said}]
    assert shown(row("item.closed", "custom", ItemSnap(state="completed"), ref_seq=7), answer) == []


@pytest.mark.rule("MA-B3.2", "MA-B3.3", "MA-B3.4", "MA-B5.2")
def test_phases() -> None:
    second, third = sevt(derived(UUID(int=70), "claude", 1)), sevt(derived(UUID(int=70), "claude", 2))
    assert shown(row("session.phase", "active", PhaseSnap())) == [
        {"id": OWN, "type": "session.status_running", "processed_at": TIME},
        {"id": second, "type": "session.thread_status_running", **STATUS},
    ]
    assert shown(row("session.phase", "retrying", PhaseSnap())) == [
        {"id": OWN, "type": "session.status_rescheduled", "processed_at": TIME},
        {"id": second, "type": "session.thread_status_rescheduled", **STATUS},
    ]
    assert shown(row("session.phase", "terminated", PhaseSnap(usage=USAGE))) == [
        {"id": OWN, "type": "session.thread_status_terminated", **STATUS},
        {"id": second, "type": "session.status_terminated", "processed_at": TIME},
    ]
    parked = PhaseSnap(stop_reason="requires_action", action_ids=(ITEM, UUID(int=4)), usage=USAGE)
    stop = {"stop_reason": {"type": "requires_action", "event_ids": [sevt(ITEM), sevt(UUID(int=4))]}}
    assert shown(row("session.phase", "wait_action", parked)) == [
        {"id": OWN, "type": "session.thread_status_idle", **STATUS, **stop, "stop_details": None},
        {
            "id": second,
            "type": "session.usage",
            "processed_at": TIME,
            "budget": None,
            "usage": {
                "input_tokens": 1,
                "output_tokens": 2,
                "cache_creation": {"ephemeral_1h_input_tokens": 5, "ephemeral_5m_input_tokens": 4},
                "cache_read_input_tokens": 3,
                "active_seconds": 1.5,
                "list_cost": None,
                "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
            },
        },
        {"id": third, "type": "session.status_idle", "processed_at": TIME, **stop, "stop_details": None},
    ]


@pytest.mark.rule("MA-B5.1", "MA-B5.3", "MA-B5.4")
@pytest.mark.parametrize("reason", ["end_turn", "retries_exhausted", "refusal"])
def test_reasons_of_an_idle(reason: Any) -> None:
    snap = PhaseSnap(stop_reason=reason, stop_details={"category": None, "explanation": "e"}, usage=USAGE)
    idle = shown(row("session.phase", "idle", snap))[-1]
    assert idle["stop_reason"] == {"type": reason}
    details = {"type": "refusal", "category": None, "explanation": "e"} if reason == "refusal" else None
    assert idle["stop_details"] == details


@pytest.mark.rule("MA-B4.1", "MA-B4.3", "MA-B4.4")
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("model_overloaded_error", "model_overloaded_error"),
        ("rate_limited", "model_rate_limited_error"),
        ("stalled", "model_request_failed_error"),
        ("billing_error", "billing_error"),
        ("tool_use_limit_reached_error", "tool_use_limit_reached_error"),
        ("something_new", "unknown_error"),
    ],
)
def test_errors(code: str, kind: str) -> None:
    error = row("session.error", snap=ErrorSnap(code=code, message="m", retry="exhausted", flushed=(ITEM,)))
    assert shown(error) == [
        {
            "id": OWN,
            "type": "session.error",
            "error": {"type": kind, "message": "m", "retry_status": {"type": "exhausted"}},
            "flushed_event_ids": [sevt(ITEM)],
            "processed_at": TIME,
        }
    ]


@pytest.mark.rule("MA-B3.7")
def test_spans() -> None:
    started = row("step.model.started", seq=5, id=UUID(int=50))
    assert shown(started) == [{"id": sevt(UUID(int=50)), "type": "span.model_request_start", "processed_at": TIME}]
    snap = StepSnap(
        is_error=True,
        input_tokens=1,
        output_tokens=2,
        cache_read_tokens=3,
        cache_creation_5m_tokens=4,
        cache_creation_1h_tokens=5,
    )
    assert shown(row("step.model.ended", snap=snap, ref_seq=5), started) == [
        {
            "id": OWN,
            "type": "span.model_request_end",
            "model_request_start_id": sevt(UUID(int=50)),
            "model_usage": {
                "input_tokens": 1,
                "output_tokens": 2,
                "cache_creation_input_tokens": 9,
                "cache_read_input_tokens": 3,
            },
            "is_error": True,
            "processed_at": TIME,
        }
    ]


def test_rows_that_this_face_does_not_show() -> None:
    hidden: set[EventType] = {
        "session.created",
        "input.applied",
        "turn.created",
        "turn.started",
        "turn.parked",
        "turn.resumed",
        "turn.ended",
        "item.held",
        "action.opened",
        "action.answered",
        "action.closed",
    }
    for kind in hidden:
        assert shown(row(kind, "message")) == shown(row(kind, "message"), sighting="stream") == []
    listed = {pair[0] for pairs in ROWS.values() for pair in pairs} | {"input.settled"}
    assert hidden | listed == set(get_args(EventType)), "a new row type must be placed"
    assert {k for t, k in ROWS["session.status_idle"] + ROWS["session.status_running"] if t == "session.phase"} | {
        "retrying",
        "terminated",
    } == set(get_args(PhaseName))


def test_every_type_that_the_sdk_filters_by_is_known() -> None:
    from anthropic.types.beta.sessions.beta_managed_agents_session_event_type import BetaManagedAgentsSessionEventType

    assert set(get_args(BetaManagedAgentsSessionEventType)) == EVENT_TYPES


def test_frames_without_a_row() -> None:
    start = to_wire_start(PreviewStarted(session_id=SESSION, thread_id=THREAD, item_id=ITEM, kind="message"))
    assert json.loads(start.data) == {"type": "event_start", "event": {"type": "agent.message", "id": sevt(ITEM)}}
    piece = PreviewDelta(session_id=SESSION, thread_id=THREAD, item_id=ITEM, offset=0, text="a\nb")
    delta = to_wire_delta(piece)
    assert b"\n" not in delta.data
    assert json.loads(delta.data) == {
        "type": "event_delta",
        "event_id": sevt(ITEM),
        "delta": {"type": "content_delta", "index": 0, "content": {"type": "text", "text": "a\nb"}},
    }
    gone = json.loads(to_wire_deleted(SESSION, AT).data)
    assert (gone["type"], gone["processed_at"]) == ("session.deleted", TIME)
