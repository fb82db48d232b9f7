"""Actions: answers that a client owes. While one is open its turn is parked and ordinary input waits."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused

BarrierKind: TypeAlias = Literal["action", "environment", "budget", "delivery", "mutation", "closure", "successor"]
ActionKind: TypeAlias = Literal["custom", "confirm"]
ActionState: TypeAlias = Literal["held", "open", "claimed", "closed"]
"""`held`: made by the model, not yet published; `open`: owed; `claimed`: answered, not yet read; `closed`: done with."""

Answer: TypeAlias = Literal["result", "allow", "deny"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a client must answer. Its id is the public id of the call."""

    session_id: UUID
    id: UUID
    thread_id: UUID
    turn_id: UUID
    round: int
    position: int
    kind: ActionKind
    name: str
    on_lost: str
    serial: bool
    state: ActionState
    event_seq: int
    """The event that carries the call's name and arguments."""
    answer: Answer | None
    answer_seq: int | None
    opened_at: datetime


def refuse_answer(action: Action | None, answer: Answer, reference: str) -> Refused | None:
    """Why this answer to this action can't be taken.

    MA-C7.2: the action must be known, of the kind that the answer fits, and still open; a second answer is refused, the first stays.
    """
    if action is None or action.state == "held":
        return Refused("invalid", "unknown_action", f"No required action has the id {reference!r}.")
    wanted: ActionKind = "custom" if answer == "result" else "confirm"
    if action.kind != wanted:
        expected = "user.custom_tool_result" if action.kind == "custom" else "user.tool_confirmation"
        return Refused(
            "invalid", "wrong_action_kind", f"The required action {reference!r} is answered with {expected}."
        )
    if action.state != "open":
        return Refused("conflict", "already_resolved", f"The required action {reference!r} was already answered.")
    return None


def still_owed(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The open actions, in the order of the calls.

    MA-B5.2: their ids are exactly those that `requires_action` names.
    """
    return tuple(sorted((a for a in actions if a.state == "open"), key=lambda a: (a.round, a.position)))
