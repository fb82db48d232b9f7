"""Inputs and their custody: what may be admitted, and which waiting inputs the next turn takes."""

from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused

InputKind: TypeAlias = Literal["message", "system", "confirmation", "custom_result", "outcome"]

Custody: TypeAlias = Literal[
    "preparing",
    "waiting",
    "held",
    "folded",
    "injecting",
    "claimed",
    "consumed",
    "dropped",
    "cancelled",
    "interrupted",
    "ambiguous",
]
"""Who must account for an input now. The last five are terminal and carry a reason."""

WAITING_COUNT_MAX: Final = 1_000
"""Inputs waiting in one thread. Beyond it a client is not talking to an agent but filling a disk."""

WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes waiting in one thread: two requests of the largest size."""


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted thing. `seq` is its receipt sequence and, with the session, its key."""

    session_id: UUID
    seq: int
    id: UUID
    thread_id: UUID
    kind: InputKind
    state: Custody
    reason: str | None
    turn_id: UUID | None
    action_id: UUID | None
    companion_of: int | None
    """A system message goes where the input of this sequence goes."""
    causal_pos: int | None
    size_bytes: int
    authority: UUID | None
    """The API key that sent it."""
    received_at: datetime
    settled_at: datetime | None


class Room(msgspec.Struct, frozen=True):
    """How full a mailbox is."""

    waiting_count: int
    waiting_bytes: int


def decide_room(room: Room, *, count: int, size_bytes: int) -> Refused | None:
    """Whether `count` more waiting inputs of `size_bytes` fit.

    MA-F10: a thread holds at most 1,000 waiting inputs and 64 MiB of them. MA-C2.4: what goes beyond is refused whole, as `mailbox_full`.
    """
    if room.waiting_count + count > WAITING_COUNT_MAX:
        return Refused(
            "rate_limited",
            "mailbox_full",
            f"The session already holds {room.waiting_count:,} waiting inputs and takes at most {WAITING_COUNT_MAX:,}: "
            "wait until it has worked through some, or interrupt it.",
        )
    if room.waiting_bytes + size_bytes > WAITING_BYTES_MAX:
        return Refused(
            "rate_limited",
            "mailbox_full",
            f"The session's waiting inputs would exceed {WAITING_BYTES_MAX // (1024 * 1024)} MB: "
            "wait until it has worked through some, or interrupt it.",
        )
    return None


class Take(msgspec.Struct, frozen=True):
    """The inputs of the next turn, in the order the model sees them."""

    inputs: tuple[Input, ...]


class Blocked(msgspec.Struct, frozen=True):
    """A free thread may not claim, and why."""

    reason: str


class Empty(msgspec.Struct, frozen=True):
    """Nothing waits."""


ClaimDecision: TypeAlias = Take | Blocked | Empty


def decide_claim(waiting: tuple[Input, ...], *, turn_active: bool) -> ClaimDecision:
    """Which waiting inputs the next turn takes: the head in receipt order, with the system message that follows it.

    MA-C4.1: a thread with an open turn takes nothing. MA-C4.2: one turn for each message, in receipt order; an older input that is not
    ready blocks the ones behind it.
    """
    if turn_active:
        return Blocked("turn_active")
    if not waiting:
        return Empty()
    head = waiting[0]
    if head.state != "waiting":
        return Blocked(head.state)
    return Take((head, *companions(head, waiting)))


def companions(head: Input, waiting: tuple[Input, ...]) -> tuple[Input, ...]:
    """The system messages that go where `head` goes."""
    return tuple(i for i in waiting if i.companion_of == head.seq)


def refuse_system(previous: InputKind | Literal["interrupt"] | None, *, last: bool, parked: bool) -> Refused | None:
    """Why a system message can't stand here.

    MA-C7.9: it ends its request, directly behind a user message or a tool result; while actions are owed only behind a result.
    """
    if not last:
        return Refused("invalid", "invalid_request_error", "system.message must be the last event of its request.")
    if previous not in ("message", "custom_result"):
        return Refused(
            "invalid",
            "invalid_request_error",
            "system.message must directly follow a user.message or user.custom_tool_result in the same request.",
        )
    if parked and previous != "custom_result":
        return Refused(
            "invalid",
            "invalid_request_error",
            "While the session waits for required actions, system.message is accepted only behind a tool result.",
        )
    return None
