"""Events of a session: send and list. Their stream is in `stream`."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.shape import Misfit, read_object
from perdure.http.claude.answers import (
    NOT_OURS,
    answer,
    bad_cursor,
    find_session,
    read_order,
    read_values,
    session_id_of,
)
from perdure.http.claude.arrivals import read_arrivals
from perdure.http.claude.event_codec import WireEvent, to_wire
from perdure.http.claude.event_types import EVENT_TYPES, ROWS, rows_of
from perdure.http.claude.session_pages import BOUNDS, Bounds, read_bounds
from perdure.http.claude.sessions import placed
from perdure.http.cursor import seal, unseal
from perdure.http.json_body import decode_body
from perdure.http.query import read_limit, read_text, refuse_unknown
from perdure.http.requests import Request, Response
from perdure.http.services import Services
from perdure.ports.ledger import READ_ROWS_MAX, Accept, EventQuery, Ledger, SeenEvent, SessionView, is_full

PAGE_EVENTS_MAX: Final = 1_000
"""MA-F9; also the default: the SDK's tool runner reads whole histories."""

PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""A page ends early when it gets larger than a request may be; the cursor goes on from there."""

_SESSION_KEYS: Final = ("limit", "order", "page", "types", "types[]", *BOUNDS)
_THREAD_KEYS: Final = ("limit", "page")
_SEQ_BYTES: Final = 8


class Cursor(msgspec.Struct, frozen=True):
    """The place of an event: its row, and its place among what the row becomes."""

    seq: int
    place: int


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A list request, read."""

    scope: str
    order: str
    limit: int
    types: frozenset[str]
    bounds: Bounds
    after: Cursor | None


async def send_events(services: Services, request: Request) -> Response | Refused:
    """`POST /v1/sessions/{session_id}/events`."""
    session_id = session_id_of(request)
    if isinstance(session_id, Refused):
        return session_id
    given = decode_body(request.body)
    if isinstance(given, Refused):
        return given
    try:
        body = read_object(given, "", known=("events",), required=("events",))
        arrivals = read_arrivals(body["events"], session_id)
    except Misfit as misfit:
        return misfit.refused
    accepted = await services.ledger.accept(
        Accept(
            session_id=session_id,
            workspace_id=request.workspace_id,
            arrivals=arrivals,
            submission=request.submission,
            authority=request.key_id,
        )
    )
    if isinstance(accepted, Refused):
        return placed(accepted)
    echo = [
        wire for event in accepted.events for wire in to_wire(SeenEvent(event, None), sighting="list", agent_name="")
    ]
    return answer({"data": [msgspec.Raw(wire.data) for wire in echo]})


async def list_events(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions/{session_id}/events`."""
    refused = refuse_unknown(request.query, _SESSION_KEYS)
    if refused is not None:
        return refused
    view = await find_session(services, request)
    return view if isinstance(view, Refused) else await list_of(services, request, view, "events")


async def list_thread_events(services: Services, request: Request, view: SessionView) -> Response | Refused:
    """The events of a session's thread, which has been found."""
    refused = refuse_unknown(request.query, _THREAD_KEYS)
    return refused if refused is not None else await list_of(services, request, view, "thread events")


async def list_of(services: Services, request: Request, view: SessionView, kind: str) -> Response | Refused:
    """A page of a session's events. Every row is of its one thread, so both lists read alike."""
    wanted = _read_wanted(request, view.session.id, kind)
    if isinstance(wanted, Refused):
        return wanted
    agent: dict[str, Any] = msgspec.json.decode(view.config.agent)
    page, more = await _read_page(services.ledger, view.session.id, wanted, str(agent["name"]))
    cursor = None
    if more and page:
        cursor = seal(request.workspace_id, wanted.scope, _cursor_bytes(page[-1]))
    return answer({"data": [msgspec.Raw(wire.data) for wire in page], "next_page": cursor})


def _read_wanted(request: Request, session_id: UUID, kind: str) -> _Wanted | Refused:
    query = request.query
    order = read_order(query, "asc")
    limit = read_limit(query, default=PAGE_EVENTS_MAX, most=PAGE_EVENTS_MAX)
    types = read_values(query, "types", EVENT_TYPES)
    bounds = read_bounds(query)
    if isinstance(order, Refused):
        return order
    if isinstance(limit, Refused):
        return limit
    if isinstance(types, Refused):
        return types
    if isinstance(bounds, Refused):
        return bounds
    times = "/".join(
        "" if t is None else t.isoformat() for t in (bounds.after, bounds.first, bounds.before, bounds.last)
    )
    scope = f"{kind} {session_id} {order} {','.join(sorted(types or ()))} {times}"
    after = _read_cursor(request, scope)
    if isinstance(after, Refused):
        return after
    return _Wanted(
        scope=scope,
        order=order,
        limit=limit,
        types=frozenset(ROWS if types is None else types),
        bounds=bounds,
        after=after,
    )


def _read_cursor(request: Request, scope: str) -> Cursor | Refused | None:
    text = read_text(request.query, "page")
    if text is None:
        return None
    raw = unseal(request.workspace_id, scope, text)
    if raw is None or len(raw) != _SEQ_BYTES + 1:
        return bad_cursor(f"{NOT_OURS} It holds for one session, order and set of filters.")
    return Cursor(int.from_bytes(raw[:_SEQ_BYTES], "big"), raw[_SEQ_BYTES])


def _cursor_bytes(wire: WireEvent) -> bytes:
    return wire.seq.to_bytes(_SEQ_BYTES, "big") + bytes([wire.place])


async def _read_page(
    ledger: Ledger, session_id: UUID, wanted: _Wanted, agent_name: str
) -> tuple[list[WireEvent], bool]:
    """Up to `limit` events, and whether more follow. Rows are read until the page is full, large enough, or at the end."""
    rows = rows_of(sorted(wanted.types))
    page: list[WireEvent] = []
    if not rows:
        return page, False
    size = 0
    position = _start(wanted)
    # The row of the cursor, and one that tells whether more follow, besides those that fill the page.
    asked = min(READ_ROWS_MAX, wanted.limit + 2)
    while True:
        seen = await ledger.read_events(_query(session_id, wanted, rows, position, asked))
        for row in seen:
            position = row.event.seq
            for wire in _expand(row, wanted, agent_name):
                if len(page) >= wanted.limit or (page and size + len(wire.data) > PAGE_BYTES_MAX):
                    return page, True
                page.append(wire)
                size += len(wire.data)
        if not is_full(seen, asked):
            return page, False


def _start(wanted: _Wanted) -> int | None:
    """The row of the cursor is read again: it may have more to show."""
    if wanted.after is None:
        return None
    return wanted.after.seq + 1 if wanted.order == "desc" else wanted.after.seq - 1


def _query(
    session_id: UUID, wanted: _Wanted, rows: tuple[tuple[str, str | None], ...], after_seq: int | None, limit: int
) -> EventQuery:
    return EventQuery(
        session_id=session_id,
        types=rows,
        after_seq=after_seq,
        descending=wanted.order == "desc",
        processed_after=wanted.bounds.after,
        processed_from=wanted.bounds.first,
        processed_before=wanted.bounds.before,
        processed_until=wanted.bounds.last,
        limit=limit,
    )


def _expand(row: SeenEvent, wanted: _Wanted, agent_name: str) -> Sequence[WireEvent]:
    """What a row shows in this list, in its order, behind the cursor."""
    events = [w for w in to_wire(row, sighting="list", agent_name=agent_name) if w.type in wanted.types]
    descending = wanted.order == "desc"
    if descending:
        events.reverse()
    after = wanted.after
    if after is None or row.event.seq != after.seq:
        return events
    return [w for w in events if (w.place < after.place if descending else w.place > after.place)]
