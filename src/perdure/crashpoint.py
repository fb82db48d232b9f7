"""Named places where a test may kill, stop or stall this process. In production each is one look at an empty plan.

The environment arms them: `PERDURE_CRASH_AT=name:count[:action]`, several with commas. At the count-th passage of `name` the action is
done: a signal to this process (SIGKILL unless said), or `stall=MS`, which blocks the thread that passes. `PERDURE_CRASH_AT=@FILE` reads the
same from a file as soon as there is one, so that a process can first come up and settle; a file is read once.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_ENV: Final = "PERDURE_CRASH_AT"


class _Plan:
    """What is armed."""

    def __init__(self, text: str) -> None:
        self.file: Path | None = None
        self.armed: dict[str, tuple[int, Callable[[], None]]] = {}
        if text.startswith("@"):
            self.file = Path(text[1:])
        else:
            self.arm(text)

    def arm(self, text: str) -> None:
        """Add what a text says."""
        for part in filter(None, text.strip().split(",")):
            name, count, *rest = part.split(":")
            self.armed[name] = (int(count), _action(rest[0] if rest else "SIGKILL"))

    def look_at_file(self) -> None:
        """Read the file, if it is there by now."""
        if self.file is None:
            return
        try:
            text = self.file.read_text("ascii")
        except FileNotFoundError:
            return
        self.file = None
        self.arm(text)


def _action(name: str) -> Callable[[], None]:
    kind, _, argument = name.partition("=")
    if kind == "stall":
        return lambda: time.sleep(int(argument) / 1000)
    number = signal.Signals[name]
    return lambda: os.kill(os.getpid(), number)


_plan: Final = _Plan(os.environ.get(_ENV, ""))


def is_armed() -> bool:
    """Whether any place may still matter: then a caller may take the trouble to find out which one it passes."""
    return bool(_plan.armed) or _plan.file is not None


def point(name: str) -> None:
    """Pass a named place."""
    if not is_armed():
        return
    _plan.look_at_file()
    found = _plan.armed.get(name)
    if found is None:
        return
    count, act = found
    if count > 1:
        _plan.armed[name] = (count - 1, act)
        return
    del _plan.armed[name]
    act()
