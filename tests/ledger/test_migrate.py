"""The migration runner against a real PostgreSQL, with migrations of its own."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.conftest import PROCESS_DEADLINE_S, connected

from perdure.postgres import migrate
from perdure.postgres.migrate import Connection, MigrationError

FIRST = "create table note (id int primary key, word text); create index note_word on note (word);"
SECOND = "alter table note add column written_at timestamptz; insert into note values (1, 'two; statements');"


@pytest.fixture
async def connection(empty_url: str) -> AsyncGenerator[Connection]:
    async with connected(empty_url) as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0001_note.sql").write_text(FIRST)
    (tmp_path / "0002_note_time.sql").write_text(SECOND)
    (tmp_path / "README.md").write_text("Not a migration.")
    return tmp_path


async def tables(connection: Connection) -> set[str]:
    rows = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
    return {row["tablename"] for row in rows}


async def test_files_are_applied_once_and_in_order(connection: Connection, folder: Path) -> None:
    assert await migrate.pending(connection, folder=folder) == ["0001_note", "0002_note_time"]
    assert await tables(connection) == set()

    assert await migrate.apply(connection, folder=folder) == ["0001_note", "0002_note_time"]
    assert await migrate.pending(connection, folder=folder) == []
    assert await migrate.apply(connection, folder=folder) == []
    assert await connection.fetchval("select word from note") == "two; statements"
    rows = await connection.fetch("select number, name, sha256, applied_at from perdure_migration order by number")
    assert [(row["number"], row["name"], len(row["sha256"])) for row in rows] == [(1, "note", 64), (2, "note_time", 64)]
    assert rows[0]["applied_at"] < rows[1]["applied_at"]


async def test_a_new_file_alone_is_applied_to_an_older_database(connection: Connection, folder: Path) -> None:
    await migrate.apply(connection, folder=folder)
    (folder / "0003_tag.sql").write_text("create table tag (id int);")
    assert await migrate.pending(connection, folder=folder) == ["0003_tag"]
    assert await migrate.apply(connection, folder=folder) == ["0003_tag"]


async def test_a_failing_file_leaves_nothing_and_can_be_repaired(connection: Connection, folder: Path) -> None:
    bad = folder / "0003_tag.sql"
    bad.write_text("create table tag (id int); insert into tag values ('no number');")
    with pytest.raises(MigrationError, match=r"migration 0003_tag failed and changed nothing: .*no number"):
        await migrate.apply(connection, folder=folder)
    assert await tables(connection) == {"note", "perdure_migration"}
    assert await migrate.pending(connection, folder=folder) == ["0003_tag"]

    bad.write_text("create table tag (id int);")
    assert await migrate.apply(connection, folder=folder) == ["0003_tag"]


async def test_two_processes_at_once_apply_each_file_once(empty_url: str, folder: Path) -> None:
    # Long enough that all of them meet at the lock.
    (folder / "0003_slow.sql").write_text("select pg_sleep(0.2); create table slow (id int);")

    async def migrate_alone() -> list[str]:
        async with connected(empty_url) as connection:
            return await migrate.apply(connection, folder=folder)

    done = await asyncio.wait_for(asyncio.gather(*(migrate_alone() for _ in range(4))), PROCESS_DEADLINE_S)
    assert sorted(label for labels in done for label in labels) == ["0001_note", "0002_note_time", "0003_slow"]


async def test_a_crash_of_the_one_who_migrates_lets_the_other_in(empty_url: str, folder: Path) -> None:
    async with connected(empty_url) as first, connected(empty_url) as second:
        # What a process holds that was killed between the lock and its commit.
        await first.execute("begin")
        await first.execute("select pg_advisory_xact_lock($1)", migrate.LOCK_KEY)
        await first.execute("create table note (half text)")
        waiting = asyncio.ensure_future(migrate.apply(second, folder=folder))
        async with connected(empty_url) as observer, asyncio.timeout(PROCESS_DEADLINE_S):
            while not await observer.fetchval("select exists (select from pg_locks where not granted)"):
                pass
            assert not waiting.done()
            pid = await first.fetchval("select pg_backend_pid()")
            await observer.execute("select pg_terminate_backend($1)", pid)
            assert await waiting == ["0001_note", "0002_note_time"]


async def test_a_wait_that_takes_too_long_ends_with_advice(
    empty_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_WAIT_MS", 50)
    monkeypatch.setattr(migrate, "TABLE_WAIT_MS", 50)
    async with connected(empty_url) as holder, connected(empty_url) as connection:
        async with holder.transaction(isolation="read_committed"):
            await holder.execute("select pg_advisory_xact_lock($1)", migrate.LOCK_KEY)
            with pytest.raises(MigrationError, match=r"another process is migrating this database: .*run it again"):
                await migrate.apply(connection, folder=folder)
        await migrate.apply(connection, folder=folder)

        (folder / "0003_more.sql").write_text("alter table note add column more text;")
        async with holder.transaction(isolation="read_committed"):
            await holder.execute("select from note")
            with pytest.raises(MigrationError, match="migration 0003_more waited too long for a table in use"):
                await migrate.apply(connection, folder=folder)
        assert await migrate.apply(connection, folder=folder) == ["0003_more"]


async def test_short_timeouts_of_a_connection_do_not_cut_a_migration(connection: Connection, folder: Path) -> None:
    await connection.execute("set statement_timeout = '100ms'; set lock_timeout = '100ms'")
    (folder / "0003_slow.sql").write_text("select pg_sleep(0.3);")
    assert "0003_slow" in await migrate.apply(connection, folder=folder)
    assert await connection.fetchval("show statement_timeout") == "100ms"


async def test_a_stricter_default_isolation_changes_nothing(empty_url: str, folder: Path) -> None:
    async def migrate_alone() -> list[str]:
        async with connected(empty_url) as connection:
            await connection.execute("set default_transaction_isolation = 'serializable'")
            return await migrate.apply(connection, folder=folder)

    done = await asyncio.gather(*(migrate_alone() for _ in range(3)))
    assert sorted(label for labels in done for label in labels) == ["0001_note", "0002_note_time"]


async def test_a_file_changed_after_it_was_applied_is_refused_by_name(connection: Connection, folder: Path) -> None:
    await migrate.apply(connection, folder=folder)
    (folder / "0001_note.sql").write_text(FIRST + "\n-- changed")
    for call in (migrate.pending, migrate.apply):
        with pytest.raises(MigrationError, match="migration 0001_note is not what was applied to this database"):
            await call(connection, folder=folder)


async def test_a_newer_database_asks_for_an_upgrade_of_perdure(connection: Connection, folder: Path) -> None:
    await migrate.apply(connection, folder=folder)
    (folder / "0002_note_time.sql").unlink()
    for call in (migrate.pending, migrate.apply):
        with pytest.raises(
            MigrationError, match=r"has migration 0002_note_time, which .* doesn't know: upgrade Perdure"
        ):
            await call(connection, folder=folder)


async def test_a_database_of_something_else_is_refused(connection: Connection, folder: Path) -> None:
    await migrate.apply(connection, folder=folder)
    (folder / "0002_note_time.sql").rename(folder / "0002_other.sql")
    with pytest.raises(MigrationError, match="has migration 0002_note_time where this Perdure has 0002_other"):
        await migrate.apply(connection, folder=folder)


async def test_a_transaction_of_the_caller_is_refused(connection: Connection, folder: Path) -> None:
    async with connection.transaction(isolation="read_committed"):
        with pytest.raises(MigrationError, match="outside a transaction"):
            await migrate.apply(connection, folder=folder)


@pytest.mark.parametrize("control", ["commit;", "BEGIN ;", "  start transaction;", "rollback work;"])
def test_a_file_that_ends_its_transaction_is_refused(folder: Path, control: str) -> None:
    (folder / "0003_tag.sql").write_text(f"create table tag (id int);\n{control}\nselect 1;")
    with pytest.raises(MigrationError, match=r"'0003_tag\.sql': remove '"):
        migrate.load_migrations(folder)


def test_a_function_body_may_begin_and_end(folder: Path) -> None:
    body = "create function one() returns int language plpgsql as $$\nbegin\n  return 1;\nend;\n$$;"
    (folder / "0003_one.sql").write_text(body)
    assert [each.label for each in migrate.load_migrations(folder)] == ["0001_note", "0002_note_time", "0003_one"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("0004_gap.sql", "number 0003 must come here"),
        ("0002_twice.sql", "number 0003 must come here"),
        ("3_short.sql", "must look like"),
        ("0003_Upper.sql", "must look like"),
    ],
)
def test_a_name_out_of_order_is_refused(folder: Path, name: str, told: str) -> None:
    (folder / name).write_text("select 1;")
    with pytest.raises(MigrationError, match=told):
        migrate.load_migrations(folder)


def test_an_installation_without_files_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(MigrationError, match="has no migration files: install Perdure again"):
            migrate.load_migrations(place)


def test_an_old_server_and_a_narrow_encoding_are_refused() -> None:
    with pytest.raises(MigrationError, match="this PostgreSQL is version 14, and Perdure needs 15 or later"):
        migrate.check_server(140_011, "UTF8")
    with pytest.raises(MigrationError, match="this database has encoding SQL_ASCII"):
        migrate.check_server(180_004, "SQL_ASCII")
    migrate.check_server(150_000, "UTF8")
