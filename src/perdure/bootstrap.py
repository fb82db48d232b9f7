"""Putting a process together: adapters behind ports, the core between them, faces and engine on top. The only place that knows all."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from perdure import crashpoint, telemetry
from perdure.bus.inprocess import InProcessBus
from perdure.core.auth import Authenticator, digest_of, make_key
from perdure.core.feed import Feeds
from perdure.core.submissions import Submissions
from perdure.domain import ids
from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.engines.embedded import EmbeddedEngine
from perdure.environments.local import LocalEnvironment
from perdure.environments.tools import TOOL_DEFINITIONS
from perdure.harnesses.loop import LoopPerformer
from perdure.http.app import create_app
from perdure.http.metrics import HttpMetrics
from perdure.http.serve import HttpServer
from perdure.http.services import Services
from perdure.models.router import Router, RouterSettings
from perdure.ports.bus import Bus, Hint
from perdure.ports.catalog import Catalog
from perdure.ports.ledger import Committed, Wake
from perdure.postgres import housekeeping
from perdure.postgres import migrate as migrations
from perdure.postgres.catalog import PostgresCatalog
from perdure.postgres.embedded import EmbeddedPostgres, start_embedded
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.notify import NotifyBus
from perdure.postgres.pool import ReadPool, connect
from perdure.postgres.workers import Workers
from perdure.settings import Settings, is_header_value, make_data_directory

DEFAULT_WORKSPACE: Final = "default"
CREDENTIALS: Final = "credentials.json"
REVIVE_S: Final = 1.0
"""How often an embedded PostgreSQL that died is noticed and started again."""

HOUSEKEEPING_S: Final = 60.0
REAP_S: Final = 2.0
WRITTEN_S: Final = 1.0
"""How long a note that a response was written out may stay in memory only."""

LAST_NOTES_S: Final = 1.0
"""What a stop gives to the last of them."""

SILENCE_MARGIN_S: Final = 5.0
"""The turn gives a silent provider up first, and knows why; its connection is closed for it."""

VERSION: Final = version("perdure")


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
async def open_database(
    settings: Settings, *, prepare: Callable[[str], Awaitable[object]] | None = None
) -> AsyncGenerator[tuple[str, EmbeddedPostgres | None]]:
    """The database's URL, migrated unless `prepare` does something else first.

    An embedded PostgreSQL is started, kept alive and, if nobody else needs it, stopped.
    """
    embedded: EmbeddedPostgres | None = None
    reviving: asyncio.Task[None] | None = None
    if settings.database_url is None:
        make_data_directory(settings.data)
        embedded = await start_embedded(settings.data, adopt=True)
        reviving = asyncio.create_task(_keep_alive(embedded), name="revive-postgres")
    url = settings.database_url or (embedded.url if embedded is not None else "")
    try:
        await (prepare or _migrate)(url)
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


async def _check_migrated(url: str) -> None:
    connection = await connect(url, application_name="perdure-migrate", hot=False)
    try:
        missing = await migrations.pending(connection)
    finally:
        await connection.close()
    if missing:
        raise migrations.MigrationError(
            f"the database lacks {', '.join(missing)}: run `perdure migrate` with the same --data or --database-url, or start a server"
        )


async def migrate(settings: Settings) -> list[str]:
    """Bring the database up to this version; the names of the migrations applied."""
    if settings.database_url is not None:
        return await _migrate(settings.database_url)
    make_data_directory(settings.data)
    embedded = await start_embedded(settings.data, adopt=True)
    try:
        return await _migrate(embedded.url)
    finally:
        await embedded.stop()


@asynccontextmanager
async def open_catalog(settings: Settings) -> AsyncGenerator[Catalog]:
    """Database and catalog alone, for the verbs that manage keys and workspaces. Raises `MigrationError` unless it is migrated."""
    async with open_database(settings, prepare=_check_migrated) as (url, _):
        pool = ReadPool(url)
        try:
            yield PostgresCatalog(pool)
        finally:
            await pool.close()


@asynccontextmanager
async def open_server(
    settings: Settings, *, api: bool, worker: bool, on_ready: Callable[[], None] | None = None
) -> AsyncGenerator[Server]:
    """Run the parts of a process that `api` and `worker` ask for, until the context ends."""
    telemetry.configure(json=settings.log_json, level=getattr(logging, settings.log_level.upper()))
    models = Router(
        RouterSettings(
            anthropic_api_key=settings.anthropic_api_key,
            anthropic_base_url=settings.anthropic_base_url,
            silence_s=settings.model_stall_ms / 1000 + SILENCE_MARGIN_S,
        )
    )
    warming: asyncio.Task[None] | None = None
    if worker:
        # While PostgreSQL starts: turns that the last process left begin to ask at once, and must not wait for an import.
        warming = asyncio.create_task(models.warm(settings.warm_model), name="warm-model")
    async with open_database(settings) as (url, _):
        parts = _Parts(settings, url, models, alone=api and worker and settings.database_url is None)
        server = await parts.start(api=api, worker=worker)
        if on_ready is not None:
            on_ready()
        try:
            yield server
        finally:
            if warming is not None:
                warming.cancel()
                await asyncio.gather(warming, return_exceptions=True)
            await server.drain()


class _Parts:
    """What one process is made of, in the order it is made."""

    def __init__(self, settings: Settings, url: str, models: Router, *, alone: bool) -> None:
        make_data_directory(settings.data)
        self.settings = settings
        self.url = url
        self.process = uuid4()
        self.log = telemetry.logger("server")
        self.pool = ReadPool(url)
        self.notify = None if settings.bus == "inprocess" or (settings.bus == "auto" and alone) else NotifyBus(url)
        self.bus: Bus = self.notify or InProcessBus()
        self.ledger = PostgresLedger(url, self.pool, on_commit=self.committed)
        self.catalog = PostgresCatalog(self.pool)
        self.feeds = Feeds(self.ledger, on_trouble=lambda e: self.log.error("feed_failed", **telemetry.blame(e)))
        self.models = models
        self.environment = LocalEnvironment(
            settings.data.resolve() / "workspaces", unsafe_no_sandbox=settings.unsafe_no_sandbox
        )
        self.workers = Workers(url, self.pool, on_lost=self._seat_lost)
        self.submissions = Submissions()
        self.engine: EmbeddedEngine | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.reap = asyncio.Event()
        self.removed: UUID | None = None

    def committed(self, committed: Committed) -> None:
        """After each commit of this process: the readers, the engine, the other processes."""
        telemetry.commits.inc()
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
            self.notify.on_gap(self._hints_lost)
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
        return server

    def spawn(self, work: Any) -> None:
        """A background loop that `stop` ends."""
        self.tasks.append(asyncio.create_task(work))

    async def ensure_credentials(self) -> str:
        """A key of the default workspace: the one in the credentials file if it still works, else a new one."""
        workspaces = await self.catalog.read_workspaces()
        found = next((w for w in workspaces if w.name == DEFAULT_WORKSPACE), None)
        if found is None:
            await self.catalog.create_workspace(new_id(), DEFAULT_WORKSPACE)
            workspaces = await self.catalog.read_workspaces()
            found = next(w for w in workspaces if w.name == DEFAULT_WORKSPACE)
        known = _known_key(self.settings.data)
        if known is not None:
            record = await self.catalog.find_key(digest_of(known))
            if record is not None and record.revoked_at is None and record.workspace_id == found.id:
                return known
        key = make_key(secrets.token_bytes(32))
        await self.catalog.create_key(new_id(), found.id, "first key", key.digest, key.hint)
        return key.secret

    async def start_api(self, server: Server) -> str:
        """Serve HTTP; streams end first on the way down, then requests."""
        authenticator = Authenticator(
            self.catalog,
            on_trouble=lambda e: self.log.error("auth_failed", **telemetry.blame(e)),
        )
        services = Services(
            ledger=self.ledger,
            catalog=self.catalog,
            feeds=self.feeds,
            models=self.models,
            environment=self.environment,
            submissions=self.submissions,
            version=VERSION,
        )
        metrics = HttpMetrics()
        if self.engine is not None:
            metrics.watch("perdure_turns_running", "Threads with calls in flight.", self.engine.running_count)
        app = create_app(
            services,
            authenticator=authenticator,
            metrics=metrics,
            readiness=self.readiness,
            warnings=await self.sandbox_warnings(),
        )
        http = HttpServer(app, host=self.settings.host, port=self.settings.port)
        port = await http.start()
        self.spawn(authenticator.run())
        self.spawn(self._note_written())
        server.on_close(http.stop)
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{port}"

    async def sandbox_warnings(self) -> list[str]:
        """The self-test of the sandbox: what would make its tools refuse, or run without it, said in the log and by `/readyz`."""
        problems = await self.environment.problems()
        for problem in problems:
            self.log.warning("sandbox", problem=problem)
        return problems

    async def start_worker(self) -> None:
        """Take a seat among the workers and run turns."""
        await self.workers.start()
        performer = LoopPerformer(
            self.ledger,
            self.models,
            self.environment,
            tool_definitions={d["name"]: d for d in TOOL_DEFINITIONS},
            preview=self.bus.preview,
            stall_ms=self.settings.model_stall_ms,
        )
        self.engine = EmbeddedEngine(
            self.ledger,
            performer,
            self.workers,
            concurrency=self.settings.concurrency,
            before_sweep=self._look_for_dead,
        )
        self.ledger.places = self.engine
        if self.notify is not None:
            self.notify.on_hint(self.engine.hinted)
        self.engine.start()
        self.spawn(self._reap())

    def _hints_lost(self) -> None:
        self.feeds.look_at_all()
        if self.engine is not None:
            self.engine.sweep_now()

    def _seat_lost(self) -> None:
        """Others took our turns: drop every call, and begin again under a new name."""
        self.log.warning("lease_lost")
        self.spawn(self._rejoin())

    async def _rejoin(self) -> None:
        if self.engine is not None:
            await self.engine.fence()
        await self.workers.rejoin()
        if self.engine is not None:
            self.engine.resume()

    async def _look_for_dead(self) -> None:
        """Before each sweep: threads whose worker is gone get a wakeup."""
        for session_id, thread_id in await self.workers.reap():
            self.log.warning("turn_orphaned", session=ids.token(session_id))
            crashpoint.point("before_wake")
            try:
                await self.ledger.wake(Wake(session_id=session_id, thread_id=thread_id))
            except InvariantViolation as error:
                # One thread's trouble is not the next one's.
                self.log.error("wake_failed", session=ids.token(session_id), error=str(error))

    async def _supervised(self, name: str, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again; an outage is waited out, a bug is told and survived."""
        while True:
            try:
                await work()
            except Unavailable:
                pass
            except Exception as error:  # noqa: BLE001  a supervised loop
                self.log.error("loop_failed", loop=name, error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(period_s)

    async def _housekeep(self) -> None:
        async def purge() -> None:
            await housekeeping.purge(self.pool)

        await self._supervised("housekeeping", HOUSEKEEPING_S, purge)

    async def _note_written(self) -> None:
        await self._supervised("written", WRITTEN_S, self._tell_written)

    async def _tell_written(self) -> None:
        await self.submissions.tell(functools.partial(housekeeping.mark_written, self.pool))

    async def _reap(self) -> None:
        """Finish deletions, whoever began them: first what is outside, then the rows."""

        async def reap() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    await self.reap.wait()
            self.reap.clear()
            found = await housekeeping.sessions_being_deleted(self.pool, behind=self.removed)
            self.removed = found[-1] if len(found) == housekeeping.ROWS_MAX else None
            for session_id in found:
                try:
                    await self._remove(session_id)
                except Exception as error:  # noqa: BLE001  one session's trouble is not the next one's; it stays behind the fence
                    self.log.error(
                        "removal_failed", session=ids.token(session_id), error=f"{type(error).__name__}: {error}"
                    )

        await self._supervised("reaper", 0.0, reap)

    async def _remove(self, session_id: UUID) -> None:
        crashpoint.point("before_workspace_removal")
        await self.environment.destroy(ids.token(session_id))
        crashpoint.point("before_row_removal")
        await housekeeping.delete_rows(self.pool, session_id)

    async def readiness(self) -> Mapping[str, str]:
        """Why this process is not ready; empty when it is."""
        problems: dict[str, str] = {}
        try:
            await self.pool.fetchrow("select 1 as one")
        except Unavailable:
            problems["database"] = "The database can't be reached."
        if self.engine is not None and self.engine.fenced:
            problems["worker"] = "This worker was counted as dead and waits for a new seat."
        return problems

    # the way down

    async def stop_worker(self) -> None:
        """Give every turn back, then the seat."""
        if self.engine is not None:
            await self.engine.drain()

    async def stop(self) -> None:
        """Close what is left."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        try:
            # What the last second answered: the next process knows it from there alone.
            async with asyncio.timeout(LAST_NOTES_S):
                await self._tell_written()
        except Exception as error:  # noqa: BLE001  without them those answers count as lost, and the stop goes on
            self.log.info("last_notes_lost", error=type(error).__name__)
        await self.feeds.close()
        await self.workers.stop()
        if self.notify is not None:
            await self.notify.stop()
        await self.ledger.stop()
        await self.pool.close()
        await self.environment.close()
        await self.models.close()


def new_id() -> UUID:
    """A random id, sorting by time like all others."""
    return ids.timed(datetime.now(UTC), uuid4())


def _known_key(data: Path) -> str | None:
    """The key that an earlier server of this data directory left for the client verbs."""
    try:
        found: Any = json.loads((data / CREDENTIALS).read_text())
    except (OSError, ValueError):
        return None
    known = found.get("api_key") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return known if isinstance(known, str) and is_header_value(known) else None
