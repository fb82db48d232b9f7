"""A step: one call to something outside. Its state says what may have happened there."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec

StepKind: TypeAlias = Literal["model", "tool", "harness", "provision", "delivery", "cleanup"]
StepState: TypeAlias = Literal["prepared", "dispatched", "done", "failed", "ambiguous"]
OnLost: TypeAlias = Literal["repeat", "ambiguous", "reconcile"]

MODEL_TRIES_MAX: Final = 3
"""Calls of one model step before its retries are exhausted."""

RETRY_FIRST_MS: Final = 1_000
RETRY_MS_MAX: Final = 60_000
"""Retry delays double from one second; a provider's own Retry-After is honoured up to the limit."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The journal row of one try. Key: (turn, ordinal, try); the provider's own call id is data in the event."""

    session_id: UUID
    id: UUID
    turn_id: UUID
    thread_id: UUID
    kind: StepKind
    ordinal: int
    try_no: int
    failures: int
    """Failed tries of this ordinal that count against the retry budget."""
    round: int
    position: int
    """Place of the call in its round: 0 is the model step, calls count from 1."""
    name: str
    state: StepState
    on_lost: OnLost
    serial: bool
    """Shares the session's one shell: such calls of a turn run one after the other."""
    item_id: UUID | None
    event_seq: int
    """The event that carries what to do: `item.opened` of a call, `step.model.started` of a model step (0 before it is dispatched)."""
    attempt_no: int
    dispatched_at: datetime | None
    settled_at: datetime | None


def decide_dispatch(steps: Sequence[Step], parallel_max: int) -> tuple[Step, ...]:
    """Which prepared steps start now, given all unsettled ones of a turn.

    MA-D1.14: calls of one reply run beside each other up to a limit, those that share a shell one after the other, in call order.
    """
    running = [s for s in steps if s.state == "dispatched"]
    room = parallel_max - len(running)
    shell_busy = any(s.serial for s in running)
    starting: list[Step] = []
    for step in sorted((s for s in steps if s.state == "prepared"), key=lambda s: s.position):
        if len(starting) >= room:
            break
        if step.serial and shell_busy:
            continue
        shell_busy = shell_busy or step.serial
        starting.append(step)
    return tuple(starting)


def decide_lost(step: Step) -> Literal["forget", "repeat", "ambiguous"]:
    """What becomes of a step whose worker is gone.

    MA-C9.3: one that was prepared and not started stays as it is, and is run by whoever goes on. MA-C9.4: a call that was started and
    has no result is never run again by itself, unless running it twice is harmless.
    """
    if step.state == "prepared":
        return "forget"
    return "repeat" if step.on_lost == "repeat" else "ambiguous"


def decide_retry(failures: int, retry_after_ms: int | None) -> int | None:
    """Milliseconds until the next try after `failures` failed ones, or None when the budget is spent.

    MA-F14: there are three tries. MA-C10.2: they are one second apart, doubling to sixty, or what the provider asked for, up to that.
    """
    if failures >= MODEL_TRIES_MAX:
        return None
    if retry_after_ms is not None:
        return min(retry_after_ms, RETRY_MS_MAX)
    return min(RETRY_FIRST_MS * 2 ** (failures - 1), RETRY_MS_MAX)
