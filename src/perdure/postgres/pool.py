"""Connections: how they are made, which errors mean that one is lost, and the small pool that reads use."""

import asyncio
from typing import Any, Final

import asyncpg

from perdure.domain.errors import Unavailable

POOL_MAX: Final = 2
"""Reads are short and indexed; more connections only cost the database memory."""

CONNECT_S: Final = 5.0

_HOT: Final = {
    "statement_timeout": "5000",
    "lock_timeout": "1000",
    "idle_in_transaction_session_timeout": "2000",
    "default_transaction_isolation": "read committed",
    "plan_cache_mode": "force_generic_plan",  # the same few statements for ever: planning each anew costs more than running it
    "jit": "off",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "5000",
}
_PATIENT: Final = {"jit": "off"}
_STATEMENTS: Final = 1_000
"""Prepared statements kept a connection: a few dozen forms of the write, and the reads."""

_LOST_CLASSES: Final = ("08", "57")
"""Connection exceptions, and operator intervention: shutdown, crash, starting up."""

_CANCELLED: Final = "57014"
"""A statement that took too long is an error of its own, not a lost connection."""


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the connection, or the whole database, went away."""
    if isinstance(error, asyncpg.PostgresError):
        state = str(error.sqlstate or "")
        return state[:2] in _LOST_CLASSES and state != _CANCELLED
    return isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | TimeoutError)


async def connect(url: str, *, application_name: str, hot: bool) -> Any:
    """A connection. A hot one gives up early on statements, locks and silence: it serves everybody."""
    settings = {"application_name": application_name, **(_HOT if hot else _PATIENT)}
    return await asyncpg.connect(
        url,
        timeout=CONNECT_S,
        statement_cache_size=_STATEMENTS,
        max_cached_statement_lifetime=0,
        server_settings=settings,
    )


class ReadPool:
    """A few connections for reads and for single-statement writes of the catalog.

    A read whose connection was lost is tried once more on a fresh one; a database that is away is `Unavailable`.
    """

    def __init__(self, url: str, *, size_max: int = POOL_MAX) -> None:
        self.url = url
        self._idle: list[Any] = []
        self._places = asyncio.Semaphore(size_max)
        self._closed = False

    async def fetch(self, sql: str, *parameters: Any) -> list[Any]:
        """All rows of a read."""
        return await self._retried("fetch", sql, parameters)

    async def fetchrow(self, sql: str, *parameters: Any) -> Any:
        """The first row of a read, or None."""
        return await self._retried("fetchrow", sql, parameters)

    async def execute(self, sql: str, *parameters: Any) -> str:
        """Run a statement that may be run twice."""
        return await self._retried("execute", sql, parameters)

    async def _retried(self, method: str, sql: str, parameters: tuple[Any, ...]) -> Any:
        async with self._places:
            for attempt in (1, 2):
                connection = await self._take(fresh=attempt == 2)
                try:
                    result = await getattr(connection, method)(sql, *parameters)
                except BaseException as error:
                    connection.terminate()
                    if not is_lost(error):
                        raise
                    if attempt == 2:
                        raise Unavailable("the database can't be reached") from error
                    continue
                self._give(connection)
                return result
        raise AssertionError("unreachable")

    async def _take(self, *, fresh: bool) -> Any:
        """A connection; a fresh one drops the idle ones, which have likely gone the same way."""
        if fresh:
            while self._idle:
                self._idle.pop().terminate()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        try:
            return await connect(self.url, application_name="perdure-read", hot=True)
        except Exception as error:
            if is_lost(error):
                raise Unavailable("the database can't be reached") from error
            raise

    def _give(self, connection: Any) -> None:
        if self._closed or connection.is_closed():
            connection.terminate()
        else:
            self._idle.append(connection)

    async def close(self) -> None:
        """Close what is idle; a connection in use is closed when it comes back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()
