"""A whole server in a thread of this process, for `perdure run`: the terminal keeps the main thread, and with it Ctrl-C."""

import asyncio
import contextlib
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

from perdure.bootstrap import Server, open_server
from perdure.cli.starting import check_database
from perdure.settings import Settings

STOP_S: Final = 60.0
"""A drain gives every turn back within its own, shorter, deadlines."""


class BackgroundServer:
    """Start it, then always stop it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server")
        self._ready: Future[Server] = Future()
        self._running: Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._given_up = False

    def start(self) -> Server:
        """Return once requests are answered. Raises whatever kept the server from starting."""
        self._running = self._executor.submit(self._run)
        either: list[Future[Any]] = [self._running]
        either.append(self._ready)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._ready.done():
            self._running.result()
        return self._ready.result()

    def stop(self) -> None:
        """Drain and end. Repeatable."""
        # Before the loop is looked for: one that comes later sees this.
        self._given_up = True
        running, loop = self._running, self._loop
        if running is not None and not running.done():
            if loop is not None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._end)
            wait((running,), timeout=STOP_S)
        self._executor.shutdown(wait=False)

    def _end(self) -> None:
        """Before it is ready the start is given up; afterwards it drains."""
        if self._ready.done() and self._stop is not None:
            self._stop.set()
        elif self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._stop = asyncio.Event()
        if self._given_up:
            return
        await check_database(self._settings)
        async with open_server(self._settings, api=True, worker=True) as server:
            self._ready.set_result(server)
            await self._stop.wait()
