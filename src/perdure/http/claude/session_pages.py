"""The list of sessions: its filters, its cursors, its pages in both directions."""

from datetime import UTC, datetime, timedelta
from typing import Final, get_args
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.session import SessionStatus
from perdure.http.claude.answers import NOT_OURS, answer, bad_cursor, read_order, read_values
from perdure.http.claude.session_codec import to_wire_session
from perdure.http.claude.wire import AGENT, from_wire_id
from perdure.http.cursor import seal, unseal
from perdure.http.query import (
    Query,
    invalid,
    read_flag,
    read_instant,
    read_limit,
    read_text,
    read_whole,
    refuse_unknown,
)
from perdure.http.requests import Request, Response
from perdure.http.services import Services
from perdure.ports.ledger import SessionQuery, SessionView

PROFILE: Final = "managed_agents"
"""Sessions of this face. Others are not listed."""

STATUSES: Final[tuple[str, ...]] = get_args(SessionStatus)

BOUNDS: Final = ("created_at[gt]", "created_at[gte]", "created_at[lt]", "created_at[lte]")

_KNOWN: Final = (
    "agent_id",
    "agent_version",
    *BOUNDS,
    "deployment_id",
    "include_archived",
    "limit",
    "memory_store_id",
    "order",
    "page",
    "statuses",
    "statuses[]",
)
_UNIX_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_BYTES: Final = 8
_PLACE_BYTES: Final = 1 + _TIME_BYTES + 16


class Bounds(msgspec.Struct, frozen=True):
    """`created_at[...]` of a query."""

    after: datetime | None
    first: datetime | None
    before: datetime | None
    last: datetime | None

    def holds(self, at: datetime) -> bool:
        """Whether a time lies within."""
        return (
            (self.after is None or at > self.after)
            and (self.first is None or at >= self.first)
            and (self.before is None or at < self.before)
            and (self.last is None or at <= self.last)
        )


class _Place(msgspec.Struct, frozen=True):
    """Where a page starts: behind this row, or before it when going back."""

    at: datetime
    id: UUID
    back: bool


def read_bounds(query: Query) -> Bounds | Refused:
    """The four of them."""
    found: list[datetime | None] = []
    for key in BOUNDS:
        instant = read_instant(query, key)
        if isinstance(instant, Refused):
            return instant
        found.append(instant)
    return Bounds(*found)


async def list_sessions(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions`."""
    wanted = _read_query(request)
    if isinstance(wanted, Refused):
        return wanted
    query, place, order = wanted
    if any(read_text(request.query, key) is not None for key in ("deployment_id", "memory_store_id")):
        return answer({"data": [], "next_page": None, "prev_page": None})
    back = place is not None and place.back
    asked = msgspec.structs.replace(query, limit=query.limit + 1, descending=query.descending != back)
    views = await services.ledger.read_sessions(asked)
    more = len(views) > query.limit
    views = views[: query.limit]
    if back:
        views.reverse()
    before = more if back else place is not None
    after = True if back else more
    scope = _scope(order)
    now = datetime.now(UTC)
    return answer(
        {
            "data": [to_wire_session(view, now) for view in views],
            "next_page": _seal(request, scope, views[-1], back=False) if views and after else None,
            "prev_page": _seal(request, scope, views[0], back=True) if views and before else None,
        }
    )


def _read_query(request: Request) -> tuple[SessionQuery, _Place | None, str] | Refused:
    query = request.query
    refused = refuse_unknown(query, _KNOWN)
    if refused is not None:
        return refused
    order = read_order(query, "desc")
    limit = read_limit(query)
    archived = read_flag(query, "include_archived")
    statuses = read_values(query, "statuses", STATUSES)
    bounds = read_bounds(query)
    agent = _read_agent(query)
    for value in (order, limit, archived, statuses, bounds, agent):
        if isinstance(value, Refused):
            return value
    assert isinstance(order, str) and isinstance(limit, int) and isinstance(archived, bool)
    assert not isinstance(statuses, Refused) and isinstance(bounds, Bounds) and isinstance(agent, tuple)
    place = _read_place(request, order, bounds)
    if isinstance(place, Refused):
        return place
    wanted = SessionQuery(
        workspace_id=request.workspace_id,
        profile=PROFILE,
        agent_id=agent[0],
        agent_version=agent[1],
        statuses=statuses,  # pyright: ignore[reportArgumentType]
        include_archived=archived,
        created_after=bounds.after,
        created_from=bounds.first,
        created_before=bounds.before,
        created_until=bounds.last,
        descending=order == "desc",
        after=None if place is None else (place.at, place.id),
        limit=limit,
    )
    return wanted, place, order


_NO_AGENT: Final = UUID(int=0)
"""Stands for an agent id of another form: no session has it."""


def _read_agent(query: Query) -> tuple[UUID | None, int | None] | Refused:
    text = read_text(query, "agent_id")
    version = None if read_text(query, "agent_version") is None else read_whole(query, "agent_version", default=1)
    if isinstance(version, Refused):
        return version
    if text is None:
        if version is not None:
            return invalid("agent_version", "agent_version: may be given only together with agent_id.")
        return None, None
    return from_wire_id(AGENT, text) or _NO_AGENT, version


def _scope(order: str) -> str:
    return f"sessions {order}"


def _seal(request: Request, scope: str, view: SessionView, *, back: bool) -> str:
    at = (view.session.created_at - _UNIX_ZERO) // timedelta(microseconds=1)
    place = bytes([back]) + at.to_bytes(_TIME_BYTES, "big", signed=True) + view.session.id.bytes
    return seal(request.workspace_id, scope, place)


def _read_place(request: Request, order: str, bounds: Bounds) -> _Place | Refused | None:
    cursor = read_text(request.query, "page")
    if cursor is None:
        return None
    raw = unseal(request.workspace_id, _scope(order), cursor)
    if raw is None or len(raw) != _PLACE_BYTES:
        other = "desc" if order == "asc" else "asc"
        if unseal(request.workspace_id, _scope(other), cursor) is not None:
            return bad_cursor(
                f"this cursor was made with order={other}; go on with that order, or start again without it."
            )
        return bad_cursor(NOT_OURS)
    micros = int.from_bytes(raw[1 : 1 + _TIME_BYTES], "big", signed=True)
    at = _UNIX_ZERO + timedelta(microseconds=micros)
    if not bounds.holds(at):
        return bad_cursor("the created_at filter excludes the place of this cursor; start again without it.")
    return _Place(at, UUID(bytes=raw[1 + _TIME_BYTES :]), bool(raw[0]))
