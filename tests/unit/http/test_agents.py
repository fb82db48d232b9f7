"""Agents and their versions, through the real SDK over a socket."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import anthropic
import pytest
from anthropic.types.beta.beta_managed_agents_custom_tool_params import BetaManagedAgentsCustomToolParams
from tests.unit.http.serving import Serving

from perdure.domain import ids

MODEL = "claude-test"
TOOL: BetaManagedAgentsCustomToolParams = {
    "type": "custom",
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {}},
}


@pytest.mark.rule("MA-A5.1", "MA-A5.2", "MA-A0.18", "MA-A0.19", "SDK:agents.create")
async def test_create_fills_in_every_default(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="Ada", model=MODEL)
        raw = await client.beta.agents.with_raw_response.retrieve(agent.id)
    assert agent.id.startswith("agent_") and (agent.type, agent.version) == ("agent", 1)
    assert (agent.name, agent.model.id, agent.model.speed) == ("Ada", MODEL, "standard")
    assert (agent.system, agent.description, agent.multiagent, agent.archived_at) == (None, None, None, None)
    assert (agent.tools, agent.mcp_servers, agent.skills, agent.metadata) == ([], [], [], {})
    assert agent.execution_identity.type == "service_account"
    assert agent.created_at == agent.updated_at and agent.created_at.tzinfo is not None
    body = raw.http_response.json()
    assert set(type(agent).model_fields) == set(body)
    assert body["created_at"].endswith("Z")


@pytest.mark.rule("MA-A0.9", "MA-A0.10", "MA-A0.11", "MA-A0.13", "MA-A5.3")
@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"name":"A"}', "model"),
        (b'{"name":null,"model":"m"}', "name"),
        (b'{"name":"","model":"m"}', "name"),
        (b'{"name":"A","model":"m","colour":1}', "colour"),
        (b'{"name":"A","model":"m","metadata":{"k":7}}', "metadata.k"),
        (b'{"name":"A","model":"m","tools":[{"type":"custom","name":"x"}]}', "tools.0"),
        (b'{"name":"A\\u0000","model":"m"}', "name"),
        (b"[]", "body"),
        (b"{", "body"),
    ],
)
async def test_a_bad_create_is_400_names_its_field_and_stores_nothing(
    serving: Serving, body: bytes, named: str
) -> None:
    async with serving.http() as http:
        answer = await http.post("/v1/agents", headers=serving.signed(), content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith(named)
    assert "create_agent" not in serving.catalog.calls


@pytest.mark.rule("MA-A5.16")
@pytest.mark.parametrize(
    "field",
    [
        {"mcp_servers": [{"type": "url", "name": "x", "url": "https://example.com"}]},
        {"skills": [{"type": "anthropic", "skill_id": "xlsx"}]},
        {"multiagent": {"type": "coordinator", "agents": [{"type": "self"}]}},
    ],
)
async def test_what_is_not_built_is_refused_by_name(serving: Serving, field: dict[str, Any]) -> None:
    async with serving.sdk() as client:
        with pytest.raises(anthropic.BadRequestError, match=next(iter(field))):
            await client.beta.agents.create(name="A", model=MODEL, **field)
        await client.beta.agents.create(name="A", model=MODEL, mcp_servers=[], skills=[], multiagent=None)
    assert serving.requests() == 2


@pytest.mark.rule("MA-A5.6", "MA-A5.9", "MA-A5.10", "MA-A5.11", "SDK:agents.update", "SDK:agents.retrieve")
async def test_versions_stay_as_they_were(serving: Serving) -> None:
    async with serving.sdk() as client:
        agents = client.beta.agents
        first = await agents.create(name="A", model=MODEL, system="Be brief.", metadata={"a": "1", "b": "2"})
        second = await agents.update(first.id, tools=[TOOL], metadata={"a": None, "c": "3"})
        same = await agents.update(first.id, name="A", metadata={"zz": None})
        third = await agents.update(first.id, system=None, tools=[])
        assert (second.version, same.version, third.version) == (2, 2, 3)
        assert same.updated_at == second.updated_at and second.created_at == first.created_at
        assert second.metadata == {"b": "2", "c": "3"} and second.system == "Be brief."
        assert (third.system, third.tools) == (None, [])
        assert await agents.retrieve(first.id, version=1) == first
        assert await agents.retrieve(first.id, version=2) == second
        assert await agents.retrieve(first.id) == third
        with pytest.raises(anthropic.NotFoundError, match="version"):
            await agents.retrieve(first.id, version=4)
        with pytest.raises(anthropic.BadRequestError, match="version"):
            await agents.retrieve(first.id, version=0)


@pytest.mark.rule("MA-A5.7", "MA-A0.8")
async def test_an_update_of_an_old_version_is_refused_once_and_changes_nothing(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="A", model=MODEL)
        await client.beta.agents.update(agent.id, name="B", version=1)
        before = serving.requests()
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.agents.update(agent.id, name="C", version=1)
        assert serving.requests() == before + 1
        assert caught.value.error_code == "version_mismatch"
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert (await client.beta.agents.retrieve(agent.id)).name == "B"


@pytest.mark.rule("MA-A5.8")
async def test_of_two_updates_of_one_version_one_succeeds(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="A", model=MODEL)
        outcomes = await asyncio.gather(
            *(client.beta.agents.update(agent.id, name=f"N{n}", version=1) for n in range(6)), return_exceptions=True
        )
        won = [o for o in outcomes if not isinstance(o, BaseException)]
        assert len(won) == 1 and won[0].version == 2
        assert all(isinstance(o, anthropic.BadRequestError) for o in outcomes if isinstance(o, BaseException))


@pytest.mark.rule("MA-A5.7")
async def test_updates_without_a_version_all_apply(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="A", model=MODEL)
        await asyncio.gather(*(client.beta.agents.update(agent.id, metadata={f"k{n}": "v"}) for n in range(4)))
        last = await client.beta.agents.retrieve(agent.id)
    assert last.version == 5 and set(last.metadata) == {"k0", "k1", "k2", "k3"}


@pytest.mark.rule("MA-A5.12", "MA-A5.13", "SDK:agents.archive")
async def test_an_archived_agent_stays_archived_and_takes_no_update(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="A", model=MODEL)
        archived = await client.beta.agents.archive(agent.id)
        assert archived.archived_at is not None and archived.version == 1
        assert archived.updated_at == agent.updated_at
        assert await client.beta.agents.archive(agent.id) == archived
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.agents.update(agent.id, name="B")
        assert caught.value.error_code == "agent_archived"
        assert (await client.beta.agents.list()).data == []
        assert [a.id for a in (await client.beta.agents.list(include_archived=True)).data] == [agent.id]


@pytest.mark.rule("MA-A5.14", "MA-A0.23", "MA-A0.15", "MA-F9", "SDK:agents.list")
async def test_lists_are_newest_first_and_whole_across_pages(serving: Serving) -> None:
    async with serving.sdk() as client:
        made = [await client.beta.agents.create(name=f"A{n}", model=MODEL) for n in range(25)]
        first = await client.beta.agents.list()
        assert len(first.data) == 20 and first.next_page
        for limit in (1, 7, 25, 100):
            seen = [agent.id async for agent in client.beta.agents.list(limit=limit)]
            assert seen == [agent.id for agent in reversed(made)]
        between = client.beta.agents.list(created_at_gte=made[5].created_at, created_at_lte=made[8].created_at)
        assert [a.name async for a in between] == ["A8", "A7", "A6", "A5"]
        assert (await client.beta.agents.list(created_at_gte=datetime(2100, 1, 1, tzinfo=UTC))).data == []


@pytest.mark.rule("MA-A0.24", "MA-A0.22", "MA-A0.11")
@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=1.5",
        "limit=x",
        "limit=1&limit=2",
        "page=nonsense",
        "page=",
        "created_at[gte]=today",
        "created_at[gte]=2026-01-01T00:00:00",
        "include_archived=1",
        "order=asc",
    ],
)
async def test_a_query_that_breaks_a_rule_is_400_and_named(serving: Serving, query: str) -> None:
    async with serving.http() as http:
        answer = await http.get(f"/v1/agents?{query}", headers=serving.signed())
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["error"]["message"]


@pytest.mark.rule("MA-A0.22", "MA-A1.22")
async def test_a_cursor_belongs_to_its_list_and_workspace(serving: Serving) -> None:
    other, _ = await serving.add_key(uuid4())
    async with serving.sdk() as client, serving.sdk(key=other.secret) as stranger:
        agents = [await client.beta.agents.create(name="A", model=MODEL) for _ in range(3)]
        page = (await client.beta.agents.list(limit=1)).next_page
        assert page is not None
        damaged = page[:-2] + ("AA" if page[-2:] != "AA" else "BB")
        for call in (
            stranger.beta.agents.list(page=page),
            client.beta.agents.list(page=damaged),
            client.beta.agents.list(page=page[1:]),
            client.beta.environments.list(page=page),
            client.beta.agents.versions.list(agents[0].id, page=page),
        ):
            with pytest.raises(anthropic.BadRequestError, match="page"):
                await call


@pytest.mark.rule("MA-A5.15", "SDK:agents.versions.list")
async def test_versions_are_listed_once_each_newest_first(serving: Serving) -> None:
    async with serving.sdk() as client:
        agent = await client.beta.agents.create(name="A", model=MODEL)
        made = [agent, *[await client.beta.agents.update(agent.id, name=f"N{n}") for n in range(4)]]
        for limit in (1, 2, 5, 20):
            seen = [version async for version in client.beta.agents.versions.list(agent.id, limit=limit)]
            assert seen == list(reversed(made))


@pytest.mark.rule("MA-A0.19", "MA-A0.20")
async def test_foreign_missing_and_malformed_ids_answer_alike(serving: Serving) -> None:
    other, _ = await serving.add_key(uuid4())
    async with serving.sdk() as client, serving.sdk(key=other.secret) as stranger:
        foreign = (await stranger.beta.agents.create(name="A", model=MODEL)).id
        texts: set[str] = set()
        calls = 0
        for identity in (foreign, "agent_" + ids.token(uuid4()), "agent_x", "env_" + foreign[6:], "nonsense"):
            for call in (
                client.beta.agents.retrieve(identity),
                client.beta.agents.retrieve(identity, version=1),
                client.beta.agents.update(identity, name="B"),
                client.beta.agents.archive(identity),
                client.beta.agents.versions.list(identity),
            ):
                calls += 1
                with pytest.raises(anthropic.NotFoundError) as caught:
                    await call
                response = caught.value.response
                texts.add(response.text.replace(response.headers["request-id"], ""))
        assert len(texts) == 1
        assert (await client.beta.agents.list(include_archived=True)).data == []
        assert (await stranger.beta.agents.retrieve(foreign)).name == "A"
