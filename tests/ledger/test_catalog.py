"""Both catalogs do the same; PostgreSQL's also survives what PostgreSQL does to its connections."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import pytest
from tests.conftest import DurablePostgres, connected
from tests.ledger.catalog_suite import BEHAVIOURS, Behaviour, a_workspace
from tests.ledger.relay import relayed

from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.ports.catalog import AgentRecord
from perdure.postgres.catalog import PostgresCatalog
from perdure.postgres.pool import PEER_LOST_MS, ReadPool, connect, is_busy, is_lost
from perdure.testing.oracle_catalog import OracleCatalog


@pytest.fixture
async def pool(database_url: str) -> AsyncGenerator[ReadPool]:
    pool = ReadPool(database_url)
    yield pool
    await pool.close()


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.__name__)
async def test_postgres_catalog(behaviour: Behaviour, pool: ReadPool) -> None:
    await behaviour(PostgresCatalog(pool))


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.__name__)
async def test_oracle_catalog(behaviour: Behaviour) -> None:
    await behaviour(OracleCatalog())


async def cut(url: str, application_name: str = "perdure-read") -> int:
    """End the connections of others, as an administrator does it."""
    async with connected(url) as admin:
        rows = await admin.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1"
            " and datname = current_database()",
            application_name,
        )
    return len(rows)


async def test_reads_and_writes_survive_a_cut_connection(pool: ReadPool, database_url: str) -> None:
    catalog = PostgresCatalog(pool)
    workspace, agent = await a_workspace(catalog), uuid4()
    assert await cut(database_url) == 1
    await catalog.create_agent(workspace, agent, b"1")
    assert await cut(database_url) == 1
    assert isinstance(await catalog.update_agent(workspace, agent, 1, b"2"), AgentRecord)
    assert await cut(database_url) == 1
    latest = await catalog.read_agent(workspace, agent)
    assert latest is not None and latest.version == 2


async def backend_waiting_for_a_lock(watcher: Any) -> int:
    async with asyncio.timeout(10):
        while True:
            pid = await watcher.fetchval(
                "select pid from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            if pid is not None:
                return pid
            await asyncio.sleep(0)


async def test_update_cut_off_in_the_middle_is_made_once(pool: ReadPool, database_url: str) -> None:
    catalog = PostgresCatalog(pool)
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    async with connected(database_url) as holder, connected(database_url) as watcher:
        async with holder.transaction(isolation="read_committed"):
            await holder.execute("select from agent where id = $1 for no key update", agent)
            update = asyncio.create_task(catalog.update_agent(workspace, agent, 1, b"2"))
            pid = await backend_waiting_for_a_lock(watcher)
            await watcher.execute("select pg_terminate_backend($1::int)", pid)
        updated = await update
    assert isinstance(updated, AgentRecord) and updated.version == 2
    assert len(await catalog.read_agent_versions(workspace, agent, None, 10)) == 2


async def test_update_whose_answer_was_lost_is_answered_by_what_it_did(pool: ReadPool) -> None:
    class LosesAnswers(ReadPool):
        """Its first transaction commits, and nobody hears of it."""

        def transaction(self, *, fresh: bool = False) -> Any:
            return pool.transaction() if fresh else Losing()

    class Losing:
        def __init__(self) -> None:
            self.inner = pool.transaction()

        async def __aenter__(self) -> Any:
            return await self.inner.__aenter__()

        async def __aexit__(self, *args: Any) -> None:
            await self.inner.__aexit__(*args)
            raise Unavailable("lost") from ConnectionResetError()

    sure, unsure = PostgresCatalog(pool), PostgresCatalog(LosesAnswers(""))
    workspace, agent, environment = await a_workspace(unsure), uuid4(), uuid4()
    made = await unsure.create_agent(workspace, agent, b"1")
    assert made == await sure.read_agent(workspace, agent)
    updated = await unsure.update_agent(workspace, agent, 1, b"2")
    assert isinstance(updated, AgentRecord) and updated.version == 2
    assert updated == await sure.read_agent(workspace, agent)
    placed = await unsure.create_environment(workspace, environment, b"1")
    changed = await unsure.update_environment(workspace, environment, placed.updated_at, b"2")
    assert changed == await sure.read_environment(workspace, environment)
    assert await unsure.delete_environment(workspace, environment) is True
    assert await unsure.delete_environment(workspace, environment) is False


async def test_key_needs_a_workspace(pool: ReadPool) -> None:
    with pytest.raises(InvariantViolation, match="workspace"):
        await PostgresCatalog(pool).create_key(uuid4(), uuid4(), "k", b"d", "h")


async def test_locked_row_makes_an_update_unavailable_and_nothing_is_kept(pool: ReadPool, database_url: str) -> None:
    catalog = PostgresCatalog(pool)
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    async with connected(database_url) as holder, holder.transaction(isolation="read_committed"):
        await holder.execute("select from agent where id = $1 for no key update", agent)
        with pytest.raises(Unavailable, match="busy"):
            await catalog.update_agent(workspace, agent, 1, b"2")
    assert isinstance(await catalog.update_agent(workspace, agent, 1, b"2"), AgentRecord)


async def test_pool_is_unavailable_while_postgres_is_away_and_comes_back_by_itself(
    durable_postgres: DurablePostgres,
) -> None:
    pool = ReadPool(durable_postgres.url)
    catalog = PostgresCatalog(pool)
    workspace = await a_workspace(catalog)
    await asyncio.gather(*(pool.fetch("select pg_backend_pid()") for _ in range(4)))
    await durable_postgres.stop()
    with pytest.raises(Unavailable):
        await pool.fetch("select 1")
    with pytest.raises(Unavailable):
        await catalog.create_agent(workspace, uuid4(), b"1")
    await durable_postgres.start()
    assert [w.id for w in await catalog.read_workspaces()] == [workspace]
    await durable_postgres.kill()
    await durable_postgres.start()
    # Both connections are stale now, and both are replaced.
    assert await asyncio.gather(*(pool.fetchval("select $1::int", n) for n in range(4))) == [0, 1, 2, 3]
    await pool.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await pool.fetch("select 1")


async def test_pool_keeps_to_its_size_and_forgets_a_cancelled_read(pool: ReadPool, database_url: str) -> None:
    pids = await asyncio.gather(*(pool.fetchval("select pg_backend_pid()") for _ in range(20)))
    assert len(set(pids)) <= 2
    async with connected(database_url) as holder, holder.transaction(isolation="read_committed"):
        await holder.execute("select pg_advisory_xact_lock(1)")
        read = asyncio.create_task(pool.fetch("select pg_advisory_xact_lock_shared(1)"))
        async with connected(database_url) as watcher:
            await backend_waiting_for_a_lock(watcher)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert await asyncio.gather(*(pool.fetchval("select 1") for _ in range(4))) == [1, 1, 1, 1]


@pytest.mark.parametrize("hot", [True, False])
async def test_connections_bound_what_they_wait_for(database_url: str, hot: bool) -> None:
    connection = await connect(database_url, application_name="perdure-test", hot=hot)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "jit", "application_name")
    shown = [await connection.fetchval(f"show {name}") for name in names]
    await connection.close()
    assert shown == [*(("5s", "1s", "2s") if hot else ("1min", "10s", "30s")), "off", "perdure-test"]


async def test_connection_over_the_network_notices_a_vanished_peer(database_url: str) -> None:
    async with relayed(database_url) as relay:
        connection = await connect(relay.url, application_name="perdure-test", hot=True)
        ours = connection._transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == PEER_LOST_MS
        assert await connection.fetchval("select 1") == 1
        relay.freeze()
        waiting = asyncio.create_task(connection.fetchval("select 1", timeout=0.2))
        with pytest.raises(TimeoutError) as silent:
            await waiting
        assert is_lost(silent.value)
        connection.terminate()


async def test_errors_of_the_database_are_told_apart(database_url: str) -> None:
    connection = await connect(database_url, application_name="perdure-test", hot=True)
    told: list[tuple[bool, bool]] = []
    for sql in (
        "select 1/0",
        "set statement_timeout = '10ms'; select pg_advisory_lock(1), generate_series(1, 100000000)",
        "select pg_terminate_backend(pg_backend_pid())",
        "select 1",
    ):
        with pytest.raises(Exception) as caught:
            await connection.execute(sql)
        told.append((is_lost(caught.value), is_busy(caught.value)))
    assert told == [(False, False), (False, True), (True, False), (True, False)]
    with pytest.raises(OSError) as refused:
        await connect("postgresql://postgres@127.0.0.1:1/x", application_name="perdure-test", hot=True)
    assert is_lost(refused.value) and not is_lost(ValueError())
