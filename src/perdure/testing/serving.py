"""A whole server in the caller's loop, with the scripted provider behind it and the official SDK in front.

Sessions are independent, so tests share one server: each session gets a model name of its own, and by that name its own
script at the provider.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from secrets import token_bytes
from typing import Any, Final, TypeAlias
from uuid import UUID

import httpx2

from perdure.bootstrap import Server, new_id, open_catalog, open_server
from perdure.core.auth import NewKey, make_key
from perdure.domain.errors import Refused
from perdure.settings import Settings, load
from perdure.testing.model_server import Failure, ModelServer, RecordedRequest, Reply
from perdure.testing.trail import Json, Trail, frames_of, merged, trail_of

DEADLINE_S: Final = 20.0
"""Everything here takes milliseconds; only a broken server meets this."""

READ_S: Final = 30.0
VERSION: Final = {"anthropic-version": "2026-10-21"}

Sdk: TypeAlias = Any
"""The SDK's client, asynchronous or not. It is imported when a server starts, so its types are not at hand here."""

Answer: TypeAlias = Reply | Failure
Holds: TypeAlias = Callable[[list[Json]], bool]

_script_numbers = count(1)


def message(text: str) -> Json:
    """A `user.message` to send."""
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


def result(action_id: str, text: str = "done", *, is_error: bool = False) -> Json:
    """A `user.custom_tool_result` to send."""
    content = [{"type": "text", "text": text}]
    return {
        "type": "user.custom_tool_result",
        "custom_tool_use_id": action_id,
        "content": content,
        "is_error": is_error,
    }


def confirm(action_id: str, *, deny: str | None = None) -> Json:
    """A `user.tool_confirmation` to send; with `deny` the reason of a refusal."""
    verdict = {"result": "allow"} if deny is None else {"result": "deny", "deny_message": deny}
    return {"type": "user.tool_confirmation", "tool_use_id": action_id, **verdict}


INTERRUPT: Final[Json] = {"type": "user.interrupt"}


class Script:
    """What the provider says to one model name."""

    def __init__(self) -> None:
        self.model = f"claude-script-{next(_script_numbers)}"
        self.requests: list[RecordedRequest] = []
        """Its calls, in order of arrival."""
        self._answers: deque[Answer] = deque()
        self._otherwise: Callable[[RecordedRequest], Answer] | None = None
        self._arrived = asyncio.Event()

    def enqueue(self, *answers: Answer) -> None:
        """Answers for the next calls, first in first out."""
        self._answers.extend(answers)

    def respond_with(self, otherwise: Callable[[RecordedRequest], Answer]) -> None:
        """Answer so whatever finds nothing enqueued."""
        self._otherwise = otherwise

    def answer(self, request: RecordedRequest) -> Answer:
        """The provider's side."""
        self.requests.append(request)
        self._arrived.set()
        if self._answers:
            return self._answers.popleft()
        if self._otherwise is not None:
            return self._otherwise(request)
        return Failure(400, "invalid_request_error", f"The script of {self.model} is used up.")

    async def wait_for_requests(self, wanted: int) -> list[RecordedRequest]:
        """The first `wanted` calls, once so many came."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.requests) < wanted:
                self._arrived.clear()
                await self._arrived.wait()
        return self.requests[:wanted]

    def messages(self, number: int = -1) -> list[Json]:
        """What a call sent as the model's history."""
        return self.requests[number].body["messages"]


class Told:
    """One session of a test: what its model says, what is sent to it, and what it shows."""

    def __init__(self, served: "Served", script: Script, created: Json) -> None:
        self.served = served
        self.script = script
        self.created = created
        self.id = str(created["id"])
        self.path = f"/v1/sessions/{self.id}"

    async def send(self, *events: Json) -> list[Json]:
        """Send events through the SDK; their echo."""
        sent = await self.served.client.beta.sessions.events.send(self.id, events=list(events))
        return [e.to_dict(mode="json") for e in sent.data]

    async def say(self, *texts: str) -> list[Json]:
        """Send messages in one request."""
        return await self.send(*(message(t) for t in texts))

    async def interrupt(self) -> Json:
        """Send an interrupt."""
        return (await self.send(INTERRUPT))[0]

    async def events(self, **query: Any) -> list[Json]:
        """The whole list, page by page, as it is on the wire."""
        found: list[Json] = []
        page: dict[str, str] = {}
        while True:
            answer = await self.served.ok("GET", f"{self.path}/events", params=query | page)
            found += answer["data"]
            if answer["next_page"] is None:
                return found
            page = {"page": str(answer["next_page"])}

    async def trail(self) -> Trail:
        """The whole list in short."""
        return trail_of(await self.events())

    async def status(self) -> str:
        """The status that a retrieve shows."""
        return str((await self.served.client.beta.sessions.retrieve(self.id)).status)

    async def until(self, holds: Holds) -> list[Json]:
        """The list once `holds` says yes of it: the stream is opened, the list read, and both merged by id."""
        async with asyncio.timeout(DEADLINE_S), self.stream() as response:
            events = await self.events()
            if holds(events):
                return events
            async for frame in frames_of(response):
                events = merged(events, [frame.data])
                if holds(events):
                    return await self.events()
        raise AssertionError(f"the stream of {self.id} ended before; its list is {await self.trail()}")

    async def until_idle(self, times: int = 1) -> list[Json]:
        """The list once it has so many `session.status_idle`, and ends with one or with a termination."""

        def holds(events: list[Json]) -> bool:
            kinds = [e["type"] for e in events]
            last = next((k for k in reversed(kinds) if str(k).startswith("session.status_")), None)
            ended = last == "session.status_terminated"
            return ended or (last == "session.status_idle" and kinds.count("session.status_idle") >= times)

        return await self.until(holds)

    async def turn(self, text: str, *answers: Answer) -> list[Json]:
        """A whole turn: what the model will say, a message, and the list once it is idle again."""
        idles = sum(e["type"] == "session.status_idle" for e in await self.events())
        self.script.enqueue(*answers)
        await self.say(text)
        return await self.until_idle(idles + 1)

    @asynccontextmanager
    async def stream(
        self, *, last_id: str | None = None, deltas: Sequence[str] = ()
    ) -> AsyncGenerator[httpx2.Response]:
        """The raw stream, from the moment its headers are here."""
        headers = {} if last_id is None else {"last-event-id": last_id}
        query = {"event_deltas[]": list(deltas)}
        async with self.served.http.stream(
            "GET", f"{self.path}/events/stream", headers=headers, params=query, timeout=READ_S
        ) as response:
            assert response.status_code == 200, await response.aread()
            yield response


class Served:
    """A running server, and what tests look at or change behind it."""

    def __init__(self, server: Server, models: ModelServer, settings: Settings) -> None:
        assert server.url is not None and server.api_key is not None
        self.server = server
        self.url = server.url
        self.api_key = server.api_key
        self.models = models
        self.settings = settings
        self.client: Sdk = self.sdk()
        self.http = httpx2.AsyncClient(base_url=self.url, headers=self.signed(), timeout=READ_S)
        self.agent_id = ""
        self.environment_id = ""
        self.made: list[Told] = []
        """Every session that `make_session` made."""
        self._scripts: dict[str, Script] = {}
        models.respond_with(self._answer)

    def _answer(self, request: RecordedRequest) -> Answer:
        script = self._scripts.get(str(request.body["model"]))
        if script is None:
            return Failure(404, "not_found_error", f"No script has the model {request.body['model']}.")
        return script.answer(request)

    def sdk(self, **options: Any) -> Sdk:
        """The official client, as its users make it."""
        options = {"api_key": self.api_key, "base_url": self.url, **options}
        return importlib.import_module("anthropic").AsyncAnthropic(**options)

    def sync_sdk(self, **options: Any) -> Sdk:
        """The official client without a loop; call it in a thread."""
        options = {"api_key": self.api_key, "base_url": self.url, **options}
        return importlib.import_module("anthropic").Anthropic(**options)

    def signed(self, key: str | None = None) -> dict[str, str]:
        """The headers of a plain request."""
        return {"authorization": f"Bearer {key or self.api_key}", **VERSION}

    async def call(self, method: str, target: str, **options: Any) -> httpx2.Response:
        """A plain request, sent once."""
        return await self.http.request(method, target, **options)

    async def ok(self, method: str, target: str, **options: Any) -> Any:
        """The body of a plain request that is answered with 200."""
        response = await self.call(method, target, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def prepare(self) -> None:
        """The agent and environment that sessions of the tests start from."""
        agent = await self.client.beta.agents.create(name="tested", model="claude-nobody")
        environment = await self.client.beta.environments.create(name="place")
        self.agent_id, self.environment_id = str(agent.id), str(environment.id)

    def script(self) -> Script:
        """A model name of its own, and what is said to it."""
        script = Script()
        self._scripts[script.model] = script
        return script

    async def make_session(
        self,
        *answers: Answer,
        tools: Sequence[Json] = (),
        system: str | None = None,
        script: Script | None = None,
        **fields: Any,
    ) -> Told:
        """A session with a script of its own, through the SDK."""
        script = script or self.script()
        script.enqueue(*answers)
        agent = {
            "type": "agent_with_overrides",
            "id": self.agent_id,
            "model": script.model,
            "system": system,
            "tools": list(tools),
        }
        created = await self.client.beta.sessions.create(agent=agent, environment_id=self.environment_id, **fields)
        told = Told(self, script, created.to_dict(mode="json"))
        self.made.append(told)
        return told

    async def add_key(self, workspace_id: UUID | None = None) -> tuple[NewKey, UUID]:
        """Another key, of the default workspace or a given one."""
        key, key_id = make_key(token_bytes(32)), new_id()
        async with open_catalog(self.settings) as catalog:
            workspaces = await catalog.read_workspaces()
            await catalog.create_key(key_id, workspace_id or workspaces[0].id, "added", key.digest, key.hint)
        return key, key_id

    async def add_workspace(self) -> tuple[NewKey, UUID]:
        """A key of a new workspace, and that workspace."""
        workspace_id = new_id()
        async with open_catalog(self.settings) as catalog:
            made = await catalog.create_workspace(workspace_id, f"other {workspace_id}")
            assert not isinstance(made, Refused), made
        key, _ = await self.add_key(workspace_id)
        return key, workspace_id

    async def revoke_key(self, key_id: UUID) -> None:
        """Revoke a key, as the operator's verb does."""
        async with open_catalog(self.settings) as catalog:
            await catalog.revoke_key(key_id)

    async def close(self) -> None:
        """Close the clients; the server ends with `serve`."""
        await self.client.close()
        await self.http.aclose()


@asynccontextmanager
async def serve(database_url: str, data: Path, **flags: Any) -> AsyncGenerator[Served]:
    """Start a server and its provider on free ports; both are gone when the block ends."""
    # Seconds of work, which must not fall into the loop that the server's leases live in.
    await asyncio.to_thread(importlib.import_module, "anthropic")
    models = await ModelServer.start()
    settings = load(
        {"data": data, "port": 0, "database_url": database_url, "anthropic_base_url": models.base_url, **flags},
        environ={},
    )
    try:
        async with open_server(settings, api=True, worker=True) as server:
            served = Served(server, models, settings)
            try:
                await served.prepare()
                yield served
            finally:
                await served.close()
    finally:
        await models.close()
