"""Controls: durable stops with the generation that they captured, so that a late one can't hit a successor."""

from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.turn import Turn

ControlKind: TypeAlias = Literal["interrupt", "stop", "cancel", "mutation"]

STOP_GRACE_MS: Final = 5_000
"""How long an interrupted call may take to end by itself before its turn ends over it."""


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """One interrupt and the turn it captured."""

    session_id: UUID
    seq: int
    thread_id: UUID
    kind: ControlKind
    state: Literal["open", "done"]
    target_turn_id: UUID | None
    target_gen: int
    outcome: str | None
    at: datetime


InterruptDecision: TypeAlias = Literal["nothing", "end_head", "end_turn", "capture"]


def decide_interrupt(turn: Turn | None, *, in_flight: bool, waiting_count: int) -> InterruptDecision:
    """What an interrupt ends.

    MA-C8.1: an idle or parked session is left as it is; a call in flight is cancelled first; otherwise the turn, or the head of the
    mailbox that no worker has taken yet, ends in the same commit. MA-C8.9: a turn that waits for its retry ends without another try.
    """
    if turn is None:
        return "end_head" if waiting_count else "nothing"
    if turn.state == "waiting" and turn.wait == "action":
        return "nothing"
    if turn.state == "active" and in_flight:
        return "capture"
    return "end_turn"
