"""What the write path does when something fails: each rule provoked on the real writer, against a real PostgreSQL."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import asyncpg
import msgspec
import pytest
from tests.conftest import DurablePostgres, connected
from tests.ledger.ledger_sessions import WORKSPACE, make_session, open_ledger

from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.domain.submission import SubmissionKey
from perdure.ports.ledger import Accept, Accepted, Arrival
from perdure.postgres import pool as pools
from perdure.postgres import writer as writers
from perdure.postgres.ledger import WRITERS, PostgresLedger
from perdure.postgres.pool import ReadPool
from perdure.testing.processes import until

DEADLINE_S = 20.0
CHUNK_BYTES = 65_536
READY = b"Z\x00\x00\x00\x05"
"""How PostgreSQL says that it is through with a request."""
WRITERS_SQL = (
    "select pid from pg_stat_activity where application_name = 'perdure-writer' and datname = current_database()"
)

WRITING_SQL = f"{WRITERS_SQL} and wait_event = 'PgSleep'"
"""The backend that is in the middle of a slow write."""

SLOW_WRITES = """
create function slow() returns trigger language plpgsql as $$
begin
    if convert_from(coalesce(new.body, ''), 'utf8') like '%slow%' then perform pg_sleep(1); end if;
    return new;
end $$;
create trigger slow before insert on event for each row execute function slow()"""

SLOW_STARTS = """
create function slow_start() returns trigger language plpgsql as $$
begin
    perform pg_sleep(1);
    return new;
end $$;
create trigger slow_start before update on session for each row execute function slow_start()"""
"""A batch that holds its sessions for a second before anything else of it is done."""

SLOW_CREATIONS = """
create function slow_creation() returns trigger language plpgsql as $$
begin
    perform pg_sleep(0.5);
    return new;
end $$;
create trigger slow_creation before insert on session for each row execute function slow_creation()"""

FAILING_WRITES = """
create function fail() returns trigger language plpgsql as $$
begin
    if convert_from(coalesce(new.body, ''), 'utf8') like '%poison%' then raise exception 'made to fail' using errcode = '{code}'; end if;
    return new;
end $$;
create trigger fail before insert on event for each row execute function fail()"""


def message(text: str) -> Arrival:
    return Arrival(kind="message", body=b'{"content":[{"type":"text","text":"%s"}]}' % text.encode())


def accept(session_id: UUID, text: str, *, key: bytes | None = None) -> Accept:
    submission = None
    if key is not None:
        submission = SubmissionKey(digest=key, body_digest=b"same", explicit=True, attempt=0, request_id=UUID(int=9))
    return Accept(session_id=session_id, workspace_id=WORKSPACE, arrivals=(message(text),), submission=submission)


@pytest.fixture
async def pool(database_url: str) -> AsyncGenerator[ReadPool]:
    pool = ReadPool(database_url, application_name="test")
    yield pool
    await pool.close()


async def texts(pool: ReadPool, session_id: UUID) -> list[str]:
    """What was said in a session, in order, after the first hello."""
    rows = await pool.fetch(
        "select seq, body from event where session_id = $1 and type = 'input.received' order by seq", session_id
    )
    return [bytes(r["body"]).decode().split('"text":"')[1].split('"')[0] for r in rows[1:]]


async def outcomes(*calls: Coroutine[Any, Any, Any]) -> list[str]:
    """How each of these ended, by the name of the answer's or the exception's class."""
    async with asyncio.timeout(DEADLINE_S):
        return [type(r).__name__ for r in await asyncio.gather(*calls, return_exceptions=True)]


class FaultyLine:
    """Connections to PostgreSQL that can be cut behind a request: its reply is dropped, or the request itself is held back."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._socket = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._database = parts.path
        self._countdown = 0
        self._hold = asyncio.Event()
        self._holds = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.delivered = asyncio.Event()
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}{self._database}"

    def cut_after(self, requests: int, *, hold: bool = False) -> None:
        """The `requests`-th request from now on is the last that its connection carries. `hold` delivers it only after `deliver`."""
        self._countdown, self._holds = requests, hold

    async def deliver(self) -> None:
        """Let the held request go on to PostgreSQL, long after its client left, and wait until that answered."""
        self._hold.set()
        async with asyncio.timeout(DEADLINE_S):
            await self.delivered.wait()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_reader, there = await asyncio.open_unix_connection(self._socket)
        replies = asyncio.create_task(self._pass(there_reader, writer))
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self._countdown == 1:
                    self._countdown = 0
                    replies.cancel()
                    await asyncio.gather(replies, return_exceptions=True)
                    await self._leave(data, writer, there_reader, there)
                    return
                self._countdown = max(0, self._countdown - 1)
                there.write(data)
                await there.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, there):
                end.close()
            replies.cancel()
            await asyncio.gather(replies, writer.wait_closed(), there.wait_closed(), return_exceptions=True)

    async def _leave(
        self, data: bytes, writer: asyncio.StreamWriter, there_reader: asyncio.StreamReader, there: asyncio.StreamWriter
    ) -> None:
        """The client loses its connection now. PostgreSQL knows nothing of it and does what it is asked."""
        if not self._holds:
            there.write(data)
            await there.drain()
        writer.transport.abort()
        if self._holds:
            await self._hold.wait()
            there.write(data)
            await there.drain()
        while (data := await there_reader.read(CHUNK_BYTES)) and READY not in data:
            pass
        self.delivered.set()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                target.write(data)
                await target.drain()
            target.close()


@asynccontextmanager
async def faulty(url: str) -> AsyncGenerator[FaultyLine]:
    line = FaultyLine(url)
    await line.open()
    try:
        yield line
    finally:
        await line.close()


# ------------------------------------------------------------------------------------------------ what PostgreSQL refuses


async def test_poison_command_fails_alone_among_other_sessions(database_url: str, pool: ReadPool) -> None:
    await pool.execute(
        "alter table event add constraint no_poison check (position('poison'::bytea in coalesce(body, '')) = 0)"
    )
    async with open_ledger(database_url) as ledger:
        sessions = [await make_session(ledger) for _ in range(20)]
        said = ["poison" if i == 7 else f"m{i}" for i in range(20)]
        ended = await outcomes(*(ledger.accept(accept(s, t)) for s, t in zip(sessions, said, strict=True)))
        assert ended == ["InvariantViolation" if t == "poison" else "Accepted" for t in said]
        for session, text in zip(sessions, said, strict=True):
            assert await texts(pool, session) == ([] if text == "poison" else [text])


async def test_poison_command_fails_alone_among_others_of_its_session(database_url: str, pool: ReadPool) -> None:
    await pool.execute(
        "alter table event add constraint no_poison check (position('poison'::bytea in coalesce(body, '')) = 0)"
    )
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        said = ["a", "b", "poison", "c", "d"]
        ended = await outcomes(*(ledger.accept(accept(session, t)) for t in said))
        assert ended == ["Accepted", "Accepted", "InvariantViolation", "Accepted", "Accepted"]
        assert await texts(pool, session) == ["a", "b", "c", "d"]


async def test_value_that_the_driver_refuses_fails_alone(database_url: str, pool: ReadPool) -> None:
    async with open_ledger(database_url) as ledger:
        one, other = await make_session(ledger), await make_session(ledger)
        wrong = Accept(
            session_id=one,
            workspace_id=WORKSPACE,
            arrivals=(Arrival(kind="message", body="no bytes"),),  # pyright: ignore[reportArgumentType]
        )
        calls = (ledger.accept(wrong), ledger.accept(accept(one, "a")), ledger.accept(accept(other, "b")))
        assert await outcomes(*calls) == ["InvariantViolation", "Accepted", "Accepted"]
        assert await texts(pool, one) == ["a"]


async def test_error_of_a_rule_fails_its_command_alone(database_url: str, pool: ReadPool) -> None:
    async with open_ledger(database_url) as ledger:
        one, other = await make_session(ledger), await make_session(ledger)
        # An answer to no action: the face never lets it through, and the rules assert that.
        broken = Accept(
            session_id=one, workspace_id=WORKSPACE, arrivals=(Arrival(kind="message", body=b"{}", answer="allow"),)
        )
        calls = (ledger.accept(accept(one, "a")), ledger.accept(broken), ledger.accept(accept(one, "b")))
        ended = await outcomes(*calls, ledger.accept(accept(other, "c")))
        assert ended == ["Accepted", "InvariantViolation", "Accepted", "Accepted"]
        assert await texts(pool, one) == ["a", "b"]


@pytest.mark.parametrize("code", ["40P01", "40001", "57014", "53100", "55P03"])
async def test_database_that_gives_up_for_want_of_something_is_unavailable_and_a_later_try_succeeds(
    database_url: str, pool: ReadPool, code: str
) -> None:
    """A deadlock, a conflict, a timeout, a full disk, a lock: nothing of it is a bug, and nothing was kept."""
    await pool.execute(FAILING_WRITES.format(code=code))
    async with open_ledger(database_url) as ledger:
        one, other = await make_session(ledger), await make_session(ledger)
        calls = (ledger.accept(accept(one, "poison")), ledger.accept(accept(other, "fine")))
        assert await outcomes(*calls) == ["Unavailable", "Accepted"]
        await pool.execute("drop trigger fail on event")
        assert await outcomes(ledger.accept(accept(one, "poison"))) == ["Accepted"]
        assert await texts(pool, one) == ["poison"]


async def test_large_commands_go_alone_and_the_small_ones_beside_them(database_url: str, pool: ReadPool) -> None:
    async with open_ledger(database_url) as ledger:
        sessions = [await make_session(ledger) for _ in range(6)]
        large = "x" * (24 * 1024 * 1024)
        said = [large if i in (1, 4) else f"m{i}" for i in range(6)]
        ended = await outcomes(*(ledger.accept(accept(s, t)) for s, t in zip(sessions, said, strict=True)))
        assert ended == ["Accepted"] * 6
        sizes = await pool.fetch("select size_bytes from input where seq > 5 order by size_bytes desc limit 2")
        assert all(r["size_bytes"] > len(large) for r in sizes)


# --------------------------------------------------------------------------------------------------- connections that break


async def test_cut_before_the_commit_is_written_again(database_url: str, pool: ReadPool) -> None:
    await pool.execute(SLOW_WRITES)
    async with open_ledger(database_url) as ledger:
        one, other = await make_session(ledger), await make_session(ledger)
        calls = asyncio.ensure_future(
            outcomes(ledger.accept(accept(one, "slow")), ledger.accept(accept(other, "beside")))
        )
        await until(lambda: pool.fetchval(f"select pg_terminate_backend(pid) from ({WRITING_SQL}) w"), 5)
        assert await calls == ["Accepted", "Accepted"]
        assert await texts(pool, one) == ["slow"]
        assert await texts(pool, other) == ["beside"]


@pytest.mark.parametrize("text", ["quick", "slow"])
async def test_reply_lost_after_the_commit_is_answered_and_not_written_again(
    database_url: str, pool: ReadPool, text: str
) -> None:
    """The slow one is still being written while the writer asks, on a new connection, what became of it."""
    await pool.execute(SLOW_WRITES)
    async with faulty(database_url) as line, open_ledger(line.url) as ledger:
        session = await make_session(ledger)
        # Both statements are prepared by now, so a command is two requests: read, then write.
        await ledger.accept(accept(session, "first"))
        line.cut_after(2)
        answer = await ledger.accept(accept(session, text))
        assert isinstance(answer, Accepted)
        assert await texts(pool, session) == ["first", text]
        await ledger.accept(accept(session, "next"))
        assert await texts(pool, session) == ["first", text, "next"]


async def test_batch_in_doubt_that_meets_another_error_is_neither_failed_nor_written_again(
    database_url: str, pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a failover the address may lead to a standby for a while: that it takes no writes says nothing of the batch before."""
    standby = [asyncpg.ReadOnlySQLTransactionError("standby"), asyncpg.UndefinedTableError("half restored")]
    async with faulty(database_url) as line, open_ledger(line.url) as ledger:
        # Of one writer, so that they share a batch.
        sessions = [s for s in [await make_session(ledger) for _ in range(12)] if s.int % WRITERS == 0]
        for session in sessions:
            await ledger.accept(accept(session, "first"))
        connected = writers.Writer._connected  # pyright: ignore[reportPrivateUsage]
        settle = writers.Writer._kept  # pyright: ignore[reportPrivateUsage]
        in_doubt: list[Any] = []

        async def kept(writer: Any, *rest: Any) -> set[UUID]:
            in_doubt.append(writer)
            return await settle(writer, *rest)

        async def connect_badly(writer: Any) -> Any:
            if writer in in_doubt and standby:
                raise standby.pop()
            return await connected(writer)

        monkeypatch.setattr(writers.Writer, "_kept", kept)
        monkeypatch.setattr(writers.Writer, "_connected", connect_badly)
        line.cut_after(2)
        answers = await asyncio.gather(*(ledger.accept(accept(s, "second")) for s in sessions))
        assert in_doubt and not standby
        assert all(isinstance(a, Accepted) for a in answers)
        for session in sessions:
            assert await texts(pool, session) == ["first", "second"]


async def test_reply_lost_in_a_batch_that_has_its_sessions_but_nothing_else_yet_is_not_written_again(
    database_url: str, pool: ReadPool
) -> None:
    """Whoever asks what became of it must wait for it, however early it is."""
    async with faulty(database_url) as line, open_ledger(line.url) as ledger:
        session = await make_session(ledger)
        await ledger.accept(accept(session, "first"))
        await pool.execute(SLOW_STARTS)
        line.cut_after(2)
        assert isinstance(await ledger.accept(accept(session, "second")), Accepted)
        assert await texts(pool, session) == ["first", "second"]


async def test_request_that_arrives_after_it_was_given_up_writes_nothing(
    database_url: str, pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line breaks with the statement still on its way. It comes in after it was given up, and before it is written again."""
    async with faulty(database_url) as line, open_ledger(line.url) as ledger:
        session = await make_session(ledger)
        await ledger.accept(accept(session, "first"))
        line.cut_after(2, hold=True)
        settle = writers.Writer._kept  # pyright: ignore[reportPrivateUsage]

        async def settle_then_deliver(*arguments: Any) -> set[UUID]:
            kept = await settle(*arguments)
            await line.deliver()
            return kept

        monkeypatch.setattr(writers.Writer, "_kept", settle_then_deliver)
        assert isinstance(await ledger.accept(accept(session, "second")), Accepted)
        assert await texts(pool, session) == ["first", "second"]
        assert isinstance(await ledger.accept(accept(session, "third")), Accepted)
        assert await texts(pool, session) == ["first", "second", "third"]


async def test_lost_connection_before_the_write_is_not_even_noticed(database_url: str, pool: ReadPool) -> None:
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        for n in range(3):
            await pool.fetch(f"select pg_terminate_backend(pid) from ({WRITERS_SQL}) w")
            assert await outcomes(ledger.accept(accept(session, f"m{n}"))) == ["Accepted"]
        assert await texts(pool, session) == ["m0", "m1", "m2"]


@pytest.mark.parametrize("attempt", [1, 0], ids=["its retry", "the same on purpose"])
async def test_creation_at_another_process_while_the_first_is_being_written(
    database_url: str, pool: ReadPool, attempt: int
) -> None:
    """A retry finds the session that the first one makes; an equal request that is meant makes another."""
    await pool.execute(SLOW_CREATIONS)
    key = SubmissionKey(digest=b"c" * 32, body_digest=b"b" * 32, explicit=False, attempt=0, request_id=UUID(int=9))
    async with open_ledger(database_url) as ledger, open_ledger(database_url) as other:
        first = asyncio.ensure_future(make_session(ledger, submission=key))
        await until(lambda: pool.fetchval(WRITING_SQL), DEADLINE_S)
        await make_session(other, submission=msgspec.structs.replace(key, attempt=attempt))
        await first
        assert await pool.fetchval("select count(*) from session") == 2 - attempt
        assert await pool.fetchval("select count(*) from submission") == 1


async def test_retries_of_equal_creations_at_several_processes_get_a_session_each(
    database_url: str, pool: ReadPool
) -> None:
    """The record names the last session made: one retry takes it, and every other one makes its own."""
    key = SubmissionKey(digest=b"c" * 32, body_digest=b"b" * 32, explicit=False, attempt=0, request_id=UUID(int=9))
    async with open_ledger(database_url) as ledger, open_ledger(database_url) as other:
        await make_session(ledger, submission=key)
        lost = await make_session(ledger, submission=key)
        places = (ledger, other, ledger, other)
        got = await asyncio.gather(
            *(make_session(place, submission=msgspec.structs.replace(key, attempt=1)) for place in places)
        )
        assert lost in got
        assert len(set(got)) == len(places)
        assert await pool.fetchval("select count(*) from session") == 2 + len(places) - 1
        record = await pool.fetchrow("select session_id, attempt from submission")
        assert record["session_id"] in got
        assert record["attempt"] == 1
        third = await make_session(other, submission=msgspec.structs.replace(key, attempt=2))
        assert third == record["session_id"], "its first retry was not answered either"


async def test_frozen_backend_holds_up_its_own_sessions_alone(
    database_url: str, pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend stops in the middle of a commit. Its batch is told so, the others go on, and a retry by key finds what was kept."""
    monkeypatch.setattr(pools, "HOT_STATEMENT_MS", 1_500)
    monkeypatch.setattr(pools, "REPLY_MARGIN_S", 0.5)
    monkeypatch.setattr(pools, "HOT_LOCK_MS", 300)
    monkeypatch.setattr(writers, "RESOLVE_S", 1.0)
    await pool.execute(SLOW_WRITES)
    async with open_ledger(database_url) as ledger:
        one = await make_session(ledger)
        other = await beside(ledger, one)
        pending = asyncio.ensure_future(outcomes(ledger.accept(accept(one, "slow", key=b"k" * 32))))
        pid = await until(lambda: pool.fetchval(WRITING_SQL), DEADLINE_S)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await pending == ["Unavailable"]
            assert await outcomes(ledger.accept(accept(other, "beside"))) == ["Accepted"]
            assert await outcomes(ledger.accept(accept(one, "blocked"))) == ["Unavailable"]
        finally:
            os.kill(pid, signal.SIGCONT)
        gone = f"select not exists (select from pg_stat_activity where pid = {pid})"
        await until(lambda: pool.fetchval(gone), DEADLINE_S)
        assert await outcomes(ledger.accept(accept(one, "slow", key=b"k" * 32))) == ["Accepted"]
        assert await texts(pool, one) == ["slow"]


async def beside(ledger: PostgresLedger, session_id: UUID) -> UUID:
    """Another session that the same writer serves."""
    while True:
        found = await make_session(ledger)
        if found.int % 2 == session_id.int % 2:
            return found


async def test_restart_of_postgres_in_the_middle_loses_and_doubles_nothing(durable_postgres: DurablePostgres) -> None:
    """Callers write all the time while it is killed, and again while it is stopped in order. What was acknowledged is there once."""
    async with open_ledger(durable_postgres.url) as ledger:
        sessions = [await make_session(ledger) for _ in range(4)]
        kept: dict[UUID, list[str]] = {s: [] for s in sessions}
        lost: dict[UUID, list[str]] = {s: [] for s in sessions}
        over = asyncio.Event()

        async def write(session: UUID, name: str) -> None:
            count = 0
            while not over.is_set():
                count += 1
                try:
                    await ledger.accept(accept(session, f"{name}-{count}"))
                    kept[session].append(f"{name}-{count}")
                except Unavailable:
                    lost[session].append(f"{name}-{count}")
                    await asyncio.sleep(0)

        async def more() -> bool:
            return sum(map(len, kept.values())) >= wanted

        callers = [asyncio.ensure_future(write(s, f"c{i}")) for s in sessions for i in range(2)]
        for end in (durable_postgres.kill, durable_postgres.stop):
            wanted = sum(map(len, kept.values())) + 100
            await until(more, DEADLINE_S)
            await end()
            await durable_postgres.start()
        wanted = sum(map(len, kept.values())) + 100
        await until(more, DEADLINE_S)
        over.set()
        await asyncio.gather(*callers)
        pool = ReadPool(durable_postgres.url)
        for session in sessions:
            found = await texts(pool, session)
            assert len(found) == len(set(found)), "written twice"
            assert set(kept[session]) <= set(found), "acknowledged and lost"
            assert set(found) <= set(kept[session]) | set(lost[session])
        await pool.close()


# -------------------------------------------------------------------------------------------------------- busy neighbours


async def test_caller_that_gave_up_is_skipped_and_hurts_nobody(database_url: str, pool: ReadPool) -> None:
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        calls = [asyncio.ensure_future(ledger.accept(accept(session, t))) for t in ("a", "b", "c")]
        await asyncio.sleep(0)
        calls[1].cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r).__name__ for r in ended] == ["Accepted", "CancelledError", "Accepted"]
        assert await texts(pool, session) == ["a", "c"]


async def test_caller_that_gives_up_during_the_write_hurts_nobody(database_url: str, pool: ReadPool) -> None:
    await pool.execute(SLOW_WRITES)
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        calls = [asyncio.ensure_future(ledger.accept(accept(session, t))) for t in ("a", "slow", "c")]
        await until(lambda: pool.fetchval(WRITING_SQL), DEADLINE_S)
        calls[1].cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r).__name__ for r in ended] == ["Accepted", "CancelledError", "Accepted"]
        assert await texts(pool, session) == ["a", "slow", "c"]


@pytest.mark.parametrize("processes", [1, 2])
async def test_hot_session_admits_every_caller_in_one_strict_order(
    database_url: str, pool: ReadPool, processes: int
) -> None:
    """Sixty-four callers on one session, through one ledger, or through two that know nothing of each other."""
    async with contextlib.AsyncExitStack() as stack:
        ledgers = [await stack.enter_async_context(open_ledger(database_url)) for _ in range(processes)]
        session = await make_session(ledgers[0])

        async def caller(number: int) -> list[int]:
            seqs: list[int] = []
            for n in range(3):
                answer = await ledgers[number % processes].accept(accept(session, f"{number}-{n}"))
                assert isinstance(answer, Accepted)
                seqs.append(answer.events[0].seq)
            return seqs

        async with asyncio.timeout(DEADLINE_S):
            seqs = await asyncio.gather(*(caller(i) for i in range(64)))
        assert all(s == sorted(s) for s in seqs), "each caller's own order is kept"
        found = await texts(pool, session)
        assert len(found) == len(set(found)) == 64 * 3
        every = await pool.fetch("select seq from event where session_id = $1 order by seq", session)
        assert [r["seq"] for r in every] == list(range(1, len(every) + 1))


async def test_foreign_lock_makes_its_session_wait_and_no_other(
    database_url: str, pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the row: first passed over, then waited for, as long as a lock may be waited for."""
    monkeypatch.setattr(pools, "HOT_LOCK_MS", 300)
    async with open_ledger(database_url) as ledger, connected(database_url) as foreign:
        one = await make_session(ledger)
        other = await beside(ledger, one)
        await foreign.execute(f"begin; select from session where id = '{one}' for update")
        calls = (ledger.accept(accept(one, "refused")), ledger.accept(accept(other, "beside")))
        assert await outcomes(*calls) == ["Unavailable", "Accepted"]
        assert await texts(pool, one) == []
        waiting = asyncio.ensure_future(outcomes(ledger.accept(accept(one, "waited"))))
        held_up = "select true from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        await until(lambda: pool.fetchval(held_up), DEADLINE_S)
        await foreign.execute("commit")
        assert await waiting == ["Accepted"]
        assert await texts(pool, one) == ["waited"]


async def test_stop_finishes_the_batch_in_hand_and_refuses_the_rest(database_url: str, pool: ReadPool) -> None:
    await pool.execute(SLOW_WRITES)
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        first = asyncio.ensure_future(ledger.accept(accept(session, "slow")))
        await until(lambda: pool.fetchval(WRITING_SQL), DEADLINE_S)
        second = asyncio.ensure_future(ledger.accept(accept(session, "late")))
        await asyncio.sleep(0)
        await ledger.stop()
        assert isinstance(await first, Accepted)
        with pytest.raises(Unavailable):
            await second
        with pytest.raises(Unavailable):
            await ledger.accept(accept(session, "after"))
        assert await texts(pool, session) == ["slow"]


async def test_failed_batch_leaves_the_writer_as_good_as_new(database_url: str, pool: ReadPool) -> None:
    """Whatever went wrong before, the next command is as if nothing had."""
    await pool.execute(FAILING_WRITES.format(code="XX000"))
    async with open_ledger(database_url) as ledger:
        session = await make_session(ledger)
        for n in range(5):
            with pytest.raises(InvariantViolation):
                await ledger.accept(accept(session, "poison"))
            assert isinstance(await ledger.accept(accept(session, f"m{n}")), Accepted)
        assert await texts(pool, session) == [f"m{n}" for n in range(5)]
