"""What an agent's configuration may say, what it becomes, and what follows for calls."""

from typing import Any

import pytest

from perdure.domain.agent import (
    Judged,
    judge_call,
    new_agent,
    next_version,
    offered_tools,
    overridden,
    read_version,
    refuse_archived,
    refuse_version,
    replaced_fields,
    snapshot,
    updated_agent,
)
from perdure.domain.errors import Refused

SET = "agent_toolset_20260401"
ASK = {"type": "always_ask"}
ALLOW = {"type": "always_allow"}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, "description": "d", "input_schema": {"type": "object"}, **fields}


def made(**fields: Any) -> dict[str, Any]:
    body = new_agent({"name": "n", "model": "m", **fields})
    assert not isinstance(body, Refused), body
    return body


def refusal(**fields: Any) -> Refused:
    refused = new_agent({"name": "n", "model": "m", **fields})
    assert isinstance(refused, Refused), refused
    return refused


@pytest.mark.rule("MA-A5.1", "MA-A5.2", "MA-A1.11")
def test_the_normal_form_has_every_default() -> None:
    assert made() == {
        "name": "n",
        "model": {"id": "m", "effort": None, "speed": "standard", "inference_geo": None},
        "system": None,
        "description": None,
        "tools": [],
        "mcp_servers": [],
        "skills": [],
        "multiagent": None,
        "metadata": {},
        "execution_identity": {"type": "service_account"},
    }
    rich = made(model={"id": "m", "effort": "high", "speed": "fast"}, execution_identity=None, multiagent=None)
    assert rich["model"] == {"id": "m", "effort": {"type": "high"}, "speed": "fast", "inference_geo": None}
    assert made(model={"id": "m", "effort": {"type": "low"}, "speed": None})["model"]["effort"] == {"type": "low"}


@pytest.mark.rule("MA-A5.4", "MA-D2.5")
def test_tool_sets_are_resolved() -> None:
    assert made(tools=[{"type": SET}])["tools"] == [
        {"type": SET, "default_config": {"enabled": True, "permission_policy": ALLOW}, "configs": []}
    ]
    given = {
        "type": SET,
        "default_config": {"permission_policy": ASK},
        "configs": [
            {"name": "bash", "enabled": False},
            {"name": "read", "permission_policy": ALLOW, "type": "read"},
            {"name": "web_search", "enabled": False, "allowed_domains": None},
        ],
    }
    resolved = made(tools=[given])["tools"]
    assert resolved[0]["configs"] == [
        {"type": "bash", "name": "bash", "enabled": False, "permission_policy": ASK},
        {"type": "read", "name": "read", "enabled": True, "permission_policy": ALLOW},
        {"type": "web_search", "name": "web_search", "enabled": False, "permission_policy": ASK},
    ]
    assert made(tools=resolved)["tools"] == resolved, "what was answered can be sent again"


@pytest.mark.rule("MA-A0.9")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "model: must be a string or an object, not null."),
        ({"model": 1}, "model: must be a string or an object, not a number."),
        ({"model": {"id": "m", "effort": 1}}, "model.effort: must be a string or an object, not a number."),
        ({"name": " "}, "name: must not be blank."),
    ],
)
def test_messages_name_every_form_that_is_taken(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields).message == message


@pytest.mark.rule(
    "MA-A5.3", "MA-A5.5", "MA-A5.16", "MA-A5.17", "MA-D1.3", "MA-D1.16", "MA-D2.6", "MA-D5.1", "MA-F3", "MA-F4",
    "MA-F5", "MA-F6",
)  # fmt: skip
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"name": ""}, "name"),
        ({"name": None}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"name": " \u2003 "}, "name"),
        ({"model": None}, "model"),
        ({"model": ""}, "model.id"),
        ({"model": {"id": "m", "effort": "huge"}}, "model.effort"),
        ({"model": {"id": "m", "effort": {"type": "huge"}}}, "model.effort.type"),
        ({"model": {"id": "m", "speed": "slow"}}, "model.speed"),
        ({"model": {"id": "m", "inference_geo": "eu"}}, "model.inference_geo"),
        ({"model": {"id": "m", "temperature": 1}}, "model.temperature"),
        ({"system": "x" * 100_001}, "system"),
        ({"metadata": {"a": None}}, "metadata.a"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"mcp_servers": "x"}, "mcp_servers"),
        ({"skills": [{"type": "custom"}]}, "skills"),
        ({"multiagent": {"type": "coordinator"}}, "multiagent"),
        ({"execution_identity": {"type": "aws_role"}}, "execution_identity.type"),
        ({"execution_identity": {"type": "root"}}, "execution_identity.type"),
        ({"colour": "red"}, "colour"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "bash"}]}, "tools.0.type"),
        ({"tools": [{"type": SET}, {"type": SET}]}, "tools.1"),
        ({"tools": [{"type": SET, "configs": [{"name": "rm"}]}]}, "tools.0.configs.0.name"),
        ({"tools": [{"type": SET, "configs": [{"name": "bash"}, {"name": "bash"}]}]}, "tools.0.configs.1.name"),
        ({"tools": [{"type": SET, "configs": [{"name": "bash", "type": "read"}]}]}, "tools.0.configs.0.type"),
        ({"tools": [{"type": SET, "configs": [{"name": "web_search"}]}]}, "tools.0.configs.0"),
        ({"tools": [{"type": SET, "configs": [{"name": "web_fetch", "enabled": True}]}]}, "tools.0.configs.0"),
        (
            {"tools": [{"type": SET, "configs": [{"name": "web_fetch", "enabled": False, "url_sources": {}}]}]},
            "tools.0.configs.0.url_sources",
        ),
        (
            {"tools": [{"type": SET, "default_config": {"permission_policy": {"type": "auto"}}}]},
            "tools.0.default_config.permission_policy.type",
        ),
        (
            {"tools": [{"type": SET, "configs": [{"name": "bash", "permission_policy": {"type": "never"}}]}]},
            "tools.0.configs.0.permission_policy.type",
        ),
        ({"tools": [custom("a b")]}, "tools.0.name"),
        ({"tools": [custom("")]}, "tools.0.name"),
        ({"tools": [custom("x" * 129)]}, "tools.0.name"),
        ({"tools": [custom("t", description="")]}, "tools.0.description"),
        ({"tools": [custom("t", description=" ")]}, "tools.0.description"),
        ({"tools": [{"type": "custom", "name": "t", "input_schema": {"type": "object"}}]}, "tools.0.description"),
        ({"tools": [custom("t", input_schema={"type": "array"})]}, "tools.0.input_schema.type"),
        ({"tools": [custom("t", input_schema={})]}, "tools.0.input_schema.type"),
        (
            {"tools": [custom("t", input_schema={"type": "object", "properties": []})]},
            "tools.0.input_schema.properties",
        ),
        ({"tools": [custom("t", input_schema={"type": "object", "required": [1]})]}, "tools.0.input_schema.required.0"),
        ({"tools": [custom("t", permission_policy=ASK)]}, "tools.0.permission_policy"),
        ({"tools": [custom("t"), custom("t")]}, "tools.1"),
        ({"tools": [{"type": SET}, custom("bash")]}, "tools.1"),
        ({"tools": [custom("bash"), {"type": SET}]}, "tools.1"),
        ({"tools": [custom(f"t{i}") for i in range(257)]}, "tools"),
        ({"tools": [{"type": SET}, *(custom(f"t{i}") for i in range(251))]}, "tools"),
    ],
)
def test_bad_configurations_name_the_place(fields: dict[str, Any], place: str) -> None:
    refused = refusal(**fields)
    assert refused.kind in ("invalid", "unsupported")
    assert refused.message.startswith(place + ": ")
    assert refused.param == place


def test_limits_hold_exactly() -> None:
    assert made(name="x" * 256, system="x" * 100_000)
    assert len(made(tools=[custom(f"t{i}") for i in range(256)])["tools"]) == 256
    assert made(tools=[{"type": SET}, *(custom(f"t{i}") for i in range(250))])
    assert made(tools=[custom("a" * 128), custom("A-z_9")])
    taken_away = {"type": SET, "configs": [{"name": "bash", "enabled": False}]}
    assert made(tools=[taken_away, custom("bash")]), "the name of a tool that was taken away is free"
    assert new_agent([]) == Refused(
        "invalid", "invalid_request_error", "body: must be an object, not an array.", "body"
    )
    for missing in ("name", "model"):
        refused = new_agent({k: v for k, v in {"name": "n", "model": "m"}.items() if k != missing})
        assert isinstance(refused, Refused)
        assert refused.param == missing


@pytest.mark.rule("MA-A5.7", "MA-A5.9", "MA-A5.10", "MA-A5.11", "MA-A5.12")
def test_updates() -> None:
    before = made(
        system="s",
        description="d",
        tools=[custom("t")],
        metadata={"a": "1", "b": "2"},
        model={"id": "m", "effort": "low"},
    )

    def after(**patch: Any) -> dict[str, Any]:
        body = updated_agent(before, patch)
        assert not isinstance(body, Refused), body
        return body

    assert after() == after(name="n", version=3) == after(metadata={}) == after(metadata=None) == before
    assert next_version(4, before, after()) == 4
    assert next_version(4, before, after(name="x")) == 5
    for empty in (None, ""):
        assert (after(system=empty)["system"], after(description=empty)["description"]) == (None, None)
    assert after(tools=None)["tools"] == after(tools=[])["tools"] == []
    assert after(tools=[custom("u")])["tools"] == [custom("u")]
    assert after(metadata={"a": None, "c": "3"})["metadata"] == {"b": "2", "c": "3"}
    assert after(model="other")["model"] == before["model"] | {"id": "other"}, "an effort not spoken of is kept"
    assert after(model={"id": "m", "effort": None})["model"]["effort"] is None
    for bad in ({"name": None}, {"model": None}, {"name": ""}, {"x": 1}, {"metadata": {str(i): "" for i in range(15)}}):
        assert isinstance(updated_agent(before, bad), Refused)
    assert (read_version({}), read_version({"version": 2}), read_version({"version": 2**63 - 1})) == (
        None,
        2,
        2**63 - 1,
    )
    for bad in (None, 0, 2**63, 1.0, True, "1"):
        assert isinstance(read_version({"version": bad}), Refused)
    assert isinstance(read_version({"version": 0}), Refused)
    assert (refuse_version(None, 4), refuse_version(4, 4)) == (None, None)
    conflict = refuse_version(3, 4)
    assert conflict is not None
    assert (conflict.kind, conflict.code) == ("conflict", "version_mismatch")
    assert refuse_archived(archived=False) is None
    assert refuse_archived(archived=True) is not None


@pytest.mark.rule("MA-A1.4", "MA-A1.5", "MA-A1.6")
def test_overrides() -> None:
    base = snapshot("token", 3, made(system="s", metadata={"a": "b"}, model={"id": "m", "effort": "low"}))
    assert "metadata" not in base
    assert overridden(base, {}, "agent") == base
    changed = overridden(base, {"model": {"id": "o", "effort": "max"}, "system": "", "skills": None}, "agent")
    assert changed == base | {"model": base["model"] | {"id": "o", "effort": None}, "system": None}
    for bad, place in (
        ({"model": None}, "agent.model"),
        ({"tools": [custom("a b")]}, "agent.tools.0.name"),
        ({"mcp_servers": [{}]}, "agent.mcp_servers"),
    ):
        refused = overridden(base, bad, "agent")
        assert isinstance(refused, Refused)
        assert refused.message.startswith(place + ": ")
    assert replaced_fields({"tools": [], "mcp_servers": []}, "agent") == {"tools": [], "mcp_servers": []}
    assert isinstance(replaced_fields({"tools": None}, "agent"), Refused)


def agent_with(*tools: dict[str, Any]) -> dict[str, Any]:
    return snapshot("token", 1, made(tools=list(tools)))


@pytest.mark.rule("MA-D1.1", "MA-D1.16", "MA-D4.1")
def test_the_model_is_told_of_what_it_may_call() -> None:
    schema = {
        "type": "object",
        "properties": {"q": {"type": "string"}},
        "required": ["q"],
        "additionalProperties": False,
    }
    configs = [{"name": "bash", "permission_policy": ASK}, {"name": "grep", "enabled": False}]
    agent = agent_with(custom("look", input_schema=schema), {"type": SET, "configs": configs})
    offered = offered_tools(agent)
    assert [(t.name, t.owner) for t in offered] == [
        ("bash", "ask"),
        ("read", "server"),
        ("write", "server"),
        ("edit", "server"),
        ("glob", "server"),
        ("look", "custom"),
    ]
    assert offered[-1].definition == {"name": "look", "description": "d", "input_schema": schema}
    assert offered_tools(agent_with()) == []


@pytest.mark.rule("MA-D1.2", "MA-D2.1", "MA-D2.2", "MA-D2.5")
def test_calls_are_judged() -> None:
    configs = [{"name": "bash", "permission_policy": ASK}, {"name": "grep", "enabled": False}]
    agent = agent_with({"type": SET, "configs": configs}, custom("look"))
    assert judge_call(agent, "bash", {}) == Judged(owner="ask", policy="always_ask", serial=True)
    assert judge_call(agent, "write", {}) == Judged(owner="server", policy="always_allow")
    assert judge_call(agent, "read", {}) == Judged(owner="server", policy="always_allow", on_lost="repeat")
    assert judge_call(agent, "look", {}) == Judged(owner="custom")
    for name, arguments, said in (
        ("grep", {}, "not enabled"),
        ("web_search", {}, "No tool has the name"),
        ("nothing", {}, "look"),
        ("bash", None, "one JSON object"),
        ("look", None, "one JSON object"),
    ):
        judged = judge_call(agent, name, arguments)
        assert (judged.owner, judged.policy) == ("refused", None)
        assert said in judged.error
    off = agent_with(
        {"type": SET, "default_config": {"enabled": False}, "configs": [{"name": "read", "enabled": True}]}
    )
    assert [t.name for t in offered_tools(off)] == ["read"]
    assert judge_call(off, "bash", {}).owner == "refused"
    assert judge_call(agent_with(), "bash", {}).owner == "refused"
