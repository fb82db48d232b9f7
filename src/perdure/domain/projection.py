"""What the public sees of a session at one moment: status, stop reason, usage. Retrieve, lists, threads and events ask here.

The status is stored in the commit that changes it; here is said what each phase means and what may be read from the stored numbers.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.event import PhaseName, PhaseSnap, UsageSnap
from perdure.domain.session import Session, SessionStatus, Thread

StopReason: TypeAlias = Literal["end_turn", "requires_action", "retries_exhausted", "refusal"]

STATUS_OF_PHASE: Final[Mapping[PhaseName, SessionStatus]] = {
    "active": "running",
    "idle": "idle",
    "wait_action": "idle",
    "wait_env": "idle",
    "failed": "idle",
    "retrying": "rescheduling",
    "terminated": "terminated",
}
"""Total: every phase has exactly one status, and a status is entered by no other way than its phases."""

FOLLOWED_BY: Final[Mapping[SessionStatus, frozenset[SessionStatus]]] = {
    "idle": frozenset({"idle", "running", "terminated"}),
    "running": frozenset({"idle", "rescheduling", "terminated"}),
    "rescheduling": frozenset({"idle", "running", "terminated"}),
    "terminated": frozenset(),
}
"""Idle follows idle when some of several required actions were answered, or an input was withdrawn."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as every face reads it."""

    status: SessionStatus
    stop_reason: StopReason | None
    """Why it is idle; None for every other status."""
    action_ids: tuple[UUID, ...]
    stop_details: dict[str, Any] | None
    usage: UsageSnap | None


def project_phase(name: PhaseName, snap: PhaseSnap) -> Phase:
    """The public meaning of one phase row.

    MA-B5.1: an idle without a reason of its own is `end_turn`, an interrupted turn's too. MA-B5.4: a refusal carries the provider's
    details where it gave any. Every other reason is passed on as it was stored, never made up.
    """
    status = STATUS_OF_PHASE[name]
    reason: StopReason | None = (snap.stop_reason or "end_turn") if status == "idle" else None
    return Phase(
        status=status,
        stop_reason=reason,
        action_ids=snap.action_ids if reason == "requires_action" else (),
        stop_details=snap.stop_details if reason == "refusal" else None,
        usage=snap.usage,
    )


def may_follow(before: SessionStatus, after: SessionStatus) -> bool:
    """Whether a session may be seen to go from one status to another, row after row.

    MA-B6.1: only these steps happen; running never follows itself, and nothing follows terminated.
    """
    return after in FOLLOWED_BY[before]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Usage and times of a session at one moment."""

    usage: UsageSnap
    duration_ms: int


def project_activity(session: Session, now: datetime) -> Activity:
    """What a session has used by `now`, the stretch that is running included.

    The clock of the reader may lag behind the ledger's: nothing goes below what the last commit knew.
    """
    now = max(now, session.seen_at)
    ended = session.updated_at if session.status == "terminated" else now
    running = session.running_since
    return Activity(
        usage=UsageSnap(
            input_tokens=session.input_tokens,
            output_tokens=session.output_tokens,
            cache_read_tokens=session.cache_read_tokens,
            cache_creation_5m_tokens=session.cache_creation_5m_tokens,
            cache_creation_1h_tokens=session.cache_creation_1h_tokens,
            active_ms=session.active_ms + (0 if running is None else _ms(now - running)),
        ),
        duration_ms=_ms(ended - session.created_at),
    )


def has_been_idle(session: Session, thread: Thread) -> bool:
    """Whether a thread has come to rest after its first turn; before that it has no usage to show."""
    resting = session.status in ("idle", "terminated")
    return session.active_ms > 0 or (resting and thread.turn_gen > 0)


def _ms(span: timedelta) -> int:
    return max(0, span // timedelta(milliseconds=1))
