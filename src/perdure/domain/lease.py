"""Workers and their leases: when a process counts as dead."""

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

LEASE_MS: Final = 10_000
"""How long a worker that nobody hears from keeps its turns: a host or network that is gone is noticed within 15 s."""

RENEW_MS: Final = 1_000
TICK_MS_MAX: Final = 30_000
"""A main loop that did not tick for this long is stuck, and its lease is no longer renewed."""

LOCK_FREE_MS: Final = 2_000
"""How long a worker's advisory lock must be free before that counts: its connection may just be reconnecting."""

LOCK_TRUST_MS: Final = 5_000
LAPSE_TRUST_MS: Final = 10_000
"""After PostgreSQL itself came up, a free lock and a lapsed lease prove nothing for a while: everybody is reconnecting."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process that runs turns."""

    id: UUID
    host: str
    boot: str
    pid: int
    started: str
    lease_until: datetime
    lock_free_since: datetime | None
    dead_at: datetime | None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one observer knows of a worker."""

    now: datetime
    database_up_since: datetime
    process_gone: bool
    """The worker ran on the observer's host and boot, and no process with its id and start time is left."""


def is_dead(worker: Worker, evidence: Evidence) -> bool:
    """Whether a worker's turns may be taken over.

    MA-C15.1: at once when its process is seen to be gone, after two seconds without its lock, else when its lease lapsed; the last two
    only once the database has been up long enough for living workers to come back.
    """
    if worker.dead_at is not None or evidence.process_gone:
        return True
    up = evidence.now - evidence.database_up_since
    free = worker.lock_free_since
    if free is not None and up >= timedelta(milliseconds=LOCK_TRUST_MS):
        return evidence.now - free >= timedelta(milliseconds=LOCK_FREE_MS)
    return up >= timedelta(milliseconds=LAPSE_TRUST_MS) and worker.lease_until <= evidence.now
