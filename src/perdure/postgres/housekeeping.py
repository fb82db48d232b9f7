"""What is done in the background: the rows of deleted sessions, tombstones, old submissions, notes of written responses.

Every piece may be done by any process, twice, or begun by one and ended by another.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from perdure.postgres.pool import ReadPool
from perdure.postgres.workers import forget_dead

ROWS_MAX: Final = 1_000
"""Rows removed in one transaction: a session of any size goes without a long lock."""

TOMBSTONE_H: Final = 24
SUBMISSION_H: Final = 24

CHILDREN: Final = (
    "outbox",
    "control",
    "action",
    "step",
    "transcript",
    "event",
    "input",
    "turn",
    "thread",
    "submission",
    "session_config",
)


async def sessions_being_deleted(pool: ReadPool) -> list[UUID]:
    """Sessions behind the deletion fence whose rows are still there."""
    return [r["id"] for r in await pool.fetch("select id from session where state = 'deleting' order by id limit 100")]


async def delete_rows(pool: ReadPool, session_id: UUID) -> None:
    """Remove a fenced session's rows, children first, and leave its tombstone."""
    for table in CHILDREN:
        while True:
            done = await pool.execute(
                f"""
                delete from {table} where ctid = any(array(
                    select c.ctid from {table} c join session s on s.id = c.session_id
                     where c.session_id = $1 and s.state = 'deleting' limit {ROWS_MAX}))""",
                session_id,
            )
            if int(done.split()[-1]) < ROWS_MAX:
                break
    await pool.execute(
        "update session set state = 'deleted', rev = rev + 1, updated_at = clock_timestamp() where id = $1 and state = 'deleting'",
        session_id,
    )


async def mark_written(pool: ReadPool, notes: Sequence[tuple[bytes, datetime, bool]]) -> None:
    """Note which responses went out in full. Losing some to a crash makes their requests match a little longer."""
    await pool.execute(
        """
        update submission u set written_at = n.at, connection_reused = n.reused
          from unnest($1::bytea[], $2::timestamptz[], $3::boolean[]) as n (digest, at, reused)
         where u.digest = n.digest and u.created_at <= n.at""",
        [d for d, _, _ in notes],
        [a for _, a, _ in notes],
        [r for _, _, r in notes],
    )


async def purge(pool: ReadPool) -> None:
    """Forget what has served its time."""
    await pool.execute(
        f"delete from session where state = 'deleted' and updated_at < clock_timestamp() - interval '{TOMBSTONE_H} hours'"
    )
    await pool.execute(f"delete from submission where created_at < clock_timestamp() - interval '{SUBMISSION_H} hours'")
    await forget_dead(pool)
