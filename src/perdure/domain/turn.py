"""A turn: one run of the agent for one or more inputs, from claim to settlement, parking included."""

from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec

TurnState: TypeAlias = Literal["active", "waiting", "frozen", "settled"]
TurnWait: TypeAlias = Literal["action", "retry", "capacity", "provision"]
TurnOutcome: TypeAlias = Literal["completed", "refused", "failed", "interrupted", "cancelled"]

CHARGE_MAX: Final = 3
"""A turn whose process died this often is more likely the cause than the victim."""

ROUNDS_MAX: Final = 100
"""Model calls in one turn: far above what agents need, low enough to end a loop of tools within the hour."""

CUT_ROUNDS_MAX: Final = 3
"""Replies in a row that met their output limit: text is continued this often, a call that is cut off each time is given up."""

PARALLEL_TOOLS_MAX: Final = 4
"""Tool calls of one turn in flight at once: a turn must not take the whole host."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a turn. Whoever writes for it must name its id, attempt and lease token."""

    session_id: UUID
    id: UUID
    thread_id: UUID
    gen: int
    state: TurnState
    wait: TurnWait | None
    wake_at: datetime | None
    attempt_no: int
    charge: int
    charged: bool
    """Whether this attempt has already been charged."""
    worker_id: UUID | None
    lease_token: int
    outcome: TurnOutcome | None
    error_code: str | None
    round: int
    """Counts model calls; the calls of a reply belong to its round."""
    cut_rounds: int
    causal_pos: int
    """Where the current round stands in the model's history."""
    out_index: int
    """The next output index."""
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_creation_5m_tokens: int
    cache_creation_1h_tokens: int
    progress_at: datetime
    created_at: datetime
    ended_at: datetime | None


class Lease(msgspec.Struct, frozen=True):
    """The fence of a turn, as its worker holds it."""

    turn_id: UUID
    attempt_no: int
    token: int


def holds(turn: Turn, lease: Lease) -> bool:
    """Whether the holder of this lease may still write for the turn.

    MA-C15.5: a worker that lost its turn to another attempt, to an interrupt or to the turn's end writes nothing more. MA-C6.4: so a
    late result of its calls is dropped.
    """
    return (
        turn.id == lease.turn_id
        and turn.state == "active"
        and turn.attempt_no == lease.attempt_no
        and turn.lease_token == lease.token
    )


def may_take_over(turn: Turn) -> bool:
    """Whether a dead attempt may be followed by another: at most `CHARGE_MAX` charged ones (MA-C15.2)."""
    return turn.charge < CHARGE_MAX
