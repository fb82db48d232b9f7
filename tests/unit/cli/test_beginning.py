"""Which session somebody gets who only wants to talk, and what is made for it, and when."""

import pytest
from tests.unit.cli.answering import Answering, Json, reply
from tests.unit.cli.conftest import Answers, Terminal

from perdure.cli.beginning import (
    CLAUDE_MODEL,
    LOCAL_MODEL,
    MARK,
    NAME,
    NOTHING_TO_ASK,
    PAGE_ROWS,
    PAGES_MAX,
    SMALL_MODEL_NOTE,
    TOOL_SET,
    Wish,
    begin_session,
)
from perdure.cli.chatting import chat
from perdure.cli.client import Client
from perdure.cli.exits import CommandFailed

ASK: Json = {"permission_policy": {"type": "always_ask"}}
ALLOW: Json = {"permission_policy": {"type": "always_allow"}}
CUSTOM: Json = {"type": "custom", "name": "weather", "description": "Now.", "input_schema": {"type": "object"}}


def agent(*tools: Json) -> Json:
    return {"id": "agent_theirs", "version": 7, "name": "theirs", "metadata": {}, "tools": list(tools)}


def tool_set(*configs: Json, **default: object) -> Json:
    return {"type": TOOL_SET, "default_config": {**ALLOW, **default}, "configs": list(configs)}


def row(identity: str, **metadata: str) -> Json:
    return {"id": identity, "name": NAME, "metadata": metadata}


def test_a_new_session_takes_claude_where_the_server_can(server: Answering, client: Client) -> None:
    begun = begin_session(client, Wish(), "hello")
    assert begun.notes == (f"Model {CLAUDE_MODEL}.",)
    assert server.bodies[-1]["agent"]["tools"][0]["default_config"] == {"permission_policy": {"type": "always_allow"}}
    assert server.bodies[-1]["title"] == "hello"


def test_a_new_session_takes_the_local_model_elsewhere_and_says_what_it_can_not_do(
    server: Answering, client: Client
) -> None:
    server.unknown_models = (CLAUDE_MODEL,)
    begun = begin_session(client, Wish(), "hello")
    assert begun.notes == (SMALL_MODEL_NOTE,)
    assert server.bodies[-1]["agent"]["tools"] == []


def test_a_model_that_was_asked_for_is_never_replaced(server: Answering, client: Client) -> None:
    server.unknown_models = ("gpt-9",)
    with pytest.raises(CommandFailed, match="no provider"):
        begin_session(client, Wish(model="gpt-9"), "hello")


def test_ask_lets_every_call_wait(server: Answering, client: Client) -> None:
    begin_session(client, Wish(model="scripted/demo", ask=True), "hello")
    assert server.bodies[-1]["agent"]["tools"][0]["default_config"] == {"permission_policy": {"type": "always_ask"}}


def test_ask_lets_every_built_in_tool_of_a_given_agent_wait_and_keeps_the_rest(
    server: Answering, client: Client
) -> None:
    bash: Json = {"type": "bash", "name": "bash", "enabled": True, **ALLOW}
    server.agents = [agent(tool_set(bash, enabled=False), CUSTOM)]
    begun = begin_session(client, Wish(agent_id="agent_theirs", ask=True), "hello")
    assert server.bodies[-1]["agent"] == {
        "type": "agent_with_overrides",
        "id": "agent_theirs",
        "version": 7,
        "tools": [{**tool_set({**bash, **ASK}, enabled=False), "default_config": {"enabled": False, **ASK}}, CUSTOM],
    }
    assert len(begun.notes) == 1


def test_a_given_agent_is_taken_as_it_is_without_ask(server: Answering, client: Client) -> None:
    server.agents = [agent(tool_set())]
    begin_session(client, Wish(agent_id="agent_theirs"), "hello")
    assert server.bodies[-1]["agent"] == {"type": "agent", "id": "agent_theirs"}
    begin_session(client, Wish(agent_id="agent_theirs", model="scripted/x"), "hello")
    overridden = {"type": "agent_with_overrides", "id": "agent_theirs", "model": "scripted/x"}
    assert server.bodies[-1]["agent"] == overridden


def test_nothing_is_made_for_an_agent_that_is_not_there(server: Answering, client: Client) -> None:
    with pytest.raises(CommandFailed, match="Agent not found"):
        begin_session(client, Wish(agent_id="agent_theirs", ask=True), "hello")
    assert server.bodies == []


def test_ask_says_when_there_is_nothing_to_ask_about(server: Answering, client: Client) -> None:
    server.unknown_models = (CLAUDE_MODEL,)
    server.agents = [agent(CUSTOM)]
    for wish in (
        Wish(ask=True),
        Wish(ask=True, model=LOCAL_MODEL),
        Wish(ask=True, agent_id="agent_theirs"),
        Wish(ask=True, agent_id="agent_theirs", model=LOCAL_MODEL),
    ):
        assert begin_session(client, wish, "hello").notes[-1].startswith(NOTHING_TO_ASK)


def test_our_agent_is_found_behind_many_newer_ones(server: Answering, client: Client) -> None:
    others = [{"id": f"agent_{n}", "name": "other", "metadata": {}} for n in range(2 * PAGE_ROWS)]
    server.agents = [*others, row("agent_ours", **MARK)]
    server.environments = [row("env_ours", **MARK)]
    begin_session(client, Wish(model="scripted/x"), "hello")
    (session,) = server.bodies
    assert (session["agent"]["id"], session["environment_id"]) == ("agent_ours", "env_ours")


def test_what_only_has_our_name_is_left_alone(server: Answering, client: Client) -> None:
    server.agents = [row("agent_theirs", perdure="else")]
    server.environments = [row("env_theirs")]
    begin_session(client, Wish(model="scripted/x"), "hello")
    environment, ours, session = server.bodies
    assert environment == {"name": NAME, "metadata": MARK}
    assert ours == {"name": NAME, "model": LOCAL_MODEL, "metadata": MARK}
    assert (session["agent"]["id"], session["environment_id"]) == ("agent_one", "env_one")


def test_the_search_for_ours_ends(server: Answering, client: Client) -> None:
    rows = [{"id": f"agent_{n}", "name": "other", "metadata": {}} for n in range(PAGES_MAX * PAGE_ROWS)]
    server.agents = [*rows, row("agent_ours", **MARK)]
    begin_session(client, Wish(model="scripted/x"), "hello")
    assert server.bodies[-1]["agent"]["id"] == "agent_one"
    assert sum(path == "/v1/agents" and method == "GET" for method, path, _ in server.requests) == PAGES_MAX


def test_who_leaves_without_a_word_leaves_nothing_behind(server: Answering, client: Client, terminal: Terminal) -> None:
    asker = Answers(["", "  "], is_interactive=True)
    assert chat(client, None, None, Wish(), terminal.screen(), asker) == 0
    assert server.bodies == []
    assert "begins with your first message" in terminal.err.getvalue()


def test_the_first_message_makes_the_session_and_the_second_goes_on_with_it(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    server.turns += [reply("one"), reply("two")]
    asker = Answers(["first", "second"], is_interactive=True)
    assert chat(client, None, None, Wish(), terminal.screen(), asker) == 0
    assert terminal.out.getvalue() == "one\ntwo\n"
    assert [body["title"] for body in server.bodies if "title" in body] == ["first"]


def test_an_unknown_agent_is_told_before_anybody_types(server: Answering, client: Client, terminal: Terminal) -> None:
    asker = Answers(["never asked"], is_interactive=True)
    with pytest.raises(CommandFailed, match="Agent not found"):
        chat(client, None, None, Wish(agent_id="agent_x"), terminal.screen(), asker)
    assert asker.lines == ["never asked"]
    assert server.bodies == []
