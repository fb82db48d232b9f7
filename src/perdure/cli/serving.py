"""`perdure up`, `serve` and `worker`: a process that runs until it is told to stop."""

import asyncio
import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from typing import Final

import msgspec

from perdure.bootstrap import Server, open_server
from perdure.cli.announcing import announced, find_neighbour, still_there
from perdure.cli.credentials import FILE_NAME, data_option, read_credentials
from perdure.cli.exits import FAILED, OK
from perdure.cli.starting import check_address, check_database, describe_database, explained, hang_up_signals
from perdure.environments.local import LocalEnvironment
from perdure.settings import Settings, make_data_directory

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
    if roles.worker and settings.warm_model is not None:
        _check_warm(settings, settings.warm_model)
    import uvloop

    with explained(settings), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
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
        self._neighbour = find_neighbour(settings.data) if roles.api else None

    async def run(self) -> int:
        """Start, wait for the end, drain."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (*SIGNALS, *hang_up_signals()):
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
            self._neighbour = await asyncio.to_thread(still_there, self._neighbour)
            with announced(self._settings.data, server, self._neighbour) if self._roles.api else nullcontext():
                self._announce(server)
                was_told = await self._wait_for_end(server)
        say("Stopped." if was_told else "The server ended by itself; its log says why.")
        return OK if was_told else FAILED

    async def _wait_for_end(self, server: Server) -> bool:
        """Drain when told to, or see it end by itself. True when it was told."""
        told = asyncio.create_task(self._told.wait())
        closed = asyncio.create_task(server.wait_closed())
        await asyncio.wait((told, closed), return_when=asyncio.FIRST_COMPLETED)
        was_told = told.done()
        told.cancel()
        await server.drain()
        await closed
        return was_told

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
        make_data_directory(self._settings.data)
        root = self._settings.data.resolve() / "workspaces"
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
        data = self._settings.data
        path = str(data / FILE_NAME)
        if server.api_key is not None and server.api_key != self._known_key:
            print(f"A new API key of the workspace `default`: {server.api_key}", flush=True)
        if self._neighbour is None:
            print(f"The key is in {path!r}. Talk to it: perdure chat{data_option(data)}", flush=True)
        else:
            print(
                f"{path!r} goes on naming the server at {self._neighbour.url}, which runs there too. "
                f"Talk to this one: perdure chat --url {server.url} --api-key KEY",
                flush=True,
            )


def _check_warm(settings: Settings, model: str) -> None:
    """A model to make ready that nobody serves is a mistake, but none that keeps turns of others from running."""
    from perdure.models.router import Router, RouterSettings
    from perdure.ports.model import ModelUnknown

    keys = RouterSettings(anthropic_api_key=settings.anthropic_api_key, anthropic_base_url=settings.anthropic_base_url)
    try:
        Router(keys).check(model)
    except ModelUnknown as unknown:
        say(f"Warning: warm_model makes nothing ready. {unknown}")


def say(text: str) -> None:
    """One line about what goes on, on standard error. Lost where it can't be written: the server goes on."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
