"""Deletion that is cut off and taken up again, records that had their time, and notes of written responses."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.conftest import connected
from tests.ledger.ledger_sessions import WORKSPACE, claim, make_session, open_ledger

from perdure.domain import ids
from perdure.domain.event import encode
from perdure.domain.submission import SubmissionKey, Written, WrittenNote
from perdure.ports.ledger import (
    Accept,
    Accepted,
    Advance,
    Arrival,
    DeleteSession,
    Done,
    ModelReplied,
    OutBlock,
)
from perdure.ports.model import Usage
from perdure.postgres.housekeeping import Purged, delete_rows, mark_written, purge, sessions_being_deleted
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.pool import ReadPool
from perdure.postgres.tables import CHILDREN

DEADLINE_S = 20.0
KEPT = ("submission",)
"""What a tombstone keeps beside itself."""


@pytest.fixture
async def pool(database_url: str) -> AsyncGenerator[ReadPool]:
    pool = ReadPool(database_url)
    yield pool
    await pool.close()


@pytest.fixture
async def ledger(database_url: str) -> AsyncGenerator[PostgresLedger]:
    async with open_ledger(database_url) as ledger:
        yield ledger


def a_key(digest: bytes = b"d" * 32, *, attempt: int = 0) -> SubmissionKey:
    return SubmissionKey(digest=digest, body_digest=digest, explicit=False, attempt=attempt, request_id=uuid4())


async def finished_session(ledger: PostgresLedger, *, submission: SubmissionKey | None = None) -> UUID:
    """An idle session with a turn behind it: a row in most tables."""
    session = await make_session(ledger, submission=submission)
    step = (answer := await claim(ledger, session, uuid4())).steps[0]
    await ledger.advance(
        Advance(
            session_id=session,
            thread_id=ids.primary_thread(session),
            worker_id=uuid4(),
            command_id=uuid4(),
            lease=answer.lease,
            outcome=ModelReplied(
                step_id=step.id,
                blocks=(OutBlock(index=0, kind="message", body=encode({"text": "hi"})),),
                calls=(),
                transcript=encode([{"type": "text", "text": "hi"}]),
                stop_reason="end_turn",
                stop_details=None,
                usage=Usage(input_tokens=1, output_tokens=1),
            ),
        )
    )
    return session


async def fence(ledger: PostgresLedger, session: UUID) -> None:
    assert await ledger.delete(DeleteSession(session_id=session, workspace_id=WORKSPACE)) == Done()


async def counts(pool: ReadPool, session: UUID) -> dict[str, int]:
    """Rows of a session, by table, without empty ones."""
    found = {
        t.name: await pool.fetchval(f"select count(*) from {t.name} where {t.session_column} = $1", session)
        for t in CHILDREN
    }
    return {name: count for name, count in found.items() if count}


async def session_row(pool: ReadPool, session: UUID) -> Any:
    return await pool.fetchrow("select * from session where id = $1", session)


async def fill_events(pool: ReadPool, session: UUID, count: int) -> None:
    """History that a deletion takes several transactions for."""
    await pool.execute(
        """insert into event (session_id, seq, id, thread_id, type, kind, at, snap)
           select $1, 1000 + n, gen_random_uuid(), $1, 'filler', '', clock_timestamp(), '' from generate_series(1, $2) n""",
        session,
        count,
    )


async def age(pool: ReadPool, table: str, column: str, hours: float) -> None:
    await pool.execute(f"update {table} set {column} = {column} - $1 * interval '1 hour'", hours)


# ------------------------------------------------------------------------------------------------------------- deletion


async def test_deleted_session_leaves_a_tombstone_and_nothing_else(pool: ReadPool, ledger: PostgresLedger) -> None:
    session = await finished_session(ledger, submission=a_key())
    other = await finished_session(ledger)
    before, untouched = await session_row(pool, session), await counts(pool, other)
    assert set(await counts(pool, session)) >= {"event", "input", "turn", "step", "transcript", "thread", "submission"}
    await fence(ledger, session)
    assert await sessions_being_deleted(pool) == [session]
    assert await delete_rows(pool, session) is True
    row = await session_row(pool, session)
    assert set(await counts(pool, session)) == set(KEPT)
    assert (row["state"], row["agent_id"], row["environment_id"], row["model"]) == ("deleted", None, None, "")
    assert row["workspace_id"] == WORKSPACE and row["rev"] > before["rev"] and row["updated_at"] > before["updated_at"]
    assert await sessions_being_deleted(pool) == []
    assert await delete_rows(pool, session) is True
    assert await counts(pool, other) == untouched
    assert (await session_row(pool, other))["state"] == "open"


async def test_nothing_is_removed_of_a_session_that_is_not_being_deleted(
    pool: ReadPool, ledger: PostgresLedger
) -> None:
    session = await finished_session(ledger)
    before = await counts(pool, session)
    assert await delete_rows(pool, session) is False
    assert await counts(pool, session) == before
    assert await delete_rows(pool, uuid4()) is True


async def test_unsettled_cleanup_holds_the_rows(pool: ReadPool, ledger: PostgresLedger) -> None:
    session = await finished_session(ledger)
    await fence(ledger, session)
    await pool.execute("update step set kind = 'cleanup', state = 'dispatched' where session_id = $1", session)
    before = await counts(pool, session)
    assert await delete_rows(pool, session) is False
    assert await counts(pool, session) == before
    await pool.execute("update step set state = 'done' where session_id = $1", session)
    assert await delete_rows(pool, session) is True


class CutOff(ReadPool):
    """A process that dies after some transactions."""

    def __init__(self, url: str, transactions: int) -> None:
        super().__init__(url)
        self.left = transactions

    @asynccontextmanager
    async def transaction(self, *, fresh: bool = False) -> AsyncGenerator[Any]:
        if self.left == 0:
            raise ProcessLookupError
        self.left -= 1
        async with super().transaction(fresh=fresh) as connection:
            yield connection


async def test_deletion_cut_off_anywhere_is_finished_by_another(
    database_url: str, pool: ReadPool, ledger: PostgresLedger
) -> None:
    session = await finished_session(ledger)
    await fill_events(pool, session, 2_500)
    await fence(ledger, session)
    left: list[int] = []
    revs: list[int] = []
    for _ in range(2):
        dying = CutOff(database_url, 1)
        with pytest.raises(ProcessLookupError):
            await delete_rows(dying, session)
        await dying.close()
        left.append(sum((await counts(pool, session)).values()))
        revs.append((await session_row(pool, session))["rev"])
        assert (await session_row(pool, session))["state"] == "deleting"
        assert await sessions_being_deleted(pool) == [session]
    assert left[0] - left[1] == 1_000 and left[0] > 1_500
    assert revs[1] == revs[0] + 1
    assert await delete_rows(pool, session) is True
    assert await counts(pool, session) == {}


async def test_two_processes_delete_one_session_together(
    database_url: str, pool: ReadPool, ledger: PostgresLedger
) -> None:
    session = await finished_session(ledger)
    await fill_events(pool, session, 4_000)
    await fence(ledger, session)
    pools = [ReadPool(database_url) for _ in range(3)]

    async def persist(own: ReadPool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not await delete_rows(own, session):
                pass

    await asyncio.gather(*(persist(p) for p in pools))
    for p in pools:
        await p.close()
    assert await counts(pool, session) == {}
    assert (await session_row(pool, session))["state"] == "deleted"


async def test_session_in_another_process_hands_is_left_to_it(
    database_url: str, pool: ReadPool, ledger: PostgresLedger
) -> None:
    session = await finished_session(ledger)
    await fence(ledger, session)
    before = await counts(pool, session)
    async with connected(database_url) as other, other.transaction(isolation="read_committed"):
        await other.execute("select from session where id = $1 for no key update", session)
        assert await delete_rows(pool, session) is False
    assert await counts(pool, session) == before


# ---------------------------------------------------------------------------------------------------------------- purge


async def test_purge_removes_what_had_its_time_and_only_that(pool: ReadPool, ledger: PostgresLedger) -> None:
    gone = await finished_session(ledger, submission=a_key(b"a" * 32))
    kept = await finished_session(ledger, submission=a_key(b"b" * 32))
    await fence(ledger, gone)
    await delete_rows(pool, gone)
    assert await purge(pool) == Purged(sessions=0, submissions=0, workers=0)
    await age(pool, "session", "updated_at", 23)
    await age(pool, "submission", "created_at", 23)
    assert await purge(pool) == Purged(sessions=0, submissions=0, workers=0)
    await age(pool, "session", "updated_at", 2)
    assert await purge(pool) == Purged(sessions=1, submissions=0, workers=0)
    assert await session_row(pool, gone) is None
    # The tombstone took its record along; the other's is of a session that lives.
    assert [r["session_id"] for r in await pool.fetch("select session_id from submission")] == [kept]
    await age(pool, "submission", "created_at", 2)
    rev = (await session_row(pool, kept))["rev"]
    assert await purge(pool) == Purged(sessions=0, submissions=1, workers=0)
    assert (await session_row(pool, kept))["rev"] == rev
    assert "event" in await counts(pool, kept)


async def test_purge_removes_dead_workers_without_turns(pool: ReadPool, ledger: PostgresLedger) -> None:
    idle, busy, fresh, alive = (uuid4() for _ in range(4))
    session = await make_session(ledger)
    await claim(ledger, session, busy)
    for worker, dead_for in ((idle, "2 hours"), (busy, "2 hours"), (fresh, "1 minute"), (alive, None)):
        await pool.execute(
            """insert into worker (id, host, boot, pid, started, lease_until, dead_at)
               values ($1, '', '', 1, '', clock_timestamp(), clock_timestamp() - $2::text::interval)""",
            worker,
            dead_for,
        )
    assert await purge(pool) == Purged(sessions=0, submissions=0, workers=1)
    assert {r["id"] for r in await pool.fetch("select id from worker")} == {busy, fresh, alive}


async def test_many_processes_purge_at_once(database_url: str, pool: ReadPool) -> None:
    await pool.execute(
        """insert into submission (digest, session_id, body_digest, explicit, attempt, first_seq, last_seq, request_id,
                                   connection_reused, created_at)
           select int8send(n), gen_random_uuid(), '', false, 0, 1, 1, gen_random_uuid(), false,
                  clock_timestamp() - interval '2 days'
             from generate_series(1, 3500) n"""
    )
    pools = [ReadPool(database_url) for _ in range(3)]
    purged = await asyncio.gather(*(purge(p) for p in pools), purge(pool))
    for p in pools:
        await p.close()
    rest = await purge(pool)
    assert sum(p.submissions for p in (*purged, rest)) == 3_500
    assert await pool.fetchval("select count(*) from submission") == 0


# -------------------------------------------------------------------------------------------------------- written notes


async def read_note(pool: ReadPool, digest: bytes) -> tuple[datetime | None, bool]:
    row = await pool.fetchrow("select written_at, connection_reused from submission where digest = $1", digest)
    return row["written_at"], row["connection_reused"]


def a_note(key: SubmissionKey, *, ago_s: float = 0, reused: bool = False) -> WrittenNote:
    return WrittenNote(key.digest, Written(key.request_id, timedelta(seconds=ago_s), reused))


async def test_note_of_a_written_response_stays_and_moves_no_guard(pool: ReadPool, ledger: PostgresLedger) -> None:
    """A batch in flight, which read the session before, must not miss because of them."""
    key = a_key()
    session = await make_session(ledger, submission=key)
    rev = (await session_row(pool, session))["rev"]
    for notes, ago_s, reused in (
        ([], None, False),
        ([a_note(a_key(b"unknown" * 4))], None, False),
        ([a_note(a_key(), reused=True)], None, False),
        ([a_note(key, ago_s=500)], 500, False),
        ([a_note(key, ago_s=100)], 500, False),
        ([a_note(key, ago_s=500, reused=True)], 500, True),
        ([a_note(key, ago_s=500)], 500, True),
    ):
        await mark_written(pool, notes)
        age = await pool.fetchval("select clock_timestamp() - written_at from submission where digest = $1", key.digest)
        assert (age is None) == (ago_s is None)
        if age is not None:
            assert ago_s <= age.total_seconds() < ago_s + 60, "by the ledger's own clock"
        assert (await read_note(pool, key.digest))[1] == reused
        assert (await session_row(pool, session))["rev"] == rev


async def test_late_note_of_an_earlier_response_says_nothing_of_a_later_one(
    pool: ReadPool, ledger: PostgresLedger
) -> None:
    """The same words on purpose, or a retry that was answered again: each has a record of its own, whose response has yet to go out."""
    digest = b"d" * 32
    session = await make_session(ledger)

    async def send(key: SubmissionKey) -> Accepted:
        body = encode({"content": [{"type": "text", "text": "same"}]})
        sent = await ledger.accept(
            Accept(
                session_id=session,
                workspace_id=WORKSPACE,
                arrivals=(Arrival(kind="message", body=body),),
                submission=key,
            )
        )
        assert isinstance(sent, Accepted)
        return sent

    first, second, retry = a_key(digest), a_key(digest), a_key(digest, attempt=1)
    await send(first)
    await send(second)
    await mark_written(pool, [a_note(first, reused=True)])
    assert await read_note(pool, digest) == (None, False)
    assert (await send(retry)).repeat
    await mark_written(pool, [a_note(second, reused=True)])
    assert await read_note(pool, digest) == (None, False)
    assert (await send(a_key(digest, attempt=2))).repeat


async def test_note_waits_for_nobody_who_holds_the_record(
    pool: ReadPool, ledger: PostgresLedger, database_url: str
) -> None:
    """Then the record is being written anew: its answer has yet to go out."""
    held, free = a_key(b"h" * 32), a_key(b"f" * 32)
    for key in (held, free):
        await make_session(ledger, submission=key)
    async with connected(database_url) as other, other.transaction():
        await other.execute("select from submission where digest = $1 for update", held.digest)
        await mark_written(pool, [a_note(held), a_note(free)])
    assert (await read_note(pool, held.digest))[0] is None
    assert (await read_note(pool, free.digest))[0] is not None


async def test_notes_are_taken_from_many_processes_while_the_ledger_writes(
    database_url: str, pool: ReadPool, ledger: PostgresLedger
) -> None:
    keys = [a_key(n.to_bytes(32, "big")) for n in range(6)]
    sessions = [await make_session(ledger, submission=key) for key in keys]
    pools = [ReadPool(database_url) for _ in range(3)]
    body = encode({"content": [{"type": "text", "text": "more"}]})

    async def accept(session: UUID, n: int) -> None:
        key = a_key(n.to_bytes(16, "big") + session.bytes)
        accepted = await ledger.accept(
            Accept(
                session_id=session,
                workspace_id=WORKSPACE,
                arrivals=(Arrival(kind="message", body=body),),
                submission=key,
            )
        )
        assert isinstance(accepted, Accepted)

    async def note(own: ReadPool, n: int) -> None:
        order = keys if n % 2 else keys[::-1]
        for step in range(5):
            await mark_written(own, [a_note(key, reused=step == 4) for key in order])

    await asyncio.gather(
        *(note(p, n) for n, p in enumerate(pools)), *(accept(s, n) for s in sessions for n in range(10))
    )
    for p in pools:
        await p.close()
    await mark_written(pool, [a_note(key, reused=True) for key in keys])
    assert [(await read_note(pool, key.digest))[1] for key in keys] == [True] * 6
    for session in sessions:
        assert len(await ledger.read_inputs(session, limit=100)) == 11


async def test_retry_of_a_creation_brings_no_deleted_session_back(pool: ReadPool, ledger: PostgresLedger) -> None:
    digest = b"d" * 32
    first = await finished_session(ledger, submission=a_key(digest))
    await fence(ledger, first)
    assert await delete_rows(pool, first) is True
    # It is answered as the first time, with the session that is gone by now.
    again = await make_session(ledger, submission=a_key(digest, attempt=1))
    assert again == first
    assert (await session_row(pool, first))["state"] == "deleted"
    assert await pool.fetchval("select count(*) from session") == 1
