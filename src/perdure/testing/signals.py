"""Signals that a test waits on instead of sleeping. Any thread may set them, any loop or thread may wait."""

import asyncio
import threading


class Signal:
    """Set once, stays set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def set(self) -> None:
        """Wake everyone who waits, in their own loops. Repeatable."""
        with self._lock:
            self._event.set()
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._event.is_set()

    async def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is set; `TimeoutError` after `deadline_s`."""
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiters.append((asyncio.get_running_loop(), event))
        try:
            async with asyncio.timeout(deadline_s):
                await event.wait()
        except TimeoutError as error:
            raise TimeoutError(f"{self.name}: not within {deadline_s} s") from error

    def wait_blocking(self, deadline_s: float) -> None:
        """`wait` for a thread without a loop."""
        if not self._event.wait(deadline_s):
            raise TimeoutError(f"{self.name}: not within {deadline_s} s")


class Gate:
    """A place where a scripted peer stops until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = Signal("gate reached")
        self._opened = Signal("gate opened")

    async def reached(self, deadline_s: float = 5) -> None:
        """Wait until the peer stands at the gate."""
        await self._reached.wait(deadline_s)

    def reached_blocking(self, deadline_s: float = 5) -> None:
        """`reached` for a thread without a loop."""
        self._reached.wait_blocking(deadline_s)

    def open(self) -> None:
        """Let the peer, and everyone who comes later, pass."""
        self._opened.set()

    async def pass_through(self) -> None:
        """The peer's side: arrive, then wait for the opening."""
        self._reached.set()
        await self._opened.wait()
