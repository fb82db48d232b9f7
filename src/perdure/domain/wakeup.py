"""Wakeups: the outbox row that says a thread wants to be looked at. At most one a thread; only an `advance` consumes it."""

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from perdure.domain.control import STOP_GRACE_MS, Control
from perdure.domain.turn import Turn

SWEEP_MS: Final = 2_000
"""A lost hint costs at most this."""


class Wakeup(msgspec.Struct, frozen=True, kw_only=True):
    """Look at this thread, not before `due_at`."""

    session_id: UUID
    thread_id: UUID
    due_at: datetime
    tries: int


def due_at(
    now: datetime, *, turn: Turn | None, worker_dead: bool, waiting_count: int, controls: tuple[Control, ...]
) -> datetime | None:
    """When a thread must be looked at by anyone, or None when its owner, or nobody, will.

    MA-C3.1: a thread with claimable work, an open stop, a due retry or a lapsed lease has a wakeup.
    """
    if turn is None:
        return now if waiting_count else None
    if turn.state == "waiting":
        if turn.wait == "action":
            return None
        return turn.wake_at or now
    if worker_dead:
        return now
    if controls:
        return controls[0].at + timedelta(milliseconds=STOP_GRACE_MS)
    return None
