"""Putting a process together: adapters behind ports, the core between them, faces and engine on top. The only place that knows all."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from perdure import telemetry
from perdure.bus.inprocess import InProcessBus
from perdure.core.auth import Authenticator, make_key
from perdure.core.feed import Feeds
from perdure.core.submissions import Submissions
from perdure.domain import ids
from perdure.domain.errors import Unavailable
from perdure.engines.embedded import EmbeddedEngine
from perdure.environments.local import LocalEnvironment
from perdure.environments.tools import TOOL_DEFINITIONS
from perdure.harnesses.loop import LoopPerformer
from perdure.models.router import Router, RouterSettings
from perdure.ports.bus import Bus, Hint
from perdure.ports.catalog import Catalog
from perdure.ports.ledger import Committed, Wake
from perdure.postgres import housekeeping, migrate as migrations
from perdure.postgres.catalog import PostgresCatalog
from perdure.postgres.embedded import EmbeddedPostgres, start_embedded
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.notify import NotifyBus
from perdure.postgres.pool import ReadPool, connect
from perdure.postgres.workers import Workers
from perdure.settings import Settings

DEFAULT_WORKSPACE: Final = "default"
CREDENTIALS: Final = "credentials.json"
REVIVE_S: Final = 1.0
"""How often an embedded PostgreSQL that died is noticed and started again."""

HOUSEKEEPING_S: Final = 60.0
REAP_S: Final = 2.0
WRITTEN_S: Final = 1.0
"""How long a note that a response was written out may stay in memory only."""

VERSION: Final = version("perdure")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that `doctor` looked at."""

    name: str
    ok: bool
    detail: str
    advice: str = ""


class Server:
    """A running process."""

    def __init__(self, *, url: str | None, database_url: str, api_key: str | None) -> None:
        self.url = url
        self.database_url = database_url
        self.api_key = api_key
        self.pid = os.getpid()
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._closed = asyncio.Event()

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Add a step of the way down; steps run in the order added."""
        self._closing.append(close)

    async def drain(self) -> None:
        """Stop taking requests, give every turn back in order, close. Repeatable."""
        closing, self._closing = self._closing, []
        for close in closing:
            await close()
        self._closed.set()

    async def wait_closed(self) -> None:
        """Return once `drain` is through."""
        await self._closed.wait()


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[tuple[str, EmbeddedPostgres | None]]:
    """The database's URL, migrated; an embedded PostgreSQL is started, kept alive and, if nobody else needs it, stopped."""
    embedded: EmbeddedPostgres | None = None
    reviving: asyncio.Task[None] | None = None
    if settings.database_url is None:
        settings.data.mkdir(parents=True, exist_ok=True)
        embedded = await start_embedded(settings.data, adopt=True)
        reviving = asyncio.create_task(_keep_alive(embedded), name="revive-postgres")
    url = settings.database_url or (embedded.url if embedded is not None else "")
    try:
        await _migrate(url)
        yield url, embedded
    finally:
        if reviving is not None:
            reviving.cancel()
            await asyncio.gather(reviving, return_exceptions=True)
        if embedded is not None:
            await embedded.stop()


async def _keep_alive(embedded: EmbeddedPostgres) -> None:
    log = telemetry.logger("postgres")
    while True:
        await asyncio.sleep(REVIVE_S)
        try:
            if await embedded.revive():
                log.warning("postgres_restarted")
        except Exception as error:  # noqa: BLE001  a supervised loop
            log.error("postgres_revive_failed", error=f"{type(error).__name__}: {error}")


async def _migrate(url: str) -> list[str]:
    connection = await connect(url, application_name="perdure-migrate", hot=False)
    try:
        return await migrations.apply(connection)
    finally:
        await connection.close()


async def migrate(settings: Settings) -> list[str]:
    """Bring the database up to this version; the names of the migrations applied."""
    if settings.database_url is not None:
        return await _migrate(settings.database_url)
    settings.data.mkdir(parents=True, exist_ok=True)
    embedded = await start_embedded(settings.data, adopt=True)
    try:
        return await _migrate(embedded.url)
    finally:
        await embedded.stop()


@asynccontextmanager
async def open_catalog(settings: Settings) -> AsyncIterator[Catalog]:
    """Database and catalog alone, for the verbs that manage keys and workspaces."""
    async with open_database(settings) as (url, _):
        pool = ReadPool(url)
        try:
            yield PostgresCatalog(pool)
        finally:
            await pool.close()


@asynccontextmanager
async def open_server(
    settings: Settings, *, api: bool, worker: bool, on_ready: Callable[[], None] | None = None
) -> AsyncIterator[Server]:
    """Run the parts of a process that `api` and `worker` ask for, until the context ends."""
    telemetry.configure(json=settings.log_json)
    async with open_database(settings) as (url, _):
        parts = _Parts(settings, url, alone=api and worker and settings.database_url is None)
        server = await parts.start(api=api, worker=worker)
        if on_ready is not None:
            on_ready()
        try:
            yield server
        finally:
            await server.drain()


class _Parts:
    """What one process is made of, in the order it is made."""

    def __init__(self, settings: Settings, url: str, *, alone: bool) -> None:
        self.settings = settings
        self.url = url
        self.process = uuid4()
        self.log = telemetry.logger("server")
        self.pool = ReadPool(url)
        self.notify = None if settings.bus == "inprocess" or (settings.bus == "auto" and alone) else NotifyBus(url)
        self.bus: Bus = self.notify or InProcessBus()
        self.ledger = PostgresLedger(url, self.pool, on_commit=self.committed)
        self.catalog = PostgresCatalog(self.pool)
        self.feeds = Feeds(self.ledger)
        self.models = Router(
            RouterSettings(anthropic_api_key=settings.anthropic_api_key, anthropic_base_url=settings.anthropic_base_url)
        )
        self.environment = LocalEnvironment(
            settings.data.resolve() / "workspaces", unsafe_no_sandbox=settings.unsafe_no_sandbox
        )
        self.workers: Workers | None = None
        self.engine: EmbeddedEngine | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.reap = asyncio.Event()

    def committed(self, committed: Committed) -> None:
        """After each commit of this process: the readers, the engine, the other processes."""
        self.feeds.committed(committed)
        if self.engine is not None:
            self.engine.committed(committed)
        if committed.deleted:
            self.reap.set()
        if self.notify is not None:
            thread = next((t for t, delay_ms in committed.woken if delay_ms == 0), None)
            stopped = next(iter(committed.stopped), None)
            self.notify.publish(
                Hint(session_id=committed.session_id, thread_id=stopped or thread, stop=stopped is not None)
            )

    async def start(self, *, api: bool, worker: bool) -> Server:
        """Start what this process does."""
        self.ledger.start()
        server = Server(url=None, database_url=self.url, api_key=await self.ensure_credentials() if api else None)
        if self.notify is not None:
            self.notify.on_hint(self.feeds.hinted)
            await self.notify.start()
        self.bus.on_preview(self.feeds.preview)
        if worker:
            await self.start_worker()
        if api:
            server.url = await self.start_api(server)
        if worker:
            server.on_close(self.stop_worker)
        server.on_close(self.stop)
        self.spawn(self._housekeep())
        if server.url is not None and server.api_key is not None:
            write_credentials(self.settings.data, server)
        return server

    def spawn(self, work: Any) -> None:
        """A background loop that `stop` ends."""
        self.tasks.append(asyncio.create_task(work))

    async def ensure_credentials(self) -> str:
        """A key of the default workspace: the one in the credentials file if it still works, else a new one."""
        workspaces = await self.catalog.read_workspaces()
        found = next((w for w in workspaces if w.name == DEFAULT_WORKSPACE), None)
        if found is None:
            made = await self.catalog.create_workspace(UUID(bytes=os.urandom(16)), DEFAULT_WORKSPACE)
            workspaces = await self.catalog.read_workspaces()
            found = next(w for w in workspaces if w.name == DEFAULT_WORKSPACE)
            self.log.info("workspace_created", workspace=str(found.id), by_us=not isinstance(made, type(None)))
        known = read_credentials(self.settings.data).get("api_key")
        if isinstance(known, str):
            record = await self.catalog.find_key(digest_of(known))
            if record is not None and record.revoked_at is None and record.workspace_id == found.id:
                return known
        key = make_key(secrets.token_bytes(32))
        await self.catalog.create_key(UUID(bytes=os.urandom(16)), found.id, "first key", key.digest, key.hint)
        return key.secret
