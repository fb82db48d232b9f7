"""A session for somebody who only wants to talk: an agent and an environment of the terminal's own, made once, found again."""

from typing import Any, Final

import msgspec

from perdure.cli.client import ApiError, Client, Json
from perdure.cli.text import one_line

NAME: Final = "perdure-terminal"
"""Of the agent and of the environment that `run` and `chat` share."""

PAGE_ROWS: Final = 100
TITLE_CHARS_MAX: Final = 60
CLAUDE_MODEL: Final = "claude-sonnet-5-5"
LOCAL_MODEL: Final = "local/smollm2"
TOOL_SET: Final = "agent_toolset_20260401"
SMALL_MODEL_NOTE: Final = (
    f"Model {LOCAL_MODEL}: a small one that runs on this machine; it can chat but not call tools. "
    "Start the server with ANTHROPIC_API_KEY set to use Claude."
)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of session is wanted. Without a model: Claude if the server can reach it, else the local one."""

    model: str | None = None
    agent_id: str | None = None
    ask: bool = False
    """Every tool call waits for a yes."""


class Begun(msgspec.Struct, frozen=True):
    """A new session, and what the person should know about it."""

    session_id: str
    model: str
    note: str | None


def begin_session(client: Client, wish: Wish, first_text: str | None) -> Begun:
    """Make the session."""
    environment_id = _find_or_make(client, "/v1/environments", {"name": NAME})
    title = one_line(first_text, TITLE_CHARS_MAX) if first_text and first_text.strip() else "Terminal chat"
    body: Json = {"environment_id": environment_id, "title": title}
    if wish.agent_id is not None:
        agent: Any = {"type": "agent", "id": wish.agent_id}
        if wish.model is not None:
            agent = {"type": "agent_with_overrides", "id": wish.agent_id, "model": wish.model}
        return _made(client.post("/v1/sessions", {**body, "agent": agent}), None)
    agent_id = _find_or_make(client, "/v1/agents", {"name": NAME, "model": LOCAL_MODEL})
    if wish.model is not None:
        return _made(client.post("/v1/sessions", {**body, "agent": _agent(agent_id, wish.model, wish)}), None)
    try:
        return _made(client.post("/v1/sessions", {**body, "agent": _agent(agent_id, CLAUDE_MODEL, wish)}), None)
    except ApiError as error:
        if error.error_code != "model_unknown":
            raise
    session = client.post("/v1/sessions", {**body, "agent": _agent(agent_id, LOCAL_MODEL, wish)})
    return _made(session, SMALL_MODEL_NOTE)


def _agent(agent_id: str, model: str, wish: Wish) -> Json:
    """The terminal's agent with this model, and with tools if the model can call any."""
    tools: list[Json] = []
    if not model.startswith("local/"):
        policy = "always_ask" if wish.ask else "always_allow"
        tools = [{"type": TOOL_SET, "default_config": {"permission_policy": {"type": policy}}}]
    return {"type": "agent_with_overrides", "id": agent_id, "model": model, "tools": tools}


def _find_or_make(client: Client, path: str, body: Json) -> str:
    for row in client.get(path, {"limit": PAGE_ROWS})["data"]:
        if row["name"] == body["name"]:
            return str(row["id"])
    return str(client.post(path, body)["id"])


def _made(session: Json, note: str | None) -> Begun:
    return Begun(str(session["id"]), str(session["agent"]["model"]["id"]), note)
