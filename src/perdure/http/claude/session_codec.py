"""Sessions and threads as objects of this face."""

from datetime import datetime
from typing import Any, Final

import msgspec

from perdure.domain.event import UsageSnap
from perdure.domain.ids import derived, primary_thread
from perdure.domain.projection import has_been_idle, project_activity
from perdure.domain.session import Session
from perdure.http.claude.wire import AGENT, ENVIRONMENT, SESSION, THREAD, to_wire_id, to_wire_seconds, to_wire_time
from perdure.ports.ledger import SessionView

AGENT_FIELDS: Final = (
    "version",
    "name",
    "description",
    "system",
    "model",
    "tools",
    "mcp_servers",
    "skills",
    "multiagent",
    "execution_identity",
)


def to_wire_agent(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The resolved agent of a session."""
    fields = {name: snapshot[name] for name in AGENT_FIELDS}
    return {"id": AGENT + str(snapshot["id"]), "type": "agent", **fields}


def to_wire_session(view: SessionView, now: datetime) -> dict[str, Any]:
    """A `session`. What this version can't have (budget, deployment, resources, vaults, outcomes) is empty, never left out."""
    session = view.session
    activity = project_activity(session, now)
    return {
        "id": to_wire_id(SESSION, session.id),
        "type": "session",
        "status": session.status,
        "agent": to_wire_agent(msgspec.json.decode(view.config.agent)),
        "environment_id": _environment_id(session),
        "title": view.config.title,
        "metadata": msgspec.Raw(view.config.metadata),
        "resources": [],
        "vault_ids": [],
        "budget": None,
        "deployment_id": None,
        "outcome_evaluations": [],
        "stats": {
            "active_seconds": to_wire_seconds(activity.usage.active_ms),
            "duration_seconds": to_wire_seconds(activity.duration_ms),
        },
        "usage": to_wire_usage(activity.usage),
        "created_at": to_wire_time(session.created_at),
        "updated_at": to_wire_time(session.updated_at),
        "archived_at": None if session.archived_at is None else to_wire_time(session.archived_at),
    }


def to_wire_thread(view: SessionView, now: datetime) -> dict[str, Any]:
    """The primary `session_thread`: its status is the session's, its agent has no roster."""
    session, thread = view.session, view.thread
    activity = project_activity(session, now)
    rested = has_been_idle(session, thread)
    agent = to_wire_agent(msgspec.json.decode(view.config.agent))
    del agent["multiagent"]
    stats = {
        "active_seconds": to_wire_seconds(activity.usage.active_ms),
        "duration_seconds": to_wire_seconds(activity.duration_ms),
        "startup_seconds": None,
    }
    return {
        "id": to_wire_id(THREAD, primary_thread(session.id)),
        "type": "session_thread",
        "session_id": to_wire_id(SESSION, session.id),
        "parent_thread_id": None,
        "agent": agent,
        "status": session.status,
        "stats": stats if rested else None,
        "usage": to_wire_usage(activity.usage) if rested else None,
        "workflow_run_id": None,
        "created_at": to_wire_time(thread.created_at),
        "updated_at": to_wire_time(session.updated_at),
        "archived_at": None if session.archived_at is None else to_wire_time(session.archived_at),
    }


def to_wire_usage(usage: UsageSnap) -> dict[str, Any]:
    """Cumulative usage. No list price is known here, and no tool runs at the provider."""
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_creation": {
            "ephemeral_1h_input_tokens": usage.cache_creation_1h_tokens,
            "ephemeral_5m_input_tokens": usage.cache_creation_5m_tokens,
        },
        "cache_read_input_tokens": usage.cache_read_tokens,
        "active_seconds": to_wire_seconds(usage.active_ms),
        "list_cost": None,
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
    }


def _environment_id(session: Session) -> str:
    """A session that another face made without an environment shows one fixed id for its workspace."""
    identity = session.environment_id or derived(session.workspace_id, "claude", "no environment")
    return to_wire_id(ENVIRONMENT, identity)
