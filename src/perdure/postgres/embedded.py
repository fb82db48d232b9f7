"""A real PostgreSQL from a wheel, inside the data directory, on a unix socket and never on TCP.

It outlives us: when our process is killed PostgreSQL goes on, and the next start attaches to it. `postmaster` says how
the process is handled and what the lock files mean; this is its asyncio side.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import quote

import asyncpg

from perdure.postgres.postmaster import (
    SUPERUSER,
    Place,
    Postmaster,
    default_settings,
    disk_full,
    ensure_running,
    explain_os_error,
    is_postmaster,
    open_place,
    read_postmaster,
    shut_down,
    start_lock,
)
from perdure.postgres.waiting import POLL_S, EmbeddedPostgresError, FileLock, Patience, StillRecoveringError

__all__ = [
    "DATABASE",
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "StillRecoveringError",
    "is_running",
    "start_embedded",
    "wait_ready",
]

DATABASE: Final = "perdure"

# Crash recovery replays at most `max_wal_size` of log: about a minute on a slow disk, doubled.
START_DEADLINE_S: Final = 120.0
# A fast shutdown writes one checkpoint. After this PostgreSQL is told to go without it: safe, only slower to start.
STOP_DEADLINE_S: Final = 30.0

# A ready PostgreSQL answers within milliseconds; one that was just told to stop is gone after its checkpoint.
ANSWER_PATIENCE_S: Final = 20.0

# What passes by itself: starting, stopping, crowded, cut.
_NOT_NOW: Final = (
    OSError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.PostgresConnectionError,
)
_T = TypeVar("_T")


class _Connection(Protocol):
    """What is used here of asyncpg's connection, which has no types of its own."""

    async def execute(self, query: str) -> str: ...
    async def close(self) -> None: ...


class EmbeddedPostgres:
    """One holder of the PostgreSQL of one data directory, from `start_embedded` until `stop`."""

    def __init__(
        self,
        place: Place,
        holder: FileLock,
        postmaster: Postmaster,
        *,
        settings: Mapping[str, str],
        started_here: bool,
        adopt: bool,
    ) -> None:
        self.started_here = started_here
        """Whether this holder started PostgreSQL, rather than attached to it."""
        self._place = place
        self._holder = holder
        self._postmaster = postmaster
        self._settings = settings
        self._adopt = adopt

    @property
    def data(self) -> Path:
        return self._place.data

    @property
    def pid(self) -> int:
        return self._postmaster.pid

    @property
    def url(self) -> str:
        """The DSN of database `perdure`; the same over every restart of one data directory."""
        return _url(self._postmaster, DATABASE)

    def is_alive(self) -> bool:
        """Whether the PostgreSQL that this holder knows still runs. Cheap enough for a loop."""
        return is_postmaster(self.pid, self._place.pgdata)

    async def revive(self, *, deadline_s: float = START_DEADLINE_S) -> bool:
        """Start PostgreSQL again if it died under us. True when this call started it."""
        if self.is_alive():
            return False
        place, settings = self._place, self._settings

        def ensure(patience: Patience) -> tuple[Postmaster, bool]:
            with start_lock(place, patience):
                return ensure_running(place, settings, patience)

        self._postmaster, started = await _in_thread(place.data, ensure, deadline_s)
        self.started_here = self.started_here or started
        return started

    async def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Stop holding; stop PostgreSQL too if this holder started or adopted it and no other is left. Idempotent."""
        if self._holder.fd < 0:
            return
        place, holder = self._place, self._holder
        may_stop = self.started_here or self._adopt

        def let_go(patience: Patience) -> None:
            try:
                with start_lock(place, patience):
                    if holder.try_exclusive() and may_stop:
                        shut_down(place, patience)
            finally:
                holder.close()

        await _in_thread(place.data, let_go, deadline_s)


async def start_embedded(
    data: Path,
    *,
    settings: Mapping[str, str] | None = None,
    adopt: bool = False,
    deadline_s: float = START_DEADLINE_S,
) -> EmbeddedPostgres:
    """Start PostgreSQL in `data`, or attach to the one that runs there; its database `perdure` exists afterwards.

    `settings` go over `default_settings` and matter only to the process that starts it. With `adopt` this holder may
    stop PostgreSQL also when it only attached, so that the last one to leave doesn't leave it running without an owner.

    Raises `EmbeddedPostgresError`. Cancelled or failed, it leaves running only what it found running.
    """
    chosen = {**default_settings(), **(settings or {})}

    def begin(patience: Patience) -> EmbeddedPostgres:
        place = open_place(data, patience)
        holder = place.lock("pg.holders.lock")
        try:
            with start_lock(place, patience):
                if not holder.try_shared():
                    raise EmbeddedPostgresError(
                        f"another program has locked pg.holders.lock in {str(place.data)!r}: stop that program"
                    )
                postmaster, started = ensure_running(place, chosen, patience)
        except BaseException:
            holder.close()
            raise
        return EmbeddedPostgres(place, holder, postmaster, settings=chosen, started_here=started, adopt=adopt)

    postgres = await _in_thread(data, begin, deadline_s)
    try:
        await _await_database(postgres)
    except BaseException:
        await postgres.stop()
        raise
    return postgres


def is_running(data: Path) -> bool:
    """Whether a PostgreSQL runs in this data directory. Changes nothing."""
    pgdata = data.expanduser().resolve() / "pg"
    found = read_postmaster(pgdata)
    return found is not None and is_postmaster(found.pid, pgdata)


async def wait_ready(url: str, deadline_s: float) -> None:
    """Wait until any PostgreSQL answers a query at `url`.

    Raises `EmbeddedPostgresError` with the last reason at the deadline, and at once for a refusal that waiting can't
    change (wrong password, no such database).
    """
    until = time.monotonic() + deadline_s
    while True:
        try:
            async with asyncio.timeout(max(until - time.monotonic(), POLL_S)):
                connection = await _connect(url)
                try:
                    await connection.execute("select 1")
                finally:
                    await connection.close()
                return
        except _NOT_NOW as error:
            if time.monotonic() >= until:
                reason = str(error) or type(error).__name__
                raise EmbeddedPostgresError(
                    f"PostgreSQL did not answer within {deadline_s:g} s: start it, or check --database-url ({reason})"
                ) from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise EmbeddedPostgresError(
                f"PostgreSQL refuses this connection: check --database-url ({error})"
            ) from error
        await asyncio.sleep(2 * POLL_S)


def _url(postmaster: Postmaster, database: str) -> str:
    return f"postgresql://{SUPERUSER}@/{database}?host={quote(postmaster.socket_dir)}&port={postmaster.port}"


async def _connect(url: str) -> _Connection:
    return cast("_Connection", await asyncpg.connect(url))  # pyright: ignore[reportUnknownMemberType]


async def _in_thread(data: Path, work: Callable[[Patience], _T], deadline_s: float) -> _T:
    """Run blocking `work`. When we are cancelled it is told so, and awaited: no lock is dropped behind its back."""
    patience = Patience.of(deadline_s)
    running = asyncio.ensure_future(asyncio.to_thread(work, patience))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        patience.abandoned.set()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(result, EmbeddedPostgres):
            await result.stop()
        raise
    except OSError as error:
        raise EmbeddedPostgresError(explain_os_error(error, data)) from error


async def _await_database(postgres: EmbeddedPostgres) -> None:
    """Have database `perdure`, also when the PostgreSQL found was just being stopped by somebody else."""
    until = time.monotonic() + ANSWER_PATIENCE_S
    while True:
        try:
            await _ensure_database(postgres)
            return
        except _NOT_NOW as error:
            if time.monotonic() >= until:
                raise EmbeddedPostgresError(
                    f"PostgreSQL (process {postgres.pid}) runs in {str(postgres.data)!r} but does not answer: "
                    f"stop it with `kill -INT {postgres.pid}` and start again ({error})"
                ) from error
        except asyncpg.DiskFullError as error:
            raise EmbeddedPostgresError(disk_full(postgres.data)) from error
        await asyncio.sleep(2 * POLL_S)
        await postgres.revive()


async def _ensure_database(postgres: EmbeddedPostgres) -> None:
    """Create database `perdure` when missing. Safe when two do it at once: only the result counts."""
    try:
        connection = await _connect(postgres.url)
    except asyncpg.InvalidCatalogNameError:
        connection = await _connect(postgres.url.replace(f"@/{DATABASE}?", "@/postgres?", 1))
        with contextlib.suppress(asyncpg.DuplicateDatabaseError, asyncpg.UniqueViolationError):
            await connection.execute(f"create database {DATABASE} template template0")
    await connection.close()
