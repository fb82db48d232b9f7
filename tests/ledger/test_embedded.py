"""The PostgreSQL of a data directory, with real processes, real signals and real leftovers."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest
from tests.conftest import PROCESS_DEADLINE_S, SMALL, DurablePostgres, connected, copy_of, data_directory, in_database

from perdure.postgres import postmaster
from perdure.postgres.embedded import EmbeddedPostgresError, is_running, start_embedded, wait_ready

# Holds PostgreSQL until its input ends. Everything is imported before it gives up being root: afterwards the folders of
# Python itself may be out of reach.
HOLDER = """
import asyncio, asyncpg, concurrent.futures.thread, json, os, pathlib, sys
from perdure.postgres.embedded import EmbeddedPostgresError, start_embedded

async def hold(data, uid, settings):
    if uid >= 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    try:
        server = await start_embedded(pathlib.Path(data), settings=settings)
    except EmbeddedPostgresError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"pid": server.pid, "url": server.url, "started_here": server.started_here}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

asyncio.run(hold(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
"""
# Any system user but root who needs no entry in the list of users beyond the one that every system has.
NOBODY = 65534


class Holder:
    """Another process that started, or attached to, the PostgreSQL of a directory."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: dict[str, object] = {}

    async def hear(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PROCESS_DEADLINE_S)
        self.said = json.loads(line)

    async def leave(self) -> None:
        """Let it end in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), PROCESS_DEADLINE_S) == 0

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.wait_for(self.process.wait(), PROCESS_DEADLINE_S)


@asynccontextmanager
async def holding(data: Path, *, uid: int = -1) -> AsyncGenerator[Holder]:
    """Such a process, whose first words were not heard yet."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, str(data), str(uid), json.dumps(SMALL)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Holder(process)
    finally:
        if process.returncode is None:
            process.kill()
        # Reads to the end of the pipe, which closes it too.
        await process.communicate()


@pytest.fixture
def data() -> Iterator[Path]:
    with data_directory() as folder:
        yield folder


@pytest.fixture
def old_data(cluster: Path) -> Iterator[Path]:
    with copy_of(cluster) as folder:
        yield folder


async def keep_a_row(url: str) -> None:
    async with connected(url) as connection:
        await connection.execute("create table kept (word text); insert into kept values ('acknowledged')")


async def kept_row(url: str) -> str:
    async with connected(url) as connection:
        return await connection.fetchval("select word from kept")


def appears(path: Path) -> None:
    until = time.monotonic() + PROCESS_DEADLINE_S
    while not path.exists():
        assert time.monotonic() < until, path


async def end_process(pid: int, how: signal.Signals) -> None:
    process = psutil.Process(pid)
    process.send_signal(how)
    await asyncio.to_thread(psutil.wait_procs, [process], PROCESS_DEADLINE_S)


async def test_new_directory_gets_a_durable_server_on_a_socket_only(data: Path) -> None:
    server = await start_embedded(data)
    try:
        async with connected(server.url) as connection:
            shown = {name: await connection.fetchval(f"show {name}") for name in ("fsync", "synchronous_commit", "jit")}
            assert shown == {"fsync": "on", "synchronous_commit": "on", "jit": "off"}
            assert await connection.fetchval("show listen_addresses") == ""
            assert await connection.fetchval("select current_database()") == "perdure"
            assert (await connection.fetchval("show server_version")).startswith("18.")
        assert server.started_here
        assert is_running(data)
        assert "ready to accept connections" in (data / "postgres.log").read_text()
    finally:
        await server.stop()
    assert not is_running(data)


async def test_stopped_server_starts_again_with_its_data_and_the_same_url(old_data: Path) -> None:
    first = await start_embedded(old_data, settings=SMALL)
    await keep_a_row(first.url)
    await first.stop()
    await first.stop()

    second = await start_embedded(old_data, settings=SMALL)
    try:
        assert second.url == first.url
        assert await kept_row(second.url) == "acknowledged"
    finally:
        await second.stop()


async def test_only_the_holder_that_started_it_stops_it_and_only_as_the_last(old_data: Path) -> None:
    starter = await start_embedded(old_data, settings=SMALL)
    guest = await start_embedded(old_data)
    assert (guest.pid, guest.url, guest.started_here) == (starter.pid, starter.url, False)

    await guest.stop()
    assert is_running(old_data)
    late_guest, heir = await start_embedded(old_data), await start_embedded(old_data, adopt=True)
    await starter.stop()
    assert is_running(old_data)
    await late_guest.stop()
    assert is_running(old_data)
    await heir.stop()
    assert not is_running(old_data)


async def test_two_processes_at_once_on_a_new_directory_share_one_server(data: Path) -> None:
    async with holding(data) as one, holding(data) as other:
        await asyncio.gather(one.hear(), other.hear())
        assert one.said["pid"] == other.said["pid"]
        assert sorted([one.said["started_here"], other.said["started_here"]], key=str) == [False, True]
        starter, guest = (one, other) if one.said["started_here"] else (other, one)
        await guest.leave()
        assert is_running(data)
        await starter.leave()
    assert not is_running(data)


async def test_server_outlives_its_killed_starter_and_the_next_start_attaches(old_data: Path) -> None:
    async with holding(old_data) as starter:
        await starter.hear()
        await keep_a_row(str(starter.said["url"]))
        await starter.kill()
    assert is_running(old_data)

    server = await start_embedded(old_data, adopt=True)
    assert (server.pid, server.started_here) == (starter.said["pid"], False)
    assert await kept_row(server.url) == "acknowledged"
    await server.stop()
    assert not is_running(old_data)


async def test_killed_server_is_revived_with_every_committed_row(old_data: Path) -> None:
    server = await start_embedded(old_data, settings=SMALL)
    try:
        await keep_a_row(server.url)
        assert not await server.revive()
        before = (server.pid, server.url)
        await end_process(server.pid, signal.SIGKILL)
        assert not server.is_alive()
        assert (old_data / "pg" / "postmaster.pid").exists()

        assert await server.revive()
        assert server.pid != before[0]
        assert server.url == before[1]
        assert await kept_row(server.url) == "acknowledged"
    finally:
        await server.stop()
    assert not is_running(old_data)


async def test_server_and_starter_killed_together_leave_a_directory_that_starts(old_data: Path) -> None:
    async with holding(old_data) as starter:
        await starter.hear()
        await keep_a_row(str(starter.said["url"]))
        await starter.kill()
    await end_process(int(str(starter.said["pid"])), signal.SIGKILL)

    server = await start_embedded(old_data, settings=SMALL)
    try:
        assert server.started_here
        assert await kept_row(server.url) == "acknowledged"
    finally:
        await server.stop()


async def test_busy_backend_of_a_killed_server_is_ended_before_the_next_start(
    old_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postmaster, "LEFTOVER_PATIENCE_S", 0.3)
    server = await start_embedded(old_data, settings=SMALL)
    try:
        async with connected(server.url) as connection:
            backend = psutil.Process(await connection.fetchval("select pg_backend_pid()"))
            # It looks at nothing but its own loop, so it doesn't notice that its server is gone.
            endless = asyncio.ensure_future(connection.execute("do $$ begin loop end loop; end $$"))
            async with connected(server.url) as observer:
                is_busy = "select exists (select from pg_stat_activity where query like 'do %' and state = 'active')"
                async with asyncio.timeout(PROCESS_DEADLINE_S):
                    while not await observer.fetchval(is_busy):
                        pass
            await end_process(server.pid, signal.SIGKILL)
            assert backend.is_running()

            assert await server.revive()
            assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
            with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
                await asyncio.wait_for(endless, PROCESS_DEADLINE_S)
    finally:
        await server.stop()


async def test_pid_file_that_names_somebody_elses_process_does_not_stop_a_start(old_data: Path) -> None:
    with data_directory() as elsewhere:
        neighbour = await start_embedded(elsewhere, settings=SMALL)
        server = await start_embedded(old_data, settings=SMALL)
        await keep_a_row(server.url)
        await end_process(server.pid, signal.SIGKILL)
        # What a recycled process id looks like: alive, and of the very same user.
        for file in (old_data / "pg" / "postmaster.pid", old_data / "socket" / ".s.PGSQL.5432.lock"):
            _, rest = file.read_text().split("\n", 1)
            file.write_text(f"{neighbour.pid}\n{rest}")
        assert not is_running(old_data)

        assert await server.revive()
        assert await kept_row(server.url) == "acknowledged"
        assert neighbour.is_alive()
        await server.stop()
        await neighbour.stop()


@pytest.mark.parametrize("name", ["n" * 150, 'it\'s a "place", with 100% of ü?&'])
async def test_long_and_odd_paths_work(data: Path, name: str) -> None:
    server = await start_embedded(data / name, settings=SMALL)
    async with connected(server.url) as connection:
        folder = Path((await connection.fetchval("show unix_socket_directories")).strip('"').replace('""', '"'))
    assert len(os.fsencode(folder / ".s.PGSQL.5432")) <= postmaster.SOCKET_PATH_BYTES_MAX
    await server.stop()
    assert folder.exists() == (folder.parent == data / name)
    assert not is_running(data / name)


async def test_works_for_a_normal_user(data: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else -1
    own = data / "own"
    own.mkdir()
    if uid >= 0:
        data.chmod(0o711)
        os.chown(own, uid, uid)
    async with holding(own, uid=uid) as holder:
        await holder.hear()
        assert holder.said["started_here"], holder.said
        assert psutil.Process(int(str(holder.said["pid"]))).uids().real == (uid if uid >= 0 else os.geteuid())
        await holder.leave()
    assert not is_running(own)


async def test_directory_that_may_not_be_written_is_named_with_a_way_out(data: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else -1
    closed = data / "closed"
    closed.mkdir(mode=0o555)
    data.chmod(0o711)
    async with holding(closed, uid=uid) as holder:
        await holder.hear()
    assert f"data directory {str(closed)!r} is not writable by system user" in str(holder.said["error"])
    assert "--data" in str(holder.said["error"])


async def test_half_made_directory_of_a_killed_start_is_replaced(data: Path) -> None:
    stale = data / "pg.new.killed"
    stale.mkdir()
    (stale / "PG_VERSION").write_text("18\n")

    server = await start_embedded(data, settings=SMALL)
    await server.stop()
    assert sorted(path.name for path in data.glob("pg*") if path.is_dir()) == ["pg"]


async def test_directory_of_another_major_version_is_refused_untouched(data: Path) -> None:
    (data / "pg").mkdir()
    (data / "pg" / "PG_VERSION").write_text("16\n")
    with pytest.raises(
        EmbeddedPostgresError, match=r"pg' was made by PostgreSQL 16, and this Perdure brings 18: export"
    ):
        await start_embedded(data)
    assert [path.name for path in (data / "pg").iterdir()] == ["PG_VERSION"]


async def test_directory_with_something_else_in_it_is_refused_untouched(data: Path) -> None:
    (data / "pg").mkdir()
    (data / "pg" / "photo.jpg").touch()
    with pytest.raises(EmbeddedPostgresError, match=r"pg' is not empty and holds no PostgreSQL data: move it away"):
        await start_embedded(data)
    assert [path.name for path in (data / "pg").iterdir()] == ["photo.jpg"]


async def test_file_in_place_of_the_directory_is_refused(data: Path) -> None:
    (data / "file").touch()
    with pytest.raises(EmbeddedPostgresError, match=r"file' can't be used: choose another with --data"):
        await start_embedded(data / "file")


async def test_server_that_gives_up_is_quoted_and_leaves_nothing(old_data: Path) -> None:
    with pytest.raises(
        EmbeddedPostgresError, match=r'(?s)did not start in .*parameter "fsync" requires a Boolean value'
    ):
        await start_embedded(old_data, settings={**SMALL, "fsync": "perhaps"})
    assert not is_running(old_data)
    server = await start_embedded(old_data, settings=SMALL)
    assert server.started_here
    await server.stop()
    assert not is_running(old_data)


async def test_cancelled_start_leaves_nothing_running(data: Path) -> None:
    starting = asyncio.ensure_future(start_embedded(data, settings=SMALL))
    # The cluster is complete when this name appears; PostgreSQL itself comes next.
    await asyncio.to_thread(appears, data / "pg" / "PG_VERSION")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    # Only the one who finds nothing running starts it.
    server = await start_embedded(data, settings=SMALL)
    assert server.started_here
    await server.stop()


def test_full_disk_is_named_with_a_way_out() -> None:
    output = "PANIC:  could not write to file: No space left on device\nLOG:  shutting down"
    told = postmaster.explain_output(output, Path("/data"))
    assert told.startswith("the disk of data directory '/data' is full: free some space and start again")
    assert postmaster.explain_os_error(OSError(errno.ENOSPC, "No space left on device"), Path("/data")).startswith(
        told.partition(" (")[0]
    )


async def test_wait_ready_returns_when_the_server_answers(old_data: Path) -> None:
    durable = DurablePostgres(old_data)
    await durable.start()
    await durable.kill()
    with pytest.raises(EmbeddedPostgresError, match="did not answer within 0"):
        await wait_ready(durable.url, 0.05)

    waiting = asyncio.ensure_future(wait_ready(durable.url, PROCESS_DEADLINE_S))
    await durable.start()
    await waiting
    await durable.close()


async def test_start_beside_a_shutdown_ends_with_a_running_server(old_data: Path) -> None:
    durable = DurablePostgres(old_data)
    await durable.start()
    psutil.Process(durable.pid).send_signal(signal.SIGINT)

    server = await start_embedded(old_data, settings=SMALL)
    async with connected(server.url) as connection:
        assert await connection.fetchval("select 1") == 1
    await durable.close()
    await server.stop()


async def test_wait_ready_does_not_wait_for_what_waiting_cannot_change(postgres_url: str) -> None:
    with pytest.raises(EmbeddedPostgresError, match='database "missing" does not exist'):
        await wait_ready(in_database(postgres_url, "missing"), 60)
    with pytest.raises(EmbeddedPostgresError, match="check --database-url"):
        await wait_ready("not a url", 60)


async def test_wait_ready_gives_up_on_a_server_that_never_speaks() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        with pytest.raises(EmbeddedPostgresError, match=r"did not answer within 0\.2 s"):
            await wait_ready(f"postgresql://someone@127.0.0.1:{port}/perdure", 0.2)


def test_nothing_runs_where_nothing_is(data: Path) -> None:
    assert not is_running(data)
    assert not is_running(data / "missing")
