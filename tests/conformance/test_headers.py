"""Every request: who asks, which generation of headers, the envelope of errors, and what is not built."""

import asyncio
import json
from typing import Any

import anthropic
import pytest

from perdure.http.claude.not_built import NOT_BUILT
from perdure.http.claude.routes import ROUTES
from perdure.http.requests import StreamRoute
from perdure.testing.model_server import Reply, Text
from perdure.testing.serving import Served, message

OLD = {"anthropic-version": "2023-06-01", "anthropic-beta": "managed-agents-2026-04-01"}
NEW = {"anthropic-version": "2026-10-21", "anthropic-beta": "managed-agents-2026-04-01,other-2026-01-01"}


def bare(served: Served) -> Any:
    """A client without headers of its own."""
    import httpx2

    return httpx2.AsyncClient(base_url=served.url, timeout=20)


@pytest.mark.rule("MA-A0.1", "MA-A0.4", "MA-A0.26", "MA-A0.27", "MA-A0.5")
@pytest.mark.parametrize("era", ["old", "new", "old and prefixed"])
async def test_both_generations_of_headers_go_through_a_whole_turn(served: Served, era: str) -> None:
    auth = {"authorization": f"Bearer {served.api_key}"} if era == "new" else {"x-api-key": served.api_key}
    headers = auth | (NEW if era == "new" else OLD)
    prefix = "/claude" if "prefixed" in era else ""
    query = {} if era == "new" else {"beta": "true"}
    script = served.script()
    script.enqueue(Reply(Text("hello")))
    async with bare(served) as client:

        async def post(path: str, body: Any) -> Any:
            response = await client.post(prefix + path, json=body, headers=headers, params=query)
            assert response.status_code == 200, response.text
            assert response.headers["request-id"] == response.headers["x-request-id"]
            return response.json()

        agent = await post("/v1/agents", {"name": "n", "model": script.model})
        place = await post("/v1/environments", {"name": "n"})
        session = await post(
            "/v1/sessions",
            {"agent": agent["id"], "environment_id": place["id"], "initial_events": [message("hi")]},
        )
        path = f"{prefix}/v1/sessions/{session['id']}"
        async with client.stream("GET", f"{path}/events/stream", headers=headers, params=query) as stream:
            listed = (await client.get(f"{path}/events", headers=headers, params=query)).json()["data"]
            if listed[-1]["type"] != "session.status_idle":
                async for line in stream.aiter_lines():
                    if line == "event: session.status_idle":
                        break
        listed = (await client.get(f"{path}/events", headers=headers, params=query)).json()["data"]
    assert listed[-1]["type"] == "session.status_idle"


@pytest.mark.rule("MA-A0.2", "MA-A0.3", "MA-A0.6", "MA-A0.21", "MA-A0.26", "MA-E2.2")
async def test_who_is_refused_and_how(served: Served) -> None:
    secret, wrong = served.api_key, "pk_" + "x" * 43
    own = {"authorization": f"Bearer {secret}"}
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"authorization": f"Bearer {wrong}"}, 401),
        ({"x-api-key": wrong}, 401),
        ({"x-api-key": "sk-ant-something"}, 401),
        ({"authorization": f"Basic {secret}"}, 401),
        ({**own, "x-api-key": wrong}, 401),
        ({**own, "x-api-key": secret}, 200),
        ({"x-api-key": secret}, 200),
        (own, 200),
        ({**own, "anthropic-workspace-id": "wrkspc_" + "0" * 26}, 403),
    ]
    async with bare(served) as client:
        for headers, status in cases:
            response = await client.get("/v1/sessions", headers=OLD | headers, params={"limit": 1})
            assert response.status_code == status, (headers, response.text)
            if status != 200:
                _check_envelope(response)
                kind = "authentication_error" if status == 401 else "permission_error"
                assert response.json()["error"]["type"] == kind
                assert wrong not in response.text
                assert secret not in response.text
        for headers in ({}, {"openai-beta": "agents=v1", **OLD}):
            ambiguous = await client.get("/v1/agents", headers=own | headers)
            assert ambiguous.status_code == 400
            assert "anthropic-version" in ambiguous.text
        assert (await client.get("/claude/v1/agents", headers=own)).status_code == 200


def _check_envelope(response: Any) -> None:
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) <= {"type", "message", "details"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.rule("MA-A0.16", "MA-A0.8")
@pytest.mark.parametrize(("method", "template", "name"), NOT_BUILT)
async def test_what_is_not_built_says_so_by_name(served: Served, method: str, template: str, name: str) -> None:
    path = "/".join("x" if part.startswith("{") else part for part in template.split("/"))
    response = await served.call(method, path, json={} if method != "GET" else None)
    assert response.status_code == 501
    assert response.headers["x-should-retry"] == "false"
    _check_envelope(response)
    assert name in response.text


@pytest.mark.rule("MA-A0.17")
async def test_unknown_paths_and_methods(served: Served) -> None:
    for path in ("/v1", "/v1/messages", "/v1/models", "/v1/sessionz", "/v1/sessions/a/b/c/d", "/", "/claude"):
        response = await served.call("GET", path)
        assert response.status_code == 404, path
        _check_envelope(response)
    for method, path in (("PUT", "/v1/sessions"), ("PATCH", "/v1/agents/x"), ("DELETE", "/v1/agents/x")):
        response = await served.call(method, path)
        assert response.status_code == 405
        assert response.headers["allow"]
        _check_envelope(response)


@pytest.mark.rule("MA-A0.13", "MA-A0.14", "MA-A0.9")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"1e999",
        b"\xff\xfe",
        b'{"name": "\xc3\x28"}',
        b'{"name": "a\\u0000b", "model": "m"}',
        b'{"name": "\\ud800", "model": "m"}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"name": "n", "name": "m", "model": 1}',
        b'{"agent": NaN}',
    ],
)
async def test_bodies_that_are_no_request(served: Served, body: bytes) -> None:
    told = await served.make_session()
    for route in ROUTES:
        if route.method != "POST" or route.template.endswith("/archive"):
            continue
        path = route.template.format(
            session_id=told.id, agent_id=served.agent_id, environment_id=served.environment_id, thread_id="x"
        )
        response = await served.call("POST", path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, (path, response.text)
        _check_envelope(response)
    assert await told.events() == []


@pytest.mark.rule("MA-A0.12", "MA-F1")
async def test_a_body_over_the_limit_is_413_announced_or_not(served: Served) -> None:
    told = await served.make_session()
    over = b'{"events": "' + b"x" * (32 * 1024 * 1024) + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(over), 1 << 20):
            yield over[start : start + (1 << 20)]

    for content in (over, pieces()):
        response = await served.call("POST", f"{told.path}/events", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "request_too_large"
    with pytest.raises(anthropic.APIStatusError) as caught:
        await told.say("x" * (32 * 1024 * 1024))
    assert caught.value.status_code == 413
    assert await told.events() == []


@pytest.mark.rule("MA-A0.20", "MA-A0.22", "MA-A0.19")
async def test_ids_of_another_workspace_answer_like_missing_ones_on_every_route(served: Served) -> None:
    key, _ = await served.add_workspace()
    told = await served.make_session(Reply(Text("x")))
    await told.turn("m")
    (thread,) = (await served.ok("GET", f"{told.path}/threads"))["data"]
    there = {
        "session_id": told.id,
        "thread_id": thread["id"],
        "agent_id": served.agent_id,
        "environment_id": served.environment_id,
    }
    missing = {k: v.split("_")[0] + "_" + "0" * 26 for k, v in there.items()}
    bodies = {
        "/v1/sessions/{session_id}/events": {"events": [message("m")]},
        "/v1/sessions/{session_id}": {"title": "x"},
        "/v1/agents/{agent_id}": {"name": "x"},
        "/v1/environments/{environment_id}": {"name": "x"},
    }
    before = (await served.ok("GET", told.path)) | {"stats": None}
    seen = 0
    for route in ROUTES:
        if "{" not in route.template:
            continue
        body = bodies.get(route.template, {}) if route.method == "POST" else None

        async def ask(ids: dict[str, str], route: Any = route, body: Any = body) -> tuple[int, Any]:
            response = await served.call(
                route.method, route.template.format(**ids), json=body, headers=served.signed(key.secret)
            )
            return response.status_code, {k: v for k, v in response.json().items() if k != "request_id"}

        foreign = await ask(there)
        assert foreign[0] == 404, (route.template, foreign)
        assert foreign == await ask(missing)
        assert json.dumps(foreign[1]).count("0" * 26) == 0
        nonsense = await ask(dict.fromkeys(there, "nonsense"))
        assert nonsense == foreign
        seen += isinstance(route, StreamRoute)
    assert seen == 2
    assert (await served.ok("GET", told.path)) | {"stats": None} == before
    for path in ("/v1/sessions", "/v1/agents", "/v1/environments"):
        response = await served.call("GET", path, headers=served.signed(key.secret))
        assert response.json()["data"] == []
    theirs = {"agent": served.agent_id, "environment_id": served.environment_id}
    response = await served.call("POST", "/v1/sessions", json=theirs, headers=served.signed(key.secret))
    assert response.status_code == 404


@pytest.mark.rule("MA-A0.5")
async def test_request_ids_differ(served: Served) -> None:
    answers = await asyncio.gather(*(served.call("GET", "/v1/sessions", params={"limit": 1}) for _ in range(8)))
    assert len({a.headers["request-id"] for a in answers}) == 8
