"""Keys of requests and keys of tenants: one request once, and nobody reaches into another's workspace."""

import asyncio
from collections.abc import AsyncGenerator
from hashlib import sha256
from uuid import uuid4

import httpx2
import pytest
from tests.cases.driving import INTERRUPT, VERSION, Driven, Json, Site, message, open_peer, result_of

from perdure import bootstrap, settings
from perdure.core.auth import make_key
from perdure.http.claude.routes import ROUTES
from perdure.http.claude.wire import AGENT, ENVIRONMENT, SESSION, THREAD, to_wire_id
from perdure.testing.model_server import Reply, Text

BODIES: dict[str, list[Json]] = {
    "agents.update": [{"name": "Taken"}],
    "environments.update": [{"name": "taken"}],
    "sessions.update": [{"title": "Taken"}],
    "sessions.events.send": [{"events": [message("injected")]}, {"events": [INTERRUPT]}],
}
"""What is sent to the routes that want a body; the others get none."""


async def admitted(session: Driven) -> list[str]:
    """The ids of the messages of a session."""
    return [e["id"] for e in await session.listed("user.message")]


@pytest.mark.case("B045")
async def test_one_key_fifty_requests_two_processes(site: Site) -> None:
    """Elsewhere equal requests at the same time ran twice or failed; here all fifty get the one answer, also after a restart."""
    session = await site.open()
    key = {"Idempotency-Key": "fifty"}
    site.script(Reply(Text("once")))
    async with open_peer(site) as peer:
        posts = [session.post(message("once"), http=(site.http, peer.http)[n % 2], headers=key) for n in range(50)]
        answers = await asyncio.gather(*posts)
    assert {a.status_code for a in answers} == {200}
    assert [e["id"] for a in answers for e in a.json()["data"]] == await admitted(session) * 50
    assert await session.idle(1) == "end_turn"
    await session.check(idles=1)
    assert len(site.requests) == 1
    async with open_peer(site) as restarted:
        again = await session.post(message("once"), http=restarted.http, headers=key)
        assert [e["id"] for e in again.json()["data"]] == await admitted(session)
        other = await session.post(message("another"), http=restarted.http, headers=key)
        assert other.json()["error"]["details"]["error_code"] == "idempotency_key_reused"
    await session.go_on(idles=2)


@pytest.mark.case("B045")
async def test_one_key_two_bodies(site: Site) -> None:
    """Exactly one of two bodies is admitted under a key; the other is refused, and no request fails."""
    session = await site.open()
    site.script(Reply(Text("once")))
    async with open_peer(site) as peer:
        posts = [
            session.post(
                message(f"body {n // 2 % 2}"), http=(site.http, peer.http)[n % 2], headers={"Idempotency-Key": "two"}
            )
            for n in range(50)
        ]
        answers = await asyncio.gather(*posts)
    accepted = [n // 2 % 2 for n, a in enumerate(answers) if a.status_code == 200]
    assert len(set(accepted)) == 1
    assert len(accepted) in (24, 26)
    refused = [a for a in answers if a.status_code != 200]
    assert {a.status_code for a in refused} == {400}
    assert {a.json()["error"]["details"]["error_code"] for a in refused} == {"idempotency_key_reused"}
    assert await session.idle(1) == "end_turn"
    [kept] = await session.listed("user.message")
    assert kept["content"][0]["text"] == f"body {accepted[0]}"
    await session.go_on(idles=2)


@pytest.mark.case("B045")
async def test_sessions_under_one_key(site: Site) -> None:
    """The same for sessions: fifty creates with one key are one session."""
    session = await site.open()
    agent = (await session.retrieve())["agent"]["id"]
    body = {"agent": agent, "environment_id": site.environment_id}
    async with open_peer(site) as peer:
        posts = [
            (site.http, peer.http)[n % 2].post("/v1/sessions", json=body, headers={"Idempotency-Key": "create"})
            for n in range(50)
        ]
        answers = await asyncio.gather(*posts)
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["id"] for a in answers}) == 1
    listed = (await site.http.get("/v1/sessions", params={"agent_id": agent})).json()["data"]
    assert len(listed) == 2
    await session.go_on(idles=1)


@pytest.mark.case("B045")
@pytest.mark.parametrize(
    ("key", "status"),
    [(b"k" * 257, 400), (b"", 400), ("😀".encode(), 200), ("😀".encode() * 64, 200), ("😀".encode() * 64 + b"k", 400)],
    ids=["257 bytes", "empty", "emoji", "256 bytes of emoji", "257 bytes of emoji"],
)
async def test_the_length_of_a_key(site: Site, key: bytes, status: int) -> None:
    """A key has 1 to 256 bytes, whatever they are."""
    session = await site.open()
    headers = [(b"idempotency-key", key)]
    answered = await site.http.post(session.path + "/events", json={"events": [INTERRUPT]}, headers=headers)
    assert answered.status_code == status, answered.text
    if status == 400:
        assert "Idempotency-Key" in answered.json()["error"]["message"]
        assert await session.listed() == []
    else:
        again = await site.http.post(session.path + "/events", json={"events": [INTERRUPT]}, headers=headers)
        assert again.json() == answered.json()
        assert len(await session.listed()) == 1
    await session.go_on(idles=1)


@pytest.fixture(scope="module")
async def stranger(module_site: Site) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client with the key of another workspace."""
    given = settings.load({"data": module_site.data, "database_url": module_site.server.database_url}, {})
    key, workspace_id = make_key(sha256(b"stranger").digest()), uuid4()
    async with bootstrap.open_catalog(given) as catalog:
        await catalog.create_workspace(workspace_id, "strangers")
        await catalog.create_key(uuid4(), workspace_id, "stranger", key.digest, key.hint)
    headers = {"x-api-key": key.secret, **VERSION}
    async with httpx2.AsyncClient(base_url=module_site.url, headers=headers, timeout=15) as http:
        yield http


def without_id(answered: httpx2.Response) -> Json:
    """The body of an answer apart from the id of its request."""
    return {k: v for k, v in answered.json().items() if k != "request_id"}


async def lived_in(site: Site) -> tuple[Driven, dict[str, str]]:
    """A session of tenant A with some history, and the ids that name what belongs to it."""
    session = await site.open()
    site.script(Reply(Text("a secret")))
    await session.send(message("tell me"))
    assert await session.idle(1) == "end_turn"
    agent = (await session.retrieve())["agent"]["id"]
    thread = session.seen("session.thread_status_running")[0]["session_thread_id"]
    ids = {"agent_id": agent, "environment_id": site.environment_id, "session_id": session.id, "thread_id": thread}
    return session, ids


@pytest.mark.case("B051")
async def test_every_route_with_the_ids_of_another_tenant(site: Site, stranger: httpx2.AsyncClient) -> None:
    """Elsewhere routes only asked whether the caller is known; here each answers another tenant's ids like missing ones."""
    session, ids = await lived_in(site)
    kinds = {"agent_id": AGENT, "environment_id": ENVIRONMENT, "session_id": SESSION, "thread_id": THREAD}
    missing = {name: to_wire_id(kind, uuid4()) for name, kind in kinds.items()}
    before = await session.listed()
    state = await session.retrieve()
    frames = len(session.frames)
    tried = 0
    for route in (r for r in ROUTES if "{" in r.template):
        for body in BODIES.get(route.sdk_method, [{}]):
            content = body or None
            found = await stranger.request(route.method, route.template.format(**ids), json=content)
            absent = await stranger.request(route.method, route.template.format(**missing), json=content)
            assert found.status_code == 404, (route.sdk_method, found.text)
            assert (absent.status_code, without_id(absent)) == (404, without_id(found)), route.sdk_method
            tried += 1
    assert tried == sum("{" in r.template for r in ROUTES) + 1
    answer = {"events": [result_of(before[0]["id"], "injected")]}
    assert (await stranger.post(session.path + "/events", json=answer)).status_code == 404
    assert await session.listed() == before
    assert len(session.frames) == frames
    # Its age goes on.
    assert {**await session.retrieve(), "stats": None} == {**state, "stats": None}
    await session.go_on(idles=2)


@pytest.mark.case("B051")
async def test_ids_of_another_tenant_inside_a_request(site: Site, stranger: httpx2.AsyncClient) -> None:
    """A session can't be made of another tenant's agent or environment, nor can another's thread be named from one's own session."""
    session, ids = await lived_in(site)
    own_agent = (await stranger.post("/v1/agents", json={"name": "Own", "model": "claude-opus-5"})).json()["id"]
    own_environment = (await stranger.post("/v1/environments", json={"name": "own"})).json()["id"]
    for agent, environment in ((ids["agent_id"], own_environment), (own_agent, ids["environment_id"])):
        answered = await stranger.post("/v1/sessions", json={"agent": agent, "environment_id": environment})
        assert answered.status_code in (400, 404), answered.text
        absent = await stranger.post(
            "/v1/sessions",
            json={
                "agent": to_wire_id(AGENT, uuid4()) if agent == ids["agent_id"] else agent,
                "environment_id": to_wire_id(ENVIRONMENT, uuid4()) if agent == own_agent else environment,
            },
        )
        assert (absent.status_code, without_id(absent)) == (answered.status_code, without_id(answered))
    made = (await stranger.post("/v1/sessions", json={"agent": own_agent, "environment_id": own_environment})).json()
    own = f"/v1/sessions/{made['id']}"
    assert (await stranger.get(f"{own}/threads/{ids['thread_id']}")).status_code == 404
    aimed = {"type": "user.interrupt", "session_thread_id": ids["thread_id"]}
    assert (await stranger.post(f"{own}/events", json={"events": [aimed]})).status_code == 400
    for path in ("/v1/sessions", "/v1/agents", "/v1/environments"):
        listed = {row["id"] for row in (await stranger.get(path)).json()["data"]}
        assert listed.isdisjoint({*ids.values()})
    await session.go_on(idles=2)


@pytest.mark.case("B051")
async def test_cursors_and_request_keys_of_another_tenant(site: Site, stranger: httpx2.AsyncClient) -> None:
    """A cursor holds in its workspace alone, and another tenant's Idempotency-Key names a new request."""
    session, _ = await lived_in(site)
    await site.open()
    for path in ("/v1/sessions", "/v1/agents"):
        cursor = (await site.http.get(path, params={"limit": 1})).json()["next_page"]
        assert cursor is not None
        answered = await stranger.get(path, params={"limit": 1, "page": cursor})
        assert answered.status_code == 400
    key = {"Idempotency-Key": "the same"}
    environment = (await stranger.post("/v1/environments", json={"name": "keys"})).json()["id"]
    agent = (await stranger.post("/v1/agents", json={"name": "Keys", "model": "claude-opus-5"})).json()["id"]
    first = await site.http.post(session.path + "/events", json={"events": [INTERRUPT]}, headers=key)
    assert first.status_code == 200
    stolen = await stranger.post(session.path + "/events", json={"events": [INTERRUPT]}, headers=key)
    assert stolen.status_code == 404
    theirs = await stranger.post("/v1/sessions", json={"agent": agent, "environment_id": environment}, headers=key)
    assert theirs.status_code == 200
    own = await site.http.post("/v1/sessions", json={"agent": agent, "environment_id": environment}, headers=key)
    assert own.status_code in (400, 404)
    assert len(await session.listed("user.interrupt")) == 1
    await session.go_on(idles=2)
