"""A session for somebody who only wants to talk: an agent and an environment of the terminal's own, made once, found again."""

from typing import Any, Final
from urllib.parse import quote

import msgspec

from perdure.cli.client import ApiError, Client, Json
from perdure.cli.text import one_line

NAME: Final = "perdure-terminal"
"""Of the agent and of the environment that `run` and `chat` share."""

MARK: Final = {"perdure": "terminal"}
"""In the metadata of both. A name alone may be anybody's, and what is under it somebody else's to change."""

PAGE_ROWS: Final = 100
PAGES_MAX: Final = 10
"""Ours is used all the time but not made anew, so it may be old. Behind a thousand newer ones, another is made rather than looked for."""

TITLE_CHARS_MAX: Final = 60
CLAUDE_MODEL: Final = "claude-sonnet-5-5"
LOCAL: Final = "local/"
LOCAL_MODEL: Final = LOCAL + "smollm2"
TOOL_SET: Final = "agent_toolset_20260401"
SMALL_MODEL_NOTE: Final = (
    f"Model {LOCAL_MODEL}: a small one that runs on this machine; it can chat but not call tools. "
    "Start the server with ANTHROPIC_API_KEY set to use Claude."
)
NOTHING_TO_ASK: Final = "--ask has nothing to ask about: "


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of session is wanted. Without a model: Claude if the server can reach it, else the local one."""

    model: str | None = None
    agent_id: str | None = None
    ask: bool = False
    """Every call of a built-in tool waits for a yes."""


class Begun(msgspec.Struct, frozen=True):
    """A new session, and what the person should know about it."""

    session_id: str
    notes: tuple[str, ...]


def check_wish(client: Client, wish: Wish) -> None:
    """Raise what would keep the session from being made, as far as it can be known without making anything."""
    if wish.agent_id is None:
        client.get("/v1/agents", {"limit": 1})
    else:
        _read_agent(client, wish.agent_id)


def begin_session(client: Client, wish: Wish, first_text: str) -> Begun:
    """Make the session."""
    if wish.agent_id is not None:
        return _begin_with(client, _read_agent(client, wish.agent_id), wish, first_text)
    body = _body(client, first_text)
    agent_id = _find_or_make(client, "/v1/agents", {"name": NAME, "model": LOCAL_MODEL, "metadata": MARK})
    if wish.model is not None:
        return _begun(client.post("/v1/sessions", {**body, "agent": _own_agent(agent_id, wish.model, wish)}), wish)
    try:
        session = client.post("/v1/sessions", {**body, "agent": _own_agent(agent_id, CLAUDE_MODEL, wish)})
    except ApiError as error:
        if error.error_code != "model_unknown":
            raise
        session = client.post("/v1/sessions", {**body, "agent": _own_agent(agent_id, LOCAL_MODEL, wish)})
        return _begun(session, wish, SMALL_MODEL_NOTE)
    return _begun(session, wish)


def _begin_with(client: Client, agent: Json, wish: Wish, first_text: str) -> Begun:
    """With somebody's agent as it is, or with what was wished for instead."""
    overrides: Json = {} if wish.model is None else {"model": wish.model}
    if wish.ask:
        # Of the version whose tools these are: a later one may have others.
        overrides |= {"version": agent["version"], "tools": [_asking(tool) for tool in agent["tools"]]}
    kind = "agent_with_overrides" if overrides else "agent"
    body = {**_body(client, first_text), "agent": {"type": kind, "id": agent["id"], **overrides}}
    return _begun(client.post("/v1/sessions", body), wish)


def _asking(tool: Json) -> Json:
    """The same tool, waiting for a yes whatever its agent says. A custom one is run by the client, who can refuse."""
    if tool["type"] == "custom":
        return tool
    ask: Json = {"permission_policy": {"type": "always_ask"}}
    configs: list[Json] = tool["configs"]
    return {**tool, "default_config": {**tool["default_config"], **ask}, "configs": [{**c, **ask} for c in configs]}


def _own_agent(agent_id: str, model: str, wish: Wish) -> Json:
    """The terminal's agent with this model, and with tools if the model can call any."""
    tools: list[Json] = []
    if not model.startswith(LOCAL):
        policy = "always_ask" if wish.ask else "always_allow"
        tools = [{"type": TOOL_SET, "default_config": {"permission_policy": {"type": policy}}}]
    return {"type": "agent_with_overrides", "id": agent_id, "model": model, "tools": tools}


def _body(client: Client, first_text: str) -> Json:
    environment_id = _find_or_make(client, "/v1/environments", {"name": NAME, "metadata": MARK})
    return {"environment_id": environment_id, "title": one_line(first_text, TITLE_CHARS_MAX)}


def _read_agent(client: Client, agent_id: str) -> Json:
    return client.get(f"/v1/agents/{quote(agent_id, safe='')}")


def _find_or_make(client: Client, path: str, body: Json) -> str:
    params: dict[str, str | int | list[str]] = {"limit": PAGE_ROWS}
    for _ in range(PAGES_MAX):
        answer = client.get(path, params)
        for row in answer["data"]:
            if row["name"] == NAME and MARK.items() <= row["metadata"].items():
                return str(row["id"])
        if answer["next_page"] is None:
            break
        params = {"limit": PAGE_ROWS, "page": str(answer["next_page"])}
    return str(client.post(path, body)["id"])


def _begun(session: Json, wish: Wish, note: str | None = None) -> Begun:
    model = str(session["agent"]["model"]["id"])
    notes = [note or f"Model {model}."]
    if wish.ask:
        tools: list[Any] = session["agent"]["tools"]
        if model.startswith(LOCAL):
            notes.append(f"{NOTHING_TO_ASK}the model {model} calls no tools.")
        elif all(tool["type"] == "custom" for tool in tools):
            notes.append(f"{NOTHING_TO_ASK}the agent has no built-in tools.")
    return Begun(str(session["id"]), tuple(notes))
