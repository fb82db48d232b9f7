"""Submit once: answers that got lost on the way, keys, and requests that are meant twice."""

import asyncio
from typing import Any
from uuid import UUID

import anthropic
import httpx2
import pytest
from tests.conformance.test_tools import CUSTOM, CUSTOM_USE

from perdure.domain.errors import Unavailable
from perdure.postgres.ledger import PostgresLedger
from perdure.testing.model_server import Call, Reply, Text
from perdure.testing.proxy import Proxy
from perdure.testing.serving import READ_S, Served, message, result
from perdure.testing.trail import only, trail_of


@pytest.mark.rule("MA-E1.1", "MA-C2.1")
async def test_a_send_whose_answer_was_lost_is_admitted_once(served: Served) -> None:
    async with Proxy(served.url) as proxy:
        client = served.sdk(base_url=proxy.url)
        told = await served.make_session()
        told.script.respond_with(lambda _: Reply(Text("r")))
        for number in range(3):
            proxy.lose_answer()
            sent = await client.beta.sessions.events.send(told.id, events=[message(f"m{number}"), message("also")])
            assert proxy.lost.is_set()
            listed = await told.until_idle(number + 1)
            users = only(listed, "user.message")
            assert len(users) == 2 * (number + 1)
            assert [e.id for e in sent.data] == [e["id"] for e in users[-2:]]
        await client.close()


@pytest.mark.rule("MA-E1.1")
async def test_a_session_whose_answer_was_lost_is_made_once(served: Served) -> None:
    async with Proxy(served.url) as proxy:
        client = served.sdk(base_url=proxy.url)
        script = served.script()
        script.respond_with(lambda _: Reply(Text("r")))
        agent = await served.client.beta.agents.create(name="once", model=script.model)
        proxy.lose_answer()
        created = await client.beta.sessions.create(
            agent=agent.id, environment_id=served.environment_id, initial_events=[message("m")]
        )
        assert proxy.lost.is_set()
        assert [s.id async for s in served.client.beta.sessions.list(agent_id=agent.id)] == [created.id]
        await script.wait_for_requests(1)
        proxy.lose_answer()
        for _ in range(50):
            if (await served.client.beta.sessions.retrieve(created.id)).status == "idle":
                break
        deleted = await client.beta.sessions.delete(created.id)
        assert deleted.type == "session_deleted"
        await client.close()


@pytest.mark.rule("MA-E1.1")
async def test_two_clients_that_lost_the_answers_to_equal_creations_get_a_session_each(served: Served) -> None:
    body = {"agent": served.agent_id, "environment_id": served.environment_id, "title": "equal"}

    async def create(retry_count: int) -> str:
        """On a connection of its own, which nobody uses again."""
        headers = served.signed() | {"x-stainless-retry-count": str(retry_count)}
        async with httpx2.AsyncClient(base_url=served.url, timeout=READ_S) as http:
            answer = await http.post("/v1/sessions", json=body, headers=headers)
        assert answer.status_code == 200
        return str(answer.json()["id"])

    first, second = await create(0), await create(0)
    assert first != second
    retried = [await create(1), await create(1), await create(1)]
    assert retried[0] == second, "the record names the last session made"
    assert len({first, *retried}) == 4, "no session has two owners"
    assert await create(2) == retried[2]


@pytest.mark.rule("MA-E1.1", "MA-E1.7")
async def test_a_creation_that_was_made_and_answered_503_is_not_made_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal one was made and answered before: what is known of that answer says nothing of this one's."""
    agent = await served.client.beta.agents.create(name="made and not shown", model=served.script().model)

    async def create() -> str:
        made = await served.client.beta.sessions.create(agent=agent.id, environment_id=served.environment_id)
        return str(made.id)

    first = await create()
    read_session, failures = PostgresLedger.read_session, [Unavailable()]

    async def fail_once(self: PostgresLedger, workspace_id: UUID, session_id: UUID) -> Any:
        if failures:
            raise failures.pop()
        return await read_session(self, workspace_id, session_id)

    monkeypatch.setattr(PostgresLedger, "read_session", fail_once)
    second = await create()
    assert failures == [], "it was refused once after its commit, and the SDK came again"
    listed = [s.id async for s in served.client.beta.sessions.list(agent_id=agent.id)]
    assert sorted(listed) == sorted({first, second}) and len(listed) == 2


@pytest.mark.rule("MA-E1.1", "MA-C7.4")
async def test_an_answer_to_an_action_that_got_lost_is_not_already_resolved(served: Served) -> None:
    async with Proxy(served.url) as proxy:
        client = served.sdk(base_url=proxy.url)
        told = await served.make_session(Reply(Call("lookup")), Reply(Text("on")), tools=[CUSTOM])
        await told.say("go")
        (use,) = only(await told.until_idle(), CUSTOM_USE)
        proxy.lose_answer()
        sent = await client.beta.sessions.events.send(told.id, events=[result(use["id"])])
        listed = await told.until_idle(2)
        assert [e["id"] for e in only(listed, "user.custom_tool_result")] == [sent.data[0].id]
        await client.close()


@pytest.mark.rule("MA-E1.2")
async def test_equal_requests_on_purpose_are_both_admitted(served: Served) -> None:
    told = await served.make_session()
    told.script.respond_with(lambda _: Reply(Text("r")))
    first = await told.say("same")
    second, third = await asyncio.gather(told.say("same"), told.say("same"))
    listed = await told.until(lambda e: len(only(e, "agent.message")) == 3)
    ids = {e["id"] for e in only(listed, "user.message")}
    assert ids == {first[0]["id"], second[0]["id"], third[0]["id"]}
    assert len(ids) == 3


def _post(served: Served, path: str, body: Any, **headers: str) -> Any:
    return served.call("POST", path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.rule("MA-E1.4", "MA-E1.3", "MA-E1.6")
async def test_an_idempotency_key_admits_once(served: Served) -> None:
    told = await served.make_session()
    told.script.respond_with(lambda _: Reply(Text("r")))
    path, body = f"{told.path}/events", {"events": [message("keyed")]}
    answers = await asyncio.gather(*(_post(served, path, body, idempotency_key="k1") for _ in range(5)))
    bodies = [a.json() for a in answers]
    assert {a.status_code for a in answers} == {200}
    assert len({b["data"][0]["id"] for b in bodies}) == 1
    other = await _post(served, path, {"events": [message("other")]}, idempotency_key="k1")
    assert other.status_code == 400
    assert other.json()["error"]["details"]["error_code"] == "idempotency_key_reused"
    assert other.headers["x-should-retry"] == "false"
    second, _ = await served.add_key()
    theirs = await served.call(
        "POST", path, json=body, headers={**served.signed(second.secret), "idempotency-key": "k1"}
    )
    assert theirs.json()["data"][0]["id"] != bodies[0]["data"][0]["id"]
    listed = await told.until(lambda e: len(only(e, "agent.message")) == 2)
    assert len(only(listed, "user.message")) == 2
    for bad in ("", "k" * 257):
        assert (await _post(served, path, body, idempotency_key=bad)).status_code == 400


@pytest.mark.rule("MA-E1.5", "MA-E1.4")
async def test_the_first_answer_comes_back_even_after_the_session_was_archived(served: Served) -> None:
    told = await served.make_session()
    told.script.respond_with(lambda _: Reply(Text("r")))
    path, body = f"{told.path}/events", {"events": [message("m")]}
    first = (await _post(served, path, body, idempotency_key="archived")).json()
    await told.until_idle()
    await served.client.beta.sessions.archive(told.id)
    again = await _post(served, path, body, idempotency_key="archived")
    assert again.status_code == 200
    assert [e["id"] for e in again.json()["data"]] == [e["id"] for e in first["data"]]
    fresh = await _post(served, path, body)
    assert fresh.status_code == 400


@pytest.mark.rule("MA-E1.5", "MA-E1.4")
async def test_a_creation_is_answered_again_though_its_agent_is_archived_and_its_environment_gone(
    served: Served,
) -> None:
    agent = await served.client.beta.agents.create(name="once", model=served.script().model)
    environment = await served.client.beta.environments.create(name="once")
    body = {"agent": agent.id, "environment_id": environment.id}
    first = await _post(served, "/v1/sessions", body, idempotency_key="made")
    await served.client.beta.agents.archive(agent.id)
    await served.client.beta.environments.archive(environment.id)
    again = await _post(served, "/v1/sessions", body, idempotency_key="made")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    fresh = await _post(served, "/v1/sessions", body, idempotency_key="fresh")
    assert fresh.status_code == 400
    assert fresh.json()["error"]["message"].startswith("agent: the agent is archived")
    assert [s.id async for s in served.client.beta.sessions.list(agent_id=agent.id)] == [first.json()["id"]]


@pytest.mark.rule("MA-E1.4")
async def test_a_refused_request_leaves_its_key_free(served: Served) -> None:
    told = await served.make_session(Reply(Text("r")))
    path = f"{told.path}/events"
    assert (await _post(served, path, {"events": []}, idempotency_key="free")).status_code == 400
    assert (await _post(served, path, {"events": [message("m")]}, idempotency_key="free")).status_code == 200
    await told.until_idle()


@pytest.mark.rule("MA-A0.8", "MA-A0.7")
async def test_a_conflict_is_sent_once_and_not_three_times(served: Served) -> None:
    async with Proxy(served.url) as proxy:
        client = served.sdk(base_url=proxy.url)
        told = await served.make_session()
        await served.client.beta.sessions.archive(told.id)
        requests = len(served.models.requests)
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.sessions.events.send(told.id, events=[message("m")])
        assert caught.value.request.headers["x-stainless-retry-count"] == "0"
        assert proxy.connections == 1
        assert len(served.models.requests) == requests
        assert trail_of(await told.events())[-1].type == "session.status_terminated"
        await client.close()


@pytest.mark.rule("MA-E1.4")
async def test_a_key_is_not_read_where_nothing_is_submitted_once(served: Served) -> None:
    agents = [
        (await _post(served, "/v1/agents", {"name": "n", "model": "claude-a"}, idempotency_key="k")) for _ in range(2)
    ]
    assert [a.status_code for a in agents] == [200, 200]
    assert agents[0].json()["id"] != agents[1].json()["id"]
    told = await served.make_session()
    for title in ("one", "two"):
        assert (await _post(served, told.path, {"title": title}, idempotency_key="k")).json()["title"] == title
