"""A real server for cases, on a fresh database, against the strict scripted provider; and a session of it, driven and checked."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from anthropic import AsyncAnthropic
from tests.conftest import connected

from perdure import bootstrap, settings
from perdure.http.claude.wire import SESSION, from_wire_id
from perdure.testing.model_server import Failure, ModelServer, RecordedRequest, Reply, Text
from perdure.testing.stubs import CuttingLine, StubEnvironment

VERSION = {"anthropic-version": "2026-10-21"}
DEADLINE_S = 15.0
MODEL = "claude-opus-5"
TOOLSET: dict[str, Any] = {"type": "agent_toolset_20260401"}

T = TypeVar("T")
Json = dict[str, Any]


def custom_tool(name: str) -> Json:
    """A tool that the client runs."""
    return {"type": "custom", "name": name, "description": "Test", "input_schema": {"type": "object"}}


def message(*texts: str) -> Json:
    """A user's message."""
    return {"type": "user.message", "content": [{"type": "text", "text": text} for text in texts]}


def result_of(action_id: str, text: str) -> Json:
    """The client's result of a custom tool."""
    content = [{"type": "text", "text": text}]
    return {"type": "user.custom_tool_result", "custom_tool_use_id": action_id, "content": content}


def confirmation_of(action_id: str, result: str) -> Json:
    """The client's word on a call that asks."""
    return {"type": "user.tool_confirmation", "tool_use_id": action_id, "result": result}


_OPEN = {
    "turn": "select * from turn where session_id = $1 and state <> 'settled'",
    "step": "select * from step where session_id = $1 and state in ('prepared', 'dispatched')",
    "input": "select * from input where session_id = $1 and settled_at is null",
    "action": "select * from action where session_id = $1 and state <> 'closed'",
    "control": "select * from control where session_id = $1 and state = 'open'",
}

INTERRUPT: Json = {"type": "user.interrupt"}


@dataclass(frozen=True)
class Frame:
    """One event of a stream."""

    id: str | None
    type: str
    data: Json


async def read_frames(response: httpx2.Response) -> AsyncGenerator[Frame]:
    """The frames of a stream. Lines end at LF alone, as this server writes them; a comment has no data and is no frame."""
    buffered = b""
    async for piece in response.aiter_raw():
        buffered += piece
        *whole, buffered = buffered.split(b"\n\n")
        for block in whole:
            lines = [line.partition(b": ") for line in block.split(b"\n") if not line.startswith(b":")]
            assert len({name for name, _, _ in lines}) == len(lines), f"a field came twice: {block!r}"
            found = {name: value for name, _, value in lines}
            if b"data" in found:
                identity = found.get(b"id")
                yield Frame(
                    identity.decode() if identity else None, found[b"event"].decode(), json.loads(found[b"data"])
                )


@dataclass
class Site:
    """A running server and its surroundings."""

    server: bootstrap.Server
    models: ModelServer
    http: httpx2.AsyncClient
    data: Path
    environment: StubEnvironment | None
    environment_id: str = ""
    replies: deque[Reply | Failure] = field(default_factory=deque[Reply | Failure])
    base: int = 0
    """How many requests the provider had got before this test."""
    sessions: list["Driven"] = field(default_factory=list["Driven"])

    @property
    def tools(self) -> StubEnvironment:
        """The stand-in for the sandbox, where the module asked for it."""
        assert self.environment is not None
        return self.environment

    @property
    def url(self) -> str:
        assert self.server.url is not None
        return self.server.url

    def script(self, *replies: Reply | Failure) -> None:
        """What the provider answers next, in order."""
        self.replies.extend(replies)

    def next_reply(self, request: RecordedRequest) -> Reply | Failure:
        """The provider's side of the script."""
        del request
        if self.replies:
            return self.replies.popleft()
        return Failure(400, "invalid_request_error", "the test has no reply for this request")

    @property
    def requests(self) -> list[RecordedRequest]:
        """What the provider got in this test."""
        return self.models.requests[self.base :]

    async def arrived(self, count: int) -> RecordedRequest:
        """The `count`th request of this test, once it is there."""
        return (await self.models.wait_for_requests(self.base + count, DEADLINE_S))[-1]

    def client(self) -> AsyncAnthropic:
        """The official client."""
        assert self.server.api_key is not None
        return AsyncAnthropic(api_key=self.server.api_key, base_url=self.url)

    async def make(self, path: str, body: Json, **headers: str) -> Json:
        """A POST that must succeed."""
        answered = await self.http.post(path, json=body, headers=headers)
        assert answered.status_code == 200, answered.text
        return answered.json()

    async def open(self, *tools: Json, deltas: bool = False, http: httpx2.AsyncClient | None = None) -> "Driven":
        """A new session of a new agent, its stream followed from the start."""
        if not self.environment_id:
            self.environment_id = (await self.make("/v1/environments", {"name": "cases"}))["id"]
        agent = await self.make("/v1/agents", {"name": "Agent", "model": MODEL, "tools": list(tools)})
        made = await self.make("/v1/sessions", {"agent": agent["id"], "environment_id": self.environment_id})
        driven = Driven(self, made["id"], http or self.http)
        await driven.follow(deltas=deltas)
        self.sessions.append(driven)
        return driven

    def check_provider(self) -> None:
        """The provider took everything that it was sent, and its script is used up."""
        assert [r.refused for r in self.requests if r.refused is not None] == []
        assert not self.replies, "the provider was asked less often than the test says"


class Driven:
    """One session as its client sees it."""

    def __init__(self, site: Site, identity: str, http: httpx2.AsyncClient) -> None:
        self.site = site
        self.id = identity
        self.path = f"/v1/sessions/{identity}"
        self.http = http
        self.frames: list[Frame] = []
        self._more = asyncio.Condition()
        self._following: asyncio.Task[None] | None = None

    # following

    async def follow(self, *, deltas: bool = False) -> None:
        """Keep a stream open from now on, resuming it whenever it ends."""
        opened = asyncio.Event()
        self._following = asyncio.create_task(self._follow(opened, deltas=deltas))
        await asyncio.wait_for(opened.wait(), DEADLINE_S)

    async def _follow(self, opened: asyncio.Event, *, deltas: bool) -> None:
        query = "?event_deltas[]=agent.message" if deltas else ""
        while True:
            # Cut off before the first frame: from the session's own first row on.
            last = next((f.id for f in reversed(self.frames) if f.id), "1.0" if opened.is_set() else None)
            headers = {"last-event-id": last} if last else {}
            try:
                async with self.http.stream("GET", self.path + "/events/stream" + query, headers=headers) as response:
                    if response.status_code != 200:
                        return
                    opened.set()
                    async for frame in read_frames(response):
                        async with self._more:
                            self.frames.append(frame)
                            self._more.notify_all()
            except httpx2.TransportError:
                pass  # cut off: resume behind the last frame

    async def unfollow(self) -> None:
        """Close the stream."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def until(self, found: Callable[[list[Frame]], T], deadline_s: float = DEADLINE_S) -> T:
        """The first true answer of `found` to the frames so far."""
        try:
            async with asyncio.timeout(deadline_s), self._more:
                while not (answer := found(self.frames)):
                    await self._more.wait()
                return answer
        except TimeoutError:
            shown = "\n".join(f"{f.id} {f.type} {json.dumps(f.data)[:200]}" for f in self.frames[-30:])
            raise TimeoutError(f"not within {deadline_s} s; the last frames:\n{shown}") from None

    def seen(self, kind: str) -> list[Json]:
        """The frames of a type so far."""
        return [f.data for f in self.frames if f.type == kind]

    async def frame(self, kind: str, count: int = 1, deadline_s: float = DEADLINE_S) -> Json:
        """The `count`th frame of a type."""
        return (await self.until(lambda _: self.seen(kind)[count - 1 : count], deadline_s))[0]

    async def idle(self, count: int, deadline_s: float = DEADLINE_S) -> str:
        """The stop reason of the `count`th idle."""
        return (await self.frame("session.status_idle", count, deadline_s))["stop_reason"]["type"]

    # calling

    async def post(
        self, *events: Json, http: httpx2.AsyncClient | None = None, headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        """Send events, whatever the answer."""
        return await (http or self.http).post(self.path + "/events", json={"events": list(events)}, headers=headers)

    async def send(self, *events: Json) -> list[Json]:
        """Send events that must be accepted."""
        answered = await self.post(*events)
        assert answered.status_code == 200, answered.text
        return answered.json()["data"]

    async def refuse(self, code: str, *events: Json) -> Json:
        """Send events that must be refused with this code; nothing of them is kept. The error."""
        before = await self.listed()
        answered = await self.post(*events)
        assert answered.status_code == 400, answered.text
        error = answered.json()["error"]
        assert error.get("details", {}).get("error_code", "invalid_request_error") == code, error
        assert [e["id"] for e in await self.listed()] == [e["id"] for e in before]
        return error

    async def retrieve(self) -> Json:
        """The session."""
        answered = await self.http.get(self.path)
        assert answered.status_code == 200, answered.text
        return answered.json()

    async def listed(self, *types: str, **query: str) -> list[Json]:
        """All events, page by page."""
        events: list[Json] = []
        params: dict[str, str | list[str]] = {**query, "types[]": list(types)} if types else {**query}
        page: str | None = None
        while True:
            asked = params | {"page": page} if page else params
            answered = await self.http.get(self.path + "/events", params=asked)
            assert answered.status_code == 200, answered.text
            found = answered.json()
            events += found["data"]
            page = found["next_page"]
            if page is None:
                return events

    async def texts(self) -> list[str]:
        """What the agent said."""
        return ["".join(b["text"] for b in e["content"]) for e in await self.listed("agent.message")]

    # checking

    async def check(self, *, idles: int) -> None:
        """What holds of any session at rest: `idles` boundaries, list and stream agree, everything is paired and settled."""
        await self.idle(idles)
        listed = await self.listed()
        await self.until(lambda _: {e["id"] for e in listed} <= {f.data.get("id") for f in self.frames})
        assert len(self.seen("session.status_idle")) == idles
        assert sum(e["type"] == "session.status_idle" for e in listed) == idles
        assert len({e["id"] for e in listed}) == len(listed)
        shown = {f.data["id"]: f.data for f in self.frames if f.id}
        assert shown == {e["id"]: e for e in listed}
        for call, answer, key in (
            ("agent.tool_use", "agent.tool_result", "tool_use_id"),
            ("span.model_request_start", "span.model_request_end", "model_request_start_id"),
        ):
            calls = sorted(e["id"] for e in listed if e["type"] == call)
            assert sorted(e[key] for e in listed if e["type"] == answer) == calls
        assert [e for e in listed if e["type"].startswith("user.") and e["processed_at"] is None] == []
        assert (await self.retrieve())["status"] == "idle"
        await self._check_rows()

    async def _check_rows(self) -> None:
        """Nothing of the session is left open in the ledger."""
        async with connected(self.site.server.database_url) as connection:
            left = {row: await connection.fetch(query, from_wire_id(SESSION, self.id)) for row, query in _OPEN.items()}
        assert left == {row: [] for row in _OPEN}

    async def go_on(self, *, idles: int) -> None:
        """The session still works: one more turn, answered by one model call, on a history that the provider takes."""
        before = len(self.site.requests)
        self.site.script(Reply(Text("Still here.")))
        await self.send(message("Are you still there?"))
        assert await self.idle(idles) == "end_turn"
        assert len(self.site.requests) == before + 1
        assert (await self.texts())[-1] == "Still here."
        await self.check(idles=idles)
        self.site.check_provider()


def history(request: RecordedRequest) -> list[Json]:
    """Every block of a request's messages, in order."""
    return [block for m in request.body["messages"] for block in m["content"]]


def results_in(request: RecordedRequest) -> dict[str, Json]:
    """Tool results of a request by the input of their call (as JSON), each of them once."""
    blocks = history(request)
    calls = {b["id"]: b for b in blocks if b["type"] == "tool_use"}
    results = [b for b in blocks if b["type"] == "tool_result"]
    assert sorted(b["tool_use_id"] for b in results) == sorted(calls)
    return {json.dumps(calls[b["tool_use_id"]]["input"]): b for b in results}


def text_of(block: Json) -> str:
    """The text of a result."""
    return "".join(b.get("text", "") for b in block.get("content", ()))


@asynccontextmanager
async def open_site(
    database_url: str, data: Path, environment: StubEnvironment | None = None, *, cutting: bool = False, **flags: Any
) -> AsyncGenerator[Site]:
    """A server with API and worker, its provider and a client. With `environment`, that runs the tools.

    With `cutting`, the provider's answers come in pieces of a few bytes.
    """
    models = await ModelServer.start()
    line = CuttingLine(models.base_url)
    await line.start()
    provider_url = line.base_url if cutting else models.base_url
    given = {"data": data, "port": 0, "database_url": database_url, "anthropic_base_url": provider_url, **flags}
    try:
        async with bootstrap.open_server(settings.load(given, {}), api=True, worker=True) as server:
            assert server.url is not None
            headers = {"x-api-key": str(server.api_key), **VERSION}
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60, limits=limits) as http:
                yield Site(server, models, http, data, environment)
    finally:
        await line.close()
        await models.close()


@dataclass(frozen=True)
class Peer:
    """Another server process's worth of parts on the same database."""

    server: bootstrap.Server
    http: httpx2.AsyncClient


@asynccontextmanager
async def open_peer(site: Site, *, worker: bool = False) -> AsyncGenerator[Peer]:
    """A second API, and a second worker if asked, beside a site's; the site's key is good for it."""
    flags = {
        "data": site.data / "peer",
        "port": 0,
        "database_url": site.server.database_url,
        "anthropic_base_url": site.models.base_url,
    }
    async with bootstrap.open_server(settings.load(flags, {}), api=True, worker=worker) as server:
        assert server.url is not None
        headers = {"x-api-key": str(site.server.api_key), **VERSION}
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60, limits=limits) as http:
            yield Peer(server, http)
