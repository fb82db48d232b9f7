"""The face on the oracle: handlers called as the ASGI layer calls them, and a session driven step by step without any engine."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID, uuid4

from perdure.core.feed import Feeds
from perdure.core.submissions import Submissions
from perdure.domain import agent as agents
from perdure.domain.errors import Refused
from perdure.domain.event import Event, encode
from perdure.domain.ids import primary_thread, token
from perdure.domain.submission import SubmissionKey
from perdure.http.claude.errors import to_wire_error
from perdure.http.claude.routes_sessions import ROUTES
from perdure.http.claude.wire import AGENT, ENVIRONMENT, SESSION, from_wire_id
from perdure.http.requests import Request, Response, Route, StreamRoute
from perdure.http.router import Found, Router
from perdure.http.services import Services
from perdure.ports.catalog import AgentRecord, EnvironmentRecord
from perdure.ports.ledger import (
    Advance,
    Answered,
    CallPlan,
    ModelErred,
    ModelReplied,
    OutBlock,
    Perform,
    SeenEvent,
    StepOutcome,
    ToolReturned,
)
from perdure.ports.model import ModelUnknown, StopReason, Usage
from perdure.testing.oracle import OracleLedger

WORKSPACE = UUID(int=11)
OTHER_WORKSPACE = UUID(int=12)
KEY = UUID(int=13)
WORKER = UUID(int=14)
AGENT_ID = UUID(int=21)
ENVIRONMENT_ID = UUID(int=22)
AT = datetime(2026, 1, 1, tzinfo=UTC)
WAIT_S = 5.0

USAGE = Usage(input_tokens=10, output_tokens=5)


class BookCatalog:
    """The part of a catalog that sessions read."""

    def __init__(self) -> None:
        self.agents: dict[tuple[UUID, int], AgentRecord] = {}
        self.environments: dict[UUID, EnvironmentRecord] = {}

    def put_agent(self, request: dict[str, Any], *, version: int = 1, archived: bool = False) -> None:
        body = agents.new_agent(request)
        assert not isinstance(body, Refused), body
        self.agents[AGENT_ID, version] = AgentRecord(
            id=AGENT_ID,
            workspace_id=WORKSPACE,
            version=version,
            latest_version=version,
            body=encode(body),
            created_at=AT,
            updated_at=AT,
            archived_at=AT if archived else None,
        )

    def put_environment(self, *, archived: bool = False) -> None:
        config = {"type": "cloud", "networking": {"type": "unrestricted"}}
        self.environments[ENVIRONMENT_ID] = EnvironmentRecord(
            id=ENVIRONMENT_ID,
            workspace_id=WORKSPACE,
            body=encode({"name": "e", "config": config}),
            created_at=AT,
            updated_at=AT,
            archived_at=AT if archived else None,
        )

    async def read_agent(self, workspace_id: UUID, agent_id: UUID, version: int | None = None) -> AgentRecord | None:
        versions = [v for i, v in self.agents if i == agent_id]
        if not versions:
            return None
        record = self.agents.get((agent_id, max(versions) if version is None else version))
        return record if record is not None and record.workspace_id == workspace_id else None

    async def read_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        record = self.environments.get(environment_id)
        return record if record is not None and record.workspace_id == workspace_id else None


class NamedModels:
    """A router that knows every model whose name starts with `test/`."""

    def check(self, model: str) -> None:
        if not model.startswith("test/"):
            raise ModelUnknown(f"No provider serves {model!r}: set one up.")


class Frames:
    """A stream's answer as it grows."""

    def __init__(self, *, broken: bool = False) -> None:
        self.headers: dict[str, str] | None = None
        self.data = b""
        self._broken = broken
        self._grown = asyncio.Event()
        self.begun = asyncio.Event()

    async def start(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.begun.set()

    async def write(self, data: bytes) -> None:
        if self._broken:
            raise ConnectionError("gone")
        self.data += data
        self._grown.set()

    async def closed(self) -> None:
        await asyncio.Event().wait()

    async def until(self, holds: Callable[["Frames"], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds(self):
                self._grown.clear()
                await self._grown.wait()

    def raw(self) -> list[dict[str, str]]:
        """The frames as field to value; comments are left out."""
        found: list[dict[str, str]] = []
        for block in self.data.decode().split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            if lines:
                found.append({name: value for name, _, value in (line.partition(": ") for line in lines)})
        return found

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(f["data"]) for f in self.raw()]

    def types(self) -> list[str]:
        return [e["type"] for e in self.events()]


class Stream:
    """An open stream and its task."""

    def __init__(self, frames: Frames, task: "asyncio.Task[Refused | None]") -> None:
        self.frames = frames
        self.task = task

    async def until(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        await self.frames.until(lambda f: f.types().count(kind) >= count)
        return self.frames.events()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Face:
    """One process without an engine."""

    def __init__(self) -> None:
        self.ledger = OracleLedger()
        self.catalog = BookCatalog()
        self.catalog.put_agent({"name": "helper", "model": "test/m"})
        self.catalog.put_environment()
        self.feeds = Feeds(self.ledger)
        self.ledger.on_commit = self.feeds.committed
        self.router = Router(ROUTES)
        self.services = Services(
            ledger=self.ledger,
            catalog=self.catalog,  # pyright: ignore[reportArgumentType]
            feeds=self.feeds,
            models=NamedModels(),  # pyright: ignore[reportArgumentType]
            environment=None,  # pyright: ignore[reportArgumentType]
            submissions=Submissions(),
        )

    async def close(self) -> None:
        await self.feeds.close()

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        workspace: UUID = WORKSPACE,
        submission: SubmissionKey | None = None,
    ) -> tuple[Route | StreamRoute, Request]:
        path, _, query = target.partition("?")
        found = self.router.find(method, path)
        assert isinstance(found, Found), f"{method} {path}"
        assert isinstance(found.route, (Route, StreamRoute))
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return found.route, Request(
            method=method,
            path=path,
            params=found.params,
            query=parse_qsl(query, keep_blank_values=True),
            headers=headers or {},
            body=raw,
            workspace_id=workspace,
            key_id=KEY,
            submission=submission,
            request_id="req_1",
        )

    async def call(self, method: str, target: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        route, request = self.request(method, target, body, **options)
        assert isinstance(route, Route)
        result = await route.handler(self.services, request)
        if isinstance(result, Refused):
            status, data, _ = to_wire_error(result, request.request_id)
            return status, json.loads(data)
        assert isinstance(result, Response)
        return result.status, json.loads(result.body)

    async def ok(self, method: str, target: str, body: Any = None, **options: Any) -> Any:
        status, value = await self.call(method, target, body, **options)
        assert status == 200, value
        return value

    async def refused(self, method: str, target: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """The error of a call that must be refused, with its status beside it."""
        status, value = await self.call(method, target, body, **options)
        assert status != 200, value
        return {"status": status, **value["error"]}

    async def open(self, target: str, *, broken: bool = False, **options: Any) -> Stream:
        """Open a stream and wait until its headers are out."""
        route, request = self.request("GET", target, **options)
        assert isinstance(route, StreamRoute)
        frames = Frames(broken=broken)
        task = asyncio.create_task(route.handler(self.services, request, frames))
        begun = asyncio.ensure_future(frames.begun.wait())
        await asyncio.wait({task, begun}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        return Stream(frames, task)

    # a session, step by step

    async def session(self, **fields: Any) -> str:
        """The id of a new session."""
        body = {"agent": AGENT + token(AGENT_ID), "environment_id": ENVIRONMENT + token(ENVIRONMENT_ID), **fields}
        return str((await self.ok("POST", "/v1/sessions", body))["id"])

    async def say(self, session: str, text: str) -> dict[str, Any]:
        """Send a message; its echo."""
        event = {"type": "user.message", "content": [{"type": "text", "text": text}]}
        return (await self.ok("POST", f"/v1/sessions/{session}/events", {"events": [event]}))["data"][0]

    async def advance(self, session: str, lease: Any = None, outcome: StepOutcome | None = None) -> Answered:
        session_id = from_wire_id(SESSION, session)
        assert session_id is not None
        return await self.ledger.advance(
            Advance(
                session_id=session_id,
                thread_id=primary_thread(session_id),
                worker_id=WORKER,
                command_id=uuid4(),
                lease=lease,
                outcome=outcome,
            )
        )

    async def begin(self, session: str) -> Perform:
        """Claim or resume the work of a session, up to its next call."""
        answered = await self.advance(session)
        assert isinstance(answered, Perform), answered
        return answered

    async def reply(
        self,
        session: str,
        performing: Perform,
        text: str | None = None,
        *,
        thinking: bool = False,
        calls: Sequence[CallPlan] = (),
        stop_reason: StopReason = "end_turn",
        stop_details: dict[str, Any] | None = None,
    ) -> Answered:
        """End the model step of a turn."""
        blocks: list[OutBlock] = []
        if thinking:
            blocks.append(OutBlock(index=0, kind="thinking", body=b"{}"))
        if text is not None:
            content = [{"type": "text", "text": text}]
            blocks.append(OutBlock(index=1, kind="message", body=encode({"content": content})))
        return await self.advance(
            session,
            performing.lease,
            ModelReplied(
                step_id=performing.steps[0].id,
                blocks=tuple(blocks),
                calls=tuple(calls),
                transcript=encode([{"type": "text", "text": text or "."}]),
                stop_reason="tool_use" if calls else stop_reason,
                stop_details=None if stop_details is None else encode(stop_details),
                usage=USAGE,
            ),
        )

    async def fail(self, session: str, performing: Perform, *, retryable: bool, code: str = "overloaded") -> Answered:
        """Let the model step of a turn fail."""
        return await self.advance(
            session,
            performing.lease,
            ModelErred(step_id=performing.steps[0].id, code=code, message="no", retryable=retryable),
        )

    async def tool(self, session: str, performing: Perform, text: str = "out", *, is_error: bool = False) -> Answered:
        """End the first tool step of what is performed."""
        body = encode({"content": [{"type": "text", "text": text}], "is_error": is_error})
        return await self.advance(
            session,
            performing.lease,
            ToolReturned(step_id=performing.steps[0].id, body=body, transcript=body, is_error=is_error),
        )

    async def turn(self, session: str, text: str, answer: str) -> None:
        """A whole plain turn."""
        await self.say(session, text)
        await self.reply(session, await self.begin(session), answer)

    async def events(self, session: str, query: str = "") -> list[dict[str, Any]]:
        return (await self.ok("GET", f"/v1/sessions/{session}/events{query}"))["data"]

    async def types(self, session: str) -> list[str]:
        return [e["type"] for e in await self.events(session)]


def call_plan(
    index: int, owner: str, name: str = "bash", arguments: dict[str, Any] | None = None, error: str = ""
) -> CallPlan:
    """A judged call."""
    policy = {"server": "always_allow", "ask": "always_ask"}.get(owner)
    return CallPlan(
        index=index,
        name=name,
        owner=owner,  # pyright: ignore[reportArgumentType]
        body=encode({"name": name, "input": arguments or {"command": "ls"}}),
        error=error,
        policy=policy,
    )


def rows_of(face: Face, session: str) -> list[SeenEvent]:
    """Every row of a session, as a reader meets it."""
    session_id = from_wire_id(SESSION, session)
    assert session_id is not None
    return [
        face.ledger._seen(e)  # pyright: ignore[reportPrivateUsage]
        for e in sorted(face.ledger.rows(Event, session_id), key=lambda e: e.seq)
    ]
