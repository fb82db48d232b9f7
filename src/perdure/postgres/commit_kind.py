"""What a commit does, in words, for the named crash points: `before_commit.finish`, `after_commit.finish`. Asked only when one is armed."""

from typing import Final

from perdure.core.facts import Changes
from perdure.domain.control import Control
from perdure.domain.event import Event
from perdure.domain.session import Session
from perdure.domain.step import Step

_OF_EVENTS: Final = {
    "input.received": "accept",
    "turn.created": "claim",
    "turn.parked": "park",
    "turn.resumed": "resume",
    "turn.ended": "finish",
    "session.error": "error",
    "session.updated": "update",
}


def kinds_of(changes: Changes) -> frozenset[str]:
    """Every kind that fits; a commit often does several things at once."""
    kinds: set[str] = set()
    if changes.expected_rev is None:
        kinds.add("create")
    for event in changes.of(Event):
        if isinstance(event, Event) and event.type in _OF_EVENTS:
            kinds.add(_OF_EVENTS[event.type])
    for step in changes.of(Step):
        if isinstance(step, Step):
            kinds.add(_of_step(step))
    for session in changes.of(Session):
        if isinstance(session, Session) and session.state in ("deleting", "archived"):
            kinds.add("delete" if session.state == "deleting" else "archive")
    if changes.of(Control):
        kinds.add("interrupt")
    return frozenset(kinds or {"wake"})


def _of_step(step: Step) -> str:
    match step.state:
        case "prepared":
            return "prepare"
        case "dispatched":
            return f"dispatch_{step.kind}"
        case "ambiguous":
            return "lose"
        case "done" | "failed":
            return f"outcome_{step.kind}"
