"""Every route under random input: never a 5xx, nothing stored by what is refused, and the server is well afterwards."""

import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.conftest import DATABASE
from tests.conformance.test_model_replies import PIXEL, system
from tests.conformance.test_tools import ASK_BASH, CUSTOM
from tests.conftest import connected, in_database

from perdure.http.claude.routes import ROUTES
from perdure.http.requests import AnyRoute, StreamRoute
from perdure.testing.model_server import Call, Reply, Text
from perdure.testing.serving import READ_S, Served, Told, confirm, result
from perdure.testing.trail import only

LONG = bool(os.environ.get("PERDURE_LONG"))
EXAMPLES = 400 if LONG else 40
"""For each route."""

FUZZ = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))

# Deleted sessions go whenever the server gets to it, so they count as gone.
COUNTS = """
with living as (select * from session where workspace_id = $1 and state not in ('deleting', 'deleted'))
select (select count(*) from living),
  (select max(updated_at)::text from living),
  (select count(*) from event e join living s on s.id = e.session_id),
  (select count(*) from agent where workspace_id = $1),
  (select count(*) from agent_version v join agent a on a.id = v.agent_id where a.workspace_id = $1),
  (select max(updated_at)::text from environment where workspace_id = $1),
  (select count(*) from environment where workspace_id = $1)
"""
BUSY = "select count(*) from session where workspace_id = $1 and status in ('running', 'rescheduling')"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "\x00", "a" * 300, "sevt_" + "0" * 26, "always_ask", "claude-x", "1e400"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
IDS = st.sampled_from(["%00", "..", "sesn_", "sesn_" + "z" * 26, "SESN_" + "0" * 26, "%2F", "é", "a" * 400, "%FF%FE"])
KEYS = st.sampled_from(
    [
        "limit",
        "page",
        "order",
        "types[]",
        "statuses[]",
        "created_at[gt]",
        "created_at[lte]",
        "agent_id",
        "agent_version",
        "version",
        "include_archived",
        "event_deltas[]",
        "beta",
        "deployment_id",
        "created_at[gt][x]",
        "[]",
    ]
)
QUERIES = st.lists(
    st.tuples(KEYS | st.text(max_size=8), st.text(max_size=12) | st.sampled_from(["1", "-1", "asc", "true", "NaN"])),
    max_size=4,
)


class World:
    """A workspace of its own, one of each thing in it, and what is stored of it."""

    def __init__(self, served: Served, http: httpx2.AsyncClient, database: Any, workspace_id: Any) -> None:
        self.served = served
        self.http = http
        self.database = database
        self.workspace_id = workspace_id
        self.ids: dict[str, str] = {}

    async def prepare(self) -> None:
        """One agent, one environment, one session."""
        agent = await self._post("/v1/agents", {"name": "n", "model": "claude-nobody"})
        place = await self._post("/v1/environments", {"name": "n"})
        session = await self._post("/v1/sessions", {"agent": agent["id"], "environment_id": place["id"]})
        (thread,) = (await self.http.get(f"/v1/sessions/{session['id']}/threads")).json()["data"]
        self.ids = {
            "agent_id": agent["id"],
            "environment_id": place["id"],
            "session_id": session["id"],
            "thread_id": thread["id"],
        }

    async def _post(self, path: str, body: Any) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def valid(self, route: AnyRoute) -> Any:
        """A body that the route would take."""
        match route.sdk_method:
            case "sessions.create":
                agent = {"type": "agent_with_overrides", "id": self.ids["agent_id"], "version": 1, "tools": [CUSTOM]}
                return {
                    "agent": agent,
                    "environment_id": self.ids["environment_id"],
                    "title": "t",
                    "metadata": {"k": "v"},
                    "initial_events": [],
                }
            case "sessions.update":
                return {"title": "t", "metadata": {"k": None, "j": "v"}, "agent": {"tools": [ASK_BASH]}}
            case "sessions.events.send":
                picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
                first = {"type": "user.message", "content": [{"type": "text", "text": "m"}, picture]}
                return {"events": [first, confirm("sevt_" + "0" * 26), result("sevt_" + "0" * 26), system("s")]}
            case "agents.create" | "agents.update":
                model = {"id": "claude-nobody", "effort": "low", "speed": "standard"}
                return {"name": "n", "model": model, "tools": [ASK_BASH, CUSTOM], "metadata": {"k": "v"}, "system": "s"}
            case "environments.create" | "environments.update":
                config = {"type": "cloud", "networking": {"type": "unrestricted"}, "packages": {"pip": []}}
                return {"name": "n", "config": config, "metadata": {"k": "v"}, "scope": "organization"}
            case _:
                return {}

    async def stored(self) -> Any:
        """What is there, once nothing is at work."""
        while await self.database.fetchval(BUSY, self.workspace_id):
            await self.http.get("/healthz")
        return tuple(await self.database.fetchrow(COUNTS, self.workspace_id))


@pytest.fixture(scope="module")
async def world(running: Served, template_url: str) -> AsyncGenerator[World]:
    """The workspace."""
    key, workspace_id = await running.add_workspace()
    async with (
        connected(in_database(template_url, DATABASE)) as database,
        httpx2.AsyncClient(base_url=running.url, headers=running.signed(key.secret), timeout=READ_S) as http,
    ):
        made = World(running, http, database, workspace_id)
        await made.prepare()
        yield made


def mutated(data: st.DataObject, value: Any) -> Any:
    """A valid body with one to three things wrong."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, value)
    return value


def _mutate(data: st.DataObject, value: Any) -> None:
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places or data.draw(st.booleans()):
            break
        place = data.draw(st.sampled_from(places))
        if not isinstance(value[place], (dict, list)):
            break
        value = value[place]
    change: Callable[[], None]
    if isinstance(value, dict):
        name = data.draw(st.sampled_from([*value, "surprise", "type"]))
        if name in value and data.draw(st.booleans()):
            change = lambda: value.pop(name)  # noqa: E731
        else:
            new = data.draw(VALUES)
            change = lambda: value.update({name: new})  # noqa: E731
    else:
        new = data.draw(VALUES)
        times = data.draw(st.sampled_from([1, 2, 51]))
        change = lambda: value.extend([*value, new] * times) if len(value) < 100 else None  # noqa: E731
    change()


def body_of(data: st.DataObject, world: World, route: AnyRoute) -> bytes:
    """Random bytes, random JSON, or a valid body gone wrong."""
    how = data.draw(st.sampled_from(["bytes", "json", "mutated", "mutated", "mutated"]))
    if how == "bytes":
        return data.draw(st.binary(max_size=60))
    value = data.draw(VALUES) if how == "json" else mutated(data, world.valid(route))
    return json.dumps(value).encode("utf-8", "surrogatepass")


@pytest.mark.rule("MA-A0.9", "MA-A0.13", "MA-A0.14", "MA-A0.6", "MA-A0.24", "MA-A1.22")
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.sdk_method)
@FUZZ
@given(data=st.data())
async def test_a_route_under_random_input(world: World, route: AnyRoute, data: st.DataObject) -> None:
    ids = dict(world.ids)
    for name in ids:
        if "{" + name in route.template and data.draw(st.integers(0, 5)) == 0:
            ids[name] = data.draw(IDS)
    headers = {}
    if isinstance(route, StreamRoute):
        headers["last-event-id"] = data.draw(st.sampled_from(["", "1.0", "9.9", "x", "1" * 40, "-1.0", "1.2.3"]))
    before = await world.stored()
    async with world.http.stream(
        route.method,
        route.template.format(**ids),
        params=data.draw(QUERIES),
        content=body_of(data, world, route) if route.method == "POST" else None,
        headers=headers,
    ) as response:
        status = response.status_code
        assert status < 500, (await response.aread())[:500]
        if status >= 400:
            error = json.loads(await response.aread())
            assert error["type"] == "error"
            assert error["error"]["message"]
            assert error["request_id"] == response.headers["request-id"]
    if status >= 400:
        assert await world.stored() == before
    elif route.sdk_method.endswith((".archive", ".delete")) or "%" in str(ids):
        await world.prepare()


async def test_the_server_is_well_after_the_fuzz(running: Served) -> None:
    assert (await running.call("GET", "/readyz")).json()["status"] == "ready"
    told = await running.make_session()
    await told.turn("hello", Reply(Text("well")))


TEXTS = st.text(min_size=1, max_size=40).filter(lambda t: "\x00" not in t)
TEXT_BLOCKS = st.builds(lambda t: {"type": "text", "text": t}, TEXTS)
IMAGES = st.sampled_from(
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    ]
)
DOCUMENTS = st.builds(
    lambda source, more: {"type": "document", "source": source, **more},
    st.builds(lambda t: {"type": "text", "media_type": "text/plain", "data": t}, TEXTS)
    | st.just({"type": "url", "url": "https://example.com/a.pdf"}),
    st.fixed_dictionaries({}, optional={"title": TEXTS | st.none(), "context": TEXTS | st.none()}),
)
RESULTS = st.builds(
    lambda texts, cited, title: {
        "type": "search_result",
        "source": "https://example.com",
        "title": title,
        "citations": {"enabled": cited},
        "content": texts,
    },
    st.lists(TEXT_BLOCKS, min_size=1, max_size=2),
    st.booleans(),
    TEXTS,
)
CONTENT = st.lists(TEXT_BLOCKS | IMAGES | DOCUMENTS, min_size=1, max_size=4)
RESULT_CONTENT = st.lists(TEXT_BLOCKS | IMAGES | DOCUMENTS | RESULTS, max_size=4)
REPLIES = st.lists(st.builds(Text, st.text(max_size=30)) | st.builds(lambda: Call("lookup", {"key": "x"})), max_size=3)
ROUNDS = st.fixed_dictionaries(
    {
        "content": CONTENT,
        "system": st.none() | TEXTS,
        "interrupt": st.sampled_from([False, False, False, True]),
        "reply": REPLIES,
        "result": RESULT_CONTENT,
        "is_error": st.booleans(),
    }
)


@pytest.mark.rule("MA-C5.1", "MA-B1.1", "MA-B1.7", "MA-B1.9")
@settings(max_examples=400 if LONG else 40, suppress_health_check=list(HealthCheck))
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=3))
async def test_whatever_is_accepted_the_provider_takes(running: Served, rounds: list[dict[str, Any]]) -> None:
    """Random content, random replies, interrupts in between: no request that the provider refuses, no session that dies of one."""
    first = len(running.models.requests)
    told = await running.make_session(tools=[CUSTOM])
    told.script.respond_with(lambda _: Reply(Text("end")))
    for one in rounds:
        told.script.enqueue(Reply(*one["reply"]))
        await _play(told, one)
    refused = [r.refused for r in running.models.requests[first:] if r.refused is not None]
    assert refused == []
    assert await told.status() in ("running", "idle")


async def _play(told: Told, one: dict[str, Any]) -> None:
    """Send a message, and answer what it leads to. What may not be sent (blank text) is sent plainly instead."""
    events: list[Any] = [{"type": "user.message", "content": one["content"]}]
    if one["system"] is not None:
        events.append(system(one["system"]))
    if not await _sent(told, events):
        await told.say("plain")
    if one["interrupt"]:
        await told.interrupt()
    while True:
        listed = await told.until(_rests)
        stop = only(listed, "session.status_idle")[-1]["stop_reason"]
        if stop["type"] != "requires_action":
            return
        given = {"content": one["result"], "is_error": one["is_error"]}
        if not await _sent(told, [result(i) | given for i in stop["event_ids"]]):
            await told.send(*(result(i) for i in stop["event_ids"]))


async def _sent(told: Told, events: list[Any]) -> bool:
    response = await told.served.call("POST", f"{told.path}/events", json={"events": events})
    assert response.status_code in (200, 400)
    return response.status_code == 200


def _rests(events: list[Any]) -> bool:
    last = next(e["type"] for e in reversed(events) if e["type"].startswith("session.status_"))
    return last in ("session.status_idle", "session.status_terminated")
