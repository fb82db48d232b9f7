"""The schema's numbered files, applied in order and once.

A file `NNNN_name.sql` is applied in one transaction together with its row in `perdure_migration`, under an advisory
lock of that transaction. So a crash leaves whole files only, and of two processes that migrate at once the second finds
the work done.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final, Protocol

import asyncpg
import msgspec

SERVER_VERSION_MIN: Final = 15

# Any number will do that nobody else uses: "perdure" in ASCII.
LOCK_KEY: Final = 0x70657264757265
# The other process is at work on a schema change, and the longest of them rewrites a table.
LOCK_WAIT_MS: Final = 300_000
# A schema change that waits for a table makes everybody else wait behind it: better to fail, and run again.
TABLE_WAIT_MS: Final = 10_000

_NAME: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
# A file that ended the transaction would be applied without its row.
_TRANSACTION_CONTROL: Final = re.compile(
    r"^\s*(begin|start\s+transaction|commit|rollback|abort)(\s+(work|transaction))?\s*;", re.IGNORECASE | re.MULTILINE
)

_CREATE_TABLE: Final = """
create table if not exists perdure_migration (
  number int primary key,
  name text not null,
  sha256 text not null,
  applied_at timestamptz not null default clock_timestamp()
)
"""


class MigrationError(Exception):
    """The schema can't be brought up to date. The message says what to do; nothing of the failed file was applied."""


class Connection(Protocol):
    """What is used here of an asyncpg connection, pooled or not."""

    async def execute(self, query: str, *args: object) -> str: ...
    async def fetch(self, query: str, *args: object) -> Sequence[Any]: ...
    async def fetchval(self, query: str, *args: object) -> Any: ...
    def transaction(self, *, isolation: str) -> AbstractAsyncContextManager[object, None]: ...
    def is_in_transaction(self) -> bool: ...


class Migration(msgspec.Struct, frozen=True):
    """One file."""

    number: int
    name: str
    sql: str
    sha256: str

    @property
    def label(self) -> str:
        """As people say it: `0001_ledger`."""
        return f"{self.number:04d}_{self.name}"


def load_migrations(folder: Traversable | None = None) -> tuple[Migration, ...]:
    """The files of `folder`, or those that Perdure ships, numbered from 1 without a gap."""
    folder = folder or resources.files("perdure.postgres") / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql")) if folder.is_dir() else []
    found: list[Migration] = []
    for expected, name in enumerate(names, start=1):
        match = _NAME.fullmatch(name)
        if match is None:
            raise MigrationError(f"migration file {name!r}: its name must look like 0001_lower_case_words.sql")
        if int(match[1]) != expected:
            raise MigrationError(
                f"migration file {name!r}: number {expected:04d} must come here, each number once, without a gap"
            )
        sql = (folder / name).read_text("utf-8")
        if control := _TRANSACTION_CONTROL.search(sql):
            raise MigrationError(
                f"migration file {name!r}: remove {control[0].strip()!r}; each file is one transaction"
            )
        found.append(Migration(expected, match[2], sql, hashlib.sha256(sql.encode()).hexdigest()))
    if not found:
        raise MigrationError("this installation has no migration files: install Perdure again")
    return tuple(found)


async def pending(connection: Connection, *, folder: Traversable | None = None) -> list[str]:
    """What `apply` would apply now. Changes nothing; raises `MigrationError` where `apply` would refuse."""
    migrations = load_migrations(folder)
    await _check_server(connection)
    return [migration.label for migration in await _read_pending(connection, migrations)]


async def apply(connection: Connection, *, folder: Traversable | None = None) -> list[str]:
    """Apply what is missing, file by file; what was applied here. The connection must be outside a transaction.

    Safe to call from many processes at once, and to call again after any failure.
    """
    if connection.is_in_transaction():
        raise MigrationError("migrations need a connection that is outside a transaction")
    migrations = load_migrations(folder)
    await _check_server(connection)
    applied: list[str] = []
    while await _read_pending(connection, migrations):
        label = await _apply_next(connection, migrations)
        if label is None:
            break
        applied.append(label)
    return applied


async def _apply_next(connection: Connection, migrations: Sequence[Migration]) -> str | None:
    """Apply the first missing file in one transaction; none when another process has applied them all meanwhile."""
    label: str | None = None
    try:
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(f"set local statement_timeout = 0; set local lock_timeout = {LOCK_WAIT_MS}")
            await connection.execute("select pg_advisory_xact_lock($1)", LOCK_KEY)
            await connection.execute(f"set local lock_timeout = {TABLE_WAIT_MS}")
            await connection.execute(_CREATE_TABLE)
            missing = await _read_pending(connection, migrations)
            if not missing:
                return None
            migration, label = missing[0], missing[0].label
            await connection.execute(migration.sql)
            await connection.execute(
                "insert into perdure_migration (number, name, sha256) values ($1, $2, $3)",
                migration.number,
                migration.name,
                migration.sha256,
            )
    except asyncpg.LockNotAvailableError as error:
        what = "another process is migrating this database"
        if label is not None:
            what = f"migration {label} waited too long for a table in use"
        raise MigrationError(f"{what}: nothing was changed; run it again when that has ended ({error})") from error
    except (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError) as error:
        raise MigrationError(f"the connection was lost while migrating: run it again ({error})") from error
    except asyncpg.PostgresError as error:
        raise MigrationError(f"migration {label or 'table'} failed and changed nothing: {error}") from error
    return label


async def _check_server(connection: Connection) -> None:
    number: int = await connection.fetchval("select current_setting('server_version_num')::int")
    encoding: str = await connection.fetchval("select current_setting('server_encoding')")
    check_server(number, encoding)


def check_server(version_number: int, encoding: str) -> None:
    """Refuse a PostgreSQL that Perdure can't use. `version_number` is the server's own form, such as 150004."""
    major = version_number // 10_000
    if major < SERVER_VERSION_MIN:
        raise MigrationError(
            f"this PostgreSQL is version {major}, and Perdure needs {SERVER_VERSION_MIN} or later: upgrade it, "
            "or leave out --database-url to use the embedded one"
        )
    if encoding != "UTF8":
        raise MigrationError(
            f"this database has encoding {encoding}: create one with `encoding 'UTF8' template template0`"
        )


async def _read_pending(connection: Connection, migrations: Sequence[Migration]) -> list[Migration]:
    """The files not applied yet, after a check that those applied are the same as ours."""
    if await connection.fetchval("select to_regclass('perdure_migration') is null"):
        return list(migrations)
    rows = await connection.fetch("select number, name, sha256 from perdure_migration order by number")
    for row in rows:
        number: int = row["number"]
        label = f"{number:04d}_{row['name']}"
        if number > len(migrations):
            raise MigrationError(
                f"this database has migration {label}, which this Perdure doesn't know: upgrade Perdure"
            )
        ours = migrations[number - 1]
        if ours.label != label:
            raise MigrationError(
                f"this database has migration {label} where this Perdure has {ours.label}: "
                "it was made by something else; use another database"
            )
        if ours.sha256 != row["sha256"]:
            raise MigrationError(
                f"migration {label} is not what was applied to this database: install a released Perdure; "
                "a change of the schema goes into a new file"
            )
    done = {row["number"] for row in rows}
    return [migration for migration in migrations if migration.number not in done]
