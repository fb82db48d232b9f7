"""`perdure sessions` and `perdure inputs`: verbs that ask a running server."""

from typing import Any, Final
from urllib.parse import quote

from perdure.cli.client import Client, Json
from perdure.cli.exits import OK, REFUSED, CommandFailed
from perdure.cli.table import show_fields, show_json, show_rows
from perdure.cli.text import compact

SESSION_PREFIXES: Final = ("sesn_",)
INPUT_PREFIX: Final = "sevt_"


def list_sessions(client: Client, *, limit: int, statuses: list[str], archived: bool, as_json: bool) -> int:
    """The newest sessions."""
    params: dict[str, str | int | list[str]] = {"limit": limit}
    if statuses:
        params["statuses[]"] = statuses
    if archived:
        params["include_archived"] = "true"
    sessions: list[Json] = client.get("/v1/sessions", params)["data"]
    if as_json:
        show_json({"data": sessions})
        return OK
    rows = [_session_row(session) for session in sessions]
    show_rows(
        ("id", "status", "model", "created_at", "title"),
        rows,
        as_json=False,
        empty="No sessions: `perdure chat` begins one.",
    )
    return OK


def show_session(client: Client, session_id: str, *, as_json: bool) -> int:
    """One session: what it is, how it is, and what it used."""
    session = client.get(session_path(session_id))
    if as_json:
        show_json(session)
        return OK
    usage: Json = session["usage"]
    agent: Json = session["agent"]
    fields = {
        **_session_row(session),
        "agent": f"{agent['id']}, version {agent['version']}, {agent['name']}",
        "environment": session["environment_id"],
        "updated_at": session["updated_at"][:19] + "Z",
        "tokens": f"{usage['input_tokens']} in, {usage['output_tokens']} out",
        "metadata": compact(session["metadata"]) if session["metadata"] else None,
    }
    show_fields(fields)
    return OK


def archive_session(client: Client, session_id: str, *, as_json: bool) -> int:
    """Let a session take no more input; its events stay."""
    session = client.post(f"{session_path(session_id)}/archive")
    if as_json:
        show_json(session)
    else:
        print(f"Archived: {session_id}. It takes no more input; its events stay.")
    return OK


def session_path(session_id: str) -> str:
    """Where a session is. Raises `CommandFailed` for what is no id of one."""
    return f"/v1/sessions/{_checked(session_id, SESSION_PREFIXES)}"


def list_inputs(client: Client, session_id: str, *, limit: int, as_json: bool) -> int:
    """Where each input of a session is."""
    path = f"/perdure/v1/sessions/{_checked(session_id, SESSION_PREFIXES)}/inputs"
    rows: list[Json] = client.get(path, {"limit": limit})["data"]
    columns = ("id", "kind", "state", "reason", "turn_id", "received_at", "settled_at")
    show_rows(columns, rows, as_json=as_json, empty="This session has no inputs.")
    return OK


def withdraw_input(client: Client, session_id: str, input_id: str, *, as_json: bool) -> int:
    """Take an input back before a turn takes it."""
    session = _checked(session_id, SESSION_PREFIXES)
    answer = client.post(f"/perdure/v1/sessions/{session}/inputs/{_checked(input_id, (INPUT_PREFIX,))}/withdraw")
    if as_json:
        show_json(answer)
    else:
        print(f"Withdrawn: {input_id}. No turn will take it.")
    return OK


def _session_row(session: Json) -> dict[str, Any]:
    return {
        "id": session["id"],
        "status": session["status"] + (", archived" if session["archived_at"] is not None else ""),
        "model": session["agent"]["model"]["id"],
        "created_at": session["created_at"][:19] + "Z",
        "title": session["title"],
    }


def _checked(identity: str, prefixes: tuple[str, ...]) -> str:
    """An id that may stand in a path."""
    if not identity.startswith(prefixes):
        raise CommandFailed(
            f"{identity!r} is not an id of this kind: it starts with {' or '.join(prefixes)}; "
            "`perdure sessions list` and `perdure inputs list` show them.",
            code=REFUSED,
        )
    return quote(identity, safe="")
