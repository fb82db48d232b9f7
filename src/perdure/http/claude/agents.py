"""Agents and their versions. What a configuration may say is decided in `domain.agent`; this is the wire around it."""

from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.agent import (
    Body,
    new_agent,
    next_version,
    read_version,
    refuse_archived,
    refuse_version,
    updated_agent,
)
from perdure.domain.errors import Refused
from perdure.http.claude.catalog_page import (
    encode_page,
    new_id,
    next_cursor,
    read_page,
    refuse_cursor,
    to_wire_time_or_null,
)
from perdure.http.claude.wire import AGENT, from_wire_id, to_wire_id, to_wire_time
from perdure.http.cursor import seal, unseal
from perdure.http.json_body import decode_body
from perdure.http.query import LIMIT_MAX, read_limit, read_text, read_whole, refuse_unknown
from perdure.http.requests import AnyRoute, Request, Response, Route
from perdure.http.services import Services
from perdure.ports.catalog import AgentRecord

SCOPE: Final = "agents"
LIST_KEYS: Final = ("created_at[gte]", "created_at[lte]", "include_archived", "limit", "page")
LATEST: Final = 0
"""No version has this number."""

UPDATE_TRIES_MAX: Final = 8
"""An update without a version that loses this often in a row meets a client in a loop, not a coincidence."""

NO_AGENT: Final = Refused("not_found", "agent_not_found", "Agent not found.")
NO_VERSION: Final = Refused("not_found", "agent_version_not_found", "The agent has no such version.", "version")


def to_wire_agent(record: AgentRecord) -> dict[str, Any]:
    """One version of an agent, as the SDK reads it."""
    body: Body = msgspec.json.decode(record.body)
    return {
        "id": to_wire_id(AGENT, record.id),
        "type": "agent",
        "version": record.version,
        **body,
        "created_at": to_wire_time(record.created_at),
        "updated_at": to_wire_time(record.updated_at),
        "archived_at": to_wire_time_or_null(record.archived_at),
    }


def _answer(record: AgentRecord) -> Response:
    return Response(200, msgspec.json.encode(to_wire_agent(record)))


def _agent_id(request: Request) -> UUID | None:
    return from_wire_id(AGENT, request.params["agent_id"])


async def create_agent(services: Services, request: Request) -> Response | Refused:
    """Version 1."""
    given = decode_body(request.body)
    body = given if isinstance(given, Refused) else new_agent(given)
    if isinstance(body, Refused):
        return body
    return _answer(await services.catalog.create_agent(request.workspace_id, new_id(), msgspec.json.encode(body)))


async def retrieve_agent(services: Services, request: Request) -> Response | Refused:
    """The latest version, or the one asked for (MA-A5.6)."""
    refused = refuse_unknown(request.query, ("version",))
    version = read_whole(request.query, "version", default=LATEST)
    if refused is not None or isinstance(version, Refused):
        return refused or version  # pyright: ignore[reportReturnType]
    agent_id = _agent_id(request)
    if agent_id is None:
        return NO_AGENT
    record = await services.catalog.read_agent(request.workspace_id, agent_id, version or None)
    if record is not None:
        return _answer(record)
    known = version and await services.catalog.read_agent(request.workspace_id, agent_id) is not None
    return NO_VERSION if known else NO_AGENT


async def list_agents(services: Services, request: Request) -> Response | Refused:
    """Latest versions, newest agent first (MA-A5.14)."""
    refused = refuse_unknown(request.query, LIST_KEYS)
    if refused is not None:
        return refused
    page = read_page(request.query, request.workspace_id, SCOPE)
    if isinstance(page, Refused):
        return page
    rows = await services.catalog.read_agents(page)
    data = [to_wire_agent(row) for row in rows[: page.limit - 1]]
    return Response(200, encode_page(data, next_cursor(page, SCOPE, rows)))


async def update_agent(services: Services, request: Request) -> Response | Refused:
    """A new version, or the same when nothing changes. Without `version` it applies to whatever is there, even after losing a race."""
    given = decode_body(request.body)
    named = given if isinstance(given, Refused) else read_version(given)
    if isinstance(named, Refused):
        return named
    agent_id = _agent_id(request)
    if agent_id is None:
        return NO_AGENT
    for _ in range(UPDATE_TRIES_MAX):
        record = await services.catalog.read_agent(request.workspace_id, agent_id)
        if record is None:
            return NO_AGENT
        before: Body = msgspec.json.decode(record.body)
        after = updated_agent(before, given)
        refused = refuse_archived(archived=record.archived_at is not None) or refuse_version(named, record.version)
        if isinstance(after, Refused) or refused is not None:
            return after if isinstance(after, Refused) else refused  # pyright: ignore[reportReturnType]
        if next_version(record.version, before, after) == record.version:
            return _answer(record)
        updated = await services.catalog.update_agent(
            request.workspace_id, agent_id, record.version, msgspec.json.encode(after)
        )
        if isinstance(updated, AgentRecord):
            return _answer(updated)
        # Another update or an archive came first: judge again by what is there now.
    return Refused(
        "conflict", "version_mismatch", "The agent is being changed by others all the time: try again.", "version"
    )


async def archive_agent(services: Services, request: Request) -> Response | Refused:
    """No more updates and no new sessions."""
    agent_id = _agent_id(request)
    record = None if agent_id is None else await services.catalog.archive_agent(request.workspace_id, agent_id)
    return NO_AGENT if record is None else _answer(record)


async def list_versions(services: Services, request: Request) -> Response | Refused:
    """Every version as it was, newest first (MA-A5.15)."""
    refused = refuse_unknown(request.query, ("limit", "page"))
    limit = read_limit(request.query, most=LIMIT_MAX)
    if refused is not None or isinstance(limit, Refused):
        return refused or limit  # pyright: ignore[reportReturnType]
    agent_id = _agent_id(request)
    if agent_id is None or await services.catalog.read_agent(request.workspace_id, agent_id) is None:
        return NO_AGENT
    scope = f"{SCOPE}/{agent_id}/versions"
    before: int | None = None
    cursor = read_text(request.query, "page")
    if cursor is not None:
        place = unseal(request.workspace_id, scope, cursor)
        if place is None:
            return refuse_cursor()
        before = int.from_bytes(place, "big")
    rows = await services.catalog.read_agent_versions(request.workspace_id, agent_id, before, limit + 1)
    shown = rows[:limit]
    next_page = None
    if len(rows) > limit:
        next_page = seal(request.workspace_id, scope, shown[-1].version.to_bytes(8, "big"))
    return Response(200, encode_page([to_wire_agent(row) for row in shown], next_page))


ROUTES: Final[tuple[AnyRoute, ...]] = (
    Route(method="POST", template="/v1/agents", handler=create_agent, sdk_method="agents.create"),
    Route(method="GET", template="/v1/agents", handler=list_agents, sdk_method="agents.list"),
    Route(method="GET", template="/v1/agents/{agent_id}", handler=retrieve_agent, sdk_method="agents.retrieve"),
    Route(method="POST", template="/v1/agents/{agent_id}", handler=update_agent, sdk_method="agents.update"),
    Route(method="POST", template="/v1/agents/{agent_id}/archive", handler=archive_agent, sdk_method="agents.archive"),
    Route(
        method="GET",
        template="/v1/agents/{agent_id}/versions",
        handler=list_versions,
        sdk_method="agents.versions.list",
    ),
)
