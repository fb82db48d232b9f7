"""The live stream of a session: rows as they commit, previews in between, comments while nothing happens."""

import asyncio
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.core.feed import CutOff, FeedItem, Gone, Row, Subscription
from perdure.domain.errors import Refused, Unavailable
from perdure.http.claude.answers import SESSION_NOT_FOUND, find_session, read_values
from perdure.http.claude.event_codec import WireEvent, to_wire, to_wire_deleted, to_wire_delta, to_wire_start
from perdure.http.claude.events import Cursor
from perdure.http.query import invalid, refuse_unknown
from perdure.http.requests import Request, SendStream
from perdure.http.services import Services
from perdure.ports.bus import PreviewDelta, PreviewStarted
from perdure.ports.ledger import SessionView

KEEPALIVE_S: Final = 12.0
"""Silence before a comment: proxies and clients are promised one at least every 15 s, and a busy loop may be late."""

DELTA_TYPES: Final = ("agent.message", "agent.thinking")
DELTA_VALUES_MAX: Final = 100
"""MA-F8."""

OPENED: Final = b": open\n\n"
KEEPALIVE: Final = b": keepalive\n\n"
HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies that buffer would turn a stream into a late file.
    "x-accel-buffering": "no",
}

_KNOWN: Final = ("event_deltas", "event_deltas[]")
_ID_PARTS: Final = 2
_PLACE_MAX: Final = 2
"""A row becomes at most three events."""

_ID_DIGITS_MAX: Final = 18


async def stream_events(services: Services, request: Request, send: SendStream) -> Refused | None:
    """`GET /v1/sessions/{session_id}/events/stream`."""
    view = await find_session(services, request)
    return view if isinstance(view, Refused) else await stream_of(services, request, send, view)


async def stream_of(services: Services, request: Request, send: SendStream, view: SessionView) -> Refused | None:
    """Stream a session that was found. The starting point is read before the headers leave, so nothing after them is missed."""
    deltas = _read_deltas(request)
    if isinstance(deltas, Refused):
        return deltas
    resume = read_last_id(request.headers.get("last-event-id"))
    if isinstance(resume, Refused):
        return resume
    if resume is not None and resume.seq > view.session.receipt_seq:
        return _bad_id("this session has no event with this id yet")
    session_id = view.session.id
    reader = await services.feeds.subscribe(
        session_id, after_seq=None if resume is None else resume.seq - 1, previews=bool(deltas)
    )
    if reader is None:
        return SESSION_NOT_FOUND
    try:
        agent: dict[str, Any] = msgspec.json.decode(view.config.agent)
        await send.start(HEADERS)
        await send.write(OPENED)
        await _pump(reader, send, Frames(session_id, str(agent["name"]), deltas, resume))
    except (ConnectionError, Unavailable):
        # The peer is gone, or the ledger is: either way the client opens the stream again and resumes by its last id.
        return None
    finally:
        reader.close()
    return None


async def _pump(reader: Subscription, send: SendStream, frames: "Frames") -> None:
    """Rows that show nothing on this face are silence too, so the wait counts from the last byte, not from the last item."""
    clock = asyncio.get_running_loop().time
    due = clock() + KEEPALIVE_S
    while True:
        item = await reader.next(max(0.0, due - clock()))
        data = KEEPALIVE if item is None else frames.of(item)
        if data:
            await send.write(data)
            due = clock() + KEEPALIVE_S
        if isinstance(item, (Gone, CutOff)):
            return


class Frames:
    """Turns what one reader gets into bytes. Remembers which previews it opened and how much text of each it sent."""

    def __init__(self, session_id: UUID, agent_name: str, deltas: frozenset[str], resume: Cursor | None) -> None:
        self._session_id = session_id
        self._agent_name = agent_name
        self._deltas = deltas
        self._resume = resume
        self._sent: dict[UUID, int] = {}
        """Code points of each open preview that went out."""

    def of(self, item: FeedItem) -> bytes:
        """The frames of one item; none for what this face does not show."""
        match item:
            case Row(seen):
                event = seen.event
                if event.type == "item.closed" and event.item_id is not None:
                    self._sent.pop(event.item_id, None)
                wires = to_wire(seen, sighting="stream", agent_name=self._agent_name)
                return b"".join(frame(wire, persisted=True) for wire in wires if self._is_new(wire))
            case PreviewStarted():
                return self._start(item)
            case PreviewDelta():
                return self._delta(item)
            case Gone():
                return frame(to_wire_deleted(self._session_id, datetime.now(UTC)), persisted=False)
            case CutOff():
                return b""

    def _is_new(self, wire: WireEvent) -> bool:
        resume = self._resume
        return resume is None or wire.seq > resume.seq or wire.place > resume.place

    def _start(self, preview: PreviewStarted) -> bytes:
        wire = to_wire_start(preview)
        kind = "agent.message" if preview.kind == "message" else "agent.thinking"
        if kind not in self._deltas or preview.item_id in self._sent:
            return b""
        self._sent[preview.item_id] = 0 if kind == "agent.message" else -1
        return frame(wire, persisted=False)

    def _delta(self, preview: PreviewDelta) -> bytes:
        """A piece that does not follow the last one is not sent, nor any after it: what was sent stays a prefix."""
        if self._sent.get(preview.item_id) != preview.offset:
            return b""
        self._sent[preview.item_id] += len(preview.text)
        return frame(to_wire_delta(preview), persisted=False)


_SEPARATORS: Final = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\u0085\u2028\u2029")
"""What many a client's line reader ends a line at. Control characters are escaped in JSON as it is."""


def frame(wire: WireEvent, *, persisted: bool) -> bytes:
    """One event of the stream, its JSON in one `data` line, also for readers that take other characters for line breaks."""
    cursor = f"id: {wire.seq}.{wire.place}\n".encode() if persisted else b""
    data = wire.data
    for character, escape in _SEPARATORS:
        data = data.replace(character, escape)
    return b"event: " + wire.type.encode() + b"\n" + cursor + b"data: " + data + b"\n\n"


def _read_deltas(request: Request) -> frozenset[str] | Refused:
    refused = refuse_unknown(request.query, _KNOWN)
    if refused is not None:
        return refused
    if len(request.query) > DELTA_VALUES_MAX:
        rule = f"event_deltas[]: may be given at most {DELTA_VALUES_MAX} times."
        return invalid("event_deltas[]", rule)
    values = read_values(request.query, "event_deltas", DELTA_TYPES)
    return values if isinstance(values, Refused) else frozenset(values or ())


def read_last_id(text: str | None) -> Cursor | Refused | None:
    """`Last-Event-ID`: the `id` of a frame of this stream, `seq.place`. An empty one counts as none, as in browsers."""
    if not text:
        return None
    parts = text.split(".")
    digits = all(p.isascii() and p.isdigit() and len(p) <= _ID_DIGITS_MAX for p in parts)
    if len(parts) != _ID_PARTS or not digits or int(parts[0]) < 1 or int(parts[1]) > _PLACE_MAX:
        return _bad_id("it is not an id of this stream")
    return Cursor(int(parts[0]), int(parts[1]))


def _bad_id(why: str) -> Refused:
    return invalid("Last-Event-ID", f"Last-Event-ID: {why}: open the stream without it, and list what came before.")
