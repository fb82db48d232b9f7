"""Agents with their versions, and environments, through the SDK."""

import asyncio
from typing import Any

import anthropic
import pytest
from tests.conformance.test_sessions import refused
from tests.conformance.test_tools import CUSTOM, TOOLSET

from perdure.testing.model_server import Reply, Text
from perdure.testing.serving import Served, message

MISSING_AGENT = "agent_" + "0" * 26
MISSING_PLACE = "env_" + "0" * 26


@pytest.mark.rule("MA-A5.1", "MA-A5.2", "MA-A5.4", "MA-A0.18", "SDK:agents.create", "SDK:agents.retrieve")
async def test_create_an_agent_with_little_and_with_much(served: Served) -> None:
    agents = served.client.beta.agents
    small = await agents.create(name="n", model="claude-a")
    assert (small.version, small.type, small.model.id, small.model.effort) == (1, "agent", "claude-a", None)
    assert (small.system, small.description, small.archived_at, small.multiagent) == (None, None, None, None)
    assert (small.tools, small.mcp_servers, small.skills, small.metadata) == ([], [], [], {})
    assert small.id.startswith("agent_")
    large = await agents.create(
        name="n" * 256,
        model={"id": "claude-a", "effort": "high", "speed": "fast"},
        system="s" * 100_000,
        description="d",
        metadata={"k" * 64: "v" * 512},
        tools=[
            {"type": "agent_toolset_20260401", "configs": [{"name": "bash", "enabled": False}]},
            CUSTOM,
        ],
        mcp_servers=[],
        skills=None,
        multiagent=None,
    )
    config = large.tools[0].configs[0]
    assert (config.name, config.enabled, config.permission_policy.type) == ("bash", False, "always_allow")
    assert large.tools[0].default_config.enabled is True
    assert large.model.effort is not None
    assert (await agents.retrieve(large.id)).to_dict() == large.to_dict()


@pytest.mark.rule(
    "MA-A5.3", "MA-F3", "MA-F4", "MA-F5", "MA-F6", "MA-A5.16", "MA-A0.11", "MA-A0.10", "MA-A0.14", "MA-A0.7"
)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "name"),
        ({"name": " \n"}, "name: must not be blank"),
        ({"name": "n" * 257}, "name"),
        ({"name": None}, "name"),
        ({"name": 5}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"model": None}, "model: must be a string or an object, not null"),
        ({"model": {"effort": "high"}}, "model.id"),
        ({"model": {"id": "claude-a", "effort": "extreme"}}, "model.effort"),
        ({"model": {"id": "claude-a", "inference_geo": "eu"}}, "inference_geo"),
        ({"system": "s" * 100_001}, "system"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": None}, "metadata"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "https://x"}]}, "mcp_servers"),
        ({"skills": [{"type": "custom", "skill_id": "skill_1"}]}, "skills"),
        ({"multiagent": {"type": "coordinator", "agents": [MISSING_AGENT]}}, "multiagent"),
        ({"execution_identity": {"type": "aws_role"}}, "execution_identity"),
        ({"surprise": True}, "surprise"),
    ],
)
async def test_a_bad_agent_is_refused_with_the_field(served: Served, change: dict[str, Any], match: str) -> None:
    agents = served.client.beta.agents
    newest = (await agents.list(limit=1)).data[0].id
    body = {"name": "n", "model": "claude-a"}
    await refused(agents.create(**body, extra_body=change), match)
    assert (await agents.list(limit=1)).data[0].id == newest


@pytest.mark.rule("MA-A5.6", "MA-A5.7", "MA-A5.9", "MA-A5.10", "MA-A5.11", "MA-A5.15", "SDK:agents.update")
@pytest.mark.rule("SDK:agents.versions.list")
async def test_versions_stay_as_they_were(served: Served) -> None:
    agents = served.client.beta.agents
    first = await agents.create(name="n", model="claude-a", system="1", metadata={"a": "1"}, tools=[TOOLSET])
    second = await agents.update(first.id, version=1, system="2", metadata={"a": None, "b": "2"})
    assert (second.version, second.system, second.metadata) == (2, "2", {"b": "2"})
    third = await agents.update(first.id, system=None, tools=[])
    assert (third.version, third.system, third.tools) == (3, None, [])
    same = await agents.update(first.id, version=3, tools=None, system=None, name="n")
    assert same.to_dict() == third.to_dict()
    error = await refused(agents.update(first.id, version=2, system="late"), "version")
    assert error["details"]["error_code"] == "version_mismatch"
    for change in ({"name": None}, {"model": None}, {"name": ""}):
        await refused(agents.update(first.id, extra_body=change), next(iter(change)))
    versions = [v.to_dict() async for v in agents.versions.list(first.id, limit=2)]
    assert versions == [third.to_dict(), second.to_dict(), first.to_dict()]
    for version, known in enumerate((first, second, third), start=1):
        assert (await agents.retrieve(first.id, version=version)).to_dict() == known.to_dict()
    await refused(agents.retrieve(first.id, version=4), "version", anthropic.NotFoundError)
    await refused(agents.retrieve(first.id, version=0), "version")
    for asked in (
        agents.retrieve(MISSING_AGENT),
        agents.update(MISSING_AGENT, name="x"),
        agents.archive(MISSING_AGENT),
        agents.versions.list(MISSING_AGENT),
        agents.retrieve("agent_short"),
    ):
        await refused(asked, "Agent not found", anthropic.NotFoundError)


@pytest.mark.rule("MA-A5.6", "MA-A5.7", "MA-A1.3", "MA-A1.16", "MA-A0.9", "MA-A0.24")
@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, 2**64, 99999999999999999999])
async def test_numbers_beyond_what_the_ledger_can_hold_are_refused_by_rule(served: Served, number: int) -> None:
    beta, kept = served.client.beta, number < 2**63
    agent = await beta.agents.create(name="n", model="claude-a")
    in_query = "must be a whole number from 1 to"
    await refused(beta.agents.retrieve(agent.id, version=number), f"version: {in_query} 999,999,999")
    await refused(beta.sessions.list(agent_id=agent.id, agent_version=number), f"agent_version: {in_query} 999,999,999")
    await refused(beta.agents.list(limit=number), f"limit: {in_query} 100, not '{number}'")
    await refused(beta.agents.versions.list(agent.id, limit=number), f"limit: {in_query}")
    await refused(beta.sessions.list(limit=number), f"limit: {in_query}")
    rule = "64 bits" if number >= 2**64 else "must be from 1 to 9,223,372,036,854,775,807"
    await refused(beta.agents.update(agent.id, version=number, name="m"), "version 1, not" if kept else rule)
    await refused(
        beta.sessions.create(
            agent={"type": "agent", "id": agent.id, "version": number}, environment_id=served.environment_id
        ),
        "agent.version: .*" + ("has no version" if kept else rule),
        anthropic.NotFoundError if kept else anthropic.BadRequestError,
    )
    assert (await beta.agents.retrieve(agent.id)).to_dict() == agent.to_dict()


@pytest.mark.rule("MA-A5.7", "MA-A0.10")
async def test_null_is_no_version(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(name="n", model="claude-a")
    await refused(agents.update(agent.id, version=None, name="m"), "version: must be a whole number, not null")
    assert (await agents.retrieve(agent.id)).to_dict() == agent.to_dict()


@pytest.mark.rule("MA-A5.8")
async def test_of_updates_that_name_the_same_version_one_succeeds(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(name="n", model="claude-a")
    for version in range(1, 6):
        raced = await asyncio.gather(
            *(agents.update(agent.id, version=version, system=f"{version} {n}") for n in range(5)),
            return_exceptions=True,
        )
        won = [r for r in raced if not isinstance(r, BaseException)]
        assert [r.version for r in won] == [version + 1]
        assert all(isinstance(r, anthropic.BadRequestError) for r in raced if r not in won)
        assert (await agents.retrieve(agent.id)).system == won[0].system
    free = await asyncio.gather(*(agents.update(agent.id, metadata={str(n): "x"}) for n in range(4)))
    assert sorted(r.version for r in free) == [7, 8, 9, 10]
    assert (await agents.retrieve(agent.id)).metadata == {str(n): "x" for n in range(4)}


@pytest.mark.rule("MA-A5.12", "MA-A5.13", "SDK:agents.archive")
async def test_an_archived_agent_takes_no_update_and_its_sessions_go_on(served: Served) -> None:
    beta = served.client.beta
    script = served.script()
    agent = await beta.agents.create(name="n", model=script.model)
    session = await beta.sessions.create(agent=agent.id, environment_id=served.environment_id)
    raced = await asyncio.gather(
        beta.agents.archive(agent.id), beta.agents.update(agent.id, system="raced"), return_exceptions=True
    )
    assert not isinstance(raced[0], BaseException)
    archived = await beta.agents.retrieve(agent.id)
    # Either may have come first.
    latest = agent if isinstance(raced[1], BaseException) else raced[1]
    assert archived.archived_at is not None and archived.updated_at == latest.updated_at
    assert (archived.version, archived.system) == (latest.version, latest.system)
    assert (await beta.agents.archive(agent.id)).to_dict() == archived.to_dict()
    await refused(beta.agents.update(agent.id, system="late"), "archived")
    script.enqueue(Reply(Text("on")))
    await beta.sessions.events.send(session.id, events=[message("m")])
    await script.wait_for_requests(1)


@pytest.mark.rule("MA-A5.14", "MA-A0.23", "MA-A0.24", "MA-F9", "SDK:agents.list")
async def test_list_agents(served: Served) -> None:
    agents = served.client.beta.agents
    made = [await agents.create(name=f"listed {n}", model="claude-a") for n in range(4)]
    ids = [a.id for a in made]
    since = {"created_at_gte": made[0].created_at}
    assert [a.id async for a in agents.list(limit=2, **since)] == ids[::-1]
    assert [a.id async for a in agents.list(**since, created_at_lte=made[1].created_at)] == ids[1::-1]
    await agents.update(ids[0], system="newer")
    await agents.archive(ids[3])
    assert [a.id async for a in agents.list(**since)] == ids[2::-1]
    assert [a.id async for a in agents.list(**since, include_archived=True)] == ids[::-1]
    assert [a.version for a in (await agents.list(**since)).data] == [1, 1, 2]
    for limit in (0, 101):
        await refused(agents.list(limit=limit), "limit")
    await refused(agents.list(extra_query={"include_archived": "maybe"}), "include_archived")


@pytest.mark.rule("MA-A6.1", "MA-A6.2", "MA-A6.3", "MA-A6.6", "MA-A6.7", "MA-A6.9")
@pytest.mark.rule("SDK:environments.create", "SDK:environments.retrieve", "SDK:environments.list")
@pytest.mark.rule("SDK:environments.update", "SDK:environments.archive", "SDK:environments.delete")
async def test_environments_from_creation_to_deletion(served: Served) -> None:
    beta = served.client.beta
    place = await beta.environments.create(name="place", metadata={"a": "1", "b": "2"}, description="d")
    assert place.id.startswith("env_")
    assert (place.config.type, place.config.networking.type) == ("cloud", "unrestricted")
    assert place.config.packages.pip == []
    full = await beta.environments.create(
        name="full",
        scope="organization",
        config={"type": "cloud", "networking": {"type": "unrestricted"}, "packages": {"pip": []}},
    )
    assert full.config.to_dict() == place.config.to_dict()
    changed = await beta.environments.update(place.id, name="new", metadata={"a": None, "b": "", "c": "3"})
    assert (changed.name, changed.description, changed.metadata) == ("new", "d", {"c": "3"})
    assert changed.config.to_dict() == place.config.to_dict()
    assert (await beta.environments.retrieve(place.id)).to_dict() == changed.to_dict()
    listed = [e.id async for e in beta.environments.list(limit=1)]
    assert listed[:2] == [full.id, place.id]
    session = await beta.sessions.create(agent=served.agent_id, environment_id=place.id)
    archived = await beta.environments.archive(place.id)
    assert archived.archived_at == archived.updated_at > place.updated_at
    assert place.id not in [e.id async for e in beta.environments.list()]
    assert place.id in [e.id async for e in beta.environments.list(include_archived=True)]
    await refused(beta.environments.update(place.id, name="late"), "archived")
    error = await refused(
        beta.sessions.create(agent=served.agent_id, environment_id=place.id), "environment_id: .*archived"
    )
    assert error["details"]["error_code"] == "environment_archived"
    deleted = await beta.environments.delete(place.id)
    assert (deleted.id, deleted.type) == (place.id, "environment_deleted")
    assert (await beta.sessions.retrieve(session.id)).environment_id == place.id
    for asked in (
        beta.environments.retrieve(place.id),
        beta.environments.update(place.id, name="x"),
        beta.environments.archive(place.id),
        beta.environments.delete(place.id),
        beta.environments.retrieve(MISSING_PLACE),
    ):
        await refused(asked, "Environment not found", anthropic.NotFoundError)


@pytest.mark.rule("MA-A6.4", "MA-A6.5", "MA-A6.8", "MA-A6.9", "MA-A6.1")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"config": {"type": "self_hosted"}}, "self_hosted"),
        ({"config": {"type": "cloud", "networking": {"type": "limited", "allowed_hosts": ["x"]}}}, "limited"),
        ({"config": {"type": "cloud", "packages": {"pip": ["numpy"]}}}, "packages"),
        (
            {"config": {"type": "cloud", "networking": {"type": "limited"}, "packages": {"npm": ["x"]}}},
            "limited networking is not built",
        ),
        ({"config": {"type": "cloud", "networking": {"type": "none"}}}, "networking.type"),
        ({"config": {"type": "cloud", "surprise": 1}}, "config.surprise"),
        ({"scope": "account"}, "scope"),
        ({"name": ""}, "name"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
    ],
)
async def test_environments_that_can_not_be_are_refused(served: Served, change: dict[str, Any], match: str) -> None:
    environments = served.client.beta.environments
    newest = (await environments.list(limit=1)).data[0]
    await refused(environments.create(name="n", extra_body=change), match)
    assert (await environments.list(limit=1)).data[0].to_dict() == newest.to_dict()
    if "self_hosted" in match:
        error = await refused(environments.update(newest.id, extra_body=change), "type")
        assert error["details"]["error_code"] == "invalid_config_type_change"
