"""Workers that live, stall, lose their connection, or die: with real processes, real signals and a real PostgreSQL."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.conftest import DurablePostgres, connected
from tests.ledger.ledger_sessions import claim, make_session, open_ledger
from tests.ledger.relay import relayed

from perdure.domain import ids
from perdure.domain.errors import Unavailable
from perdure.domain.lease import LEASE_MS, LOCK_FREE_MS, LOCK_TRUST_MS, RENEW_MS, Worker
from perdure.ports.ledger import Perform, Wake
from perdure.postgres import workers
from perdure.postgres.pool import ReadPool
from perdure.postgres.workers import (
    Identity,
    WorkerLease,
    Workers,
    bury,
    find_dead,
    is_process_gone,
    orphaned_threads,
    own_identity,
)
from perdure.testing.signals import Signal

DEADLINE_S = 20.0

# A process with a seat among the workers. It says its id, and each new one.
SEATED = """
import asyncio, sys
from perdure import telemetry
from perdure.postgres.pool import ReadPool
from perdure.postgres.workers import Workers

async def sit(url):
    telemetry.configure(json=True)
    lost = asyncio.Event()
    seat = Workers(url, ReadPool(url), on_lost=lost.set)
    await seat.start()
    print(seat.id, flush=True)
    leave = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while True:
        news = asyncio.create_task(lost.wait())
        await asyncio.wait({leave, news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if leave.done():
            break
        lost.clear()
        assert not seat.may_start()
        await seat.rejoin()
        print(seat.id, flush=True)
    await seat.stop()

asyncio.run(sit(sys.argv[1]))
"""


class Seated:
    """Such a process."""

    def __init__(self, process: asyncio.subprocess.Process, worker_id: UUID) -> None:
        self.process = process
        self.worker_id = worker_id

    async def hear(self) -> UUID:
        return await _hear(self.process)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), DEADLINE_S) == 0


async def _hear(process: asyncio.subprocess.Process) -> UUID:
    assert process.stdout is not None
    return UUID((await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode().strip())


@asynccontextmanager
async def seated(url: str) -> AsyncGenerator[Seated]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SEATED, url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Seated(process, await _hear(process))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def pool(database_url: str) -> AsyncGenerator[ReadPool]:
    pool = ReadPool(database_url)
    yield pool
    await pool.close()


@pytest.fixture
def me() -> Identity:
    """An observer without a row of its own."""
    return own_identity()


async def until(fact: Callable[[], Awaitable[Any]], deadline_s: float = DEADLINE_S) -> Any:
    """Ask until the answer is a true one."""
    async with asyncio.timeout(deadline_s):
        while True:
            if answer := await fact():
                return answer
            # Some facts are looked at without waiting for anybody.
            await asyncio.sleep(0)


async def row_of(pool: ReadPool, worker_id: UUID) -> Any:
    return await pool.fetchrow("select * from worker where id = $1", worker_id)


async def cut_lease(pool: ReadPool, worker_id: UUID) -> int:
    """End the connection that holds a worker's lock."""
    key = worker_id.int & (2**64 - 1)
    return await pool.fetchval(
        """select count(pg_terminate_backend(pid)) from pg_locks
            where locktype = 'advisory' and classid::bigint = $1 and objid::bigint = $2""",
        key >> 32,
        key & (2**32 - 1),
    )


async def lock_holders(pool: ReadPool, worker_id: UUID) -> list[int]:
    """Who holds a worker's lock, by process."""
    key = worker_id.int & (2**64 - 1)
    sql = "select pid from pg_locks where locktype = 'advisory' and classid::bigint = $1 and objid::bigint = $2"
    return [row["pid"] for row in await pool.fetch(sql, key >> 32, key & (2**32 - 1))]


async def cut_own(pool: ReadPool) -> None:
    await pool.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'perdure-lease' and datname = current_database()"
    )


@asynccontextmanager
async def leased(url: str, **options: Any) -> AsyncGenerator[tuple[WorkerLease, Signal]]:
    lost = Signal("lease lost")
    lease = WorkerLease(url, own_identity(), on_lost=lost.set, **options)
    await lease.start()
    try:
        yield lease, lost
    finally:
        await lease.stop()


# ------------------------------------------------------------------------------------------------------------ processes


@pytest.mark.rule("MA-C15.1")
async def test_killed_process_is_buried_by_the_next_sweep_and_its_turn_goes_to_another(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with open_ledger(database_url) as ledger, seated(database_url) as victim, seated(database_url) as other:
        session = await make_session(ledger)
        await claim(ledger, session, victim.worker_id)
        assert await find_dead(pool, me) == []
        assert await orphaned_threads(pool) == []
        victim.send(signal.SIGKILL)
        # Nobody has waited for it when the first sweep looks: a zombie holds no lease either.
        killed_at = time.monotonic()
        assert await until(lambda: find_dead(pool, me)) == [victim.worker_id]
        assert time.monotonic() - killed_at < 1.0
        thread = ids.primary_thread(session)
        assert await orphaned_threads(pool) == [(session, thread)]
        await ledger.wake(Wake(session_id=session, thread_id=thread))
        assert await orphaned_threads(pool) == []
        assert isinstance(await claim(ledger, session, other.worker_id), Perform)
        assert await orphaned_threads(pool) == []
        assert await find_dead(pool, me) == []


async def test_stopped_process_is_buried_once_its_lease_lapsed_and_comes_back_under_a_new_id(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with seated(database_url) as sleeper:
        sleeper.send(signal.SIGSTOP)
        # Its process is there and its lock is held: only time tells.
        assert await find_dead(pool, me) == []
        await pool.execute(
            "update worker set lease_until = clock_timestamp() where id = $1 and dead_at is null", sleeper.worker_id
        )
        assert await until(lambda: find_dead(pool, me)) == [sleeper.worker_id]
        sleeper.send(signal.SIGCONT)
        reborn = await sleeper.hear()
        assert reborn != sleeper.worker_id
        assert (await row_of(pool, reborn))["dead_at"] is None
        assert (await row_of(pool, sleeper.worker_id))["dead_at"] is not None
        assert await find_dead(pool, me) == []


async def test_worker_whose_lock_stays_free_is_buried_after_two_seconds(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with seated(database_url) as cut_off:
        cut_off.send(signal.SIGSTOP)
        assert await cut_lease(pool, cut_off.worker_id) == 1

        async def seen_free() -> bool:
            assert await find_dead(pool, me) == []
            return (await row_of(pool, cut_off.worker_id))["lock_free_since"] is not None

        await until(seen_free)
        assert await until(lambda: find_dead(pool, me)) == [cut_off.worker_id]
        row = await row_of(pool, cut_off.worker_id)
        assert (row["dead_at"] - row["lock_free_since"]).total_seconds() * 1000 >= LOCK_FREE_MS
        assert row["dead_at"] < row["lease_until"]


async def test_worker_that_leaves_in_order_is_dead_at_once_and_its_row_stays(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with seated(database_url) as leaver:
        await leaver.leave()
        assert (await row_of(pool, leaver.worker_id))["dead_at"] is not None
        assert await find_dead(pool, me) == []


# ---------------------------------------------------------------------------------------------------------------- lease


async def test_lease_is_renewed_while_the_main_loop_ticks(database_url: str, pool: ReadPool) -> None:
    async with leased(database_url) as (lease, lost):
        first = await row_of(pool, lease.identity.id)
        assert (first["host"], first["boot"], first["pid"]) == (
            lease.identity.host,
            lease.identity.boot,
            os.getpid(),
        )
        assert lease.may_start()

        async def renewed() -> bool:
            return (await row_of(pool, lease.identity.id))["lease_until"] > first["lease_until"]

        await until(renewed)
        assert lease.may_start() and not lost.is_set()
    assert not lease.may_start()
    assert (await row_of(pool, lease.identity.id))["dead_at"] is not None


async def test_stalled_main_loop_renews_nothing_and_is_no_death(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with leased(database_url, tick_ms_max=1) as (lease, lost):

        async def may_not() -> bool:
            return not lease.may_start()

        async def may() -> bool:
            lease.tick()
            return lease.may_start()

        await until(may_not)
        before = await row_of(pool, lease.identity.id)
        assert await find_dead(pool, me) == [] and not lost.is_set()
        await until(may)
        assert (await row_of(pool, lease.identity.id))["lease_until"] > before["lease_until"]


@pytest.mark.rule("MA-C15.5")
async def test_buried_worker_hears_of_it_and_starts_nothing(database_url: str, pool: ReadPool) -> None:
    async with leased(database_url) as (lease, lost):
        seen = msgspec.convert(dict(await row_of(pool, lease.identity.id)), Worker)
        assert await bury(pool, [(seen, True)]) == [seen.id]
        await lost.wait(DEADLINE_S)
        assert not lease.may_start()
        row = await row_of(pool, lease.identity.id)
    after = await row_of(pool, lease.identity.id)
    assert after["dead_at"] == row["dead_at"] and after["lease_until"] == row["lease_until"]


async def test_worker_that_renewed_since_it_was_seen_is_not_buried(database_url: str, pool: ReadPool) -> None:
    async with leased(database_url) as (lease, _):
        seen = msgspec.convert(dict(await row_of(pool, lease.identity.id)), Worker)

        async def renewed() -> bool:
            return (await row_of(pool, lease.identity.id))["lease_until"] > seen.lease_until

        await until(renewed)
        assert await bury(pool, [(seen, False)]) == []
        assert (await row_of(pool, lease.identity.id))["dead_at"] is None


async def test_cut_lease_connection_is_made_anew_with_its_lock(database_url: str, pool: ReadPool, me: Identity) -> None:
    async with leased(database_url) as (lease, lost):
        await cut_own(pool)
        cut_at = (await pool.fetchrow("select clock_timestamp() as now"))["now"]

        async def renewed() -> bool:
            await find_dead(pool, me)
            row = await row_of(pool, lease.identity.id)
            renewed_since = (row["lease_until"] - cut_at).total_seconds() * 1000 > LEASE_MS
            return renewed_since and row["lock_free_since"] is None

        await until(renewed)
        assert lease.may_start() and not lost.is_set()
        assert await cut_lease(pool, lease.identity.id) == 1


async def test_seat_that_was_taken_is_left_and_another_taken(database_url: str, pool: ReadPool) -> None:
    lost = Signal("seat lost")
    seat = Workers(database_url, pool, on_lost=lost.set)
    await seat.start()
    first = seat.id
    assert seat.may_start()
    await pool.execute("update worker set dead_at = clock_timestamp() where id = $1", first)
    await lost.wait(DEADLINE_S)
    assert not seat.may_start()
    await seat.rejoin()
    assert seat.id != first and seat.may_start()
    assert await seat.reap() == []
    second = seat.id
    await seat.stop()
    await seat.stop()
    assert not seat.may_start()
    assert (await row_of(pool, second))["dead_at"] is not None


@pytest.mark.rule("MA-C15.1")
async def test_after_our_own_connection_was_lost_others_have_time_to_come_back(
    database_url: str, pool: ReadPool
) -> None:
    """A standby that took over has been up for long, and a role without rights is not told of a crash: neither proves anything."""
    seat = Workers(database_url, pool, on_lost=Signal("not lost").set)
    await seat.start()
    async with seated(database_url) as silent:
        silent.send(signal.SIGSTOP)
        assert await cut_lease(pool, silent.worker_id) == 1
        await seat.reap()
        await pool.execute(
            "update worker set lock_free_since = clock_timestamp() - interval '1 minute', lease_until = clock_timestamp()"
            " where id = $1",
            silent.worker_id,
        )
        settled = "select clock_timestamp() - pg_postmaster_start_time() > $1 * interval '1 millisecond'"
        await until(lambda: pool.fetchval(settled, LOCK_TRUST_MS))
        [before] = await lock_holders(pool, seat.id)
        assert await cut_lease(pool, seat.id) == 1

        async def is_back() -> bool:
            return await lock_holders(pool, seat.id) not in ([], [before])

        await until(is_back)
        assert seat.may_start()
        await seat.reap()
        assert (await row_of(pool, silent.worker_id))["dead_at"] is None
        # Seen by a process that lost nothing, the same signs are proof.
        assert await until(lambda: find_dead(pool, seat.identity)) == [silent.worker_id]
    await seat.stop()


async def test_turns_of_a_missing_worker_are_orphaned_and_the_rules_see_it_dead(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with open_ledger(database_url) as ledger:
        session, missing = await make_session(ledger), uuid4()
        await claim(ledger, session, missing)
        thread = ids.primary_thread(session)
        assert await orphaned_threads(pool) == [(session, thread)]
        await find_dead(pool, me)
        assert (await row_of(pool, missing))["dead_at"] is not None
        await ledger.wake(Wake(session_id=session, thread_id=thread))
        assert await orphaned_threads(pool) == []
        assert [(w.session_id, w.thread_id) for w in await ledger.read_work(10)] == [(session, thread)]


async def test_due_threads_are_read_page_by_page(database_url: str) -> None:
    """So a page of threads that stay due, whatever is done, hides none behind it."""
    async with open_ledger(database_url) as ledger:
        waiting = {await make_session(ledger) for _ in range(5)}
        whole = await ledger.read_work(10)
        first = await ledger.read_work(3)
        rest = await ledger.read_work(3, first[-1])
        assert {w.session_id for w in whole} == waiting
        assert [*first, *rest] == list(whole)
        assert await ledger.read_work(3, rest[-1]) == []


async def test_of_many_observers_one_buries(database_url: str, pool: ReadPool, me: Identity) -> None:
    dead = [uuid4() for _ in range(20)]
    await pool.execute(
        """insert into worker (id, host, boot, pid, started, lease_until)
           select id, $2, $3, $4, 'another start', clock_timestamp() + interval '1 minute' from unnest($1::uuid[]) as id""",
        dead,
        me.host,
        me.boot,
        os.getpid(),
    )
    pools = [ReadPool(database_url) for _ in range(4)]
    buried = await asyncio.gather(*(find_dead(p, own_identity()) for p in pools))
    for p in pools:
        await p.close()
    rest = await find_dead(pool, me)
    # Each exactly once: a row in another's hands is passed over, and left to the next sweep.
    assert sorted([*(w for each in buried for w in each), *rest]) == sorted(dead)


# ------------------------------------------------------------------------------------------------- PostgreSQL goes away


@pytest.mark.rule("MA-C15.4")
async def test_restart_of_postgres_buries_no_living_worker(durable_postgres: DurablePostgres, me: Identity) -> None:
    pool = ReadPool(durable_postgres.url)
    async with leased(durable_postgres.url) as (lease, lost):
        await durable_postgres.stop()

        async def may_not() -> bool:
            return not lease.may_start()

        stopped_at = time.monotonic()
        await until(may_not)
        assert time.monotonic() - stopped_at < (LOCK_FREE_MS + RENEW_MS) / 1000
        # As after a long outage: every lease lapsed while nobody could renew.
        await durable_postgres.start()
        await pool.execute("update worker set lease_until = clock_timestamp() where dead_at is null")

        async def may() -> bool:
            assert await find_dead(pool, me) == []
            return lease.may_start()

        await until(may)
        assert not lost.is_set()
    await pool.close()


async def test_crash_of_a_backend_counts_as_a_restart(durable_postgres: DurablePostgres, me: Identity) -> None:
    pool = ReadPool(durable_postgres.url)
    await pool.execute(
        "insert into worker (id, host, boot, pid, started, lease_until) values ($1, 'h', 'b', 1, 's', clock_timestamp())",
        uuid4(),
    )

    async def up_since() -> Any:
        return (await pool.fetch(workers._OBSERVE_SQL, me.id))[0]["up_since"]

    before, postmaster = await up_since(), durable_postgres.pid
    async with connected(durable_postgres.url) as victim:
        os.kill(await victim.fetchval("select pg_backend_pid()"), signal.SIGKILL)

        async def risen() -> bool:
            try:
                return await up_since() > before
            except Unavailable:
                return False

        await until(risen)
    assert durable_postgres.pid == postmaster
    # Lapsed, and not trusted yet.
    assert await find_dead(pool, me) == []
    await pool.close()


async def test_frozen_network_stops_new_calls_until_the_lease_is_renewed_on_another_connection(
    database_url: str, pool: ReadPool, me: Identity
) -> None:
    async with relayed(database_url) as relay, leased(relay.url) as (lease, lost):
        assert lease.may_start()
        relay.freeze()

        async def may_not() -> bool:
            return not lease.may_start()

        async def may() -> bool:
            lease.tick()
            assert await find_dead(pool, me) == []
            return lease.may_start()

        await until(may_not)
        relay.thaw()
        # PostgreSQL knows nothing of our leaving: the old connection still has the lock, and so it is not free.
        await until(may)
        assert relay.frozen_count >= 1 and not lost.is_set()
        await relay.drop_frozen()

        async def locked_again() -> bool:
            await find_dead(pool, me)
            return len(await lock_holders(pool, lease.identity.id)) == 1 and lease.may_start()

        await until(locked_again)
        assert not lost.is_set()


async def test_no_seat_without_a_database(pool: ReadPool) -> None:
    seat = Workers("postgresql://postgres@127.0.0.1:1/none", pool, on_lost=lambda: None)
    with pytest.raises(Unavailable):
        await seat.start()
    assert not seat.may_start()
    await seat.stop()


# ------------------------------------------------------------------------------------------------------ what a process is


def as_worker(identity: Identity, **changes: Any) -> Worker:
    fields = {**msgspec.structs.asdict(identity), "lease_until": datetime.now(UTC)}
    return Worker(**{**fields, "lock_free_since": None, "dead_at": None, **changes})


def test_process_is_told_by_its_start_where_process_ids_mean_the_same(me: Identity) -> None:
    assert not is_process_gone(as_worker(me), me)
    assert is_process_gone(as_worker(me, started="1"), me), "another process has its number now"
    assert is_process_gone(as_worker(me, pid=2**22 + 1), me), "no such process"
    assert not is_process_gone(as_worker(me, pid=2**22 + 1, host="elsewhere"), me)
    assert not is_process_gone(as_worker(me, pid=2**22 + 1, boot="earlier"), me)
    assert not is_process_gone(as_worker(me, pid=2**22 + 1, boot=""), msgspec.structs.replace(me, boot=""))
    assert "pid:[" in me.host and me.boot and me.started.isdigit()
