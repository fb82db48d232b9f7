"""Rows of the ledger as events of this face: a static table, read by pure functions.

A row becomes none to three wire events. The one at place 0 has the row's id, or the id of the item or input that it shows; the others
have ids derived from the row. Nothing here looks at the present state of a session: what a codec needs stands in the row.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.event import ErrorSnap, Event, InputSnap, ItemSnap, PhaseName, PhaseSnap, StepSnap
from perdure.domain.ids import derived
from perdure.domain.projection import Phase, project_phase
from perdure.domain.transcript import denial_text
from perdure.http.claude.session_codec import to_wire_agent, to_wire_usage
from perdure.http.claude.wire import EVENT, THREAD, expansion_id, to_wire_id, to_wire_time
from perdure.ports.bus import PreviewDelta, PreviewStarted
from perdure.ports.ledger import SeenEvent

Sighting: TypeAlias = Literal["list", "stream"]
Fields: TypeAlias = dict[str, Any]
Expansion: TypeAlias = list[tuple[str, str, Fields]]
"""(id, type, own fields), in public order."""


class WireEvent(msgspec.Struct, frozen=True):
    """One event as clients get it. (`seq`, `place`) is its cursor; `data` is its JSON, ready to be sent or put into a page."""

    seq: int
    place: int
    id: str
    type: str
    data: bytes


class _Content(msgspec.Struct):
    """A stored body with blocks, passed on without being taken apart."""

    content: msgspec.Raw
    is_error: bool = False


class _Call(msgspec.Struct):
    name: str
    input: msgspec.Raw


class _Confirmation(msgspec.Struct):
    result: str
    deny_message: str | None = None


class _Decoders:
    """One decoder for each form, made once."""

    phase = msgspec.json.Decoder(PhaseSnap)
    error = msgspec.json.Decoder(ErrorSnap)
    input = msgspec.json.Decoder(InputSnap)
    item = msgspec.json.Decoder(ItemSnap)
    step = msgspec.json.Decoder(StepSnap)
    content = msgspec.json.Decoder(_Content)
    call = msgspec.json.Decoder(_Call)
    confirmation = msgspec.json.Decoder(_Confirmation)


_ENCODER: Final = msgspec.json.Encoder()


def to_wire(seen: SeenEvent, *, sighting: Sighting, agent_name: str) -> tuple[WireEvent, ...]:
    """What a row shows. `agent_name` is the session's, fixed at its creation."""
    event = seen.event
    if event.type == "session.phase":
        expansion = _phase(event, agent_name)
    else:
        expand = _TABLE.get((event.type, event.kind)) or _TABLE.get((event.type, ""))
        expansion = [] if expand is None else expand(seen, sighting)
    return tuple(
        WireEvent(event.seq, place, identity, kind, _ENCODER.encode({"id": identity, "type": kind, **fields}))
        for place, (identity, kind, fields) in enumerate(expansion)
    )


def _own(event: Event, kind: str, **fields: Any) -> Expansion:
    return [(to_wire_id(EVENT, event.id), kind, {**fields, "processed_at": to_wire_time(event.at)})]


def _item(event: Event, kind: str, **fields: Any) -> Expansion:
    assert event.item_id is not None
    return [(to_wire_id(EVENT, event.item_id), kind, {**fields, "processed_at": to_wire_time(event.at)})]


def _body(seen: SeenEvent) -> bytes:
    """The body of a row, or of the row that it shows again."""
    body = seen.event.body
    if body is None and seen.referred is not None:
        body = seen.referred.body
    assert body is not None, f"row {seen.event.seq} of {seen.event.session_id} has no body"
    return body


# ------------------------------------------------------------------------------------------------------------------ inputs


def _received(seen: SeenEvent, sighting: Sighting) -> Expansion:
    """First sighting. A list shows what is known now; a stream what was known then, also when it is replayed."""
    event = seen.event
    at = event.processed_at
    if sighting == "stream" and event.processed_seq != event.seq:
        at = None
    return _input(event, at)


def _settled(seen: SeenEvent, sighting: Sighting) -> Expansion:
    """Second sighting, on streams alone, and not of what was processed when it came."""
    received = seen.referred
    if sighting == "list" or received is None or received.processed_seq == received.seq:
        return []
    return _input(received, seen.event.at)


def _input(event: Event, processed_at: datetime | None) -> Expansion:
    kind, fields = _INPUTS[event.kind](event)
    fields["processed_at"] = None if processed_at is None else to_wire_time(processed_at)
    return [(to_wire_id(EVENT, event.id), kind, fields)]


def _message(event: Event) -> tuple[str, Fields]:
    return "user.message", {"content": _Decoders.content.decode(event.body or b"").content}


def _system(event: Event) -> tuple[str, Fields]:
    return "system.message", {"content": _Decoders.content.decode(event.body or b"").content}


def _interrupt(event: Event) -> tuple[str, Fields]:
    named: Fields = msgspec.json.decode(event.body or b"{}")
    return "user.interrupt", named


def _confirmation(event: Event) -> tuple[str, Fields]:
    body = _Decoders.confirmation.decode(event.body or b"")
    fields = {"tool_use_id": _answered(event), "result": body.result, "deny_message": body.deny_message}
    return "user.tool_confirmation", fields


def _custom_result(event: Event) -> tuple[str, Fields]:
    body = _Decoders.content.decode(event.body or b"")
    fields = {"custom_tool_use_id": _answered(event), "content": body.content, "is_error": body.is_error}
    return "user.custom_tool_result", fields


def _answered(event: Event) -> str:
    action_id = _Decoders.input.decode(event.snap).action_id
    assert action_id is not None
    return to_wire_id(EVENT, action_id)


_INPUTS: Final[Mapping[str, Callable[[Event], tuple[str, Fields]]]] = {
    "message": _message,
    "system": _system,
    "interrupt": _interrupt,
    "confirmation": _confirmation,
    "custom_result": _custom_result,
}


# ------------------------------------------------------------------------------------------------------------------- items


def _spoken(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    if _Decoders.item.decode(seen.event.snap).state != "completed":
        return []
    return _item(seen.event, "agent.message", content=_Decoders.content.decode(_body(seen)).content)


def _thought(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    completed = _Decoders.item.decode(seen.event.snap).state == "completed"
    return _item(seen.event, "agent.thinking") if completed else []


def _tool_use(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    snap = _Decoders.item.decode(seen.event.snap)
    call = _Decoders.call.decode(_body(seen))
    fields: Fields = {"name": call.name, "input": call.input, "evaluated_permission": snap.permission}
    if snap.permission != "deny" and snap.policy is not None:
        fields["evaluation"] = {"type": snap.policy}
    return _item(seen.event, "agent.tool_use", **fields)


def _custom_tool_use(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    call = _Decoders.call.decode(_body(seen))
    return _item(seen.event, "agent.custom_tool_use", name=call.name, input=call.input)


def _tool_result(seen: SeenEvent, sighting: Sighting) -> Expansion:
    """A result has the row's own id: its item's belongs to the call. A denial refers to the confirmation that said it."""
    del sighting
    event = seen.event
    assert event.item_id is not None
    fields: Fields = {"tool_use_id": to_wire_id(EVENT, event.item_id)}
    if _Decoders.item.decode(event.snap).permission == "deny" and event.body is None:
        text = denial_text(_Decoders.confirmation.decode(_body(seen)).deny_message)
        fields |= {"content": [{"type": "text", "text": text}], "is_error": True}
    else:
        body = _Decoders.content.decode(_body(seen))
        fields |= {"content": body.content, "is_error": body.is_error}
    return _own(event, "agent.tool_result", **fields)


# ----------------------------------------------------------------------------------------------------------------- session


def _phase(event: Event, agent_name: str) -> Expansion:
    """A thread's status next to its session's. At rest the thread comes first and the session last, usage directly before it."""
    kind: PhaseName = event.kind  # pyright: ignore[reportAssignmentType]
    phase = project_phase(kind, _Decoders.phase.decode(event.snap))
    thread: Fields = {"session_thread_id": to_wire_id(THREAD, event.thread_id), "agent_name": agent_name}
    order: list[tuple[str, Fields]]
    match phase.status:
        case "running":
            order = [("session.status_running", {}), ("session.thread_status_running", thread)]
        case "rescheduling":
            order = [("session.status_rescheduled", {}), ("session.thread_status_rescheduled", thread)]
        case "terminated":
            order = [("session.thread_status_terminated", thread), ("session.status_terminated", {})]
        case "idle":
            stop: Fields = {"stop_reason": _stop_reason(phase), "stop_details": _stop_details(phase)}
            order = [("session.thread_status_idle", thread | stop)]
            if phase.usage is not None:
                order.append(("session.usage", {"usage": to_wire_usage(phase.usage), "budget": None}))
            order.append(("session.status_idle", stop))
    at = to_wire_time(event.at)
    return [
        (expansion_id(event.id, place), name, {**fields, "processed_at": at})
        for place, (name, fields) in enumerate(order)
    ]


def _stop_reason(phase: Phase) -> Fields:
    assert phase.stop_reason is not None
    if phase.stop_reason == "requires_action":
        return {"type": "requires_action", "event_ids": [to_wire_id(EVENT, i) for i in phase.action_ids]}
    return {"type": phase.stop_reason}


def _stop_details(phase: Phase) -> Fields | None:
    if phase.stop_details is None:
        return None
    details = phase.stop_details
    return {"type": "refusal", "category": details.get("category"), "explanation": details.get("explanation")}


ERROR_TYPES: Final[Mapping[str, str]] = {
    "overloaded": "model_overloaded_error",
    "rate_limited": "model_rate_limited_error",
    "request_failed": "model_request_failed_error",
    "request_too_large": "model_request_failed_error",
    "authentication": "model_request_failed_error",
    "refused": "model_request_failed_error",
    "stalled": "model_request_failed_error",
    "billing": "billing_error",
    **{
        name: name
        for name in (
            "model_overloaded_error",
            "model_rate_limited_error",
            "model_request_failed_error",
            "billing_error",
            "tool_use_limit_reached_error",
            "compaction_limit_reached_error",
        )
    },
}
"""Codes of the ledger, and of the provider port, as members of the SDK's union; any other code is `unknown_error`."""


def _error(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    snap = _Decoders.error.decode(seen.event.snap)
    error = {
        "type": ERROR_TYPES.get(snap.code, "unknown_error"),
        "message": snap.message,
        "retry_status": {"type": snap.retry},
    }
    flushed: Fields = {}
    if snap.flushed:
        flushed["flushed_event_ids"] = [to_wire_id(EVENT, i) for i in snap.flushed]
    return _own(seen.event, "session.error", error=error, **flushed)


def _updated(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    changed: Fields = msgspec.json.decode(_body(seen))
    if changed.get("metadata") == {}:
        # As the SDK describes it: the bag is shown unless it was cleared.
        del changed["metadata"]
    if "agent" in changed:
        changed["agent"] = to_wire_agent(changed["agent"])
    return _own(seen.event, "session.updated", **changed)


def _span_started(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    return _own(seen.event, "span.model_request_start")


def _span_ended(seen: SeenEvent, sighting: Sighting) -> Expansion:
    del sighting
    snap = _Decoders.step.decode(seen.event.snap)
    assert seen.referred is not None, "the end of a span refers to its start"
    usage = {
        "input_tokens": snap.input_tokens,
        "output_tokens": snap.output_tokens,
        "cache_creation_input_tokens": snap.cache_creation_5m_tokens + snap.cache_creation_1h_tokens,
        "cache_read_input_tokens": snap.cache_read_tokens,
    }
    return _own(
        seen.event,
        "span.model_request_end",
        model_request_start_id=to_wire_id(EVENT, seen.referred.id),
        model_usage=usage,
        is_error=snap.is_error,
    )


_TABLE: Final[Mapping[tuple[str, str], Callable[[SeenEvent, Sighting], Expansion]]] = {
    ("input.received", ""): _received,
    ("input.settled", ""): _settled,
    ("item.closed", "message"): _spoken,
    ("item.closed", "thinking"): _thought,
    ("item.closed", "tool"): _tool_result,
    ("item.opened", "tool"): _tool_use,
    ("item.opened", "custom"): _custom_tool_use,
    ("session.error", ""): _error,
    ("session.updated", ""): _updated,
    ("step.model.started", ""): _span_started,
    ("step.model.ended", ""): _span_ended,
}
"""A kind of its own, or any kind. Rows that are not here, turns and actions among them, show nothing on this face."""


# ------------------------------------------------------------------------------------------------------- frames without row


def to_wire_start(preview: PreviewStarted) -> WireEvent:
    """The opening of a preview."""
    kind = "agent.message" if preview.kind == "message" else "agent.thinking"
    identity = to_wire_id(EVENT, preview.item_id)
    return _frame("event_start", {"type": "event_start", "event": {"type": kind, "id": identity}})


def to_wire_delta(preview: PreviewDelta) -> WireEvent:
    """More text of a preview. A message has one block, so its place in the content is always 0."""
    delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": preview.text}}
    identity = to_wire_id(EVENT, preview.item_id)
    return _frame("event_delta", {"type": "event_delta", "event_id": identity, "delta": delta})


def to_wire_deleted(session_id: UUID, at: datetime) -> WireEvent:
    """The last frame of a deleted session's streams; never a row, never listed."""
    identity = to_wire_id(EVENT, derived(session_id, "claude", "deleted"))
    return _frame("session.deleted", {"id": identity, "type": "session.deleted", "processed_at": to_wire_time(at)})


def _frame(kind: str, data: Fields) -> WireEvent:
    return WireEvent(0, 0, "", kind, _ENCODER.encode(data))
