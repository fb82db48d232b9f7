"""Sessions as resources: the three forms of an agent, what is refused by name, lists, updates, threads."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import pytest
from tests.conformance.test_tools import ASK_BASH, CUSTOM, TOOLSET

from perdure.testing.model_server import Call, Gate, Reply, Text
from perdure.testing.serving import Served, Told, message
from perdure.testing.trail import Mark, kinds_of, only, trail_of


async def refused(asked: Any, match: str, kind: type[Exception] = anthropic.BadRequestError) -> dict[str, Any]:
    """The error of a call that is refused and names what is wrong."""
    with pytest.raises(kind, match=match) as caught:
        await asked
    assert caught.value.response.headers["x-should-retry"] == "false"
    return caught.value.body["error"]


@pytest.mark.rule(
    "MA-A1.1", "MA-A1.2", "MA-A1.3", "MA-A1.10", "MA-A1.11", "SDK:sessions.create", "SDK:sessions.retrieve"
)
async def test_the_three_forms_of_an_agent(served: Served) -> None:
    beta = served.client.beta
    agent = await beta.agents.create(name="one", model="claude-a", system="v1", tools=[TOOLSET])
    await beta.agents.update(agent.id, version=1, system="v2")
    forms: list[tuple[Any, int, str]] = [
        (agent.id, 2, "v2"),
        ({"type": "agent", "id": agent.id}, 2, "v2"),
        ({"type": "agent", "id": agent.id, "version": 1}, 1, "v1"),
        ({"type": "agent_with_overrides", "id": agent.id, "version": 1, "system": "own"}, 1, "own"),
    ]
    for form, version, system in forms:
        created = await beta.sessions.create(
            agent=form, environment_id=served.environment_id, title="t", metadata={"k": "v"}
        )
        assert (created.agent.version, created.agent.system) == (version, system)
        assert created.agent.execution_identity.type == "service_account"
        assert created.agent.tools[0].default_config.permission_policy.type == "always_allow"
        assert (created.status, created.title, created.metadata) == ("idle", "t", {"k": "v"})
        assert (created.budget, created.deployment_id, created.archived_at) == (None, None, None)
        assert (created.resources, created.vault_ids, created.outcome_evaluations) == ([], [], [])
        assert created.usage.input_tokens == 0
        assert created.environment_id == served.environment_id
        shown = await beta.sessions.retrieve(created.id)
        assert shown.to_dict() | {"stats": None} == created.to_dict() | {"stats": None}
    await beta.agents.update(agent.id, system="v3")
    assert (await beta.sessions.retrieve(created.id)).agent.system == "own"


@pytest.mark.rule("MA-A1.4", "MA-A1.5", "MA-A1.6")
async def test_overrides_replace_whole_fields(served: Served) -> None:
    beta = served.client.beta
    agent = await beta.agents.create(
        name="full", model={"id": "claude-a", "effort": "high"}, system="s", tools=[TOOLSET, CUSTOM]
    )

    async def create(**overrides: Any) -> Any:
        form = {"type": "agent_with_overrides", "id": agent.id, **overrides}
        return (await beta.sessions.create(agent=form, environment_id=served.environment_id)).agent

    assert len((await create()).tools) == 2
    assert (await create(tools=[])).tools == []
    assert (await create(tools=None)).tools == []
    assert (await create(system=None)).system is None
    model = (await create(model={"id": "claude-b", "effort": "low"})).model
    assert (model.id, model.effort) == ("claude-b", None)
    error = await refused(create(model=None), "model")
    assert error["details"]["error_code"] == "agent_model_required"


@pytest.mark.rule("MA-A1.7", "MA-A1.8", "MA-A1.9", "MA-A1.31", "MA-A0.11", "MA-A1.13", "MA-A1.3", "MA-F4", "MA-A0.19")
async def test_what_a_session_can_not_be_made_with_is_named(served: Served) -> None:
    beta = served.client.beta
    before = [s.id async for s in beta.sessions.list(limit=5)]
    archived_agent = await beta.agents.create(name="gone", model="claude-a")
    await beta.agents.archive(archived_agent.id)
    archived_place = await beta.environments.create(name="gone")
    await beta.environments.archive(archived_place.id)
    good = {"agent": served.agent_id, "environment_id": served.environment_id}
    missing = "agent_" + "0" * 26
    cases: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"agent": archived_agent.id}, "agent: .*archived", anthropic.BadRequestError),
        ({"agent": missing}, "agent", anthropic.NotFoundError),
        ({"agent": "nonsense"}, "agent", anthropic.NotFoundError),
        ({"agent": {"type": "agent", "id": served.agent_id, "version": 99}}, "agent.version", anthropic.NotFoundError),
        ({"agent": {"type": "other", "id": served.agent_id}}, "agent.type", anthropic.BadRequestError),
        ({"environment_id": archived_place.id}, "environment_id: .*archived", anthropic.BadRequestError),
        ({"environment_id": "env_" + "0" * 26}, "environment_id", anthropic.NotFoundError),
        ({"resources": [{"type": "file", "file_id": "file_1"}]}, "resources", anthropic.BadRequestError),
        ({"vault_ids": ["vlt_1"]}, "vault_ids", anthropic.BadRequestError),
        (
            {"budget": {"type": "limit", "max_list_cost": {"amount": "1", "currency": "USD"}}},
            "budget",
            anthropic.BadRequestError,
        ),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata", anthropic.BadRequestError),
        ({"metadata": {"k" * 65: "v"}}, "metadata", anthropic.BadRequestError),
        ({"metadata": {"k": "v" * 513}}, "metadata", anthropic.BadRequestError),
        ({"extra_body": {"surprise": 1}}, "surprise", anthropic.BadRequestError),
        ({"extra_body": {"title": 7}}, "title", anthropic.BadRequestError),
        ({"extra_body": {"initial_events": None}}, "initial_events", anthropic.BadRequestError),
    ]
    for change, match, kind in cases:
        await refused(beta.sessions.create(**(good | change)), match, kind)
    for field in ("skills", "mcp_servers"):
        form = {"type": "agent_with_overrides", "id": served.agent_id, field: [{"type": "x"}]}
        await refused(beta.sessions.create(**(good | {"agent": form})), field)
    assert [s.id async for s in beta.sessions.list(limit=5)][:5] == before[:5]
    for field in ("resources", "vault_ids"):
        made = await beta.sessions.create(**good, **{field: []})
        assert getattr(made, field) == []


@pytest.mark.rule("MA-A1.24", "MA-A1.26", "MA-A1.27", "MA-A1.13", "MA-A0.10", "SDK:sessions.update")
async def test_update_of_title_and_metadata(served: Served) -> None:
    sessions = served.client.beta.sessions
    told = await served.make_session(title="old", metadata={"a": "1", "b": "2"})
    updated = await sessions.update(told.id, title="new", metadata={"a": None, "c": "3"})
    assert (updated.title, updated.metadata) == ("new", {"b": "2", "c": "3"})
    (event,) = await told.events()
    assert {k: v for k, v in event.items() if k not in ("id", "processed_at")} == {
        "type": "session.updated",
        "title": "new",
        "metadata": {"b": "2", "c": "3"},
    }
    again = await sessions.update(told.id, title="new", metadata={"a": None, "c": "3"})
    assert again.updated_at == updated.updated_at
    assert len(await told.events()) == 1
    cleared = await sessions.update(told.id, title=None)
    assert cleared.title is None
    assert (await told.events())[-1]["title"] is None
    emptied = await sessions.update(told.id, metadata={"b": None, "c": None}, title="last")
    assert emptied.metadata == {}
    assert (await told.events())[-1].keys() == {"id", "type", "processed_at", "title"}
    await refused(sessions.update(told.id, vault_ids=["vlt_1"]), "vault_ids")
    await refused(sessions.update(told.id, extra_body={"budget": {"type": "limit"}}), "budget")
    await refused(sessions.update(told.id, metadata={str(n): "v" for n in range(17)}), "metadata")
    await refused(sessions.update(told.id, extra_body={"nope": 1}), "nope")
    assert len(await told.events()) == 3


@pytest.mark.rule("MA-A1.25", "MA-A1.26")
async def test_update_of_the_tools_holds_from_the_next_turn_for_this_session(served: Served) -> None:
    sessions = served.client.beta.sessions
    gate = Gate()
    told = await served.make_session(Reply(Text("1"), gate=gate), Reply(Text("2")), tools=[TOOLSET])
    await told.say("a")
    await gate.reached()
    before = await told.events()
    await refused(sessions.update(told.id, agent={"tools": [CUSTOM]}), "running|idle")
    assert await told.events() == before
    gate.open()
    await told.until_idle()
    updated = await sessions.update(told.id, agent={"tools": [CUSTOM]})
    assert [t.type for t in updated.agent.tools] == ["custom"]
    event = (await told.events())[-1]
    assert event["type"] == "session.updated"
    assert "title" not in event
    assert event["agent"]["tools"][0]["name"] == "lookup"
    await told.say("b")
    await told.until_idle(2)
    names = [[t["name"] for t in r.body["tools"]] for r in told.script.requests]
    assert names == [["bash", "read", "write", "edit", "glob", "grep"], ["lookup"]]
    assert (await served.client.beta.agents.retrieve(served.agent_id)).tools == []


async def _listed(served: Served, **filters: Any) -> list[str]:
    return [s.id async for s in served.client.beta.sessions.list(**filters)]


@pytest.mark.rule(
    "MA-A1.15", "MA-A1.16", "MA-A1.17", "MA-A1.18", "MA-A1.19", "MA-A1.23", "MA-A0.15", "MA-A0.23", "MA-A0.24"
)
@pytest.mark.rule("SDK:sessions.list")
async def test_list_filters_and_orders(served: Served) -> None:
    sessions = served.client.beta.sessions
    agent = await served.client.beta.agents.create(name="mine", model="claude-a")
    made = [await sessions.create(agent=agent.id, environment_id=served.environment_id, title=str(n)) for n in range(5)]
    ids = [s.id for s in made]
    mine = {"agent_id": agent.id}
    assert await _listed(served, **mine) == ids[::-1]
    assert await _listed(served, **mine, order="asc") == ids
    assert await _listed(served, **mine, order="asc", limit=2) == ids
    at = made[2].created_at
    assert await _listed(served, **mine, created_at_gt=at) == ids[:2:-1]
    assert await _listed(served, **mine, created_at_gte=at) == ids[:1:-1]
    assert await _listed(served, **mine, created_at_lt=at) == ids[1::-1]
    assert await _listed(served, **mine, created_at_lte=at.isoformat()) == ids[2::-1]
    assert await _listed(served, **mine, created_at_gte=at, created_at_lte=at) == [ids[2]]
    await sessions.archive(ids[0])
    assert await _listed(served, **mine) == ids[:0:-1]
    assert await _listed(served, **mine, include_archived=True) == ids[::-1]
    assert await _listed(served, **mine, statuses=["running"]) == []
    assert await _listed(served, **mine, statuses=["running", "idle"]) == ids[:0:-1]
    assert await _listed(served, **mine, statuses=["terminated"], include_archived=True) == [ids[0]]
    assert await _listed(served, **mine, agent_version=1) == ids[:0:-1]
    assert await _listed(served, **mine, agent_version=2) == []
    assert await _listed(served, deployment_id="depl_1") == []
    assert await _listed(served, memory_store_id="memstore_1") == []
    assert await _listed(served, agent_id="agent_" + "0" * 26) == []
    await refused(sessions.list(agent_version=1), "agent_version")
    await refused(sessions.list(statuses=["asleep"]), "statuses")
    for limit in (0, 101, -1):
        await refused(sessions.list(limit=limit), "limit")
    await refused(sessions.list(extra_query={"limit": "1.5"}), "limit")
    await refused(sessions.list(order="up"), "order")
    await refused(sessions.list(created_at_gt="yesterday"), "created_at")
    await refused(sessions.list(extra_query={"surprise": "1"}), "surprise")


@pytest.mark.rule("MA-A1.20", "MA-A1.21", "MA-A1.22", "MA-A0.22")
async def test_pages_in_both_directions_and_misused_cursors(served: Served) -> None:
    sessions = served.client.beta.sessions
    agent = await served.client.beta.agents.create(name="paged", model="claude-a")
    made = [await sessions.create(agent=agent.id, environment_id=served.environment_id) for _ in range(5)]
    ids = [s.id for s in made][::-1]
    first = await sessions.list(agent_id=agent.id, limit=2)
    second = await first.get_next_page()
    third = await second.get_next_page()
    assert [[s.id for s in p.data] for p in (first, second, third)] == [ids[:2], ids[2:4], ids[4:]]
    assert (first.prev_page, third.next_page) == (None, None)
    back = await sessions.list(agent_id=agent.id, limit=2, page=third.prev_page)
    assert [s.id for s in back.data] == ids[2:4]
    start = await sessions.list(agent_id=agent.id, limit=2, page=back.prev_page)
    assert [s.id for s in start.data] == ids[:2]
    again = await sessions.list(agent_id=agent.id, limit=2, page=start.next_page)
    assert [s.id for s in again.data] == ids[2:4]
    cursor = first.next_page
    wider = await sessions.list(limit=3, page=cursor, include_archived=True, statuses=["idle"])
    assert wider.data[0].id == ids[2]
    await refused(sessions.list(page=cursor, order="asc"), "page")
    await refused(sessions.list(page=cursor, created_at_gt=datetime.now(UTC) + timedelta(days=1)), "page")
    other, _ = await served.add_workspace()
    stranger = served.sdk(api_key=other.secret)
    await refused(stranger.beta.sessions.list(page=cursor), "page")
    await stranger.close()
    events = (await served.make_session()).path + "/events"
    for bad in ("", "x", cursor[:-2], cursor[::-1], cursor + "A", "é" * 4, "A" * 5000):
        for path in ("/v1/sessions", events, "/v1/agents", "/v1/environments"):
            response = await served.call("GET", path, params={"page": bad})
            assert response.status_code == 400, (bad, path)
            assert response.json()["error"]["message"].startswith("page"), (bad, path)
    for path in (events, "/v1/agents", "/v1/environments", f"/v1/agents/{agent.id}/versions"):
        assert (await served.call("GET", path, params={"page": cursor})).status_code == 400


@pytest.mark.rule(
    "MA-A3.1", "MA-A3.2", "MA-A3.3", "MA-A3.4", "MA-A3.5", "MA-A3.6", "MA-B6.7", "SDK:sessions.threads.list"
)
@pytest.mark.rule(
    "SDK:sessions.threads.retrieve", "SDK:sessions.threads.events.list", "SDK:sessions.threads.events.stream"
)
async def test_the_primary_thread(served: Served) -> None:
    threads = served.client.beta.sessions.threads
    gate = Gate()
    told, other = await served.make_session(Reply(Text("t"), gate=gate)), await served.make_session()
    (thread,) = [t async for t in threads.list(told.id)]
    assert (thread.parent_thread_id, thread.session_id, thread.status) == (None, told.id, "idle")
    assert (thread.usage, thread.stats) == (None, None)
    async with await threads.events.stream(thread.id, session_id=told.id, event_deltas=["agent.message"]) as opened:
        await told.say("go")
        await gate.reached()
        assert (await threads.retrieve(thread.id, session_id=told.id)).status == await told.status() == "running"
        assert [t.id async for t in threads.list(told.id, statuses=["running"])] == [thread.id]
        assert [t.id async for t in threads.list(told.id, statuses=["idle"], limit=1)] == []
        assert [t.id async for t in threads.list(told.id, limit=1_000)] == [thread.id]
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            await threads.list(told.id, limit=1_001)
        gate.open()
        seen = []
        async for event in opened:
            seen.append(event)
            if event.type == "session.status_idle":
                break
    assert "event_delta" in {e.type for e in seen}
    listed = await told.events()
    pages = [e.to_dict(mode="json") async for e in threads.events.list(thread.id, session_id=told.id, limit=2)]
    assert pages == listed
    assert {e["session_thread_id"] for e in listed if "session_thread_id" in e} == {thread.id}
    rested = await threads.retrieve(thread.id, session_id=told.id)
    assert rested.status == "idle"
    assert rested.usage.output_tokens > 0
    for asked in (
        threads.retrieve(thread.id, session_id=other.id),
        threads.events.list(thread.id, session_id=other.id),
        threads.events.stream(thread.id, session_id=other.id),
    ):
        await refused(asked, "Thread", anthropic.NotFoundError)


@pytest.mark.rule("MA-A2.6", "MA-A2.7", "MA-A2.8", "MA-A2.9", "MA-A2.10", "MA-F9", "SDK:sessions.events.list")
async def test_the_list_of_events(served: Served) -> None:
    events = served.client.beta.sessions.events
    told = await served.make_session(
        Reply(Call("bash", {"command": "true"})), Reply(Text("b")), tools=[TOOLSET, CUSTOM]
    )
    await told.turn("first")
    told.script.enqueue(Reply(Call("lookup")))
    await told.say("second")
    await told.until_idle(2)
    await told.say("waits")
    whole = await told.events()

    async def listed(**query: Any) -> list[str]:
        return [e.id async for e in events.list(told.id, **query)]

    ids = [e["id"] for e in whole]
    for limit in (1, 2, 3, 7, 1000):
        assert await listed(limit=limit) == ids
        assert await listed(limit=limit, order="desc") == ids[::-1]
    kinds = ["user.message", "session.usage", "session.status_idle"]
    assert await listed(types=kinds, limit=2) == [e["id"] for e in only(whole, *kinds)]
    assert await listed(types=kinds, order="desc", limit=1) == [e["id"] for e in only(whole, *kinds)][::-1]
    assert await listed(types=["agent.mcp_tool_use"]) == []
    middle = whole[len(whole) // 2]["processed_at"]
    at = datetime.fromisoformat(middle)
    done = [e for e in whole if e["processed_at"]]
    assert len(done) == len(whole) - 2
    assert await listed(created_at_gt=at) == [e["id"] for e in done if e["processed_at"] > middle]
    assert await listed(created_at_gte=at) == [e["id"] for e in done if e["processed_at"] >= middle]
    assert await listed(created_at_lt=at, limit=2) == [e["id"] for e in done if e["processed_at"] < middle]
    assert await listed(created_at_lte=at) == [e["id"] for e in done if e["processed_at"] <= middle]
    await refused(events.list(told.id, types=["no.such"]), "types")
    await refused(events.list(told.id, types=["session.deleted"]), "types")
    for limit in (0, 1001):
        await refused(events.list(told.id, limit=limit), "limit")
    cursor = (await events.list(told.id, limit=2)).next_page
    other = await served.make_session()
    for query in ({"order": "desc"}, {"types": ["user.message"]}, {"created_at_gt": at}):
        await refused(events.list(told.id, limit=2, page=cursor, **query), "page")
    await refused(events.list(other.id, page=cursor), "page")
    assert [e.id for e in (await events.list(told.id, limit=5, page=cursor)).data] == ids[2:7]


@pytest.mark.rule("MA-A1.12", "MA-B3.7", "MA-B3.3")
async def test_usage_is_the_sum_of_the_calls(served: Served) -> None:
    told = await served.make_session(
        Reply(Text("one")), Reply(Call("bash", {"command": "true"})), Reply(Text("three")), tools=[TOOLSET]
    )
    await told.say("a", "b")
    listed = await told.until_idle()
    spans = [e["model_usage"] for e in only(listed, "span.model_request_end")]
    assert len(spans) == 3
    assert all(s["output_tokens"] > 0 for s in spans)
    shown = await served.client.beta.sessions.retrieve(told.id)
    (usage,) = only(listed, "session.usage")
    for field in ("input_tokens", "output_tokens", "cache_read_input_tokens"):
        total = sum(s[field] for s in spans)
        assert getattr(shown.usage, field) == total
        assert usage["usage"][field] == total
    assert shown.stats.active_seconds > 0
    later = await served.client.beta.sessions.retrieve(told.id)
    assert later.stats.active_seconds == shown.stats.active_seconds
    assert later.stats.duration_seconds >= shown.stats.duration_seconds


@pytest.mark.rule("MA-E2.1", "MA-B6.2", "MA-B6.7", "MA-B8.4")
async def test_reads_agree_with_what_was_seen(served: Served) -> None:
    """A loop of the documented quirk: status and list right behind the idle event."""
    told = await served.make_session()
    told.script.respond_with(lambda _: Reply(Text("r")))
    for number in range(10):
        async with await served.client.beta.sessions.events.stream(told.id) as opened:
            await told.say(f"m{number}")
            assert await told.status() in ("running", "idle")
            async for event in opened:
                if event.type == "session.status_idle":
                    break
            shown, listed = await asyncio.gather(told.status(), told.events())
        assert shown == "idle"
        assert listed[-1]["id"] == event.id
        assert kinds_of(listed).count("agent.message") == number + 1


@pytest.mark.rule("MA-D2.6", "MA-D1.3", "MA-A5.5", "MA-D5.1", "MA-A5.17", "MA-D1.16")
@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ([{"type": "agent_toolset_20260401", "configs": [{"name": "web_search", "enabled": True}]}], "web_search"),
        ([{"type": "agent_toolset_20260401", "configs": [{"name": "nobody"}]}], "configs"),
        ([{"type": "agent_toolset_20260401", "configs": [{"name": "bash"}, {"name": "bash"}]}], "bash"),
        (
            [{"type": "agent_toolset_20260401", "default_config": {"permission_policy": {"type": "auto"}}}],
            "auto",
        ),
        ([{"type": "mcp_toolset", "mcp_server_name": "x"}], "mcp_toolset"),
        ([{**CUSTOM, "permission_policy": {"type": "always_ask"}}], "permission_policy"),
        ([TOOLSET, {**CUSTOM, "name": "bash"}], "bash"),
        ([CUSTOM, CUSTOM], "lookup"),
        ([{**CUSTOM, "name": "with space"}], "name"),
        ([{**CUSTOM, "name": "n" * 129}], "name"),
        ([{k: v for k, v in CUSTOM.items() if k != "description"}], "description"),
        ([{**CUSTOM, "input_schema": {"type": "array"}}], "input_schema"),
        ([{**CUSTOM, "name": f"t{n}"} for n in range(257)], "tools"),
    ],
)
async def test_tools_that_can_not_be_are_refused(served: Served, tools: list[Any], match: str) -> None:
    await refused(served.make_session(tools=tools), match)
    await refused(served.client.beta.agents.create(name="n", model="claude-a", tools=tools), match)


@pytest.mark.rule("MA-D1.16", "MA-D1.1", "MA-D2.2")
async def test_the_whole_toolset_is_accepted_and_the_web_tools_left_out(served: Served) -> None:
    told: Told = await served.make_session(Reply(Text("x")), tools=[ASK_BASH], initial_events=[message("m")])
    await told.until_idle()
    assert [t["name"] for t in told.script.requests[0].body["tools"]] == [
        "bash",
        "read",
        "write",
        "edit",
        "glob",
        "grep",
    ]
    assert Mark("agent.message", "x") in trail_of(await told.events())
