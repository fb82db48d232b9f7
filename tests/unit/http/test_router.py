"""Which face, and which route: tables of headers and paths."""

import pytest

from perdure.domain.errors import Refused
from perdure.http.router import Chosen, Found, Router, UnbuiltRoute, WrongMethod, choose_face

CLAUDE = {"anthropic-version": "2026-10-21"}
BETA = {"anthropic-beta": "managed-agents-2026-04-01"}
OPENAI = {"openai-beta": "agents=v1"}

FACES: list[tuple[str, dict[str, str], str]] = [
    ("/v1/sessions", {}, "claude"),
    ("/v1/sessions/sesn_1/events", OPENAI, "claude"),
    ("/v1/environments", {}, "claude"),
    ("/v1/nothing", {}, "claude"),
    ("/v1/agents/sessions", {}, "openai"),
    ("/v1/agents/sessions/s_1/turns", CLAUDE, "openai"),
    ("/v1/agents/environments", {}, "openai"),
    ("/v1/agents/automations/x", {}, "openai"),
    ("/v1/agents", CLAUDE, "claude"),
    ("/v1/agents", BETA, "claude"),
    ("/v1/agents/agent_1/versions", CLAUDE | BETA, "claude"),
    ("/v1/agents", OPENAI, "openai"),
    ("/v1/vaults", CLAUDE, "claude"),
    ("/v1/vaults/v_1", OPENAI, "openai"),
    ("/v1/files", CLAUDE, "claude"),
    ("/v1/files", {}, "openai"),
    ("/v1/files/f/content", OPENAI, "openai"),
    ("/v1/skills", CLAUDE | OPENAI, "claude"),
    ("/v1/skills", BETA, "openai"),
    ("/v1/agentsmith", {}, "claude"),
    ("/perdure/v1/sessions/s/inputs", {}, "perdure"),
]


@pytest.mark.rule("MA-A0.26")
@pytest.mark.parametrize(("path", "headers", "face"), FACES)
def test_paths_and_headers_choose_the_face(path: str, headers: dict[str, str], face: str) -> None:
    assert choose_face(path, headers) == Chosen(face, path)  # type: ignore[arg-type]


@pytest.mark.rule("MA-A0.27")
@pytest.mark.parametrize("headers", [{}, CLAUDE, OPENAI, CLAUDE | OPENAI])
@pytest.mark.parametrize(
    ("path", "face", "rest"),
    [
        ("/claude/v1/agents", "claude", "/v1/agents"),
        ("/claude/v1/agents/sessions", "claude", "/v1/agents/sessions"),
        ("/openai/v1/agents", "openai", "/v1/agents"),
        ("/openai/v1/sessions", "openai", "/v1/sessions"),
    ],
)
def test_a_prefix_forces_a_face(path: str, face: str, rest: str, headers: dict[str, str]) -> None:
    assert choose_face(path, headers) == Chosen(face, rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/agents", "/v1/agents/x", "/v1/vaults", "/v1/vaults/v/credentials"])
@pytest.mark.parametrize("headers", [{}, CLAUDE | OPENAI, BETA | OPENAI])
def test_headers_of_both_or_neither_choose_nothing(path: str, headers: dict[str, str]) -> None:
    refused = choose_face(path, headers)
    assert isinstance(refused, Refused) and refused.kind == "invalid"
    for name in ("anthropic-version", "anthropic-beta", "OpenAI-Beta", "/claude", "/openai/v1"):
        assert name in refused.message


ROUTER = Router(
    [
        UnbuiltRoute("GET", "/v1/things", "list"),
        UnbuiltRoute("POST", "/v1/things", "create"),
        UnbuiltRoute("GET", "/v1/things/{thing_id}/work/poll", "poll"),
        UnbuiltRoute("GET", "/v1/things/{thing_id}/work/{work_id}", "work"),
        UnbuiltRoute("POST", "/v1/things/{thing_id}/work/{work_id}/ack", "ack"),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "name", "params"),
    [
        ("GET", "/v1/things", "list", {}),
        ("POST", "/v1/things/", "create", {}),
        ("GET", "/v1/things/a/work/poll", "poll", {"thing_id": "a"}),
        ("GET", "/v1/things/a%2Fb/work/c", "work", {"thing_id": "a/b", "work_id": "c"}),
        ("POST", "/v1/things/a/work/poll/ack", "ack", {"thing_id": "a", "work_id": "poll"}),
    ],
)
def test_fixed_segments_go_before_named_ones(method: str, path: str, name: str, params: dict[str, str]) -> None:
    found = ROUTER.find(method, path)
    assert isinstance(found, Found)
    assert (found.route.sdk_method, found.params) == (name, params)


def test_unknown_paths_and_methods_are_told_apart() -> None:
    assert ROUTER.find("GET", "/v1/nothing") is None
    assert ROUTER.find("GET", "/v1/things//work/poll") is None
    assert ROUTER.find("GET", "/v1/things/a/work") is None
    assert ROUTER.find("DELETE", "/v1/things") == WrongMethod(("GET", "POST"))


def test_a_route_is_served_once() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Router([UnbuiltRoute("GET", "/v1/a/{x}", "one"), UnbuiltRoute("GET", "/v1/a/{y}", "two")])
