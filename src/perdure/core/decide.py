"""One command on one draft: the single door through which every implementation of the ledger applies the rules."""

from datetime import timedelta
from typing import assert_never

from perdure.core.accept import accept
from perdure.core.advance import advance, release
from perdure.core.draft import Draft
from perdure.core.facts import Facts
from perdure.core.lifecycle import archive, create, delete, update, withdraw
from perdure.domain.errors import Refused
from perdure.domain.wakeup import Wakeup
from perdure.ports.ledger import (
    Accept,
    Advance,
    ArchiveSession,
    Command,
    Committed,
    CreateSession,
    DeleteSession,
    Done,
    Release,
    Result,
    UpdateSession,
    Wake,
    WithdrawInput,
)


def decide(draft: Draft, command: Command) -> tuple[Draft, Result]:
    """Apply a command. A refusal gives back the draft as it was; an exception leaves it as it was."""
    tried = draft.fork()
    result = _apply(tried, command)
    return (draft, result) if isinstance(result, Refused) else (tried, result)


def decide_alone(facts: Facts, command: Command) -> tuple[Draft, Result]:
    """Like `decide` for the only command of its session: a draft that fails is thrown away, so nothing need be copied."""
    draft = Draft(facts)
    result = _apply(draft, command)
    return (Draft(facts), result) if isinstance(result, Refused) else (draft, result)


def _apply(draft: Draft, command: Command) -> Result:
    match command:
        case Accept():
            return accept(draft, command)
        case Advance():
            return advance(draft, command)
        case Release():
            return release(draft, command)
        case CreateSession():
            return create(draft, command)
        case UpdateSession():
            return update(draft, command)
        case ArchiveSession():
            return archive(draft, command)
        case DeleteSession():
            return delete(draft, command)
        case WithdrawInput():
            return withdraw(draft, command)
        case Wake():
            return _wake(draft, command)
        case _:
            assert_never(command)


def _wake(draft: Draft, command: Wake) -> Done:
    if draft.session_row is not None and draft.session.state == "open" and command.thread_id in draft.threads:
        draft.settle_wakeup(command.thread_id, consume=False)
    return Done()


def _delay_ms(draft: Draft, wakeup: Wakeup) -> int:
    return max(0, (wakeup.due_at - draft.now) // timedelta(milliseconds=1))


def committed(draft: Draft) -> Committed | None:
    """What the live plane is told once the draft is written. None when nothing of a session was: a repeat was counted."""
    if draft.session_row is None:
        return None
    return Committed(
        session_id=draft.session.id,
        events=tuple(draft.events),
        woken=tuple((w.thread_id, _delay_ms(draft, w)) for w in draft.wakeups.values()),
        stopped=tuple(t for t in draft.threads if draft.open_controls(t)),
        claimed=tuple(draft.claimed.items()),
        deleted=draft.session.state in ("deleting", "deleted"),
    )
