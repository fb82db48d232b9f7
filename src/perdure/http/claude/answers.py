"""What the handlers of this face share: answers, ids in paths, and the session behind one."""

from collections.abc import Collection
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.http.claude.wire import SESSION, from_wire_id
from perdure.http.query import Query, invalid, read_text
from perdure.http.requests import Request, Response
from perdure.http.services import Services
from perdure.ports.ledger import SessionView

SESSION_NOT_FOUND = Refused("not_found", "session_not_found", "Session not found.")
"""One answer for a missing, a deleted and another workspace's session, and for an id of any other form."""

_ENCODER = msgspec.json.Encoder()

T = TypeVar("T")


def answer(value: Any) -> Response:
    """200 with a JSON body."""
    return Response(200, _ENCODER.encode(value))


def session_id_of(request: Request) -> UUID | Refused:
    """The session that the path names."""
    return from_wire_id(SESSION, request.params["session_id"]) or SESSION_NOT_FOUND


async def find_session(services: Services, request: Request) -> SessionView | Refused:
    """The session that the path names, if it is of the caller's workspace."""
    session_id = session_id_of(request)
    if isinstance(session_id, Refused):
        return session_id
    return await services.ledger.read_session(request.workspace_id, session_id) or SESSION_NOT_FOUND


def read_order(query: Query, default: str) -> str | Refused:
    """`order`: `asc` or `desc`."""
    text = read_text(query, "order")
    if text is None:
        return default
    return text if text in ("asc", "desc") else invalid("order", f"order: must be asc or desc, not {text[:40]!r}.")


def read_values(query: Query, key: str, known: Collection[str]) -> tuple[str, ...] | Refused | None:
    """`key[]`: any of the known values, or None when it was not given."""
    values = [value for name, value in query if name in (key, key + "[]")]
    for value in values:
        if value not in known:
            return invalid(f"{key}[]", f"{key}[]: {value[:40]!r} is none of {', '.join(sorted(known))}.")
    return tuple(dict.fromkeys(values)) or None


def bad_cursor(rule: str) -> Refused:
    """A `page` that can't be used here."""
    return invalid("page", f"page: {rule}")


NOT_OURS = "this cursor is damaged, or was made for another list: start again without it."
