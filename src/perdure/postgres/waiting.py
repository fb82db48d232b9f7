"""How a thread at work on PostgreSQL's process waits: locks that never block, a deadline, and what it raises."""

import fcntl
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

POLL_S: Final = 0.01


class EmbeddedPostgresError(Exception):
    """PostgreSQL can't be used. The message names the data directory and what to do."""


class StillRecoveringError(EmbeddedPostgresError):
    """PostgreSQL is at work on its recovery and was left running; starting again later attaches to it."""


class AbandonedError(Exception):
    """Whoever waited for this start or stop was cancelled."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a thread may wait, and whether anybody still wants the result."""

    until: float
    abandoned: threading.Event

    @classmethod
    def of(cls, seconds: float) -> "Patience":
        return cls(time.monotonic() + seconds, threading.Event())

    def pause(self) -> bool:
        """Wait a moment. False once the deadline has passed."""
        if self.abandoned.wait(POLL_S):
            raise AbandonedError
        return time.monotonic() < self.until


class FileLock:
    """One `flock` on one open file. Never blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def try_exclusive(self) -> bool:
        """Take it alone. On false, a shared lock held before is gone."""
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take it with others."""
        return self._try(fcntl.LOCK_SH)

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self.fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
