"""The PostgreSQL side of the comparison: two processes' ledgers over one database, on connections that a history can disturb."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self
from uuid import UUID

import asyncpg
import msgspec

from perdure.core.facts import Row
from perdure.ports.ledger import Accepted, Command, Committed, Perform, Result, Wake
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.pool import ReadPool, connect
from perdure.postgres.tables import CHILDREN, SESSION, read_row
from perdure.testing.histories import Fault, Move
from perdure.testing.oracle import Clock, OracleLedger, key_tuple

DEADLINE_S = 30.0
TABLES = (SESSION, *CHILDREN)
SNAPSHOT_SQL = "select " + ", ".join(
    f"array(select t from {t.name} t where t.{t.session_column} = any($1::uuid[])) as {t.name}" for t in TABLES
)


class Trouble:
    """What the next guarded write meets."""

    def __init__(self, side: "PostgresSide") -> None:
        self.side = side
        self.between: Command | None = None
        self.answered: Result | None = None
        self.misses = 0
        self.fault: Fault = "none"
        self.met: Counter[str] = Counter()
        """What really happened, so that a test can see that it did."""

    async def before_write(self, session_ids: Sequence[UUID]) -> None:
        """Another process commits: something real, or only so much that the sessions have moved."""
        if self.between is not None and self.between.session_id in session_ids:
            command, self.between = self.between, None
            self.answered = await self.side.other.apply(command)
            self.met["between"] += 1
        if self.misses:
            self.misses -= 1
            self.met["miss"] += 1
            sql = "update session set rev = rev + 1 where id = any($1::uuid[])"
            await self.side.pool.execute(sql, list(session_ids))


class Disturbed:
    """A connection of a writer. The statements are the writer's own; around its guarded writes trouble may happen."""

    def __init__(self, connection: Any, trouble: Trouble) -> None:
        self._connection = connection
        self._trouble = trouble

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def fetch(self, sql: str, *parameters: Any) -> Any:
        if not sql.startswith("-- write_batch") or "skip locked" not in sql:
            self._trouble.met["slow path"] += sql.startswith("-- write_batch") and "the slow path" in sql
            return await self._connection.fetch(sql, *parameters)
        await self._trouble.before_write(parameters[2])
        fault, self._trouble.fault = self._trouble.fault, "none"
        self._trouble.met[fault] += 1
        self._trouble.met["batch of several"] += len(parameters[2]) > 1
        if fault == "lost_before_commit":
            self._cut()
        records = await self._connection.fetch(sql, *parameters)
        if fault == "lost_after_commit":
            self._cut()
        return records

    def _cut(self) -> None:
        self._connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


class PostgresSide:
    """Plays moves on PostgreSQL; `clock` is the oracle's."""

    def __init__(self, url: str, clock: Clock, workspace_id: UUID) -> None:
        self._url = url
        self._workspace_id = workspace_id
        self.clock = clock
        self.pool = ReadPool(url)
        self.trouble = Trouble(self)
        self.claims: dict[UUID, Perform] = {}
        self.ledger = PostgresLedger(url, self.pool, on_commit=self._heard, now=self._now)
        self.other = PostgresLedger(url, self.pool, on_commit=self._heard, now=self._now)
        for writer in (*self.ledger._writers, self.ledger._creator):
            writer._connect = self._dial

    def _heard(self, committed: Committed) -> None:
        self.claims |= dict(committed.claimed)

    def _now(self) -> Any:
        return self.clock.now

    async def _dial(self) -> Disturbed:
        return Disturbed(await connect(self._url, application_name="perdure-writer", hot=True), self.trouble)

    async def __aenter__(self) -> Self:
        sql = "insert into workspace (id, name) values ($1, $2)"
        await self.pool.execute(sql, self._workspace_id, str(self._workspace_id))
        self.ledger.start()
        self.other.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.stop()
        await self.other.stop()
        await self.pool.close()

    async def bury(self, worker_id: UUID) -> None:
        """A worker is known to be dead; its threads are woken."""
        await self.pool.execute(
            "insert into worker (id, host, boot, pid, started, lease_until, dead_at) values ($1, '', '', 1, '', $2, $2)",
            worker_id,
            self.clock.now,
        )
        sql = "select session_id, thread_id from turn where state = 'active' and worker_id = $1"
        for row in await self.pool.fetch(sql, worker_id):
            await self.ledger.wake(Wake(session_id=row["session_id"], thread_id=row["thread_id"]))

    async def play(self, move: Move) -> tuple[bool, Result | None, list[Result]]:
        """The batch at once, through the writers. Also says whether `between` came before it."""
        self.claims.clear()
        self.trouble.between, self.trouble.answered = move.between, None
        self.trouble.misses, self.trouble.fault = move.misses, move.fault
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            sent = [group.create_task(self.ledger.apply(c)) for c in move.commands]
        self.trouble.misses, self.trouble.fault = 0, "none"
        results = [t.result() for t in sent]
        if self.trouble.between is None:
            return True, self.trouble.answered, results
        late, self.trouble.between = self.trouble.between, None
        return False, await self.other.apply(late), results

    async def snapshot(self, session_ids: Collection[UUID]) -> dict[str, list[Any]]:
        """These sessions' rows, as the oracle's snapshot has them."""
        record = await self.pool.fetchrow(SNAPSHOT_SQL, list(session_ids))
        out: dict[str, list[Any]] = {}
        for table in TABLES:
            rows = [msgspec.structs.asdict(read_row(table.kind, r)) for r in record[table.name]]
            out[table.kind.__name__] = comparable(table.kind, rows)
        return out


def oracle_snapshot(oracle: OracleLedger, session_ids: Collection[UUID]) -> dict[str, list[Any]]:
    """These sessions' rows of the oracle."""
    out: dict[str, list[Any]] = {}
    for table in TABLES:
        rows = oracle.tables.get(table.kind, {}).values()
        kept = [msgspec.structs.asdict(r) for r in rows if getattr(r, table.session_column) in session_ids]
        out[table.kind.__name__] = comparable(table.kind, kept)
    return out


def comparable(kind: type[Row], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In key order, without what differs on purpose: a batch raises a session's `rev` once, the oracle once a command."""
    for row in rows:
        row.pop("rev", None)
    return sorted(rows, key=lambda r: repr(key_tuple(kind, r)))


def comparable_answer(result: Result | None) -> Any:
    """An answer, without what differs on purpose: a repeat shows its events as they are when it is read back."""
    if isinstance(result, Accepted) and result.repeat:
        return (result.span, tuple(e.id for e in result.events))
    return result


def differences(expected: dict[str, list[Any]], actual: dict[str, list[Any]]) -> list[str]:
    """What PostgreSQL has otherwise than the oracle."""
    found: list[str] = []
    for name, rows in expected.items():
        others = actual[name]
        if rows == others:
            continue
        missing = [r for r in rows if r not in others]
        extra = [r for r in others if r not in rows]
        found.append(f"{name}: the oracle has {str(missing[:1])[:700]}, PostgreSQL has {str(extra[:1])[:700]}")
    return found
