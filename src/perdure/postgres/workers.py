"""Worker rows: one per process, kept alive by a thread of their own, buried by whoever sees that their process is gone.

The lease thread has its own event loop and connection, so that neither a busy main loop nor a jam on the hot path looks like a death.
Its connection holds the advisory lock of the worker's id; PostgreSQL lets go of that lock as soon as the connection is gone.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from perdure import crashpoint, telemetry
from perdure.domain.errors import Unavailable
from perdure.domain.lease import LEASE_MS, LOCK_FREE_MS, RENEW_MS, TICK_MS_MAX, Evidence, Worker, is_dead
from perdure.postgres.pool import ReadPool, connect, is_busy, is_lost

RENEW_WAIT_S: Final = 2.0
"""A renewal without an answer by then is given up together with its connection."""

RECONNECT_S: Final = 0.25
TICK_S: Final = 1.0
STOP_S: Final = 5.0
ORPHANS_MAX: Final = 1_000
"""Threads that one look gives back; the next finds the rest."""

_REGISTER_SQL: Final = """
-- register_worker
insert into worker (id, host, boot, pid, started, lease_until)
values ($1, $2, $3, $4, $5, clock_timestamp() + $6 * interval '1 millisecond')"""

# Fenced by the id and by not being buried: an id never comes back to life. Not worth a wait for the disk.
_RENEW_SQL: Final = """
-- renew_lease
update worker
   set lease_until = clock_timestamp() + $2 * interval '1 millisecond',
       lock_free_since = case when $3 then null else lock_free_since end
 where id = $1 and dead_at is null
returning true"""

_LEAVE_SQL: Final = """
-- leave
update worker set dead_at = clock_timestamp() where id = $1 and dead_at is null"""

# The lock's key is the second half of the id; pg_locks shows it as two halves again.
_HELD: Final = """
held as materialized (
    select (l.classid::bigint << 32) | l.objid::bigint as key from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())),
seen as materialized (
    select w.id, exists (
               select from held where held.key = ('x' || right(replace(w.id::text, '-', ''), 16))::bit(64)::bigint) as locked
      from worker w where w.dead_at is null and w.id <> $1)"""

_WATCH_LOCKS_SQL: Final = f"""
-- watch_locks
with {_HELD}
, turned as (
    -- a row in someone's hands is being renewed, or watched by another
    select w.id, seen.locked from worker w join seen on seen.id = w.id
     where w.dead_at is null and seen.locked = (w.lock_free_since is not null)
     order by w.id for no key update of w skip locked)
update worker w
   set lock_free_since = case when turned.locked then null else clock_timestamp() end
  from turned where w.id = turned.id"""

# After a crash PostgreSQL starts again without a new postmaster: its checkpointer is as old as the server that works now.
_OBSERVE_SQL: Final = f"""
-- observe_workers
with {_HELD}
select w.id, w.host, w.boot, w.pid, w.started, w.lease_until, w.dead_at,
       case when seen.locked then null else w.lock_free_since end as lock_free_since,
       clock_timestamp() as now,
       greatest(pg_postmaster_start_time(),
                (select max(a.backend_start) from pg_stat_activity a where a.backend_type = 'checkpointer')) as up_since
  from worker w join seen on seen.id = w.id
 order by w.id"""

_LIVE_SQL: Final = "select 1 from worker where dead_at is null and id <> $1 limit 1"

# Unless its process is gone for certain, a worker that showed itself since we looked is left alone.
_BURY_SQL: Final = """
-- bury
with found as (
    select w.id from worker w
      join unnest($1::uuid[], $2::timestamptz[], $3::boolean[]) as n (id, lease_until, gone) on n.id = w.id
     where w.dead_at is null and (n.gone or w.lease_until = n.lease_until)
     order by w.id for no key update of w skip locked)
update worker w set dead_at = clock_timestamp() from found where w.id = found.id
returning w.id"""

# A turn may have been claimed under an id whose row was already cleared away: give it a headstone, so that the rules see a dead worker.
_MISSING_SQL: Final = """
-- bury_missing
insert into worker (id, host, boot, pid, started, lease_until, dead_at)
select distinct t.worker_id, '', '', 0, '', clock_timestamp(), clock_timestamp()
  from turn t
 where t.state = 'active' and not exists (select from worker w where w.id = t.worker_id)
on conflict (id) do nothing"""

_ANY_MISSING_SQL: Final = """
select exists (
    select from turn t where t.state = 'active' and not exists (select from worker w where w.id = t.worker_id))"""

_ORPHANS_SQL: Final = """
-- orphaned_threads
select t.session_id, t.thread_id
  from turn t left join worker w on w.id = t.worker_id
 where t.state = 'active' and (w.id is null or w.dead_at is not null)
   and not exists (select from outbox o
                    where o.session_id = t.session_id and o.thread_id = t.thread_id and o.due_at <= clock_timestamp())
 order by t.session_id limit $1"""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A worker id and the process that it stands for."""

    id: UUID
    host: str
    boot: str
    pid: int
    started: str

    @property
    def lock_key(self) -> int:
        """The key of the advisory lock."""
        return int.from_bytes(self.id.bytes[8:], "big", signed=True)


def own_identity(worker_id: UUID | None = None) -> Identity:
    """This process under a new id."""
    pid = os.getpid()
    return Identity(id=worker_id or uuid4(), host=_host(), boot=_boot(), pid=pid, started=process_started(pid) or "")


def _host() -> str:
    """Where process ids mean the same: the host's name, and the namespace of process ids, which containers have of their own."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def process_started(pid: int) -> str | None:
    """When a process started, in the kernel's own count; "" when that can't be seen, None when there is no such process.

    A process that was killed and that nobody has waited for yet is none any more.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None if _is_gone(pid) else ""
    # The name, in parentheses, may hold anything. Behind it: the state, and nineteen places later the start.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def is_process_gone(worker: Worker, me: Identity) -> bool:
    """Whether a worker's process is certainly gone. Always False for another host, or where processes can't be told apart."""
    if not worker.boot or not worker.started or (worker.host, worker.boot) != (me.host, me.boot):
        return False
    started = process_started(worker.pid)
    return started is None or (started != "" and started != worker.started)


def _now_s() -> float:
    """A clock that goes on while the machine sleeps, where there is one: a lease does not wait for us to wake up."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class WorkerLease:
    """One worker row, from registration to burial, renewed by a thread of its own.

    `on_lost` is called once, in that thread, when the row is found buried: then nothing may be started or written under this id.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        *,
        on_lost: Callable[[], None],
        tick_ms_max: int = TICK_MS_MAX,
        has_been: bool = False,
    ) -> None:
        """`has_been`: this process was connected before, under another id."""
        self.identity = identity
        self.back_since: datetime | None = None
        """When our connection came back, if it was ever lost: everybody else's may have been, and theirs may need a while."""
        self._has_been = has_been
        self._url = url
        self._on_lost = on_lost
        self._tick_ms_max = tick_ms_max
        self._ticked_at = _now_s()
        self._safe_until = 0.0
        self._lost = False
        self._locked = False
        self._connection: Any = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._log = telemetry.logger("worker")

    # ------------------------------------------------------------------------------------------- called by the main loop

    async def start(self) -> None:
        """Register; returns once the row is there and the lock is held. Raises `Unavailable` when that can't be done now."""
        loop = asyncio.get_running_loop()
        registered: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if registered.done():
                return
            if error is None:
                registered.set_result(None)
            else:
                registered.set_exception(error)

        def report(error: Exception | None) -> None:
            # The main loop may have ended meanwhile; then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, error)

        self.tick()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(report)), name="perdure-lease", daemon=True
        )
        self._thread.start()
        await registered

    def tick(self) -> None:
        """The main loop is alive."""
        self._ticked_at = _now_s()

    def may_start(self) -> bool:
        """Whether a call may be started: by our own clock nobody can have counted us as dead yet."""
        return not self._lost and _now_s() < self._safe_until

    async def stop(self) -> None:
        """Leave in order: whatever this worker still has may be taken over at once. Repeatable."""
        thread, loop, stop = self._thread, self._loop, self._stop
        self._safe_until = 0.0
        if thread is None:
            return
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join, STOP_S)

    # ------------------------------------------------------------------------------------------------- the lease's thread

    async def _main(self, report: Callable[[Exception | None], None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._register()
        except Exception as error:  # noqa: BLE001  the border of a thread: whoever started it gets to know
            self._drop()
            lost = is_lost(error) or is_busy(error)
            report(Unavailable("the database can't be reached") if lost else error)
            return
        report(None)
        try:
            await self._keep()
        finally:
            await self._leave()

    async def _register(self) -> None:
        me = self.identity
        begun_at = _now_s()
        connection = await self._locking()
        crashpoint.point("before_registration")
        await connection.execute(_REGISTER_SQL, me.id, me.host, me.boot, me.pid, me.started, LEASE_MS)
        self._renewed(begun_at)

    async def _locking(self) -> Any:
        """Our connection, made anew when it was lost, with our lock. An old one of ours may still hold it: as good while it lasts."""
        if self._connection is None or self._connection.is_closed():
            self._drop()
            self._connection = await connect(self._url, application_name="perdure-lease", hot=True)
            if self._has_been:
                self.back_since = await self._connection.fetchval("select clock_timestamp()")
            self._has_been = True
        if not self._locked:
            self._locked = bool(
                await self._connection.fetchval("select pg_try_advisory_lock($1)", self.identity.lock_key)
            )
        return self._connection

    def _renewed(self, begun_at: float) -> None:
        """Nobody buries us before our lock was free for its time, and somebody of us held it after this moment."""
        self._safe_until = begun_at + min(LOCK_FREE_MS, LEASE_MS) / 1000

    async def _keep(self) -> None:
        """Renew until stopped or buried."""
        assert self._stop is not None
        pause_s = RENEW_MS / 1000
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
                    return
            if (_now_s() - self._ticked_at) * 1000 > self._tick_ms_max:
                pause_s = RENEW_MS / 1000
                continue
            renewed = await self._renew()
            if renewed is False:
                self._lost = True
                self._log.warning("worker_lost", worker=str(self.identity.id))
                self._on_lost()
                return
            pause_s = RENEW_MS / 1000 if renewed else RECONNECT_S

    async def _renew(self) -> bool | None:
        """True: renewed. False: buried. None: not now."""
        try:
            async with asyncio.timeout(RENEW_WAIT_S):
                begun_at = _now_s()
                connection = await self._locking()
                crashpoint.point("before_renewal")
                row = await connection.fetchrow(_RENEW_SQL, self.identity.id, LEASE_MS, self._locked)
        except Exception as error:  # noqa: BLE001  a supervised loop: it goes on until it is told to stop
            if not is_busy(error):
                self._drop()
            if not (is_lost(error) or is_busy(error)):
                self._log.error("renewal_failed", error=f"{type(error).__name__}: {error}")
            return None
        if row is None:
            return False
        self._renewed(begun_at)
        return True

    async def _leave(self) -> None:
        """Say that we are gone, so that nobody has to find out."""
        self._safe_until = 0.0
        try:
            if self._connection is not None and not self._connection.is_closed() and not self._lost:
                async with asyncio.timeout(RENEW_WAIT_S):
                    await self._connection.execute(_LEAVE_SQL, self.identity.id)
        except Exception as error:  # noqa: BLE001  the end of a thread: the others will notice by themselves
            self._log.info("leave_failed", error=f"{type(error).__name__}: {error}")
        finally:
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._locked = False
        if connection is not None:
            connection.terminate()


class Workers:
    """This process among the workers: its present id, its lease, and its look at the others.

    `on_lost` is called in the loop that called `start`, when this process was counted as dead: drop every call, then `rejoin`.
    """

    def __init__(self, url: str, pool: ReadPool, *, on_lost: Callable[[], None]) -> None:
        self._url = url
        self._pool = pool
        self._on_lost = on_lost
        self._lease: WorkerLease | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._log = telemetry.logger("workers")

    @property
    def id(self) -> UUID:
        """The id that our turns name. It changes with `rejoin`."""
        return self.identity.id

    @property
    def identity(self) -> Identity:
        """Our id and process."""
        assert self._lease is not None, "start it first"
        return self._lease.identity

    def may_start(self) -> bool:
        """False when we may be counted as dead already: then no call is started."""
        return self._lease is not None and self._lease.may_start()

    async def start(self) -> None:
        """Register, and tick from this loop. Raises `Unavailable`."""
        await self._join()
        self._tick()

    async def rejoin(self) -> None:
        """Register under a new id, once nothing runs under the old one. Waits for a database that is away, or that refuses us."""
        if self._lease is not None:
            await self._lease.stop()
        while True:
            try:
                await self._join()
                return
            except Unavailable:
                pass
            except Exception as error:  # noqa: BLE001  without a seat this process is of no use: it goes on asking for one
                self._log.error("rejoin_failed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(RECONNECT_S)

    async def stop(self) -> None:
        """Leave in order. Repeatable."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        if self._lease is not None:
            await self._lease.stop()

    async def reap(self) -> list[tuple[UUID, UUID]]:
        """Bury the dead, and say which threads have lost their worker (session, thread). Raises `Unavailable`.

        While we can't renew our own lease, others most likely can't either: then only those whose process is gone count as dead.
        """
        await find_dead(self._pool, self.identity, up_since=self._up_since)
        return await orphaned_threads(self._pool)

    def _up_since(self) -> datetime | None:
        assert self._lease is not None, "start it first"
        return self._lease.back_since if self.may_start() else datetime.max.replace(tzinfo=UTC)

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()

        def lost() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_lost)

        lease = WorkerLease(self._url, own_identity(), on_lost=lost, has_been=self._lease is not None)
        await lease.start()
        self._lease = lease

    def _tick(self) -> None:
        if self._lease is not None:
            self._lease.tick()
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)


async def find_dead(
    pool: ReadPool, me: Identity, *, up_since: Callable[[], datetime | None] = lambda: None
) -> list[UUID]:
    """Look at every other worker, and bury those that `domain.lease` counts as dead; their ids. Safe in many processes at once.

    `up_since`: when the database came up for us, asked once its answer is there. The database itself may not tell: to a role without
    rights, or when a standby took over.
    """
    if await pool.fetchval(_ANY_MISSING_SQL):
        await pool.execute(_MISSING_SQL)
    if not await pool.fetch(_LIVE_SQL, me.id):
        return []
    await pool.execute(_WATCH_LOCKS_SQL, me.id)
    found: list[tuple[Worker, bool]] = []
    rows = await pool.fetch(_OBSERVE_SQL, me.id)
    since_us = up_since()
    for row in rows:
        values = dict(row)
        now, told = values.pop("now"), values.pop("up_since")
        since = told if since_us is None else max(told, since_us)
        worker = Worker(**values)
        gone = is_process_gone(worker, me)
        if is_dead(worker, Evidence(now=now, database_up_since=since, process_gone=gone)):
            found.append((worker, gone))
    return await bury(pool, found) if found else []


async def bury(pool: ReadPool, dead: list[tuple[Worker, bool]]) -> list[UUID]:
    """Mark workers as dead, for good: those whose process is gone (True), and others unless they renewed since they were seen."""
    async with pool.connection() as connection:
        rows = await connection.fetch(
            _BURY_SQL, [w.id for w, _ in dead], [w.lease_until for w, _ in dead], [gone for _, gone in dead]
        )
    return [row["id"] for row in rows]


async def orphaned_threads(pool: ReadPool) -> list[tuple[UUID, UUID]]:
    """Threads (session, thread) whose turn belongs to a dead worker and that no due wakeup shows yet: the caller wakes them."""
    return [(row["session_id"], row["thread_id"]) for row in await pool.fetch(_ORPHANS_SQL, ORPHANS_MAX)]
