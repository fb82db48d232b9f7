"""Sessions: create, retrieve, update, archive, delete. Their list is in `session_pages`."""

from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from perdure.domain import ids
from perdure.domain.agent import Body, overridden, replaced_fields, snapshot
from perdure.domain.errors import Refused
from perdure.domain.event import encode
from perdure.domain.session import SessionConfig
from perdure.domain.shape import (
    TEXT_OR_OBJECT,
    Misfit,
    join,
    read_metadata,
    read_metadata_patch,
    read_object,
    read_text,
    read_whole,
    unsupported,
)
from perdure.http.claude.answers import SESSION_NOT_FOUND, answer, find_session, session_id_of
from perdure.http.claude.arrivals import read_initial_arrivals
from perdure.http.claude.session_codec import to_wire_session
from perdure.http.claude.session_pages import PROFILE
from perdure.http.claude.wire import AGENT, ENVIRONMENT, SESSION, from_wire_id, to_wire_id
from perdure.http.json_body import decode_body
from perdure.http.requests import Request, Response
from perdure.http.services import Services
from perdure.ports.catalog import AgentRecord, EnvironmentRecord
from perdure.ports.ledger import ArchiveSession, Arrival, CreateSession, DeleteSession, UpdateSession
from perdure.ports.model import ModelUnknown

TITLE_CHARS_MAX: Final = 500
"""A line for people to find a session by."""

_CREATE_FIELDS: Final = (
    "agent",
    "environment_id",
    "title",
    "metadata",
    "initial_events",
    "resources",
    "vault_ids",
    "budget",
)
_UPDATE_FIELDS: Final = ("agent", "title", "metadata", "vault_ids", "budget")


class _AgentWish(msgspec.Struct, frozen=True):
    """Which agent a session is to have."""

    id: UUID | None
    """None for an id of another form: it answers like one that is not there."""
    version: int | None
    overrides: dict[str, Any]
    path: str


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A request to create a session, read."""

    agent: _AgentWish
    environment_id: UUID | None
    title: str | None
    metadata: dict[str, str]
    arrivals: tuple[Arrival, ...]


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent and the environment of a new session came to."""

    agent_id: UUID | None = None
    agent_version: int = 1
    environment_id: UUID | None = None
    model: str = ""
    agent: bytes = b"{}"
    environment: bytes = b"{}"


_NO_PARTS: Final = _Parts()
"""Of a session that can't be made, unless the request is the repeat of one that could."""


async def create_session(services: Services, request: Request) -> Response | Refused:
    """`POST /v1/sessions`."""
    given = decode_body(request.body)
    if isinstance(given, Refused):
        return given
    session_id = ids.timed(datetime.now(UTC), uuid4(), "session")
    wish = _read_wish(given, session_id)
    if isinstance(wish, Refused):
        return wish
    found = await _resolve(services, request, wish)
    refused = found if isinstance(found, Refused) else None
    parts = _NO_PARTS if isinstance(found, Refused) else found
    created = await services.ledger.create(
        CreateSession(
            session_id=session_id,
            workspace_id=request.workspace_id,
            profile=PROFILE,
            agent_id=parts.agent_id,
            agent_version=parts.agent_version,
            environment_id=parts.environment_id,
            model=parts.model,
            config=SessionConfig(
                session_id=session_id,
                title=wish.title,
                metadata=encode(wish.metadata),
                agent=parts.agent,
                environment=parts.environment,
            ),
            arrivals=wish.arrivals,
            submission=request.submission,
            authority=request.key_id,
            refused=refused,
        )
    )
    if isinstance(created, Refused):
        return placed(created)
    return await _show(services, request, created.session_id)


async def retrieve_session(services: Services, request: Request) -> Response | Refused:
    """`GET /v1/sessions/{session_id}`."""
    view = await find_session(services, request)
    return view if isinstance(view, Refused) else answer(to_wire_session(view, datetime.now(UTC)))


async def update_session(services: Services, request: Request) -> Response | Refused:
    """`POST /v1/sessions/{session_id}`."""
    session_id = session_id_of(request)
    if isinstance(session_id, Refused):
        return session_id
    given = decode_body(request.body)
    if isinstance(given, Refused):
        return given
    command = _read_update(given, session_id, request.workspace_id)
    if isinstance(command, Refused):
        return command
    done = await services.ledger.update(command)
    return placed(done) if isinstance(done, Refused) else await _show(services, request, session_id)


async def archive_session(services: Services, request: Request) -> Response | Refused:
    """`POST /v1/sessions/{session_id}/archive`. A body, if any, is not read."""
    session_id = session_id_of(request)
    if isinstance(session_id, Refused):
        return session_id
    done = await services.ledger.archive(ArchiveSession(session_id=session_id, workspace_id=request.workspace_id))
    return done if isinstance(done, Refused) else await _show(services, request, session_id)


async def delete_session(services: Services, request: Request) -> Response | Refused:
    """`DELETE /v1/sessions/{session_id}`. A body, if any, is not read."""
    session_id = session_id_of(request)
    if isinstance(session_id, Refused):
        return session_id
    done = await services.ledger.delete(
        DeleteSession(session_id=session_id, workspace_id=request.workspace_id, submission=request.submission)
    )
    if isinstance(done, Refused):
        return done
    return answer({"id": to_wire_id(SESSION, session_id), "type": "session_deleted"})


def placed(refused: Refused) -> Refused:
    """A refusal of the core whose message starts with its place in the request, like every other one."""
    if refused.param is None or refused.message.startswith(refused.param + ":"):
        return refused
    return msgspec.structs.replace(refused, message=f"{refused.param}: {refused.message}")


async def _show(services: Services, request: Request, session_id: UUID) -> Response | Refused:
    view = await services.ledger.read_session(request.workspace_id, session_id)
    return SESSION_NOT_FOUND if view is None else answer(to_wire_session(view, datetime.now(UTC)))


# ------------------------------------------------------------------------------------------------------------------ create


def _read_wish(request: dict[str, Any], session_id: UUID) -> _Wish | Refused:
    try:
        given = read_object(request, "", known=_CREATE_FIELDS, required=("agent", "environment_id"))
        for field in ("resources", "vault_ids"):
            if field in given and given[field] != []:
                raise unsupported(field, f"a session with {field}")
        if given.get("budget") is not None:
            raise unsupported("budget", "a session with a budget")
        title = given.get("title")
        events = given.get("initial_events", [])
        return _Wish(
            agent=_read_agent(given["agent"], "agent"),
            environment_id=from_wire_id(ENVIRONMENT, read_text(given["environment_id"], "environment_id")),
            title=None if title is None else read_text(title, "title", most=TITLE_CHARS_MAX),
            metadata=read_metadata(given.get("metadata", {}), "metadata"),
            arrivals=read_initial_arrivals(events, session_id),
        )
    except Misfit as misfit:
        return misfit.refused


def _read_agent(value: Any, path: str) -> _AgentWish:
    """The three forms: an id, a reference, a reference with overrides."""
    if isinstance(value, str):
        return _AgentWish(from_wire_id(AGENT, value), None, {}, path)
    reference = read_object(value, path, required=("type", "id"), form=TEXT_OR_OBJECT)
    kind = read_text(reference["type"], join(path, "type"))
    if kind not in ("agent", "agent_with_overrides"):
        raise Misfit(join(path, "type"), f"must be agent or agent_with_overrides, not {kind[:64]!r}.")
    known = ("type", "id", "version")
    if kind == "agent_with_overrides":
        known = (*known, "model", "system", "tools", "mcp_servers", "skills")
    given = read_object(value, path, known=known)
    version = read_whole(given["version"], join(path, "version"), least=1) if "version" in given else None
    overrides = {k: v for k, v in given.items() if k not in ("type", "id", "version")}
    return _AgentWish(from_wire_id(AGENT, read_text(given["id"], join(path, "id"))), version, overrides, path)


async def _find_agent(services: Services, request: Request, wish: _AgentWish) -> AgentRecord | Refused:
    latest = None if wish.id is None else await services.catalog.read_agent(request.workspace_id, wish.id)
    if latest is None:
        return Refused("not_found", "agent_not_found", "agent: Agent not found.", "agent")
    if latest.archived_at is not None:
        message = "agent: the agent is archived and takes no new sessions."
        return Refused("conflict", "agent_archived", message, "agent")
    if wish.version is None or wish.version == latest.version:
        return latest
    chosen = await services.catalog.read_agent(request.workspace_id, latest.id, wish.version)
    if chosen is None:
        message = f"agent.version: the agent has no version {wish.version}; its latest is {latest.version}."
        return Refused("not_found", "agent_version_not_found", message, "agent.version")
    return chosen


async def _find_environment(
    services: Services, request: Request, environment_id: UUID | None
) -> EnvironmentRecord | Refused:
    found = None
    if environment_id is not None:
        found = await services.catalog.read_environment(request.workspace_id, environment_id)
    if found is None:
        message = "environment_id: Environment not found."
        return Refused("not_found", "environment_not_found", message, "environment_id")
    if found.archived_at is not None:
        message = "environment_id: the environment is archived and takes no new sessions."
        return Refused("conflict", "environment_archived", message, "environment_id")
    return found


async def _resolve(services: Services, request: Request, wish: _Wish) -> _Parts | Refused:
    agent = await _find_agent(services, request, wish.agent)
    if isinstance(agent, Refused):
        return agent
    environment = await _find_environment(services, request, wish.environment_id)
    if isinstance(environment, Refused):
        return environment
    resolved = _resolve_agent(services, agent, wish.agent)
    if isinstance(resolved, Refused):
        return resolved
    return _Parts(
        agent_id=agent.id,
        agent_version=agent.version,
        environment_id=environment.id,
        model=resolved["model"]["id"],
        agent=encode(resolved),
        environment=encode(msgspec.json.decode(environment.body)["config"]),
    )


def _resolve_agent(services: Services, record: AgentRecord, wish: _AgentWish) -> Body | Refused:
    """The snapshot that the session keeps, with a model that could be called now."""
    base = snapshot(ids.token(record.id), record.version, msgspec.json.decode(record.body))
    resolved = overridden(base, wish.overrides, wish.path)
    if isinstance(resolved, Refused):
        return resolved
    try:
        services.models.check(resolved["model"]["id"])
    except ModelUnknown as unknown:
        return Refused("invalid", "model_unknown", f"agent.model: {unknown}", "agent.model")
    return resolved


# ------------------------------------------------------------------------------------------------------------------ update


def _read_update(request: dict[str, Any], session_id: UUID, workspace_id: UUID) -> UpdateSession | Refused:
    try:
        given = read_object(request, "", known=_UPDATE_FIELDS)
        if "vault_ids" in given:
            raise unsupported("vault_ids", "changing the vaults of a session")
        if given.get("budget") is not None:
            message = "this session was created without a budget, and none can be added later."
            raise Misfit("budget", message, code="budget_create_only")
        title = given.get("title", msgspec.UNSET)
        metadata = given.get("metadata")
        agent: Body | Refused = {}
        if "agent" in given:
            agent = replaced_fields(given["agent"], "agent")
            if isinstance(agent, Refused):
                return agent
        return UpdateSession(
            session_id=session_id,
            workspace_id=workspace_id,
            title=read_text(title, "title", most=TITLE_CHARS_MAX) if isinstance(title, str) else _no_title(title),
            metadata=msgspec.UNSET if metadata is None else read_metadata_patch(metadata, "metadata"),
            agent=encode(agent) if agent else None,
        )
    except Misfit as misfit:
        return misfit.refused


def _no_title(title: Any) -> msgspec.UnsetType | None:
    """Null clears it, nothing keeps it, and anything else is no title."""
    if title is None:
        return None
    if title is msgspec.UNSET:
        return msgspec.UNSET
    read_text(title, "title")
    raise AssertionError(title)
