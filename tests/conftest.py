"""What every suite shares: a real PostgreSQL for each worker process, and cheap fresh databases in it."""

import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import asyncpg
import hypothesis
import psutil
import pytest

from perdure.postgres import migrate
from perdure.postgres.embedded import EmbeddedPostgres, start_embedded

pytest_plugins = ["tests.rules_plugin"]

hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("default")

# Small, because several run beside each other on a machine that has other things to do.
SMALL = {"shared_buffers": "64MB", "max_wal_size": "512MB", "max_connections": "100"}
# For suites that prove nothing about a loss of power.
VOLATILE = {**SMALL, "fsync": "off", "full_page_writes": "off"}
TEMPLATE = "perdure_template"
PROCESS_DEADLINE_S = 20.0
_database_numbers = itertools.count(1)

# Ends a server whose test process was killed: the read returns when that process lets go of the pipe.
_WATCH = """
read -r _
pid=$(head -n 1 "$0/pg/postmaster.pid" 2>/dev/null) && kill -INT "$pid" 2>/dev/null
while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
rm -rf "$0"
"""


@contextmanager
def data_directory() -> Generator[Path]:
    """A data directory for a PostgreSQL, gone afterwards together with what runs in it, however this process ends.

    Not below pytest's own temporary folder, through which PostgreSQL's user may not walk.
    """
    folder = Path(tempfile.mkdtemp(prefix="perdure-test-"))
    with subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    ) as watch:
        try:
            yield folder
        finally:
            # Closing its input is the signal.
            watch.communicate(timeout=PROCESS_DEADLINE_S)


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[migrate.Connection]:
    """One connection of asyncpg, which has no types of its own."""
    connection = await asyncpg.connect(url)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        yield cast("migrate.Connection", connection)
    finally:
        await connection.close()  # pyright: ignore[reportUnknownMemberType]


def in_database(url: str, name: str) -> str:
    """The same server, another database."""
    before, _, after = url.partition("@/")
    return f"{before}@/{name}?{after.partition('?')[2]}"


@pytest.fixture(scope="session")
async def postgres_server() -> AsyncGenerator[EmbeddedPostgres]:
    """One server for this worker process, without fsync."""
    with data_directory() as data:
        server = await start_embedded(data, settings=VOLATILE)
        yield server
        await server.stop()


@pytest.fixture(scope="session")
def postgres_url(postgres_server: EmbeddedPostgres) -> str:
    """The server, its empty database `perdure`."""
    return postgres_server.url


@pytest.fixture(scope="session")
async def template_url(postgres_url: str) -> str:
    """The server, after a migrated template database was made in it once."""
    async with connected(postgres_url) as admin:
        await admin.execute(f"create database {TEMPLATE} template template0")
        async with connected(in_database(postgres_url, TEMPLATE)) as connection:
            await migrate.apply(connection)
        # Nobody may connect, or copying it would have to wait.
        await admin.execute(f"alter database {TEMPLATE} with is_template true allow_connections false")
    return postgres_url


@pytest.fixture
async def database_url(template_url: str) -> AsyncGenerator[str]:
    """A fresh database with the whole schema, dropped afterwards whoever is still connected."""
    name = f"test_{next(_database_numbers)}"
    async with connected(template_url) as admin:
        await admin.execute(f"create database {name} template {TEMPLATE} strategy file_copy")
        yield in_database(template_url, name)
        await admin.execute(f"drop database {name} with (force)")


@pytest.fixture
async def empty_url(postgres_url: str) -> AsyncGenerator[str]:
    """A database without a schema, dropped afterwards."""
    async with connected(postgres_url) as admin:
        await admin.execute("create database empty template template0 strategy file_copy")
        yield in_database(postgres_url, "empty")
        await admin.execute("drop database empty with (force)")


class DurablePostgres:
    """A PostgreSQL of one test, with fsync, that can be stopped, killed and started again. Its URL stays the same."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._server: EmbeddedPostgres | None = None

    @property
    def server(self) -> EmbeddedPostgres:
        assert self._server is not None, "start it first"
        return self._server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def pid(self) -> int:
        return self.server.pid

    async def start(self) -> None:
        """Start it, or again after a stop or kill; ready when this returns."""
        if self._server is None:
            self._server = await start_embedded(self.data, settings=SMALL)
        else:
            assert await self._server.revive(), "it runs already"

    async def stop(self) -> None:
        """A fast shutdown, as an administrator does it: sessions are cut, everything is written."""
        self._end(signal.SIGINT)

    async def kill(self) -> None:
        """As the kernel does it when memory is short. What was committed comes back with crash recovery."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process = psutil.Process(self.pid)
        process.send_signal(how)
        until = time.monotonic() + PROCESS_DEADLINE_S
        # A zombie counts as dead: some containers have nobody who reaps it.
        while self.server.is_alive():
            assert time.monotonic() < until, f"process {self.pid} survived {how.name}"
            psutil.wait_procs([process], timeout=0.02)

    async def close(self) -> None:
        """Stop it for good."""
        if self._server is not None:
            await self._server.stop()


@pytest.fixture(scope="session")
async def cluster() -> AsyncGenerator[Path]:
    """A data directory with a new, stopped PostgreSQL in it, to copy: that is quicker than to make one."""
    with data_directory() as data:
        server = await start_embedded(data, settings=SMALL)
        await server.stop()
        yield data


@contextmanager
def copy_of(cluster: Path) -> Generator[Path]:
    """A data directory of its own with such a PostgreSQL."""
    with data_directory() as data:
        # Keeps the owner, without whom PostgreSQL refuses.
        subprocess.run(["cp", "-a", str(cluster / "pg"), str(data)], check=True)
        yield data


@pytest.fixture
async def durable_postgres(cluster: Path) -> AsyncGenerator[DurablePostgres]:
    """A PostgreSQL with fsync, for this test alone, migrated."""
    with copy_of(cluster) as data:
        durable = DurablePostgres(data)
        await durable.start()
        async with connected(durable.url) as connection:
            await migrate.apply(connection)
        yield durable
        await durable.close()
