"""`perdure up`, `serve` and `worker`: a process that runs until it is told to stop."""

import asyncio
import json
import os
import signal
import sys
from typing import Final

import msgspec

from perdure.bootstrap import Server, open_server
from perdure.cli.credentials import FILE_NAME, read_credentials
from perdure.cli.exits import FAILED, OK
from perdure.cli.starting import check_address, check_database, describe_database, explained
from perdure.environments.local import LocalEnvironment
from perdure.settings import Settings

AT_ONCE_CODE: Final = 1
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """What the process does."""

    api: bool
    worker: bool


def serve(settings: Settings, roles: Roles, *, as_json: bool) -> int:
    """Run the process until a signal. Raises `CommandFailed` when it can't start."""
    if roles.api:
        check_address(settings)
    import uvloop

    with explained(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(settings, roles, as_json=as_json).run())


class _Process:
    """One process, from its start to its exit code."""

    def __init__(self, settings: Settings, roles: Roles, *, as_json: bool) -> None:
        self._settings = settings
        self._roles = roles
        self._as_json = as_json
        self._told = asyncio.Event()
        self._is_ready = False
        self._task: asyncio.Task[int] | None = None
        self._known_key = read_credentials(settings.data).api_key

    async def run(self) -> int:
        """Start, wait for the end, drain."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        # Under nohup a closed terminal is to be ignored.
        is_tied = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        for number in (*SIGNALS, signal.SIGHUP) if is_tied else SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        try:
            return await self._serve()
        except asyncio.CancelledError:
            # A signal before it was ready: the start was given up in order, and nothing had been accepted yet.
            say("Stopped before it was ready.")
            return OK

    async def _serve(self) -> int:
        say(f"PostgreSQL: {describe_database(self._settings)}")
        await check_database(self._settings)
        if self._roles.worker:
            await self._report_sandbox()
        say("Starting ...")
        async with open_server(self._settings, api=self._roles.api, worker=self._roles.worker) as server:
            self._is_ready = True
            self._announce(server)
            told = asyncio.create_task(self._told.wait())
            closed = asyncio.create_task(server.wait_closed())
            await asyncio.wait((told, closed), return_when=asyncio.FIRST_COMPLETED)
            was_told = told.done()
            told.cancel()
            await server.drain()
            await closed
        say("Stopped." if was_told else "The server ended by itself; its log says why.")
        return OK if was_told else FAILED

    def _on_signal(self, name: str) -> None:
        if self._told.is_set():
            say(f"{name} again: leaving at once. Nothing is lost; turns go on at the next start.")
            os._exit(AT_ONCE_CODE)
        self._told.set()
        say(f"{name}: draining. A second signal leaves at once.")
        if not self._is_ready and self._task is not None:
            self._task.cancel()

    async def _report_sandbox(self) -> None:
        """Try the sandbox, and say what became of it before any turn needs it."""
        root = self._settings.data.resolve() / "workspaces"
        root.mkdir(parents=True, exist_ok=True)
        environment = LocalEnvironment(root, unsafe_no_sandbox=self._settings.unsafe_no_sandbox)
        try:
            problems = await environment.problems()
        finally:
            await environment.close()
        if not problems:
            say("Sandbox: holds")
        for problem in problems:
            say(f"Sandbox: {problem}")

    def _announce(self, server: Server) -> None:
        if self._as_json:
            ready = {
                "url": server.url,
                "api_key": server.api_key,
                "database_url": server.database_url,
                "pid": server.pid,
            }
            print(json.dumps(ready), flush=True)
            return
        if server.url is None:
            print(f"Worker {server.pid} is ready.", flush=True)
            return
        print(f"Perdure is ready at {server.url} (process {server.pid}).", flush=True)
        path = self._settings.data / FILE_NAME
        if server.api_key is not None and server.api_key != self._known_key:
            print(f"A new API key of the workspace `default`: {server.api_key}", flush=True)
        print(f"The key is in {str(path)!r}. Talk to it: perdure chat", flush=True)


def say(text: str) -> None:
    """One line about what goes on, on standard error."""
    print(text, file=sys.stderr, flush=True)
