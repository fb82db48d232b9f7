"""What agents and environments share on this wire: new ids, times, and pages that run from the newest to the oldest."""

import os
import time
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.http.claude.wire import to_wire_time
from perdure.http.cursor import seal, unseal
from perdure.http.query import Query, invalid, read_flag, read_instant, read_limit, read_text
from perdure.ports.catalog import AgentRecord, EnvironmentRecord, PageQuery

TIME_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
PLACE_BYTES: Final = 8 + 16


def new_id() -> UUID:
    """An id that sorts by its time of birth (milliseconds) and is otherwise random."""
    return UUID(bytes=(time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))


def to_wire_time_or_null(at: datetime | None) -> str | None:
    """A time that may not have come."""
    return None if at is None else to_wire_time(at)


def read_page(query: Query, workspace_id: UUID, scope: str) -> PageQuery | Refused:
    """The page that a list query asks for. `limit` has one more row than the page, which tells whether another follows."""
    limit = read_limit(query)
    include_archived = read_flag(query, "include_archived")
    created_from = read_instant(query, "created_at[gte]")
    created_until = read_instant(query, "created_at[lte]")
    for value in (limit, include_archived, created_from, created_until):
        if isinstance(value, Refused):
            return value
    assert not isinstance(limit, Refused) and not isinstance(include_archived, Refused)
    assert not isinstance(created_from, Refused) and not isinstance(created_until, Refused)
    after = None
    cursor = read_text(query, "page")
    if cursor is not None:
        place = unseal(workspace_id, scope, cursor)
        if place is None or len(place) != PLACE_BYTES:
            return refuse_cursor()
        after = (TIME_ZERO + int.from_bytes(place[:8], "big") * MICROSECOND, UUID(bytes=place[8:]))
    return PageQuery(
        workspace_id=workspace_id,
        include_archived=include_archived,
        created_from=created_from,
        created_until=created_until,
        after=after,
        limit=limit + 1,
    )


def refuse_cursor() -> Refused:
    """A cursor that this list did not give out (MA-A1.22, MA-A0.22)."""
    return invalid("page", "page: is no cursor of this list: start again without it.")


def next_cursor(page: PageQuery, scope: str, rows: list[AgentRecord] | list[EnvironmentRecord]) -> str | None:
    """Where the next page begins, or None when this one is the last."""
    if len(rows) < page.limit:
        return None
    last = rows[page.limit - 2]
    place = ((last.created_at - TIME_ZERO) // MICROSECOND).to_bytes(8, "big") + last.id.bytes
    return seal(page.workspace_id, scope, place)


def encode_page(data: list[dict[str, object]], next_page: str | None) -> bytes:
    """MA-A0.23."""
    return msgspec.json.encode({"data": data, "next_page": next_page})
