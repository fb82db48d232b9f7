"""A draft: one session's facts while commands change them. Each row is written once, as its final image."""

from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.core.facts import Changes, Facts, Row, Stamp
from perdure.domain import ids, wakeup
from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.errors import InvariantViolation
from perdure.domain.event import EMPTY_SNAP, Event, EventType, UsageSnap, encode
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup
from perdure.ports.ledger import Perform

_replace: Final = msgspec.structs.replace


class Draft:
    """Mutable only here: the deciders see frozen rows, the ledger sees `changes()`."""

    def __init__(self, facts: Facts) -> None:
        self.session_id = facts.session_id
        self.session_row = facts.session
        self.expected_rev = None if facts.session is None else facts.session.rev
        seen = facts.now if facts.session is None else max(facts.now, facts.session.seen_at)
        self.now = seen
        self.config = facts.config
        self.threads: dict[UUID, Thread] = {t.id: t for t in facts.threads}
        self.turns: dict[UUID, Turn] = {t.id: t for t in facts.turns}
        self.inputs: dict[int, Input] = {i.seq: i for i in (*facts.waiting, *facts.taken)}
        self.steps: dict[UUID, Step] = {s.id: s for s in facts.steps}
        self.actions: dict[UUID, Action] = {a.id: a for a in facts.actions}
        self.controls: dict[int, Control] = {c.seq: c for c in facts.controls}
        self.wakeups: dict[UUID, Wakeup] = {w.thread_id: w for w in facts.wakeups}
        self.submissions: dict[bytes, Submission] = {s.digest: s for s in facts.submissions}
        self._found = facts.submissions
        self.dead_workers = facts.dead_workers
        self.events: list[Event] = []
        self.transcript: list[TranscriptEntry] = []
        self.claimed: dict[UUID, Perform] = {}
        """Turns claimed at admission, with what their worker is to do."""
        self._dirty: dict[tuple[type[Row], Any], Row] = {}
        self._stamps: list[Stamp] = []
        self._slept: set[UUID] = set()
        self.writes = 0
        """Counts the changes made: whether one command changed anything, whatever came before it in the same batch."""

    # --------------------------------------------------------------------------------------------------------- life of it

    def fork(self) -> "Draft":
        """A copy to try one command on; the original is untouched when it fails."""
        twin = Draft.__new__(Draft)
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value.copy() if isinstance(value, (dict, list, set)) else value
        return twin

    def changed(self) -> bool:
        """Whether anything is to be written."""
        return bool(self._dirty or self.events or self.transcript or self._slept)

    def changes(self) -> Changes:
        """What to write; the session's row included, when there is one."""
        rows: dict[type[Row], list[Row]] = {}
        if self.session_row is not None:
            rows[Session] = [_replace(self.session_row, rev=self.session_row.rev + 1, seen_at=self.now)]
        for (kind, _), row in self._dirty.items():
            if kind is not Session:
                rows.setdefault(kind, []).append(row)
        if self.events:
            rows[Event] = list(self.events)
        if self.transcript:
            rows[TranscriptEntry] = list(self.transcript)
        return Changes(
            session_id=self.session_id,
            expected_rev=self.expected_rev,
            rows=rows,
            stamps=self._merged_stamps(),
            slept=sorted(self._slept),
            found=self._found if self.expected_rev is None else (),
        )

    def _merged_stamps(self) -> list[Stamp]:
        """A row born in this very commit takes its stamp along; the others are updated."""
        fresh = {e.seq for e in self.events}
        return [s for s in self._stamps if s.seq not in fresh]

    # --------------------------------------------------------------------------------------------------------------- rows

    @property
    def session(self) -> Session:
        """The session; a command that needs one was checked to have it."""
        if self.session_row is None:
            raise InvariantViolation("a command reached a session that does not exist")
        return self.session_row

    def put(self, row: Row) -> None:
        """Keep a row's new image."""
        self.writes += 1
        match row:
            case Session():
                self.session_row = row
                self._dirty[Session, row.id] = row
            case SessionConfig():
                self.config = row
                self._dirty[SessionConfig, row.session_id] = row
            case Thread():
                self.threads[row.id] = row
                self._dirty[Thread, row.id] = row
            case Input():
                self.inputs[row.seq] = row
                self._dirty[Input, row.seq] = row
            case Turn():
                self.turns[row.id] = row
                self._dirty[Turn, row.id] = row
            case Step():
                self.steps[row.id] = row
                self._dirty[Step, row.id] = row
            case Action():
                self.actions[row.id] = row
                self._dirty[Action, row.id] = row
            case Control():
                self.controls[row.seq] = row
                self._dirty[Control, row.seq] = row
            case Submission():
                self.submissions[row.digest] = row
                self._dirty[Submission, row.digest] = row
            case Wakeup():
                self.wakeups[row.thread_id] = row
                self._dirty[Wakeup, row.thread_id] = row
                self._slept.discard(row.thread_id)
            case Event() | TranscriptEntry():
                raise InvariantViolation("events and transcript entries are appended, never put")

    def touch(self, **fields: Any) -> None:
        """Change fields of the session; its last activity moves to now."""
        self.put(_replace(self.session, updated_at=self.now, **fields))

    def thread(self, thread_id: UUID) -> Thread:
        """A thread that exists."""
        return self.threads[thread_id]

    def change_thread(self, thread_id: UUID, **fields: Any) -> None:
        """Change fields of a thread."""
        self.put(_replace(self.threads[thread_id], **fields))

    def turn_of(self, thread_id: UUID) -> Turn | None:
        """The turn that holds the thread's slot."""
        thread = self.threads.get(thread_id)
        return None if thread is None or thread.turn_id is None else self.turns[thread.turn_id]

    def change_turn(self, turn_id: UUID, **fields: Any) -> Turn:
        """Change fields of a turn."""
        turn = _replace(self.turns[turn_id], **fields)
        self.put(turn)
        return turn

    def change_input(self, entry: Input, **fields: Any) -> Input:
        """Change an input; custody moves keep the thread's counts of what waits."""
        changed = _replace(entry, **fields)
        if entry.state == "waiting" and changed.state != "waiting":
            thread = self.threads[entry.thread_id]
            self.change_thread(
                thread.id,
                waiting_count=thread.waiting_count - 1,
                waiting_bytes=thread.waiting_bytes - entry.size_bytes,
            )
        self.put(changed)
        return changed

    def waiting(self, thread_id: UUID) -> tuple[Input, ...]:
        """The known waiting inputs of a thread, in receipt order."""
        rows = (i for i in self.inputs.values() if i.thread_id == thread_id and i.state == "waiting")
        return tuple(sorted(rows, key=lambda i: i.seq))

    def taken(self, turn_id: UUID) -> tuple[Input, ...]:
        """The unsettled inputs of a turn, in receipt order."""
        rows = (i for i in self.inputs.values() if i.turn_id == turn_id and i.settled_at is None)
        return tuple(sorted(rows, key=lambda i: i.seq))

    def unsettled_steps(self, turn_id: UUID) -> tuple[Step, ...]:
        """Prepared and dispatched steps of a turn, in call order."""
        rows = (s for s in self.steps.values() if s.turn_id == turn_id and s.state in ("prepared", "dispatched"))
        return tuple(sorted(rows, key=lambda s: (s.ordinal, s.position, s.try_no)))

    def turn_actions(self, turn_id: UUID) -> tuple[Action, ...]:
        """The actions of a turn that are not closed, in call order."""
        rows = (a for a in self.actions.values() if a.turn_id == turn_id and a.state != "closed")
        return tuple(sorted(rows, key=lambda a: (a.round, a.position)))

    def open_controls(self, thread_id: UUID) -> tuple[Control, ...]:
        """Open interrupts of a thread, oldest first."""
        rows = (c for c in self.controls.values() if c.thread_id == thread_id and c.state == "open")
        return tuple(sorted(rows, key=lambda c: c.seq))

    # ------------------------------------------------------------------------------------------------------------- events

    def emit(
        self,
        type: EventType,
        *,
        thread_id: UUID,
        kind: str = "",
        snap: msgspec.Struct | None = None,
        body: bytes | None = None,
        turn_id: UUID | None = None,
        item_id: UUID | None = None,
        step_id: UUID | None = None,
        ref_seq: int | None = None,
        out_index: int | None = None,
        processed: bool = False,
    ) -> Event:
        """Append a row at the next sequence."""
        seq = self.session.receipt_seq + 1
        event = Event(
            session_id=self.session.id,
            seq=seq,
            id=ids.timed(self.now, self.session.id, "event", seq),
            thread_id=thread_id,
            type=type,
            kind=kind,
            at=self.now,
            turn_id=turn_id,
            item_id=item_id,
            step_id=step_id,
            ref_seq=ref_seq,
            out_index=out_index,
            snap=EMPTY_SNAP if snap is None else encode(snap),
            body=body,
            processed_seq=seq if processed else None,
            processed_at=self.now if processed else None,
        )
        self.events.append(event)
        self.put(_replace(self.session, receipt_seq=seq))
        return event

    def stamp(self, seq: int, processed_seq: int) -> None:
        """Mark the row of an input as processed now."""
        for i, event in enumerate(self.events):
            if event.seq == seq:
                self.events[i] = _replace(event, processed_seq=processed_seq, processed_at=self.now)
        self._stamps.append(Stamp(self.session.id, seq, processed_seq, self.now))

    def remember(self, entry: TranscriptEntry) -> None:
        """Append to the model's history."""
        self.writes += 1
        self.transcript.append(entry)

    def usage(self) -> UsageSnap:
        """The session's usage as of now."""
        s = self.session
        return UsageSnap(
            input_tokens=s.input_tokens,
            output_tokens=s.output_tokens,
            cache_read_tokens=s.cache_read_tokens,
            cache_creation_5m_tokens=s.cache_creation_5m_tokens,
            cache_creation_1h_tokens=s.cache_creation_1h_tokens,
            active_ms=s.active_ms,
        )

    # ------------------------------------------------------------------------------------------------------------ wakeups

    def is_dead(self, worker_id: UUID | None) -> bool:
        """Whether the worker of a turn is known to be gone."""
        return worker_id is not None and worker_id in self.dead_workers

    def settle_wakeup(self, thread_id: UUID, *, consume: bool) -> None:
        """Bring the wakeup of a thread in line with what the rules ask for.

        Only an `advance` consumes one; any command adds what is missing or moves it earlier.
        """
        turn = self.turn_of(thread_id)
        due = wakeup.due_at(
            self.now,
            turn=turn,
            worker_dead=turn is not None and self.is_dead(turn.worker_id),
            waiting_count=self.threads[thread_id].waiting_count,
            controls=self.open_controls(thread_id),
        )
        present = self.wakeups.get(thread_id)
        if due is None:
            if consume and present is not None:
                self.sleep(thread_id)
        elif present is None or due < present.due_at or (consume and due != present.due_at):
            self.put(Wakeup(session_id=self.session.id, thread_id=thread_id, due_at=due, tries=0))

    def sleep(self, thread_id: UUID) -> None:
        """Consume a thread's wakeup."""
        self.writes += 1
        self.wakeups.pop(thread_id, None)
        self._dirty.pop((Wakeup, thread_id), None)
        self._slept.add(thread_id)

    def elapsed_ms(self) -> int:
        """Milliseconds since the session began to run; 0 when it does not."""
        since = self.session.running_since
        return 0 if since is None else max(0, (self.now - since) // timedelta(milliseconds=1))
