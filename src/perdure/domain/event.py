"""Canonical events: the facts that every face projects. The catalogue of rows is closed."""

from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

import msgspec

EventType: TypeAlias = Literal[
    "session.created",
    "session.updated",
    "session.phase",
    "session.error",
    "input.received",
    "input.applied",
    "input.settled",
    "turn.created",
    "turn.started",
    "turn.parked",
    "turn.resumed",
    "turn.ended",
    "item.held",
    "item.opened",
    "item.closed",
    "action.opened",
    "action.answered",
    "action.closed",
    "step.model.started",
    "step.model.ended",
]

PhaseName: TypeAlias = Literal["idle", "active", "wait_action", "wait_env", "retrying", "failed", "terminated"]
"""The `kind` of a `session.phase` row."""

ItemKind: TypeAlias = Literal["message", "thinking", "tool", "custom"]
"""The `kind` of an item row: a built-in tool's call is `tool`, one that the client runs is `custom`."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `seq` orders the session; a row never changes but for the processed stamp of an `input.received`."""

    session_id: UUID
    seq: int
    id: UUID
    thread_id: UUID
    type: EventType
    kind: str
    at: datetime
    turn_id: UUID | None
    item_id: UUID | None
    step_id: UUID | None
    ref_seq: int | None
    """The row whose body this one shows again: the input behind an `input.settled`, the held call behind an `item.opened`."""
    out_index: int | None
    """Place among the turn's outputs, for faces that number them; fixed when the item is first seen."""
    snap: bytes
    """The facts of the row's own moment, JSON: what a codec may not read from current state."""
    body: bytes | None
    """The content, JSON as encoded once at the border."""
    processed_seq: int | None
    processed_at: datetime | None


class UsageSnap(msgspec.Struct, frozen=True, kw_only=True):
    """A session's usage at one moment."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_creation_5m_tokens: int
    cache_creation_1h_tokens: int
    active_ms: int


class PhaseSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a `session.phase` row freezes."""

    stop_reason: Literal["end_turn", "requires_action", "retries_exhausted", "refusal"] | None = None
    stop_details: dict[str, Any] | None = None
    action_ids: tuple[UUID, ...] = ()
    usage: UsageSnap | None = None
    reissue: bool = False


class ErrorSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a `session.error` row freezes. `flushed` names the inputs that the error dropped."""

    code: str
    message: str
    retry: Literal["retrying", "exhausted", "terminal"]
    flushed: tuple[UUID, ...] = ()


class InputSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the rows of an input freeze."""

    custody: str = "waiting"
    reason: str | None = None
    causal_pos: int | None = None
    action_id: UUID | None = None


class ItemSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an item row freezes. `permission` is how a call was judged; `state` how an item closed."""

    state: Literal["open", "completed", "incomplete", "failed"] = "open"
    permission: Literal["allow", "ask", "deny"] | None = None
    policy: str | None = None


class StepSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the rows of a model step freeze."""

    started_id: UUID | None = None
    is_error: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_creation_5m_tokens: int = 0
    cache_creation_1h_tokens: int = 0


class TurnSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a turn row freezes."""

    gen: int
    outcome: str | None = None
    error_code: str | None = None
    usage: StepSnap | None = None


class UpdateSnap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which fields a `session.updated` changed; the values are its body."""

    fields: tuple[str, ...] = ()


def encode(value: Any) -> bytes:
    """A snapshot or body, as the ledger stores it."""
    return _ENCODER.encode(value)


_ENCODER = msgspec.json.Encoder()
EMPTY_SNAP = b"{}"
