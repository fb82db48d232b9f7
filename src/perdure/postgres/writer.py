"""The one write path: group commit without locks and without a timer.

A writer takes what is queued, reads the facts of all its sessions in one statement, lets the deciders run, and writes everything in
one statement that is guarded by each session's `rev`. What was not written, because somebody else moved the session, goes back to the
head of the queue. Futures are resolved outside of everything that can fail, so that a caller who left can't hurt its neighbours.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

from perdure.core.decide import committed, decide, decide_alone
from perdure.core.draft import Draft
from perdure.core.facts import Changes, Facts, needs_of
from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.ports.ledger import Accept, Command, Committed, CreateSession, Result
from perdure.postgres import crash
from perdure.postgres.facts import FACTS_SQL, Ask, arguments, from_record
from perdure.postgres.pool import is_lost
from perdure.postgres.write import compose

BATCH_COMMANDS_MAX: Final = 128
BATCH_BYTES_MAX: Final = 1024 * 1024
"""What one commit takes: enough to share the fsync, little enough that nobody waits long for it."""

MISSES_MAX: Final = 3
"""Times a command finds its session moved before it takes the locked path."""

RESOLVE_S: Final = 15.0
"""How long a batch whose commit is in doubt waits for the database to say what became of it."""

RECONNECT_S: Final = 0.1
QUEUE_MAX: Final = 20_000
"""Commands waiting in one writer; beyond it callers are told to come back, before memory is the limit."""

Connect = Callable[[], Awaitable[Any]]


class Pending:
    """A command and who waits for it."""

    __slots__ = ("command", "future", "misses", "size_bytes")

    def __init__(self, command: Command, future: "asyncio.Future[Result]") -> None:
        self.command = command
        self.future = future
        self.misses = 0
        self.size_bytes = (
            sum(len(a.body) for a in command.arrivals) if isinstance(command, (Accept, CreateSession)) else 256
        )


class _Lost(Exception):
    """The connection went away; `writing` says whether the batch may have been committed."""

    def __init__(self, *, writing: bool) -> None:
        super().__init__()
        self.writing = writing


class Writer:
    """One connection, one batch at a time. Sessions are hashed to a writer, so a session is in one batch at most."""

    def __init__(
        self, connect: Connect, on_commit: Callable[[Committed], None], now: Callable[[], datetime] | None = None
    ) -> None:
        self._connect = connect
        self._on_commit = on_commit
        self._now = now
        self._id = uuid4()
        self._batch_no = 0
        self._queue: deque[Pending] = deque()
        self._arrived = asyncio.Event()
        self._connection: Any = None
        self._task: asyncio.Task[None] | None = None
        self._down = False

    def start(self) -> None:
        """Begin to take commands."""
        self._task = asyncio.create_task(self._run(), name="ledger-writer")

    async def stop(self) -> None:
        """Finish the batch in hand and end; what is queued is refused."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for pending in self._queue:
            _fail(pending, Unavailable("the server is shutting down"))
        self._queue.clear()
        if self._connection is not None:
            await self._connection.close()

    async def submit(self, command: Command) -> Result:
        """Queue a command and wait for its commit. Raises `Unavailable` when nothing was kept of it."""
        if self._down and self._queue:
            raise Unavailable("the database can't be reached")
        if len(self._queue) >= QUEUE_MAX:
            raise Unavailable("too many commands wait for the ledger")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(Pending(command, future))
        self._arrived.set()
        return await future

    # ------------------------------------------------------------------------------------------------------------ loop

    async def _run(self) -> None:
        while True:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take()
            if not batch:
                continue
            try:
                await self._commit(batch)
            except _Lost:
                await self._refuse(batch)
            except Exception as error:  # noqa: BLE001  a supervised loop: the batch fails, the writer and its queue live
                for pending in batch:
                    _fail(pending, InvariantViolation(f"{type(error).__name__}: {error}"))

    def _take(self) -> list[Pending]:
        """What is queued, up to the limits; a command whose caller is gone is dropped unread."""
        batch: list[Pending] = []
        size_bytes = 0
        digests: set[bytes] = set()
        while self._queue and len(batch) < BATCH_COMMANDS_MAX:
            pending = self._queue[0]
            if pending.future.done():
                self._queue.popleft()
                continue
            alone = pending.misses >= MISSES_MAX
            if batch and (alone or size_bytes + pending.size_bytes > BATCH_BYTES_MAX):
                break
            if isinstance(pending.command, CreateSession) and pending.command.submission is not None:
                if pending.command.submission.digest in digests:
                    break
                digests.add(pending.command.submission.digest)
            batch.append(self._queue.popleft())
            size_bytes += pending.size_bytes
            if alone:
                break
        return batch

    async def _refuse(self, batch: list[Pending]) -> None:
        """The database is away and nothing of the batch was kept: say so, and don't let others wait for the same."""
        self._down = True
        for pending in batch:
            _fail(pending, Unavailable("the database can't be reached"))
        while self._queue:
            _fail(self._queue.popleft(), Unavailable("the database can't be reached"))
        await asyncio.sleep(RECONNECT_S)

    # ---------------------------------------------------------------------------------------------------------- a batch

    async def _commit(self, batch: list[Pending]) -> None:
        """Read, decide, write, answer. A lost connection before the write is tried once more on a new one."""
        try:
            await self._try(batch)
        except _Lost as lost:
            self._connection = None
            if lost.writing:
                raise
            await self._try(batch)

    async def _try(self, batch: list[Pending]) -> None:
        connection = await self._connected()
        if batch[0].misses >= MISSES_MAX and not isinstance(batch[0].command, CreateSession):
            await self._locked(connection, batch)
            return
        facts = await self._read(connection, batch)
        drafts, results = _decide(batch, facts)
        changed = [d.changes() for d in drafts.values() if d.changed()]
        written: set[UUID] = set()
        if changed:
            written = await self._write(connection, batch, changed)
        self._answer(batch, drafts, results, written)

    async def _locked(self, connection: Any, batch: list[Pending]) -> None:
        """The slow path of a session that others keep moving: lock it, then read in a second statement."""
        writing = False
        changed: list[Changes] = []
        drafts: dict[UUID, Draft] = {}
        results: dict[int, Result | Exception] = {}
        written: set[UUID] = set()
        try:
            async with connection.transaction():
                await connection.execute(
                    "select id from session where id = $1 for no key update", batch[0].command.session_id
                )
                facts = await self._read(connection, batch)
                drafts, results = _decide(batch, facts)
                changed = [d.changes() for d in drafts.values() if d.changed()]
                if changed:
                    writing = True
                    written = await self._execute(connection, changed, locked=True)
        except Exception as error:
            if not is_lost(error):
                raise
            kept = await self._kept(changed) if writing else None
            if kept is None:
                raise _Lost(writing=writing) from error
            written = kept
        self._answer(batch, drafts, results, written)

    async def _read(self, connection: Any, batch: Sequence[Pending]) -> dict[UUID, Facts]:
        grouped: dict[UUID, list[Any]] = {}
        for pending in batch:
            grouped.setdefault(pending.command.session_id, []).append(needs_of(pending.command))
        asks = [Ask(session_id, tuple(needs)) for session_id, needs in grouped.items()]
        try:
            records = await connection.fetch(FACTS_SQL, *arguments(asks, self._now() if self._now else None))
        except Exception as error:
            if is_lost(error):
                raise _Lost(writing=False) from error
            raise
        return dict(from_record(r) for r in records)

    async def _write(self, connection: Any, batch: list[Pending], changed: list[Changes]) -> set[UUID]:
        """One statement, one commit. When it fails as a whole, its halves are tried, down to the one that is the cause."""
        try:
            return await self._execute(connection, changed, locked=False)
        except Exception as error:  # noqa: BLE001  whatever it was, the halves find whose it is
            if is_lost(error):
                kept = await self._kept(changed)
                return await self._again(batch, changed) if kept is None else kept
            if len(changed) == 1:
                for pending in batch:
                    if pending.command.session_id == changed[0].session_id:
                        _fail(pending, InvariantViolation(f"{type(error).__name__}: {error}"))
                return set()
        half = len(changed) // 2
        first = await self._write(connection, batch, changed[:half])
        return first | await self._write(connection, batch, changed[half:])

    async def _again(self, batch: list[Pending], changed: list[Changes]) -> set[UUID]:
        """The lost batch left no trace: write the same changes on the new connection; the guard sees to what moved since."""
        connection = await self._connected()
        return await self._write(connection, batch, changed)

    async def _execute(self, connection: Any, changed: list[Changes], *, locked: bool) -> set[UUID]:
        self._batch_no += 1
        create = changed[0].expected_rev is None
        sql, parameters = compose(changed, writer_id=self._id, batch_no=self._batch_no, create=create, locked=locked)
        crash.point("before_write")
        records = await connection.fetch(sql, *parameters)
        crash.point("after_write")
        return {r["id"] for r in records}

    def _answer(
        self,
        batch: list[Pending],
        drafts: dict[UUID, Draft],
        results: dict[int, Result | Exception],
        written: set[UUID],
    ) -> None:
        """Resolve what is decided and kept; send the rest back to the head of the queue."""
        again: list[Pending] = []
        for place, pending in enumerate(batch):
            result = results[place]
            draft = drafts[pending.command.session_id]
            if isinstance(result, Exception):
                _fail(pending, result)
            elif draft.changed() and pending.command.session_id not in written:
                pending.misses += 1
                again.append(pending)
            elif not pending.future.done():
                pending.future.set_result(result)
        self._queue.extendleft(reversed(again))
        for session_id in written:
            self._on_commit(committed(drafts[session_id]))

    # ------------------------------------------------------------------------------------------------------- connection

    async def _connected(self) -> Any:
        """The connection, made anew when it was lost."""
        if self._connection is None or self._connection.is_closed():
            try:
                connection = await self._connect()
                await connection.execute(
                    "insert into writer (id, batch_no) values ($1, $2) on conflict (id) do nothing",
                    self._id,
                    self._batch_no,
                )
            except Exception as error:
                if is_lost(error):
                    raise _Lost(writing=False) from error
                raise
            self._connection = connection
            self._down = False
        return self._connection

    async def _kept(self, changed: list[Changes]) -> set[UUID] | None:
        """The sessions that the batch in doubt wrote, or None when it was not committed.

        The writer's row says it; locking it waits for the old backend to end.
        """
        deadline = asyncio.get_running_loop().time() + RESOLVE_S
        while True:
            self._connection = None
            try:
                connection = await self._connected()
                async with connection.transaction():
                    sql = "select batch_no, missed from writer where id = $1 for update"
                    row = await connection.fetchrow(sql, self._id)
                if row["batch_no"] != self._batch_no:
                    return None
                return {c.session_id for c in changed} - set(row["missed"])
            except _Lost:
                pass
            except Exception as error:
                if not is_lost(error) and type(error).__name__ != "LockNotAvailableError":
                    raise
            if asyncio.get_running_loop().time() > deadline:
                raise _Lost(writing=True)
            await asyncio.sleep(RECONNECT_S)


def _decide(
    batch: Sequence[Pending], facts: dict[UUID, Facts]
) -> tuple[dict[UUID, Draft], dict[int, Result | Exception]]:
    """Fold the commands of each session over its facts, in order. An error of the rules fails that session's commands only."""
    drafts: dict[UUID, Draft] = {}
    alone = len(facts) == len(batch)
    failed: dict[UUID, Exception] = {}
    results: dict[int, Result | Exception] = {}
    for place, pending in enumerate(batch):
        session_id = pending.command.session_id
        try:
            if alone:
                drafts[session_id], results[place] = decide_alone(facts[session_id], pending.command)
            else:
                draft = drafts.get(session_id) or Draft(facts[session_id])
                drafts[session_id], results[place] = decide(draft, pending.command)
        except (
            AssertionError,
            InvariantViolation,
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:
            failed[session_id] = InvariantViolation(f"{type(error).__name__}: {error}")
    for place, pending in enumerate(batch):
        error = failed.get(pending.command.session_id)
        if error is not None:
            results[place] = error
            drafts[pending.command.session_id] = Draft(facts[pending.command.session_id])
    return drafts, results


def _fail(pending: Pending, error: Exception) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
