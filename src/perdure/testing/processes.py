"""Perdure as real child processes: started through the command line, signalled, waited for, started again.

A `Child` is one process from start to death; `Caller` talks to its API without any retry of its own, so that a test knows what was
answered.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import httpx2

Json: TypeAlias = dict[str, Any]
Verb: TypeAlias = Literal["up", "serve", "worker"]

API_VERSION: Final = "2026-10-21"
BETA: Final = "managed-agents-2026-04-01"

START_S: Final = 60.0
"""A child imports the whole program, and on a new data directory makes a PostgreSQL; a busy machine takes its time."""

END_S: Final = 30.0
ANSWER_S: Final = 20.0
POLL_S: Final = 0.02

# What a child may inherit: nothing that points it at another server or database.
_INHERITED: Final = ("PATH", "HOME", "LANG", "TMPDIR", "USER")


async def until(holds: Callable[[], Awaitable[Any]], deadline_s: float) -> Any:
    """Ask another process, or its database, until the answer is a true one; `TimeoutError` when it never is."""
    async with asyncio.timeout(deadline_s):
        while True:
            answer = await holds()
            if answer:
                return answer
            await asyncio.sleep(POLL_S)


class Cut(Exception):
    """No answer came: the connection was refused or broke. Whether the request was admitted, the client can't know."""


class Answer:
    """What a server answered."""

    def __init__(self, status: int, body: Json, headers: Mapping[str, str]) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    def ok(self) -> Json:
        """The body of a success."""
        assert self.status == 200, (self.status, self.body)
        return self.body


class Caller:
    """A client of one server, with one key. A request is sent once."""

    def __init__(self, url: str, api_key: str) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"x-api-key": api_key, "anthropic-version": API_VERSION, "anthropic-beta": BETA},
            timeout=httpx2.Timeout(ANSWER_S, connect=2.0),
            trust_env=False,
        )

    async def call(self, method: str, path: str, body: Json | None = None, **headers: str) -> Answer:
        """One request. Header names are written with underscores. Raises `Cut`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            response = await self._http.request(method, path, json=body, headers=named)
            content: Any = response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise Cut(f"{method} {path}: {type(error).__name__}: {error}") from error
        return Answer(response.status_code, content, response.headers)

    async def get(self, path: str) -> Json:
        """Read something that is there."""
        return (await self.call("GET", path)).ok()

    async def post(self, path: str, body: Json | None = None, **headers: str) -> Json:
        """Change something."""
        return (await self.call("POST", path, body or {}, **headers)).ok()

    async def events(self, session_id: str) -> list[Json]:
        """Every event of a session, page by page."""
        found: list[Json] = []
        page = ""
        while True:
            answer = await self.get(f"/v1/sessions/{session_id}/events?limit=1000{page}")
            found += answer["data"]
            if not answer.get("next_page"):
                return found
            page = f"&page={answer['next_page']}"

    @asynccontextmanager
    async def stream(self, session_id: str, *, after: str | None = None) -> AsyncGenerator[AsyncGenerator["Frame"]]:
        """The session's events as they come. The generator ends when the connection does, however that happens."""
        headers = {} if after is None else {"last-event-id": after}
        async with self._http.stream("GET", f"/v1/sessions/{session_id}/events/stream", headers=headers) as response:
            assert response.status_code == 200, response.status_code
            frames = _frames(response)
            try:
                yield frames
            finally:
                await frames.aclose()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()


class Frame:
    """One event of a stream, with the id to resume behind it."""

    def __init__(self, identity: str | None, event: Json) -> None:
        self.id = identity
        self.event = event


async def _frames(response: httpx2.Response) -> AsyncGenerator[Frame]:
    buffered = b""
    with contextlib.suppress(httpx2.HTTPError):
        async for piece in response.aiter_raw():
            buffered += piece
            *whole, buffered = buffered.split(b"\n\n")
            for block in whole:
                lines = (line.partition(b": ") for line in block.split(b"\n") if not line.startswith(b":"))
                fields = {name: value for name, _, value in lines}
                if b"data" in fields:
                    identity = fields.get(b"id")
                    yield Frame(None if identity is None else identity.decode(), json.loads(fields[b"data"]))


class Child:
    """One process of Perdure. What it says on standard error is kept in a file beside its data."""

    def __init__(
        self,
        verb: Verb,
        data: Path,
        *,
        database_url: str | None,
        provider_url: str,
        crash_at: str = "",
        port: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` become `PERDURE_*` of its environment; `crash_at` arms crash points, see `perdure.crashpoint`."""
        self.verb = verb
        self.data = data
        self.url = ""
        self.api_key = ""
        self.ready_at = 0.0
        """When it said that it is ready, by the monotonic clock."""
        self._database_url = database_url
        self._port = port
        self._environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | {
            "PERDURE_ANTHROPIC_BASE_URL": provider_url,
            "ANTHROPIC_API_KEY": "test-key",
            "PERDURE_CRASH_AT": crash_at,
            **{f"PERDURE_{name.upper()}": value for name, value in (settings or {}).items()},
        }
        self._process: asyncio.subprocess.Process | None = None
        self._caller: Caller | None = None
        self.log = data.with_name(f"{data.name}-{verb}-{time.monotonic_ns()}.log")

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process, once started."""
        assert self._process is not None, "start it first"
        return self._process

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.returncode

    @property
    def api(self) -> Caller:
        """A client of its API."""
        assert self._caller is not None, "it has no API, or is not ready"
        return self._caller

    async def launch(self) -> None:
        """Start it, and don't wait until it is ready."""
        command = [sys.executable, "-m", "perdure", self.verb, "--json", "--data", str(self.data)]
        if self._database_url is not None:
            command += ["--database-url", self._database_url]
        if self.verb != "worker":
            command += ["--port", str(self._port)]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, env=self._environment, cwd=self.data.parent
            )

    async def start(self) -> "Child":
        """Start it, and wait until it says that it is ready."""
        await self.launch()
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self.process.stdout.readline()
        assert line, f"{self.verb} ended before it was ready:\n{self.errors()}"
        ready: Json = json.loads(line)
        self.ready_at = time.monotonic()
        if ready["url"] is not None:
            self.url, self.api_key = ready["url"], ready["api_key"]
            self._caller = Caller(self.url, self.api_key)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait(self, deadline_s: float = END_S) -> int:
        """Its exit code; a signal's number is negative. `TimeoutError` when it goes on."""
        async with asyncio.timeout(deadline_s):
            return await self.process.wait()

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self.wait()

    async def terminate(self) -> int:
        """SIGTERM; its exit code after the drain."""
        self.send(signal.SIGTERM)
        return await self.wait()

    def errors(self) -> str:
        """What it said on standard error."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    async def close(self) -> None:
        """Leave nothing of it behind. Repeatable."""
        if self._caller is not None:
            await self._caller.close()
        if self._process is not None:
            if self._process.returncode is None:
                self.send(signal.SIGCONT)
                await self.kill()
            # Reads the pipe to its end and lets go of it.
            await self._process.communicate()
