"""What nobody waits for: the rows of deleted sessions, tombstones and records that have had their time, notes of written responses.

Everything here may be done by several processes at once, may be cut off anywhere, and is taken up again by whoever comes next.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.submission import KEPT_S, WrittenNote
from perdure.postgres.pool import ReadPool

ROWS_MAX: Final = 1_000
"""Rows that one transaction removes: enough to be quick, few enough to hold up nobody."""

STATEMENT_MS: Final = 30_000
"""A thousand rows with large bodies take longer than the hot path allows."""

TOMBSTONE_S: Final = 24 * 3600
"""How long a deleted session keeps late writers, and repeats of the request that made it, from bringing it back."""

DECISION_S: Final = 60
"""Longer than any decision takes: a record is removed only when nobody can still be deciding by it."""

WORKER_KEPT_S: Final = 3600
"""How long a dead worker's row stays, for people who look what happened."""

# Children before what they belong to. Submissions stay with the tombstone: they hold digests only.
_CHILDREN: Final = ("transcript", "event", "control", "action", "step", "input", "turn", "outbox", "thread")

_DELETING_SQL: Final = """
-- sessions_being_deleted
select id from session where state = 'deleting' and ($2::uuid is null or id > $2) order by id limit $1"""

# Skipped when another process is at this session: then it is being done.
_LOCK_SQL: Final = """
-- lock_deleting
select s.id from session s
 where s.id = $1 and s.state = 'deleting'
   and not exists (select from step p where p.session_id = s.id and p.kind = 'cleanup' and p.state in ('prepared', 'dispatched'))
   for no key update of s skip locked"""

_BUMP_SQL: Final = "update session set rev = rev + 1 where id = $1"

_TOMBSTONE_SQL: Final = """
-- make_tombstone
update session
   set rev = rev + 1, state = 'deleted', updated_at = greatest(clock_timestamp(), seen_at),
       agent_id = null, environment_id = null, model = '', running_since = null
 where id = $1"""

_PURGE_SESSIONS_SQL: Final = """
-- purge_tombstones
with old as (
    select id from session
     where state = 'deleted' and updated_at < clock_timestamp() - $1 * interval '1 second'
     order by id limit $2 for update skip locked),
records as (delete from submission m using old where m.session_id = old.id)
delete from session s using old where s.id = old.id returning s.id"""

# No guard to move: a record this old decides nothing any more, so a decision made with it is the same as one made without.
_PURGE_SUBMISSIONS_SQL: Final = """
-- purge_submissions
with old as (
    select digest from submission
     where created_at < clock_timestamp() - $1 * interval '1 second'
     order by created_at limit $2 for update skip locked)
delete from submission m using old where m.digest = old.digest returning m.digest"""

_PURGE_WORKERS_SQL: Final = """
-- purge_workers
with old as (
    select w.id from worker w
     where w.dead_at < clock_timestamp() - $1 * interval '1 second'
       and not exists (select from turn t where t.worker_id = w.id and t.state = 'active')
     order by w.id limit $2 for update skip locked)
delete from worker w using old where w.id = old.id returning w.id"""

# No guard to move: a decision made beside this is one made before it, and a note may always come late. It never waits for a row, so it
# can't be part of a deadlock, and what it skips is being written anew. A note of another request's response says nothing of this one.
_MARK_WRITTEN_SQL: Final = """
-- mark_written
with told as (
    select m.digest, n.age, n.connection_reused
      from unnest($1::bytea[], $2::uuid[], $3::interval[], $4::boolean[]) as n (digest, request_id, age, connection_reused)
      join submission m on m.digest = n.digest and m.request_id = n.request_id
     where m.written_at is null or (n.connection_reused and not m.connection_reused)
     order by m.digest for no key update of m skip locked)
update submission m set written_at = clock_timestamp() - told.age, connection_reused = told.connection_reused
  from told where m.digest = told.digest"""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """How much was removed."""

    sessions: int
    submissions: int
    workers: int


async def sessions_being_deleted(pool: ReadPool, *, limit: int = ROWS_MAX, behind: UUID | None = None) -> list[UUID]:
    """Sessions behind the fence whose rows are still there, whoever began with them, in the order of their ids. Raises `Unavailable`.

    `behind` is the last one of the round before, so that those that can't be removed are in nobody's way.
    """
    return [row["id"] for row in await pool.fetch(_DELETING_SQL, limit, behind)]


async def delete_rows(pool: ReadPool, session_id: UUID) -> bool:
    """Remove everything of a session that is being deleted, and leave its tombstone. True when that is so now.

    Each transaction removes at most a thousand rows. A crash between two leaves a session that is still being deleted; the same call
    goes on there. False, with what remains untouched, while another process is at it or a cleanup step is unsettled.
    """
    while True:
        async with pool.transaction() as connection:
            await connection.execute(f"set local statement_timeout = {STATEMENT_MS}")
            # The children are read in a statement of their own: the one that locks may have waited, and its snapshot with it.
            if await connection.fetchval(_LOCK_SQL, session_id) is None:
                break
            if not await _remove_some(connection, session_id):
                await connection.execute("delete from session_config where session_id = $1", session_id)
                await connection.execute(_TOMBSTONE_SQL, session_id)
                return True
            await connection.execute(_BUMP_SQL, session_id)
    state = await pool.fetchval("select state from session where id = $1", session_id)
    return state in (None, "deleted")


async def _remove_some(connection: Any, session_id: UUID) -> int:
    """Remove up to a thousand rows, children first; how many. The caller holds the session."""
    removed = 0
    for table in _CHILDREN:
        sql = f"""
            delete from {table}
             where ctid = any(array(select c.ctid from {table} c where c.session_id = $1 limit $2))"""
        status: str = await connection.execute(sql, session_id, ROWS_MAX - removed, timeout=2 * STATEMENT_MS / 1000)
        removed += int(status.rpartition(" ")[2])
        if removed >= ROWS_MAX:
            break
    return removed


async def purge(pool: ReadPool) -> Purged:
    """Remove what has had its time: tombstones, records of submissions, rows of dead workers without turns. Raises `Unavailable`."""
    return Purged(
        sessions=await _purge(pool, _PURGE_SESSIONS_SQL, TOMBSTONE_S),
        submissions=await _purge(pool, _PURGE_SUBMISSIONS_SQL, KEPT_S + DECISION_S),
        workers=await _purge(pool, _PURGE_WORKERS_SQL, WORKER_KEPT_S),
    )


async def _purge(pool: ReadPool, sql: str, age_s: int) -> int:
    removed = 0
    while True:
        async with pool.connection() as connection:
            count = len(await connection.fetch(sql, age_s, ROWS_MAX))
        removed += count
        if count < ROWS_MAX:
            return removed


async def mark_written(pool: ReadPool, written: Sequence[WrittenNote]) -> None:
    """Note which responses went out in full.

    Not worth a wait for the disk: a note that a crash loses is what `domain.submission` allows for. Raises `Unavailable`; the caller
    may give the same notes again.
    """
    for first in range(0, len(written), ROWS_MAX):
        part = written[first : first + ROWS_MAX]
        async with pool.transaction() as connection:
            await connection.execute("set local synchronous_commit = off")
            await connection.execute(
                _MARK_WRITTEN_SQL,
                [n.digest for n in part],
                [n.written.request_id for n in part],
                [n.written.age for n in part],
                [n.written.connection_reused for n in part],
            )
