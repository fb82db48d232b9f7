"""Facts and changes: what a ledger reads for the deciders, and what they give it to write."""

from datetime import datetime
from typing import TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.event import Event
from perdure.domain.mailbox import WAITING_COUNT_MAX, Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission, SubmissionKey
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup
from perdure.ports.ledger import (
    Accept,
    Advance,
    ArchiveSession,
    Command,
    CreateSession,
    DeleteSession,
    UpdateSession,
    WithdrawInput,
)

Row: TypeAlias = (
    Session
    | SessionConfig
    | Thread
    | Input
    | Turn
    | Step
    | Action
    | Control
    | Event
    | TranscriptEntry
    | Wakeup
    | Submission
)


class Facts(msgspec.Struct, kw_only=True):
    """One session in one snapshot, bounded: counts and heads, never bodies or history."""

    session_id: UUID
    """Whom they are about, whether it is there or not."""
    now: datetime
    session: Session | None
    config: SessionConfig | None = None
    threads: tuple[Thread, ...] = ()
    turns: tuple[Turn, ...] = ()
    """Unsettled ones."""
    waiting: tuple[Input, ...] = ()
    """The first waiting inputs of each thread, in receipt order."""
    taken: tuple[Input, ...] = ()
    """Inputs claimed or consumed whose turn is not settled."""
    steps: tuple[Step, ...] = ()
    """Unsettled ones."""
    actions: tuple[Action, ...] = ()
    """Those not closed, and those that the commands refer to."""
    controls: tuple[Control, ...] = ()
    """Open ones."""
    wakeups: tuple[Wakeup, ...] = ()
    submissions: tuple[Submission, ...] = ()
    dead_workers: frozenset[UUID] = frozenset()


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a command wants read beyond the usual."""

    heads_max: int = 0
    config: bool = False
    actions: tuple[UUID, ...] = ()
    digests: tuple[bytes, ...] = ()


class Stamp(msgspec.Struct, frozen=True):
    """The one change an event row may see: when its input was processed."""

    session_id: UUID
    seq: int
    processed_seq: int
    processed_at: datetime


class Changes(msgspec.Struct, kw_only=True):
    """Final images of the rows that one commit writes for one session."""

    session_id: UUID
    expected_rev: int | None
    """None makes the session, or counts the repeat of the request that made one: then there is no row of a session."""
    rows: dict[type[Row], list[Row]]
    stamps: list[Stamp]
    slept: list[UUID]
    """Threads whose wakeup is consumed."""
    found: tuple[Submission, ...] = ()
    """The records of earlier requests that a creation was decided by, as they were then: no other ones may be replaced."""

    def of(self, kind: type[Row]) -> list[Row]:
        """The rows of one table."""
        return self.rows.get(kind, [])


def needs_of(command: Command) -> Needs:
    """What to read for a command."""
    match command:
        case CreateSession():
            return Needs(digests=_digests(command.submission))
        case Accept():
            refs = tuple(a.action_id for a in command.arrivals if a.action_id is not None)
            # Each interrupt may end the head that waits; and what goes on at once may end by an error, which drops all that does.
            ends = command.claim_by is not None or any(a.kind == "interrupt" for a in command.arrivals)
            heads_max = WAITING_COUNT_MAX if ends else 0
            return Needs(heads_max=heads_max, actions=refs, digests=_digests(command.submission))
        case Advance():
            # Any of them may end a turn by an error, which drops all that waits.
            return Needs(heads_max=WAITING_COUNT_MAX)
        case UpdateSession():
            return Needs(config=True)
        case DeleteSession():
            return Needs(heads_max=WAITING_COUNT_MAX, digests=_digests(command.submission))
        case ArchiveSession() | WithdrawInput():
            return Needs(heads_max=WAITING_COUNT_MAX)
        case _:
            return Needs()


def _digests(key: SubmissionKey | None) -> tuple[bytes, ...]:
    return () if key is None else (key.digest,)
