"""Sessions over the face: the three agent forms, refusals by name, lists in both directions, updates, archive and deletion."""

from typing import Any

import pytest
from anthropic.types.beta import BetaManagedAgentsSession
from pydantic import TypeAdapter
from tests.unit.claude.face import AGENT_ID, ENVIRONMENT_ID, OTHER_WORKSPACE, Face, call_plan

from perdure.domain.ids import token

AGENT = "agent_" + token(AGENT_ID)
ENVIRONMENT = "env_" + token(ENVIRONMENT_ID)


def body(**fields: Any) -> dict[str, Any]:
    return {"agent": AGENT, "environment_id": ENVIRONMENT, **fields}


@pytest.mark.rule("MA-A1.1", "MA-A1.10", "MA-A1.11", "MA-A0.18")
async def test_a_new_session_is_idle_and_has_every_field(face: Face) -> None:
    made = await face.ok("POST", "/v1/sessions", body(title="t", metadata={"a": "b"}))
    TypeAdapter(BetaManagedAgentsSession).validate_python(made)
    assert made["status"] == "idle"
    assert made["title"] == "t"
    assert made["metadata"] == {"a": "b"}
    assert made["environment_id"] == ENVIRONMENT
    assert [made[k] for k in ("resources", "vault_ids", "outcome_evaluations")] == [[], [], []]
    assert [made[k] for k in ("budget", "deployment_id", "archived_at")] == [None, None, None]
    assert made["created_at"] == "2026-01-01T00:00:00.000000Z"
    assert made["agent"] == {
        "id": AGENT,
        "type": "agent",
        "version": 1,
        "name": "helper",
        "description": None,
        "system": None,
        "model": {"id": "test/m", "effort": None, "speed": "standard", "inference_geo": None},
        "tools": [],
        "mcp_servers": [],
        "skills": [],
        "multiagent": None,
        "execution_identity": {"type": "service_account"},
    }
    assert await face.ok("GET", f"/v1/sessions/{made['id']}") | {"stats": {}, "usage": {}} == made | {
        "stats": {},
        "usage": {},
    }


@pytest.mark.rule("MA-A1.2", "MA-A1.3")
async def test_a_session_takes_the_latest_version_or_the_named_one_and_keeps_it(face: Face) -> None:
    face.catalog.put_agent({"name": "second", "model": "test/m"}, version=2)
    latest = await face.ok("POST", "/v1/sessions", body())
    named = await face.ok("POST", "/v1/sessions", body(agent={"type": "agent", "id": AGENT, "version": 1}))
    plain = await face.ok("POST", "/v1/sessions", body(agent={"type": "agent", "id": AGENT}))
    face.catalog.put_agent({"name": "third", "model": "test/m"}, version=3)
    assert [s["agent"]["version"] for s in (latest, named, plain)] == [2, 1, 2]
    assert (await face.ok("GET", f"/v1/sessions/{latest['id']}"))["agent"]["name"] == "second"
    error = await face.refused("POST", "/v1/sessions", body(agent={"type": "agent", "id": AGENT, "version": 9}))
    assert (error["status"], error["details"]["error_code"]) == (404, "agent_version_not_found")


@pytest.mark.rule("MA-A1.4", "MA-A1.5", "MA-A1.6")
async def test_overrides_replace_whole_fields(face: Face) -> None:
    custom = {"type": "custom", "name": "t", "description": "d", "input_schema": {"type": "object"}}
    face.catalog.put_agent({"name": "n", "model": {"id": "test/a", "effort": "low"}, "system": "s", "tools": [custom]})

    def override(**fields: Any) -> dict[str, Any]:
        return body(agent={"type": "agent_with_overrides", "id": AGENT, **fields})

    kept = (await face.ok("POST", "/v1/sessions", override()))["agent"]
    assert (kept["system"], kept["tools"], kept["model"]["effort"]) == ("s", [custom], {"type": "low"})
    cleared = (await face.ok("POST", "/v1/sessions", override(system=None, tools=[])))["agent"]
    assert (cleared["system"], cleared["tools"]) == (None, [])
    other = (await face.ok("POST", "/v1/sessions", override(model={"id": "test/b", "effort": "max"})))["agent"]
    assert (other["model"]["id"], other["model"]["effort"], other["system"]) == ("test/b", None, "s")
    error = await face.refused("POST", "/v1/sessions", override(model=None))
    assert (error["status"], error["details"]["error_code"]) == (400, "agent_model_required")


@pytest.mark.rule("MA-A1.7", "MA-A1.8", "MA-A1.9")
async def test_archived_and_unknown_parts_are_refused_and_leave_no_session(face: Face) -> None:
    unknown = await face.refused("POST", "/v1/sessions", body(agent="agent_" + token(ENVIRONMENT_ID)))
    assert (unknown["status"], unknown["details"]["error_code"]) == (404, "agent_not_found")
    malformed = await face.refused("POST", "/v1/sessions", body(agent="nonsense"))
    assert malformed == unknown
    missing = await face.refused("POST", "/v1/sessions", body(environment_id="env_x"))
    assert (missing["status"], missing["details"]["error_code"]) == (404, "environment_not_found")
    face.catalog.put_environment(archived=True)
    archived = await face.refused("POST", "/v1/sessions", body())
    assert (archived["status"], archived["details"]["error_code"]) == (400, "environment_archived")
    face.catalog.put_environment()
    face.catalog.put_agent({"name": "n", "model": "test/m"}, archived=True)
    error = await face.refused("POST", "/v1/sessions", body())
    assert (error["status"], error["details"]["error_code"]) == (400, "agent_archived")
    assert (await face.ok("GET", "/v1/sessions"))["data"] == []


@pytest.mark.rule("MA-A1.31")
@pytest.mark.parametrize(
    ("field", "value"),
    [("resources", [{"type": "file", "file_id": "file_1"}]), ("vault_ids", ["vlt_1"]), ("budget", {"type": "limit"})],
)
async def test_what_is_not_built_is_refused_by_name(face: Face, field: str, value: Any) -> None:
    error = await face.refused("POST", "/v1/sessions", body(**{field: value}))
    assert error["status"] == 400
    assert error["message"].startswith(f"{field}: ")
    assert error["details"] == {"error_code": "unsupported", "param": field}
    await face.ok("POST", "/v1/sessions", body(resources=[], vault_ids=[], budget=None))


@pytest.mark.rule("MA-A0.9", "MA-A0.10")
@pytest.mark.parametrize(("agent", "what"), [(None, "null"), (1, "a number"), ([], "an array")])
async def test_an_agent_of_another_form_is_told_both_forms(face: Face, agent: Any, what: str) -> None:
    error = await face.refused("POST", "/v1/sessions", body(agent=agent))
    assert (error["status"], error["message"]) == (400, f"agent: must be a string or an object, not {what}.")


async def test_a_model_that_nobody_serves_is_refused_with_what_to_do(face: Face) -> None:
    face.catalog.put_agent({"name": "n", "model": "none/m"})
    error = await face.refused("POST", "/v1/sessions", body())
    assert (error["status"], error["details"]["error_code"]) == (400, "model_unknown")
    assert "set one up" in error["message"]


@pytest.mark.rule("MA-G2")
async def test_initial_events_make_a_running_session(face: Face) -> None:
    events = [{"type": "user.message", "content": [{"type": "text", "text": "hi"}]}]
    made = await face.ok("POST", "/v1/sessions", body(initial_events=events))
    assert made["status"] == "running"
    listed = await face.events(made["id"])
    assert [e["type"] for e in listed] == [
        "user.message",
        "session.status_running",
        "session.thread_status_running",
    ]
    assert listed[0]["id"].startswith("sevt_")


@pytest.mark.rule("MA-G2.1", "MA-F2")
@pytest.mark.parametrize(
    ("events", "place"),
    [
        ([{"type": "user.message", "content": []}], "initial_events.0.content"),
        ([{"type": "user.interrupt"}], "initial_events.0.type"),
        ([{"type": "system.message", "content": [{"type": "text", "text": "x"}]}], "initial_events.0.type"),
        ([{"type": "user.message", "content": [{"type": "text", "text": "x"}]}] * 51, "initial_events"),
    ],
)
async def test_bad_initial_events_make_no_session(face: Face, events: list[Any], place: str) -> None:
    error = await face.refused("POST", "/v1/sessions", body(initial_events=events))
    assert error["status"] == 400
    assert error["message"].startswith(place + ": ")
    assert (await face.ok("GET", "/v1/sessions"))["data"] == []


async def made_sessions(face: Face, count: int) -> list[str]:
    """Sessions a second apart, oldest first."""
    made: list[str] = []
    for _ in range(count):
        made.append(await face.session())
        face.ledger.clock.advance(seconds=1)
    return made


@pytest.mark.rule("MA-A1.15", "MA-A1.20", "MA-A0.23")
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_run_forward_and_back_without_gap_or_repeat(face: Face, order: str) -> None:
    expected = await made_sessions(face, 7)
    if order == "desc":
        expected.reverse()
    first = await face.ok("GET", f"/v1/sessions?limit=3&order={order}")
    assert first["prev_page"] is None
    pages = [first]
    while pages[-1]["next_page"] is not None:
        pages.append(await face.ok("GET", f"/v1/sessions?limit=3&order={order}&page={pages[-1]['next_page']}"))
    assert [s["id"] for p in pages for s in p["data"]] == expected
    back = pages[-1]
    for before in reversed(pages[:-1]):
        back = await face.ok("GET", f"/v1/sessions?limit=3&order={order}&page={back['prev_page']}")
        assert [s["id"] for s in back["data"]] == [s["id"] for s in before["data"]]
    assert back["prev_page"] is None
    assert [s["id"] for s in (await face.ok("GET", "/v1/sessions"))["data"]] == (
        expected if order == "desc" else expected[::-1]
    )


@pytest.mark.rule("MA-A1.21", "MA-A1.22", "MA-A0.22")
async def test_misused_cursors_are_refused(face: Face) -> None:
    await made_sessions(face, 3)
    page = (await face.ok("GET", "/v1/sessions?limit=1"))["next_page"]
    other_list = (await face.ok("GET", f"/v1/sessions?limit=1&include_archived=true&page={page}"))["next_page"]
    assert other_list is not None, "other filters and the limit may change"
    assert "order=desc" in (await face.refused("GET", f"/v1/sessions?order=asc&page={page}"))["message"]
    excluded = await face.refused("GET", f"/v1/sessions?page={page}&created_at[lt]=2026-01-01T00:00:00Z")
    assert "excludes" in excluded["message"]
    for bad in (page[:-4], "x" + page, "%00", "é", "a" * 600, ""):
        error = await face.refused("GET", f"/v1/sessions?page={bad}")
        assert (error["status"], error["message"][:6]) == (400, "page: ")
    foreign = await face.refused("GET", f"/v1/sessions?page={page}", workspace=OTHER_WORKSPACE)
    assert foreign["status"] == 400


@pytest.mark.rule("MA-A1.16", "MA-A1.17", "MA-A1.18", "MA-A1.19", "MA-A1.23")
async def test_filters(face: Face) -> None:
    first, second, third = await made_sessions(face, 3)
    await face.say(third, "hi")
    await face.ok("POST", f"/v1/sessions/{first}/archive")

    async def ids(query: str) -> list[str]:
        return [s["id"] for s in (await face.ok("GET", f"/v1/sessions?order=asc&{query}"))["data"]]

    assert await ids("") == [second, third]
    assert await ids("include_archived=true") == [first, second, third]
    assert await ids("statuses[]=running") == [third]
    assert await ids("statuses[]=running&statuses[]=idle") == [second, third]
    assert await ids("statuses[]=terminated&include_archived=true") == [first]
    assert await ids(f"agent_id={AGENT}&agent_version=1") == [second, third]
    assert await ids(f"agent_id={AGENT}&agent_version=2") == []
    assert await ids("agent_id=agent_nonsense") == []
    assert await ids("deployment_id=depl_1") == await ids("memory_store_id=memstore_1") == []
    assert await ids("created_at[gt]=2026-01-01T00:00:01Z") == [third]
    assert await ids("created_at[gte]=2026-01-01T00:00:01Z&created_at[lt]=2026-01-01T00:00:02Z") == [second]
    assert await ids("created_at[lte]=2026-01-01T00:00:01Z") == [second]


@pytest.mark.rule("MA-A0.24", "MA-A1.16", "MA-A1.18")
@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=1.5",
        "order=up",
        "statuses[]=busy",
        "agent_version=1",
        "include_archived=maybe",
        "created_at[gt]=yesterday",
        "colour=red",
        "order=asc&order=desc",
    ],
)
async def test_bad_queries_name_their_key(face: Face, query: str) -> None:
    error = await face.refused("GET", f"/v1/sessions?{query}")
    assert error["status"] == 400
    assert query.split("=")[0].split("[")[0] in error["message"]


@pytest.mark.rule("MA-A1.24", "MA-A1.26", "MA-A1.13")
async def test_update_merges_and_says_once_what_changed(face: Face) -> None:
    session = await face.session(title="a", metadata={"x": "1", "y": "2"})
    path = f"/v1/sessions/{session}"
    updated = await face.ok("POST", path, {"title": "b", "metadata": {"x": None, "z": "3"}})
    assert (updated["title"], updated["metadata"]) == ("b", {"y": "2", "z": "3"})
    await face.ok("POST", path, {"title": "b", "metadata": {"y": "2"}})
    await face.ok("POST", path, {})
    cleared = await face.ok("POST", path, {"title": None, "metadata": None})
    assert cleared["title"] is None
    events = await face.events(session)
    assert [e["type"] for e in events] == ["session.updated", "session.updated"]
    assert {k: events[0][k] for k in events[0] if k not in ("id", "processed_at")} == {
        "type": "session.updated",
        "title": "b",
        "metadata": {"y": "2", "z": "3"},
    }
    assert "metadata" not in events[1]
    full = await face.refused("POST", path, {"metadata": {str(i): "v" for i in range(16)}})
    assert full["message"].startswith("metadata: ")


@pytest.mark.rule("MA-A1.25", "MA-A1.27", "MA-A1.28", "MA-A0.10")
async def test_update_of_tools_needs_an_idle_session(face: Face) -> None:
    session = await face.session()
    path = f"/v1/sessions/{session}"
    tools = [{"type": "agent_toolset_20260401"}]
    updated = await face.ok("POST", path, {"agent": {"tools": tools}})
    assert updated["agent"]["tools"][0]["default_config"]["enabled"] is True
    (event,) = await face.events(session)
    assert event["agent"] == updated["agent"]
    for bad, code in (
        ({"vault_ids": []}, "unsupported"),
        ({"budget": {"type": "limit"}}, "budget_create_only"),
        ({"agent": {"tools": None}}, None),
        ({"agent": {"model": "test/x"}}, None),
        ({"title": 1}, None),
        ({"status": "idle"}, None),
    ):
        error = await face.refused("POST", path, bad)
        assert (error["status"], error["details"].get("error_code")) == (400, code)
    await face.say(session, "hi")
    assert (await face.refused("POST", path, {"agent": {"tools": []}}))["details"]["error_code"] == "session_running"
    await face.ok("POST", path, {"title": "while running"})
    await face.reply(session, await face.begin(session), "done")
    await face.ok("POST", path + "/archive")
    assert (await face.refused("POST", path, {"title": "x"}))["details"]["error_code"] == "session_archived"


@pytest.mark.rule("MA-A1.12", "MA-A1.14", "MA-A1.29", "MA-A1.30", "MA-G14")
async def test_from_a_turn_to_archive_and_deletion(face: Face) -> None:
    session = await face.session()
    path = f"/v1/sessions/{session}"
    await face.say(session, "hi")
    assert (await face.refused("POST", path + "/archive"))["details"]["error_code"] == "session_running"
    assert (await face.refused("DELETE", path))["details"]["error_code"] == "session_running"
    face.ledger.clock.advance(seconds=2)
    await face.reply(session, await face.begin(session), "done")
    used = await face.ok("GET", path)
    assert used["status"] == "idle"
    assert used["usage"]["input_tokens"] == 10
    assert used["usage"]["active_seconds"] == used["stats"]["active_seconds"] == 2.0
    assert used["usage"]["list_cost"] is None
    archived = await face.ok("POST", path + "/archive")
    assert (archived["status"], archived["archived_at"] is not None) == ("terminated", True)
    assert (await face.ok("POST", path + "/archive"))["archived_at"] == archived["archived_at"]
    assert (await face.types(session))[-2:] == ["session.thread_status_terminated", "session.status_terminated"]
    assert await face.ok("DELETE", path) == {"id": session, "type": "session_deleted"}
    for method, target in (("GET", path), ("POST", path + "/archive"), ("GET", path + "/events")):
        assert (await face.refused(method, target))["status"] == 404


@pytest.mark.rule("MA-A0.20", "MA-A0.19")
async def test_another_workspace_sees_what_is_not_there(face: Face) -> None:
    session = await face.session()
    missing = "/v1/sessions/sesn_" + token(AGENT_ID)
    for method, tail, sent in (
        ("GET", "", None),
        ("POST", "", {"title": "x"}),
        ("POST", "/archive", None),
        ("DELETE", "", None),
        ("GET", "/events", None),
        ("POST", "/events", {"events": [{"type": "user.interrupt"}]}),
        ("GET", "/threads", None),
    ):
        foreign = await face.call(method, f"/v1/sessions/{session}{tail}", sent, workspace=OTHER_WORKSPACE)
        assert foreign == await face.call(method, missing + tail, sent)
        assert foreign == await face.call(method, "/v1/sessions/nonsense" + tail, sent)
        assert foreign[0] == 404


async def test_a_parked_session_can_be_deleted(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    await face.reply(session, await face.begin(session), calls=[call_plan(0, "custom", "t")])
    assert (await face.ok("GET", f"/v1/sessions/{session}"))["status"] == "idle"
    await face.ok("DELETE", f"/v1/sessions/{session}")
