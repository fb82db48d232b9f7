"""Threads of a session. There is one, the primary; it comes into being with its session."""

from datetime import UTC, datetime
from typing import Final

from perdure.domain.errors import Refused
from perdure.domain.ids import primary_thread
from perdure.http.claude.answers import NOT_OURS, answer, bad_cursor, find_session, read_values
from perdure.http.claude.events import list_thread_events
from perdure.http.claude.session_codec import to_wire_thread
from perdure.http.claude.session_pages import STATUSES
from perdure.http.claude.stream import stream_of
from perdure.http.claude.wire import THREAD, from_wire_id
from perdure.http.query import read_limit, read_text, refuse_unknown
from perdure.http.requests import Request, Response, SendStream
from perdure.http.services import Services
from perdure.ports.ledger import SessionView

THREAD_NOT_FOUND: Final = Refused("not_found", "thread_not_found", "Thread not found.")

THREADS_MAX: Final = 1_000
"""MA-F9: of one page, and without a `limit`."""

_KNOWN: Final = ("limit", "page", "statuses", "statuses[]")


async def list_threads(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions/{session_id}/threads`."""
    refused = refuse_unknown(request.query, _KNOWN)
    if refused is not None:
        return refused
    limit = read_limit(request.query, default=THREADS_MAX, most=THREADS_MAX)
    if isinstance(limit, Refused):
        return limit
    statuses = read_values(request.query, "statuses", STATUSES)
    if isinstance(statuses, Refused):
        return statuses
    if read_text(request.query, "page") is not None:
        # One thread fits on any page, so no list of threads ever gave a cursor out.
        return bad_cursor(NOT_OURS)
    view = await find_session(services, request)
    if isinstance(view, Refused):
        return view
    shown = statuses is None or view.session.status in statuses
    return answer({"data": [to_wire_thread(view, datetime.now(UTC))] if shown else [], "next_page": None})


async def retrieve_thread(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions/{session_id}/threads/{thread_id}`."""
    view = await _find(services, request)
    return view if isinstance(view, Refused) else answer(to_wire_thread(view, datetime.now(UTC)))


async def list_events_of_thread(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions/{session_id}/threads/{thread_id}/events`."""
    view = await _find(services, request)
    return view if isinstance(view, Refused) else await list_thread_events(services, request, view)


async def stream_thread(services: Services, request: Request, send: SendStream) -> Refused | None:
    """`GET /v1/sessions/{session_id}/threads/{thread_id}/stream`."""
    view = await _find(services, request)
    return view if isinstance(view, Refused) else await stream_of(services, request, send, view)


async def _find(services: Services, request: Request) -> SessionView | Refused:
    """The session of a thread that is its own."""
    view = await find_session(services, request)
    if isinstance(view, Refused):
        return view
    if from_wire_id(THREAD, request.params["thread_id"]) != primary_thread(view.session.id):
        return THREAD_NOT_FOUND
    return view
