"""How connections are made, when one counts as lost, and the few that reads share.

A connection that was lost, or a database that is away, is `Unavailable` to callers. Every other database error stays what it is.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from perdure.domain.errors import Unavailable

HOT_STATEMENT_MS: Final = 5_000
"""Everything on the hot path takes milliseconds; what takes this long would only make a jam longer."""

HOT_LOCK_MS: Final = 1_000
"""Nobody holds a row for longer than one commit."""

HOT_IDLE_MS: Final = 2_000
"""A transaction whose client stalls this long is in the way of others."""

COLD_STATEMENT_MS: Final = 60_000
COLD_LOCK_MS: Final = 10_000
COLD_IDLE_MS: Final = 30_000
"""For work that waits for nobody and that nobody waits for."""

PEER_LOST_MS: Final = 5_000
"""How long a peer on the network may be silent before either side gives it up. Leases count on it: see `domain.lease`."""

CONNECT_S: Final = 5
STATEMENTS_MAX: Final = 500
"""Prepared statements kept a connection: the forms of the write, and the reads."""

REPLY_MARGIN_S: Final = 5.0
"""PostgreSQL ends a statement itself; if it did not even do that, it is not there any more."""

READ_CONNECTIONS: Final = 2
READ_WAIT_S: Final = 10.0
"""A read that did not get a connection by then comes back to its caller, who can decide to try again."""

_LOST: Final = (
    # Also what a timeout is: then nobody knows whether the peer is there.
    OSError,
    EOFError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.DatabaseDroppedError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    asyncpg.TooManyConnectionsError,
    # The server at this address is a standby now, or refuses us: another connection may reach the right one.
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    # The driver, of a connection whose end has come in but was not read yet.
    asyncpg.InternalClientError,
)

_BUSY: Final = (
    asyncpg.QueryCanceledError,
    asyncpg.LockNotAvailableError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
)


def is_lost(error: BaseException) -> bool:
    """Whether this says that the connection is gone, or that there is no database to connect to now.

    Then nobody knows what became of the statement in hand. False for every error with which PostgreSQL answered a statement.
    """
    if isinstance(error, asyncpg.InterfaceError):
        # The driver has one class for all that it refuses itself, mistakes of ours included.
        return "connection is closed" in str(error)
    return isinstance(error, _LOST)


def is_busy(error: BaseException) -> bool:
    """Whether PostgreSQL gave up for want of time, locks or room: nothing was kept, and a later try may do."""
    return isinstance(error, _BUSY) and not is_lost(error)


async def connect(url: str, *, application_name: str, hot: bool) -> Any:
    """A connection of asyncpg. `hot` bounds statements, locks and idle transactions tightly, for the paths that others wait on.

    Raises what `is_lost` knows when there is no database to connect to.
    """
    statement_ms, lock_ms, idle_ms = (
        (HOT_STATEMENT_MS, HOT_LOCK_MS, HOT_IDLE_MS) if hot else (COLD_STATEMENT_MS, COLD_LOCK_MS, COLD_IDLE_MS)
    )
    # The driver has no types of its own.
    driver: Any = asyncpg
    connection: Any = await driver.connect(
        url,
        timeout=CONNECT_S,
        command_timeout=statement_ms / 1000 + REPLY_MARGIN_S,
        statement_cache_size=STATEMENTS_MAX,
        max_cached_statement_lifetime=0,
        max_cacheable_statement_size=0,
        server_settings={
            "application_name": application_name,
            "statement_timeout": str(statement_ms),
            "lock_timeout": str(lock_ms),
            "idle_in_transaction_session_timeout": str(idle_ms),
            "default_transaction_isolation": "read committed",
            # Compiling costs more than any of our statements takes.
            "jit": "off",
            # The same few statements for ever: planning each anew costs more than running it.
            "plan_cache_mode": "force_generic_plan",
            # PostgreSQL's own side; it ignores these on a Unix socket.
            "tcp_keepalives_idle": "2",
            "tcp_keepalives_interval": "1",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": str(PEER_LOST_MS),
        },
    )
    _watch_peer(connection)
    return connection


def _watch_peer(connection: Any) -> None:
    """Our side: let the kernel notice a peer that vanished without a word."""
    known = connection._transport.get_extra_info("socket")
    if known is None:
        return
    # Some loops hand out an object that can be looked at only.
    with socket.socket(fileno=os.dup(known.fileno())) as own:
        if own.family == socket.AF_UNIX:
            return
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 2),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", PEER_LOST_MS),
        ):
            option = getattr(socket, name, None)
            if option is not None:
                own.setsockopt(socket.IPPROTO_TCP, option, value)


class ReadPool:
    """A few connections for reads and for small writes off the hot path. Made when first used, replaced when lost.

    It survives restarts of PostgreSQL: callers get `Unavailable` while it is away and never have to do anything about it.
    """

    def __init__(
        self, url: str, *, application_name: str = "perdure-read", connections_max: int = READ_CONNECTIONS
    ) -> None:
        self._url = url
        self._application_name = application_name
        self._free: list[Any] = []
        self._room = asyncio.Semaphore(connections_max)
        self._closed = False

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """The rows of a read. It is made again on a new connection when the first was lost, so it must not write."""
        try:
            async with self._borrowed() as connection:
                return await connection.fetch(query, *args)
        except Unavailable as error:
            if error.__cause__ is None or not is_lost(error.__cause__):
                raise
        async with self._borrowed(fresh=True) as connection:
            return await connection.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> Any:
        """The first row of a read, or None. See `fetch`."""
        rows = await self.fetch(query, *args)
        return rows[0] if rows else None

    async def fetchval(self, query: str, *args: Any) -> Any:
        """The first column of the first row of a read, or None. See `fetch`."""
        row = await self.fetchrow(query, *args)
        return None if row is None else row[0]

    async def execute(self, query: str, *args: Any) -> str:
        """One statement that may write, once. `Unavailable` can mean that it was done and its answer lost: write what bears repeating."""
        async with self._borrowed() as connection:
            return await connection.execute(query, *args)

    @asynccontextmanager
    async def connection(self, *, fresh: bool = False) -> AsyncGenerator[Any]:
        """A connection for several statements; lost or busy becomes `Unavailable`. `fresh` takes one that was never used before."""
        async with self._borrowed(fresh=fresh) as connection:
            yield connection

    @asynccontextmanager
    async def transaction(self, *, fresh: bool = False) -> AsyncGenerator[Any]:
        """A transaction (READ COMMITTED). `Unavailable` out of its end can mean that it was committed."""
        async with self._borrowed(fresh=fresh) as connection, connection.transaction(isolation="read_committed"):
            yield connection

    async def close(self) -> None:
        """Close what is free, and what is in use when it comes back. Repeatable."""
        self._closed = True
        self._drop_free()

    def _drop_free(self) -> None:
        free, self._free = self._free, []
        for connection in free:
            connection.terminate()

    @asynccontextmanager
    async def _borrowed(self, *, fresh: bool = False) -> AsyncGenerator[Any]:
        await self._enter()
        connection: Any = None
        healthy = False
        try:
            connection = await self._take(fresh=fresh)
            yield connection
            healthy = True
        except Exception as error:
            if is_lost(error):
                raise Unavailable("the database can't be reached") from error
            healthy = True
            if is_busy(error):
                raise Unavailable(f"the database is too busy: {error}") from error
            raise
        finally:
            self._give_back(connection, healthy=healthy)
            self._room.release()

    async def _enter(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")
        try:
            async with asyncio.timeout(READ_WAIT_S):
                await self._room.acquire()
        except TimeoutError:
            raise Unavailable("too many reads wait for the database") from None

    async def _take(self, *, fresh: bool) -> Any:
        if fresh:
            # Whatever cut one of them most likely cut them all.
            self._drop_free()
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
            connection.terminate()
        return await connect(self._url, application_name=self._application_name, hot=True)

    def _give_back(self, connection: Any, *, healthy: bool) -> None:
        """Keep it for the next, unless something is wrong with it or its user was cancelled in the middle of a statement."""
        if connection is None:
            return
        if healthy and not self._closed and not connection.is_closed() and not connection.is_in_transaction():
            self._free.append(connection)
        else:
            connection.terminate()
