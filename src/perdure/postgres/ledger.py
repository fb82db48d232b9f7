"""The ledger in PostgreSQL: writers for what changes, a small pool for what is read."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import msgspec

from perdure.domain.barrier import Action
from perdure.domain.errors import Fenced, InvariantViolation, Refused
from perdure.domain.event import Event
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
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
    Idle,
    Parked,
    Perform,
    Release,
    Result,
    Retry,
    SeenEvent,
    SessionQuery,
    SessionView,
    StepInput,
    UpdateSession,
    Wake,
    WithdrawInput,
    Work,
    Working,
)
from perdure.postgres.pool import ReadPool, connect
from perdure.postgres.queries import (
    FEED_SQL,
    SPAN_SQL,
    TRANSCRIPT_SQL,
    VIEW_SQL,
    event_read,
    session_filters,
)
from perdure.postgres.tables import read_row
from perdure.postgres.writer import Writer

R = TypeVar("R", bound=Any)

_WORK_SQL: Final = """
-- due_threads
select due_at, session_id, thread_id from outbox
 where due_at <= clock_timestamp() and ($2::timestamptz is null or (due_at, session_id, thread_id) > ($2, $3::uuid, $4::uuid))
 order by due_at, session_id, thread_id limit $1"""


class Places(Protocol):
    """Who may take work in the commit that admits it."""

    def offer(self, session_id: UUID) -> UUID | None:
        """The worker to claim for, its place held until `settle`; None when there is none to spare."""
        ...

    def settle(self, session_id: UUID) -> None:
        """The admission is through: what was claimed has been handed over, the place is no longer held for it."""
        ...


WRITERS: Final = 2
"""Writers for sessions: one decides while the other waits for the disk. More only compete for the same cores."""


class PostgresLedger:
    """See `perdure.ports.ledger.Ledger`."""

    def __init__(
        self,
        url: str,
        pool: ReadPool,
        *,
        on_commit: Callable[[Committed], None] = lambda _: None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        async def dial() -> Any:
            return await connect(url, application_name="perdure-writer", hot=True)

        self._pool = pool
        self.places: Places | None = None
        self._writers = [Writer(dial, on_commit, now) for _ in range(WRITERS)]
        self._creator = Writer(dial, on_commit, now)

    def start(self) -> None:
        """Start the writers; connections are made when first used."""
        for writer in (*self._writers, self._creator):
            writer.start()

    async def stop(self) -> None:
        """Finish the batches in hand."""
        for writer in (*self._writers, self._creator):
            await writer.stop()

    async def apply(self, command: Command) -> Result:
        """Commit one command."""
        writer = (
            self._creator if isinstance(command, CreateSession) else self._writers[command.session_id.int % WRITERS]
        )
        result = await writer.submit(command)
        if isinstance(result, Accepted) and result.repeat:
            return msgspec.structs.replace(result, events=await self._span(command.session_id, result.span))
        return result

    async def create(self, command: CreateSession) -> Created | Refused:
        """See `Ledger.create`."""
        return _only(await self.apply(command), Created, Refused)

    async def accept(self, command: Accept) -> Accepted | Refused:
        """See `Ledger.accept`."""
        worker = None if self.places is None else self.places.offer(command.session_id)
        if self.places is None or worker is None:
            return _only(await self.apply(command), Accepted, Refused)
        try:
            claiming = msgspec.structs.replace(command, claim_by=worker)
            return _only(await self.apply(claiming), Accepted, Refused)
        finally:
            self.places.settle(command.session_id)

    async def advance(self, command: Advance) -> Answered:
        """See `Ledger.advance`."""
        return _only(await self.apply(command), Perform, Working, Parked, Retry, Idle, Fenced)

    async def release(self, command: Release) -> Done | Fenced:
        """See `Ledger.release`."""
        return _only(await self.apply(command), Done, Fenced)

    async def update(self, command: UpdateSession) -> Done | Refused:
        """See `Ledger.update`."""
        return _only(await self.apply(command), Done, Refused)

    async def archive(self, command: ArchiveSession) -> Done | Refused:
        """See `Ledger.archive`."""
        return _only(await self.apply(command), Done, Refused)

    async def delete(self, command: DeleteSession) -> Done | Refused:
        """See `Ledger.delete`."""
        return _only(await self.apply(command), Done, Refused)

    async def withdraw(self, command: WithdrawInput) -> Done | Refused:
        """See `Ledger.withdraw`."""
        return _only(await self.apply(command), Done, Refused)

    async def wake(self, command: Wake) -> Done:
        """See `Ledger.wake`."""
        return _only(await self.apply(command), Done)

    # ----------------------------------------------------------------------------------------------------------- reads

    async def read_session(self, workspace_id: UUID, session_id: UUID) -> SessionView | None:
        """See `Ledger.read_session`."""
        row = await self._pool.fetchrow(f"{VIEW_SQL} and s.workspace_id = $1 and s.id = $2", workspace_id, session_id)
        return None if row is None else _view(row)

    async def read_sessions(self, query: SessionQuery) -> list[SessionView]:
        """See `Ledger.read_sessions`."""
        where, parameters = session_filters(query)
        order = "desc" if query.descending else "asc"
        sql = f"{VIEW_SQL} {where} order by s.created_at {order}, s.id {order} limit {int(query.limit)}"
        return [_view(r) for r in await self._pool.fetch(sql, *parameters)]

    async def read_events(self, query: EventQuery) -> list[SeenEvent]:
        """See `Ledger.read_events`."""
        sql, parameters = event_read(query)
        return _seen(await self._pool.fetch(sql, *parameters), descending=query.descending)

    async def read_feed(self, session_id: UUID, after_seq: int, limit: int) -> list[SeenEvent] | None:
        """See `Ledger.read_feed`."""
        rows = await self._pool.fetch(FEED_SQL, session_id, after_seq, limit, READ_BYTES_MAX)
        if rows:
            return _seen(rows)
        return None if await self.read_head(session_id) is None else []

    async def read_head(self, session_id: UUID) -> int | None:
        """See `Ledger.read_head`."""
        sql = "select receipt_seq from session where id = $1 and state not in ('deleting', 'deleted')"
        row = await self._pool.fetchrow(sql, session_id)
        return None if row is None else int(row["receipt_seq"])

    async def read_heads(self, session_ids: Sequence[UUID]) -> dict[UUID, int]:
        """See `Ledger.read_heads`."""
        sql = "select id, receipt_seq from session where id = any($1::uuid[]) and state not in ('deleting', 'deleted')"
        return {r["id"]: r["receipt_seq"] for r in await self._pool.fetch(sql, list(session_ids))}

    async def _span(self, session_id: UUID, span: tuple[int, int]) -> tuple[Event, ...]:
        return tuple(read_row(Event, r["event"]) for r in await self._pool.fetch(SPAN_SQL, session_id, *span))

    async def read_transcript(self, session_id: UUID, thread_id: UUID) -> list[TranscriptEntry]:
        """See `Ledger.read_transcript`."""
        rows = await self._pool.fetch(TRANSCRIPT_SQL, session_id, thread_id)
        return [read_row(TranscriptEntry, r) for r in rows]

    async def read_step(self, step: Step) -> StepInput | None:
        """See `Ledger.read_step`."""
        sql = """
            select c as config, u as turn, e as call
              from session s
              join session_config c on c.session_id = s.id
              join turn u on u.session_id = s.id and u.id = $2
              left join event e on e.session_id = s.id and e.seq = $3
             where s.id = $1 and s.state not in ('deleting', 'deleted')"""
        row = await self._pool.fetchrow(sql, step.session_id, step.turn_id, step.event_seq)
        if row is None:
            return None
        call = read_row(Event, row["call"]) if step.kind == "tool" and row["call"] is not None else None
        return StepInput(config=read_row(SessionConfig, row["config"]), turn=read_row(Turn, row["turn"]), call=call)

    async def read_inputs(self, session_id: UUID, *, limit: int) -> list[Input]:
        """See `Ledger.read_inputs`."""
        sql = "select * from input where session_id = $1 order by seq desc limit $2"
        return [read_row(Input, r) for r in await self._pool.fetch(sql, session_id, limit)]

    async def read_actions(self, session_id: UUID) -> list[Action]:
        """See `Ledger.read_actions`."""
        sql = "select * from action where session_id = $1 and state = 'open' order by round, position"
        return [read_row(Action, r) for r in await self._pool.fetch(sql, session_id)]

    async def read_work(self, limit: int, after: Work | None = None) -> Sequence[Work]:
        """See `Ledger.read_work`."""
        behind = (None, None, None) if after is None else (after.due_at, after.session_id, after.thread_id)
        found = await self._pool.fetch(_WORK_SQL, limit, *behind)
        return [Work(r["due_at"], r["session_id"], r["thread_id"]) for r in found]

    async def read_held(self, worker_id: UUID) -> Sequence[Work]:
        """See `Ledger.read_held`."""
        sql = "select progress_at, session_id, thread_id from turn where worker_id = $1 and state = 'active'"
        return [Work(r["progress_at"], r["session_id"], r["thread_id"]) for r in await self._pool.fetch(sql, worker_id)]


def _view(row: Any) -> SessionView:
    return SessionView(
        session=read_row(Session, row["session"]),
        config=read_row(SessionConfig, row["config"]),
        thread=read_row(Thread, row["thread"]),
    )


def _seen(rows: Sequence[Any], *, descending: bool = False) -> list[SeenEvent]:
    """The rows of a page in their order, with those that they refer to."""
    events = {e.seq: e for e in (read_row(Event, r["event"]) for r in rows)}
    listed = sorted((r["event"]["seq"] for r in rows if r["listed"]), reverse=descending)
    page = (events[seq] for seq in listed)
    return [SeenEvent(e, None if e.ref_seq is None else events.get(e.ref_seq)) for e in page]


def _only(result: Result, *kinds: type[R]) -> R:
    if not isinstance(result, kinds):
        raise InvariantViolation(f"the ledger answered {type(result).__name__}")
    return result
