"""The routes of sessions, their events and their threads."""

from typing import Final

from perdure.http.claude.events import list_events, send_events
from perdure.http.claude.session_pages import list_sessions
from perdure.http.claude.sessions import (
    archive_session,
    create_session,
    delete_session,
    retrieve_session,
    update_session,
)
from perdure.http.claude.stream import stream_events
from perdure.http.claude.threads import list_events_of_thread, list_threads, retrieve_thread, stream_thread
from perdure.http.requests import AnyRoute, Route, StreamRoute

_SESSION: Final = "/v1/sessions/{session_id}"
_THREAD: Final = _SESSION + "/threads/{thread_id}"

ROUTES: Final[tuple[AnyRoute, ...]] = (
    Route(
        method="POST",
        template="/v1/sessions",
        handler=create_session,
        sdk_method="sessions.create",
        submits_once=True,
    ),
    Route(method="GET", template="/v1/sessions", handler=list_sessions, sdk_method="sessions.list"),
    Route(method="GET", template=_SESSION, handler=retrieve_session, sdk_method="sessions.retrieve"),
    Route(method="POST", template=_SESSION, handler=update_session, sdk_method="sessions.update"),
    Route(method="POST", template=_SESSION + "/archive", handler=archive_session, sdk_method="sessions.archive"),
    Route(method="DELETE", template=_SESSION, handler=delete_session, sdk_method="sessions.delete", submits_once=True),
    Route(
        method="POST",
        template=_SESSION + "/events",
        handler=send_events,
        sdk_method="sessions.events.send",
        submits_once=True,
    ),
    Route(method="GET", template=_SESSION + "/events", handler=list_events, sdk_method="sessions.events.list"),
    StreamRoute(
        method="GET",
        template=_SESSION + "/events/stream",
        handler=stream_events,
        sdk_method="sessions.events.stream",
    ),
    Route(method="GET", template=_SESSION + "/threads", handler=list_threads, sdk_method="sessions.threads.list"),
    Route(method="GET", template=_THREAD, handler=retrieve_thread, sdk_method="sessions.threads.retrieve"),
    Route(
        method="GET",
        template=_THREAD + "/events",
        handler=list_events_of_thread,
        sdk_method="sessions.threads.events.list",
    ),
    StreamRoute(
        method="GET",
        template=_THREAD + "/stream",
        handler=stream_thread,
        sdk_method="sessions.threads.events.stream",
    ),
)
