"""Named places where a test may kill or stop this process. In production each is one look at an empty dictionary."""

import os
import signal
from typing import Final

_ENV: Final = "PERDURE_CRASH_AT"
"""`name:count[:SIGNAL]`: at the count-th passage of `name`, send this process the signal (SIGKILL unless said)."""


def _plan() -> dict[str, tuple[int, int]]:
    plan: dict[str, tuple[int, int]] = {}
    for part in filter(None, os.environ.get(_ENV, "").split(",")):
        name, count, *rest = part.split(":")
        plan[name] = (int(count), signal.Signals[rest[0]] if rest else signal.SIGKILL)
    return plan


_armed = _plan()


def point(name: str) -> None:
    """Pass a named place."""
    if not _armed:
        return
    left = _armed.get(name)
    if left is None:
        return
    count, number = left
    if count <= 1:
        del _armed[name]
        os.kill(os.getpid(), number)
    else:
        _armed[name] = (count - 1, number)
