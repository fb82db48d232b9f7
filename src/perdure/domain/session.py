"""The session and its threads: who may write, who owns the slot, what the public sees."""

from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused

SessionState: TypeAlias = Literal["open", "archived", "terminated", "deleting", "deleted"]
"""Stored lifecycle. `deleted` is a tombstone: the row stays 24 h so that a late writer can't bring the session back."""

SessionStatus: TypeAlias = Literal["idle", "running", "rescheduling", "terminated"]
"""Public projection, written in the commit that changes it."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The row that every write is guarded by. Small on purpose: it is rewritten at each commit."""

    id: UUID
    workspace_id: UUID
    profile: str
    rev: int
    incarnation: int
    receipt_seq: int
    state: SessionState
    status: SessionStatus
    agent_id: UUID | None
    agent_version: int
    environment_id: UUID | None
    model: str
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_creation_5m_tokens: int
    cache_creation_1h_tokens: int
    active_ms: int
    running_since: datetime | None
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None
    seen_at: datetime
    """The latest time any commit of this session was decided at: no later one goes below it."""


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was made with, and what updates change. Read by faces and by the performer, never by a decider."""

    session_id: UUID
    title: str | None
    metadata: bytes
    agent: bytes
    """The resolved agent snapshot, JSON."""
    environment: bytes
    """The environment's configuration at creation, JSON; `{}` without one."""


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A child ledger. It owns the slot: at most one unsettled turn."""

    session_id: UUID
    id: UUID
    parent_id: UUID | None
    turn_gen: int
    turn_id: UUID | None
    """The unsettled turn, parked or not."""
    causal_pos: int
    waiting_count: int
    waiting_bytes: int
    control_count: int
    """Open controls."""
    command_id: UUID | None
    answer: bytes | None
    """The last `advance` and its answer: the same command gets the same answer."""
    created_at: datetime


def refuse_input(state: SessionState) -> Refused | None:
    """Why a session in this state takes no input, and no update.

    MA-A2.14: an archived or terminated session refuses events. MA-A1.28: it refuses updates too. MA-B6.6: so it stays as it ended.
    MA-C2.6: one whose deletion has begun is not found.
    """
    if state in ("deleting", "deleted"):
        return Refused("not_found", "session_not_found", "Session not found.")
    if state == "archived":
        return Refused(
            "conflict",
            "session_archived",
            "The session is archived: it keeps its history, and nothing of it changes any more.",
        )
    if state == "terminated":
        return Refused("conflict", "session_terminated", "The session is terminated: create a new session to go on.")
    return None


def refuse_archive(
    state: SessionState, status: SessionStatus, *, waiting_count: int, owed_count: int
) -> Refused | None:
    """Why a session can't be archived now.

    MA-G14: while it runs it is not archived, and neither while input waits: none is lost by archiving.
    """
    if state in ("deleting", "deleted"):
        return Refused("not_found", "session_not_found", "Session not found.")
    if status in ("running", "rescheduling"):
        return Refused(
            "conflict",
            "session_running",
            "The session is running: interrupt it and wait until it is idle, then archive it.",
        )
    if waiting_count:
        # An interrupt would not help: it leaves what waits behind a required action.
        return Refused(
            "conflict",
            "input_waiting",
            f"The session is parked: it waits for answers ({owed_count}), and inputs ({waiting_count}) wait behind them. Answer the "
            "required actions or withdraw the inputs, then archive it; or delete it.",
        )
    return None


def refuse_delete(state: SessionState, status: SessionStatus) -> Refused | None:
    """Why a session can't be deleted now. A deletion already under way is joined, not refused.

    MA-C11.1: a running or rescheduling session is not deleted.
    """
    if state == "deleted":
        return Refused("not_found", "session_not_found", "Session not found.")
    if status in ("running", "rescheduling"):
        return Refused(
            "conflict",
            "session_running",
            "The session is running: interrupt it and wait until it is idle, then delete it.",
        )
    return None
