"""The one write path: group commit without locks and without a timer.

A writer takes what is queued, reads the facts of all its sessions in one statement, lets the deciders run, and writes everything in
one statement that is guarded by each session's `rev`. What was not written, because somebody else moved the session, goes back to the
head of the queue. Futures are resolved outside of everything that can fail, so that a caller who left can't hurt its neighbours.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from perdure import crashpoint, telemetry
from perdure.core.decide import committed, decide, decide_alone
from perdure.core.draft import Draft
from perdure.core.facts import Changes, Facts, needs_of
from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.ports.ledger import (
    Accept,
    Advance,
    Command,
    Committed,
    CreateSession,
    ModelReplied,
    Result,
    StepOutcome,
    Stopped,
    ToolReturned,
)
from perdure.postgres.commit_kind import kinds_of
from perdure.postgres.facts import FACTS_SQL, Ask, arguments, from_record
from perdure.postgres.pool import is_busy, is_lost
from perdure.postgres.write import GIVE_UP_SQL, MISSED_SQL, compose

BATCH_COMMANDS_MAX: Final = 128
BATCH_BYTES_MAX: Final = 1024 * 1024
"""What one commit takes: enough to share the fsync, little enough that nobody waits long for it."""

MISSES_MAX: Final = 3
"""Times a command finds its session moved before it takes the locked path."""

MISSES_REFUSED: Final = 10
"""Times after which a command is refused: whatever keeps the session moving, or the connection breaking, it is not ours to wait for."""

BUSY_S: Final = 10.0
"""How long the halves of a batch that PostgreSQL was too busy for are tried; the rest is refused, and its callers come again."""

STOP_S: Final = 5.0
"""How long a stop waits for the batch in hand: as long as its statement may take."""

RESOLVE_S: Final = 15.0
"""How long a batch whose commit is in doubt waits for the database to say what became of it."""

RECONNECT_S: Final = 0.1
SMALL_BYTES: Final = 256
"""What a command takes beside the bodies that it carries."""

QUEUE_MAX: Final = 20_000
"""Commands waiting in one writer; beyond it callers are told to come back, before memory is the limit."""

Connect = Callable[[], Awaitable[Any]]


class Pending:
    """A command and who waits for it."""

    __slots__ = ("alone", "command", "future", "misses", "size_bytes")

    def __init__(self, command: Command, future: "asyncio.Future[Result]") -> None:
        self.command = command
        self.future = future
        self.misses = 0
        self.alone = False
        """Its batch failed as a whole: next time it stands for itself."""
        self.size_bytes = _size_bytes(command)

    @property
    def is_single(self) -> bool:
        """Whether it shares its batch with nobody."""
        return self.alone or self.misses >= MISSES_MAX


def _size_bytes(command: Command) -> int:
    match command:
        case Accept() | CreateSession():
            return SMALL_BYTES + sum(len(a.body) for a in command.arrivals)
        case Advance():
            return SMALL_BYTES + _outcome_bytes(command.outcome)
        case _:
            return SMALL_BYTES


def _outcome_bytes(outcome: StepOutcome | None) -> int:
    match outcome:
        case ToolReturned():
            return len(outcome.body) + len(outcome.transcript)
        case ModelReplied() | Stopped():
            blocks = sum(len(b.body) for b in outcome.blocks) + sum(len(c.body) for c in outcome.calls)
            return blocks + len(outcome.transcript or b"")
        case _:
            return 0


class _Lost(Exception):
    """The connection went away, or can't be made, and nothing of what was to be done is in doubt."""


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
        self._in_hand: list[Pending] = []
        self._down = False
        self._stopping = False
        self._log = telemetry.logger("ledger")

    def start(self) -> None:
        """Begin to take commands."""
        self._task = asyncio.create_task(self._run(), name="ledger-writer")

    async def stop(self) -> None:
        """Finish the batch in hand and end; what is queued is refused."""
        self._stopping = True
        self._arrived.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for pending in (*self._in_hand, *self._queue):
            _fail(pending, Unavailable("the server is shutting down"))
        self._queue.clear()
        await self._leave()
        self._drop()

    async def _leave(self) -> None:
        """Take our row along: it says nothing to anybody any more."""
        if self._connection is None or self._connection.is_closed():
            return
        with contextlib.suppress(Exception):
            await self._connection.execute("delete from writer where id = $1", self._id)

    async def submit(self, command: Command) -> Result:
        """Queue a command and wait for its commit.

        Raises `Unavailable` when nothing was kept of it, or when the database was away too long to say.
        """
        if self._stopping:
            raise Unavailable("the server is shutting down")
        if self._down and (self._queue or self._in_hand):
            raise Unavailable("the database can't be reached")
        if len(self._queue) >= QUEUE_MAX:
            raise Unavailable("too many commands wait for the ledger")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(Pending(command, future))
        self._arrived.set()
        return await future

    # ------------------------------------------------------------------------------------------------------------ loop

    async def _run(self) -> None:
        while not self._stopping:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            self._in_hand = self._take()
            if not self._in_hand:
                continue
            try:
                await self._commit(self._in_hand)
            except _Lost:
                await self._refuse(self._in_hand)
            except Exception as error:  # noqa: BLE001  a supervised loop: the batch fails, the writer and its queue live
                self._part(self._in_hand, error)
            self._in_hand = []

    def _part(self, batch: list[Pending], error: Exception) -> None:
        """Nothing of a batch was kept. Whoever shared it with the cause is tried again without it."""
        self._drop()
        waiting = [p for p in batch if not p.future.done()]
        if len(batch) > 1 and not is_busy(error):
            for pending in waiting:
                pending.alone = True
            self._queue.extendleft(reversed(waiting))
            return
        for pending in waiting:
            _fail(pending, _refusal(error))

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
            if batch and (pending.is_single or size_bytes + pending.size_bytes > BATCH_BYTES_MAX):
                break
            if isinstance(pending.command, CreateSession) and pending.command.submission is not None:
                if pending.command.submission.digest in digests:
                    break
                digests.add(pending.command.submission.digest)
            batch.append(self._queue.popleft())
            size_bytes += pending.size_bytes
            if pending.is_single:
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
        """Read, decide, write, answer. A connection lost before the write is tried once more on a new one."""
        try:
            await self._try(batch)
        except _Lost:
            self._drop()
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
            deadline = asyncio.get_running_loop().time() + BUSY_S
            written = await self._write(batch, changed, deadline)
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
            if not writing:
                raise _Lost from error
            written = await self._kept(batch, changed)
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
                raise _Lost from error
            raise
        return dict(from_record(r) for r in records)

    async def _write(self, batch: list[Pending], changed: list[Changes], deadline: float) -> set[UUID]:
        """One statement, one commit. When it fails as a whole, its halves are tried, down to the one that is the cause."""
        try:
            return await self._execute(await self._connected(), changed, locked=False)
        except _Lost:
            # Not before the first half of a batch that was parted: the other half may be written already.
            return set()
        except Exception as error:  # noqa: BLE001  whatever it was, the halves find whose it is
            if is_lost(error):
                return await self._kept(batch, changed)
            late = is_busy(error) and asyncio.get_running_loop().time() > deadline
            if len(changed) == 1 or late:
                self._fail_sessions(batch, {c.session_id for c in changed}, error)
                return set()
        half = len(changed) // 2
        first = await self._write(batch, changed[:half], deadline)
        return first | await self._write(batch, changed[half:], deadline)

    def _fail_sessions(self, batch: list[Pending], session_ids: set[UUID], error: Exception) -> None:
        """Nothing of these sessions was kept. Several commands of one session are told apart by trying each alone."""
        counts = Counter(p.command.session_id for p in batch)
        for pending in batch:
            session_id = pending.command.session_id
            if session_id not in session_ids:
                continue
            if counts[session_id] > 1 and not is_busy(error):
                pending.alone = True
            else:
                _fail(pending, _refusal(error))

    async def _execute(self, connection: Any, changed: list[Changes], *, locked: bool) -> set[UUID]:
        self._batch_no += 1
        create = changed[0].expected_rev is None
        sql, parameters = compose(changed, writer_id=self._id, batch_no=self._batch_no, create=create, locked=locked)
        kinds = sorted({k for c in changed for k in kinds_of(c)}) if crashpoint.is_armed() else ()
        for kind in kinds:
            crashpoint.point(f"before_commit.{kind}")
        records = await connection.fetch(sql, *parameters)
        for kind in kinds:
            crashpoint.point(f"after_commit.{kind}")
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
                if pending.misses > MISSES_REFUSED:
                    _fail(pending, Unavailable("the session changes too fast, or its writes keep failing"))
                again.append(pending)
            elif not pending.future.done():
                pending.future.set_result(result)
        self._queue.extendleft(reversed(again))
        for session_id in written:
            told = committed(drafts[session_id])
            if told is not None:
                self._on_commit(told)

    # ------------------------------------------------------------------------------------------------------- connection

    async def _connected(self) -> Any:
        """The connection, made anew when it was lost."""
        if self._connection is None or self._connection.is_closed():
            self._drop()
            try:
                connection = self._connection = await self._connect()
                # With nothing committed: should the database have forgotten us, what is in doubt was forgotten too.
                await connection.execute(
                    "insert into writer (id, batch_no) values ($1, 0) on conflict (id) do nothing", self._id
                )
            except Exception as error:
                self._drop()
                if is_lost(error):
                    raise _Lost from error
                raise
            self._down = False
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _kept(self, batch: list[Pending], changed: list[Changes]) -> set[UUID]:
        """The sessions that the batch in doubt wrote. When the database doesn't come back to say so, its callers are told that.

        Our row says it. Locking it waits for the old backend, if that is at it already; marking the batch as given up keeps it from
        being committed later, if its backend had not come so far yet or the statement is still on its way.
        """
        deadline = asyncio.get_running_loop().time() + RESOLVE_S
        ids = {c.session_id for c in changed}
        self._drop()
        while True:
            try:
                connection = await self._connected()
                if await connection.fetchrow(GIVE_UP_SQL, self._id, self._batch_no, sorted(ids)) is not None:
                    return set()
                return ids - set(await connection.fetchval(MISSED_SQL, self._id))
            except _Lost:
                self._down = True
            except Exception as error:  # noqa: BLE001  whatever it is, it does not say that nothing was kept
                self._log.warning("batch_in_doubt", error=f"{type(error).__name__}: {error}")
                self._drop()
            if asyncio.get_running_loop().time() > deadline:
                self._begin_anew()
                for pending in batch:
                    if pending.command.session_id in ids:
                        _fail(pending, Unavailable("the database went away before it said what became of this"))
                return set()
            await asyncio.sleep(RECONNECT_S)

    def _begin_anew(self) -> None:
        """Leave the batch in doubt behind: a backend that hangs holds our row, and nobody else shall wait for it."""
        self._drop()
        self._id, self._batch_no = uuid4(), 0


def _decide(
    batch: Sequence[Pending], facts: dict[UUID, Facts]
) -> tuple[dict[UUID, Draft], dict[int, Result | Exception]]:
    """Fold the commands of each session over its facts, in order. An error of the rules fails its command only."""
    drafts: dict[UUID, Draft] = {}
    alone = len(facts) == len(batch)
    results: dict[int, Result | Exception] = {}
    for place, pending in enumerate(batch):
        session_id = pending.command.session_id
        draft = drafts.get(session_id)
        try:
            if alone:
                draft, results[place] = decide_alone(facts[session_id], pending.command)
            else:
                draft, results[place] = decide(draft or Draft(facts[session_id]), pending.command)
        except _RULES_FAILED as error:
            draft = draft or Draft(facts[session_id])
            results[place] = InvariantViolation(f"{type(error).__name__}: {error}")
        drafts[session_id] = draft
    return drafts, results


_RULES_FAILED: Final = (
    AssertionError,
    InvariantViolation,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
)
"""What a bug in a rule, or a row that no rule foresaw, looks like."""


def _refusal(error: Exception) -> Exception:
    """What the caller of a command is told that PostgreSQL did not take. Nothing was kept."""
    if is_busy(error):
        return Unavailable(f"the database is too busy: {error}")
    return InvariantViolation(f"{type(error).__name__}: {error}")


def _fail(pending: Pending, error: Exception) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
