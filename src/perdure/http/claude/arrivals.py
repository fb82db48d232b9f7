"""Client events, from what a request says to what the ledger admits. All are read before any is admitted."""

from typing import Any, Final
from uuid import UUID

from perdure.domain.barrier import Answer
from perdure.domain.event import encode
from perdure.domain.ids import primary_thread
from perdure.domain.shape import Misfit, join, read_array, read_choice, read_flag, read_object, read_text, unsupported
from perdure.http.claude.blocks import MESSAGE_BLOCKS, RESULT_BLOCKS, SYSTEM_BLOCKS, SYSTEM_ITEMS_MAX, read_blocks
from perdure.http.claude.event_types import CLIENT_TYPES, EVENT_TYPES
from perdure.http.claude.wire import EVENT, THREAD, from_wire_id
from perdure.ports.ledger import Arrival

EVENTS_MAX: Final = 1_000
"""Events of one request: as many as a mailbox holds."""

INITIAL_EVENTS_MAX: Final = 50
"""MA-F2."""

DENY_CHARS_MAX: Final = 10_000
"""A reason, which the model reads in place of a result."""


def read_arrivals(value: Any, session_id: UUID) -> tuple[Arrival, ...]:
    """The events of a send. Raises `Misfit`."""
    rows = read_array(value, "events", least=1, most=EVENTS_MAX)
    arrivals = tuple(_read_arrival(row, join("events", index), session_id) for index, row in enumerate(rows))
    systems = [a for a in arrivals if a.kind == "system"]
    if len(systems) > 1:
        raise Misfit(systems[1].param, "system.message may come once in a request.")
    return arrivals


def read_initial_arrivals(value: Any, session_id: UUID) -> tuple[Arrival, ...]:
    """The events that a session is created with: messages only. Raises `Misfit`."""
    rows = read_array(value, "initial_events", most=INITIAL_EVENTS_MAX)
    arrivals: list[Arrival] = []
    for index, row in enumerate(rows):
        path = join("initial_events", index)
        kind = _read_type(row, path)
        if kind not in ("user.message", "user.define_outcome"):
            raise Misfit(join(path, "type"), f"{kind} can't be an initial event; a session starts with user.message.")
        arrivals.append(_read_arrival(row, path, session_id))
    return tuple(arrivals)


def _read_type(value: Any, path: str) -> str:
    kind = read_text(read_object(value, path, required=("type",))["type"], join(path, "type"))
    if kind in CLIENT_TYPES:
        return kind
    if kind in EVENT_TYPES:
        raise Misfit(join(path, "type"), f"{kind} events are written by the server only.")
    raise Misfit(join(path, "type"), f"{kind[:64]!r} is no event type; clients send {', '.join(sorted(CLIENT_TYPES))}.")


def _read_arrival(value: Any, path: str, session_id: UUID) -> Arrival:
    match _read_type(value, path):
        case "user.message":
            given = read_object(value, path, known=("type", "content"), required=("content",))
            content = read_blocks(given["content"], join(path, "content"), MESSAGE_BLOCKS, least=1)
            return Arrival(kind="message", body=encode({"content": content}), param=path)
        case "system.message":
            given = read_object(value, path, known=("type", "content"), required=("content",))
            place = join(path, "content")
            content = read_blocks(given["content"], place, SYSTEM_BLOCKS, least=1, most=SYSTEM_ITEMS_MAX)
            return Arrival(kind="system", body=encode({"content": content}), param=path)
        case "user.interrupt":
            given = read_object(value, path, known=("type", "session_thread_id"))
            named = given.get("session_thread_id")
            _check_thread(named, join(path, "session_thread_id"), session_id)
            body = {} if named is None else {"session_thread_id": named}
            return Arrival(kind="interrupt", body=encode(body), param=path)
        case "user.custom_tool_result":
            return _read_result(value, path, session_id)
        case "user.tool_confirmation":
            return _read_confirmation(value, path, session_id)
        case "user.define_outcome":
            raise unsupported(join(path, "type"), "user.define_outcome")
        case kind:
            raise Misfit(
                join(path, "type"),
                f"{kind} is accepted only where the client runs the built-in tools; in this session the server does. "
                "Answer a custom tool with user.custom_tool_result.",
            )


def _read_result(value: Any, path: str, session_id: UUID) -> Arrival:
    known = ("type", "custom_tool_use_id", "content", "is_error", "session_thread_id")
    given = read_object(value, path, known=known, required=("custom_tool_use_id",))
    place = join(path, "content")
    content = read_blocks(given["content"], place, RESULT_BLOCKS, least=0, blank=True) if "content" in given else []
    is_error = given.get("is_error")
    body = {
        "content": content,
        "is_error": False if is_error is None else read_flag(is_error, join(path, "is_error")),
    }
    return _answer(given, path, session_id, "custom_tool_use_id", "result", encode(body))


def _read_confirmation(value: Any, path: str, session_id: UUID) -> Arrival:
    known = ("type", "tool_use_id", "result", "deny_message", "session_thread_id")
    given = read_object(value, path, known=known, required=("tool_use_id", "result"))
    result = read_choice(given["result"], join(path, "result"), ("allow", "deny"))
    message = given.get("deny_message")
    if message is not None:
        place = join(path, "deny_message")
        if result == "allow":
            raise Misfit(place, "is allowed only with result deny.")
        message = read_text(message, place, most=DENY_CHARS_MAX)
    answer: Answer = "allow" if result == "allow" else "deny"
    return _answer(
        given, path, session_id, "tool_use_id", answer, encode({"result": result, "deny_message": message or None})
    )


def _answer(given: dict[str, Any], path: str, session_id: UUID, field: str, answer: Answer, body: bytes) -> Arrival:
    place = join(path, field)
    reference = read_text(given[field], place)
    action_id = from_wire_id(EVENT, reference)
    if action_id is None:
        raise Misfit(place, f"No required action has the id {reference[:64]!r}.", code="unknown_action")
    _check_thread(given.get("session_thread_id"), join(path, "session_thread_id"), session_id)
    return Arrival(
        kind="custom_result" if answer == "result" else "confirmation",
        body=body,
        action_id=action_id,
        answer=answer,
        reference=reference,
        param=place,
    )


def _check_thread(value: Any, path: str, session_id: UUID) -> None:
    """The one thread there is may be named; an answer belongs to it, an interrupt stops it."""
    if value is None:
        return
    text = read_text(value, path)
    if from_wire_id(THREAD, text) != primary_thread(session_id):
        raise Misfit(path, f"this session has no thread with the id {text[:64]!r}.", code="unknown_thread")
