"""The oracle: the ledger in memory, the executable specification of what PostgreSQL must do.

It runs the same deciders; what it specifies is which facts they see and what becomes of their changes. Time is given by the test.
"""

import copy
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from perdure.core.decide import committed, decide
from perdure.core.draft import Draft
from perdure.core.facts import Changes, Facts, Needs, Row, needs_of
from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.errors import Fenced, InvariantViolation, Refused
from perdure.domain.event import Event
from perdure.domain.lease import Worker
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup
from perdure.ports.ledger import (
    READ_BYTES_MAX,
    Accept,
    Accepted,
    Advance,
    Answered,
    ArchiveSession,
    Command,
    Committed,
    Created,
    CreateSession,
    DeleteSession,
    Done,
    EventQuery,
    Release,
    Result,
    SeenEvent,
    SessionQuery,
    SessionView,
    StepInput,
    UpdateSession,
    Wake,
    WithdrawInput,
    Work,
)

R = TypeVar("R", bound=Any)

START = datetime(2026, 1, 1, tzinfo=UTC)

STREAM_ONLY = ("input.settled",)
"""Rows that lists leave out: the second sighting of an input."""


def key_of(row: Row) -> tuple[Any, ...]:
    """The primary key of a row."""
    match row:
        case Session():
            return (row.id,)
        case SessionConfig():
            return (row.session_id,)
        case Thread() | Turn() | Step() | Action():
            return (row.session_id, row.id)
        case Input() | Control() | Event():
            return (row.session_id, row.seq)
        case TranscriptEntry():
            return (row.session_id, row.thread_id, row.causal_pos, row.position)
        case Wakeup():
            return (row.session_id, row.thread_id)
        case Submission():
            return (row.digest,)


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = START

    def advance(self, **by: float) -> None:
        """Let time pass."""
        self.now += timedelta(**by)


class OracleLedger:
    """Tables as dictionaries. `on_commit` hears of each commit like the live plane does."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.tables: dict[type[Row], dict[tuple[Any, ...], Row]] = {}
        self.workers: dict[UUID, Worker] = {}
        self.on_commit: Callable[[Committed], None] = lambda _: None

    # one door

    def apply(self, command: Command) -> Result:
        """Decide and write one command, as one commit."""
        facts = self.facts(command.session_id, needs_of(command))
        draft, result = decide(Draft(facts), command)
        if draft.changed():
            self.write(draft.changes())
            told = committed(draft)
            if told is not None:
                self.on_commit(told)
        if isinstance(result, Accepted) and result.repeat:
            return msgspec.structs.replace(result, events=self._span(command.session_id, result.span))
        return result

    def facts(self, session_id: UUID, needs: Needs) -> Facts:
        """What a decider may see of one session."""
        session = self._table(Session).get((session_id,))
        turns = [t for t in self.rows(Turn, session_id) if t.state != "settled"]
        waiting = sorted((i for i in self.rows(Input, session_id) if i.state == "waiting"), key=lambda i: i.seq)
        digests = set(needs.digests)
        return Facts(
            session_id=session_id,
            now=self.clock.now,
            session=session if isinstance(session, Session) else None,
            config=self.config(session_id) if needs.config else None,
            threads=tuple(self.rows(Thread, session_id)),
            turns=tuple(turns),
            waiting=tuple(waiting[: needs.heads_max]),
            taken=tuple(
                i for i in self.rows(Input, session_id) if i.settled_at is None and i.state in ("claimed", "consumed")
            ),
            steps=tuple(s for s in self.rows(Step, session_id) if s.state in ("prepared", "dispatched")),
            actions=tuple(a for a in self.rows(Action, session_id) if a.state != "closed" or a.id in needs.actions),
            controls=tuple(c for c in self.rows(Control, session_id) if c.state == "open"),
            wakeups=tuple(self.rows(Wakeup, session_id)),
            submissions=tuple(s for s in self.all(Submission) if s.digest in digests),
            dead_workers=frozenset(
                t.worker_id
                for t in turns
                if t.worker_id is not None
                and (w := self.workers.get(t.worker_id)) is not None
                and w.dead_at is not None
            ),
        )

    def write(self, changes: Changes) -> None:
        """Write the images of one session, if nobody changed it since it was read."""
        before = self._table(Session).get((changes.session_id,))
        rev = before.rev if isinstance(before, Session) else None
        if rev != changes.expected_rev:
            raise InvariantViolation(f"session {changes.session_id} moved from {changes.expected_rev} to {rev}")
        for kind, rows in changes.rows.items():
            table = self._table(kind)
            for row in rows:
                key = key_of(row)
                if kind in (Event, TranscriptEntry) and key in table:
                    raise InvariantViolation(f"{kind.__name__} {key} written twice")
                table[key] = row
        for stamp in changes.stamps:
            event = self._table(Event)[stamp.session_id, stamp.seq]
            assert isinstance(event, Event)
            stamped = msgspec.structs.replace(event, processed_seq=stamp.processed_seq, processed_at=stamp.processed_at)
            self._table(Event)[stamp.session_id, stamp.seq] = stamped
        for thread_id in changes.slept:
            self._table(Wakeup).pop((changes.session_id, thread_id), None)

    # looking

    def _table(self, kind: type[Any]) -> dict[tuple[Any, ...], Any]:
        return self.tables.setdefault(kind, {})

    def all(self, kind: type[R]) -> list[R]:
        """Every row of a table, in key order."""
        table = self._table(kind)
        return [row for _, row in sorted(table.items(), key=lambda kv: repr(kv[0]))]  # pyright: ignore[reportReturnType]

    def rows(self, kind: type[R], session_id: UUID) -> list[R]:
        """A session's rows of a table."""
        return [r for r in self._table(kind).values() if getattr(r, "session_id", None) == session_id]  # pyright: ignore[reportReturnType]

    def config(self, session_id: UUID) -> SessionConfig | None:
        """A session's configuration."""
        row = self._table(SessionConfig).get((session_id,))
        return row if isinstance(row, SessionConfig) else None

    def snapshot(self) -> dict[str, list[Any]]:
        """Everything, for comparison: table name to rows in key order."""
        kinds = (
            Session,
            SessionConfig,
            Thread,
            Input,
            Turn,
            Step,
            Action,
            Control,
            Event,
            TranscriptEntry,
            Wakeup,
            Submission,
        )
        out: dict[str, list[Any]] = {}
        for kind in kinds:
            rows = [self._table(kind)[k] for k in self._table(kind)]
            out[kind.__name__] = sorted(
                (msgspec.structs.asdict(r) for r in rows), key=lambda d: repr(key_tuple(kind, d))
            )
        return out

    def fork(self) -> "OracleLedger":
        """A copy to try something on."""
        twin = OracleLedger(copy.copy(self.clock))
        twin.tables = {k: dict(v) for k, v in self.tables.items()}
        twin.workers = dict(self.workers)
        return twin

    def bury(self, worker_id: UUID) -> None:
        """A worker is known to be dead; its threads are woken."""
        known = self.workers.get(worker_id)
        self.workers[worker_id] = Worker(
            id=worker_id,
            host="h",
            boot="b",
            pid=1,
            started="s",
            lease_until=self.clock.now,
            lock_free_since=None,
            dead_at=(known.dead_at if known else None) or self.clock.now,
        )
        for turn in self.all(Turn):
            if turn.state == "active" and turn.worker_id == worker_id:
                self.apply(Wake(session_id=turn.session_id, thread_id=turn.thread_id))

    # the port

    async def create(self, command: CreateSession) -> Created | Refused:
        """See `Ledger.create`."""
        return _only(self.apply(command), Created, Refused)

    async def accept(self, command: Accept) -> Accepted | Refused:
        """See `Ledger.accept`."""
        return _only(self.apply(command), Accepted, Refused)

    async def advance(self, command: Advance) -> Answered:
        """See `Ledger.advance`."""
        return self.apply(command)  # pyright: ignore[reportReturnType]

    async def release(self, command: Release) -> Done | Fenced:
        """See `Ledger.release`."""
        return _only(self.apply(command), Done, Fenced)

    async def update(self, command: UpdateSession) -> Done | Refused:
        """See `Ledger.update`."""
        return _only(self.apply(command), Done, Refused)

    async def archive(self, command: ArchiveSession) -> Done | Refused:
        """See `Ledger.archive`."""
        return _only(self.apply(command), Done, Refused)

    async def delete(self, command: DeleteSession) -> Done | Refused:
        """See `Ledger.delete`."""
        return _only(self.apply(command), Done, Refused)

    async def withdraw(self, command: WithdrawInput) -> Done | Refused:
        """See `Ledger.withdraw`."""
        return _only(self.apply(command), Done, Refused)

    async def wake(self, command: Wake) -> Done:
        """See `Ledger.wake`."""
        return _only(self.apply(command), Done)

    def _alive(self, session_id: UUID) -> Session | None:
        session = self._table(Session).get((session_id,))
        return session if isinstance(session, Session) and session.state not in ("deleting", "deleted") else None

    def _view(self, session: Session) -> SessionView:
        config = self.config(session.id)
        assert config is not None
        thread = next(t for t in self.rows(Thread, session.id) if t.parent_id is None)
        return SessionView(session=session, config=config, thread=thread)

    async def read_session(self, workspace_id: UUID, session_id: UUID) -> SessionView | None:
        """See `Ledger.read_session`."""
        session = self._alive(session_id)
        return self._view(session) if session is not None and session.workspace_id == workspace_id else None

    async def read_sessions(self, query: SessionQuery) -> list[SessionView]:
        """See `Ledger.read_sessions`."""
        found = [s for s in self.all(Session) if self._alive(s.id) and wanted(s, query)]
        found.sort(key=lambda s: (s.created_at, s.id), reverse=query.descending)
        return [self._view(s) for s in found[: query.limit]]

    def _seen(self, event: Event) -> SeenEvent:
        referred = None if event.ref_seq is None else self._table(Event).get((event.session_id, event.ref_seq))
        return SeenEvent(event, referred if isinstance(referred, Event) else None)

    def _span(self, session_id: UUID, span: tuple[int, int]) -> tuple[Event, ...]:
        rows = (e for e in self.rows(Event, session_id) if e.type == "input.received" and span[0] <= e.seq <= span[1])
        return tuple(sorted(rows, key=lambda e: e.seq))

    async def read_events(self, query: EventQuery) -> list[SeenEvent]:
        """See `Ledger.read_events`."""
        rows = [e for e in self.rows(Event, query.session_id) if listed(e, query)]
        rows.sort(key=lambda e: e.seq, reverse=query.descending)
        return self._bounded(rows, query.limit)

    async def read_feed(self, session_id: UUID, after_seq: int, limit: int) -> list[SeenEvent] | None:
        """See `Ledger.read_feed`."""
        if self._alive(session_id) is None:
            return None
        rows = sorted((e for e in self.rows(Event, session_id) if e.seq > after_seq), key=lambda e: e.seq)
        return self._bounded(rows, limit)

    def _bounded(self, rows: Sequence[Event], limit: int) -> list[SeenEvent]:
        read: list[SeenEvent] = []
        size = 0
        for event in rows[:limit]:
            if size >= READ_BYTES_MAX:
                break
            read.append(self._seen(event))
            size += read[-1].size_bytes
        return read

    async def read_head(self, session_id: UUID) -> int | None:
        """See `Ledger.read_head`."""
        session = self._alive(session_id)
        return None if session is None else session.receipt_seq

    async def read_heads(self, session_ids: Sequence[UUID]) -> dict[UUID, int]:
        """See `Ledger.read_heads`."""
        alive = ((i, self._alive(i)) for i in session_ids)
        return {i: s.receipt_seq for i, s in alive if s is not None}

    async def read_transcript(self, session_id: UUID, thread_id: UUID) -> list[TranscriptEntry]:
        """See `Ledger.read_transcript`."""
        rows = [t for t in self.rows(TranscriptEntry, session_id) if t.thread_id == thread_id]
        rows.sort(key=lambda t: (t.causal_pos, t.position))
        out: list[TranscriptEntry] = []
        for row in rows:
            event = None if row.ref_seq is None else self._table(Event).get((session_id, row.ref_seq))
            out.append(msgspec.structs.replace(row, ref_body=event.body if isinstance(event, Event) else None))
        return out

    async def read_step(self, step: Step) -> StepInput | None:
        """See `Ledger.read_step`."""
        config = self.config(step.session_id)
        turn = self._table(Turn).get((step.session_id, step.turn_id))
        if self._alive(step.session_id) is None or config is None or not isinstance(turn, Turn):
            return None
        call = self._table(Event).get((step.session_id, step.event_seq)) if step.kind == "tool" else None
        return StepInput(config=config, turn=turn, call=call if isinstance(call, Event) else None)

    async def read_inputs(self, session_id: UUID, *, limit: int) -> list[Input]:
        """See `Ledger.read_inputs`."""
        return sorted(self.rows(Input, session_id), key=lambda i: -i.seq)[:limit]

    async def read_actions(self, session_id: UUID) -> list[Action]:
        """See `Ledger.read_actions`."""
        rows = [a for a in self.rows(Action, session_id) if a.state == "open"]
        return sorted(rows, key=lambda a: (a.round, a.position))

    async def read_work(self, limit: int, after: Work | None = None) -> Sequence[Work]:
        """See `Ledger.read_work`."""
        due = sorted((w.due_at, w.session_id, w.thread_id) for w in self.all(Wakeup) if w.due_at <= self.clock.now)
        behind = [w for w in due if after is None or w > (after.due_at, after.session_id, after.thread_id)]
        return [Work(*w) for w in behind[:limit]]

    async def read_held(self, worker_id: UUID) -> Sequence[Work]:
        """See `Ledger.read_held`."""
        held = [t for t in self.all(Turn) if t.worker_id == worker_id and t.state == "active"]
        return [Work(t.progress_at, t.session_id, t.thread_id) for t in held]


def key_tuple(kind: type[Row], row: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a dumped row, for sorting."""
    if kind is Session:
        return (str(row["id"]),)
    if kind is Submission:
        return (row["digest"],)
    names = [n for n in ("session_id", "thread_id", "seq", "causal_pos", "position", "id") if n in row]
    return tuple(str(row[n]).zfill(12) for n in names)


def wanted(session: Session, query: SessionQuery) -> bool:
    """Whether a list of sessions shows this one."""
    cursor = (session.created_at, session.id)
    checks = (
        session.workspace_id == query.workspace_id,
        session.profile == query.profile,
        query.agent_id is None or session.agent_id == query.agent_id,
        query.agent_version is None or session.agent_version == query.agent_version,
        query.statuses is None or session.status in query.statuses,
        query.include_archived or session.archived_at is None,
        query.created_after is None or session.created_at > query.created_after,
        query.created_from is None or session.created_at >= query.created_from,
        query.created_before is None or session.created_at < query.created_before,
        query.created_until is None or session.created_at <= query.created_until,
        query.after is None or (cursor < query.after if query.descending else cursor > query.after),
    )
    return all(checks)


def listed(event: Event, query: EventQuery) -> bool:
    """Whether a list of events shows this row."""
    if event.type in STREAM_ONLY:
        return False
    shown_at = event.processed_at if event.type == "input.received" else event.at
    bounded = (query.processed_after, query.processed_from, query.processed_before, query.processed_until)
    if any(b is not None for b in bounded) and shown_at is None:
        return False
    if shown_at is not None:
        after, first, before, last = bounded
        inside = (
            after is None or shown_at > after,
            first is None or shown_at >= first,
            before is None or shown_at < before,
            last is None or shown_at <= last,
        )
        if not all(inside):
            return False
    if query.types is not None and not any(t == event.type and k in (None, event.kind) for t, k in query.types):
        return False
    if query.after_seq is None:
        return True
    return event.seq < query.after_seq if query.descending else event.seq > query.after_seq


def _only(result: Result, *kinds: type[R]) -> R:
    assert isinstance(result, kinds), result
    return result
