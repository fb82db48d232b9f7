"""Agents: what a configuration may say, its normal form, and what follows from it for the tools of a session.

Three forms of the same thing. The *request* is what a client wrote. The *body* is its normal form, with every default filled in: one
version of an agent. The *snapshot* is a body under an agent's id and version, without labels: what a session keeps and works by.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.shape import (
    TEXT_OR_OBJECT,
    Misfit,
    join,
    read_array,
    read_choice,
    read_metadata,
    read_metadata_patch,
    read_name,
    read_object,
    read_text,
    read_whole,
    refuse_pairs,
    unsupported,
)
from perdure.domain.tool_set import ask_policy, builtin_configs, read_tools

NAME_CHARS_MAX: Final = 256
SYSTEM_CHARS_MAX: Final = 100_000
DESCRIPTION_CHARS_MAX: Final = 10_000
"""A few pages for people; the model never reads it."""

MODEL_CHARS_MAX: Final = 256
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
SPEEDS: Final = ("standard", "fast")

AGENT_FIELDS: Final = (
    "name",
    "model",
    "system",
    "description",
    "tools",
    "mcp_servers",
    "skills",
    "multiagent",
    "metadata",
    "execution_identity",
)
OVERRIDE_FIELDS: Final = ("model", "system", "tools", "mcp_servers", "skills")

IDENTITY: Final = {"type": "service_account"}

Body: TypeAlias = dict[str, Any]


# -------------------------------------------------------------------------------------------------------------- new, changed


def new_agent(request: Any) -> Body | Refused:
    """The body of version 1.

    MA-A5.3, MA-F3: `name` has 1 to 256 characters and is not blank, `system` at most 100,000, `metadata` and `tools` are bounded.
    """
    try:
        given = read_object(request, "", known=AGENT_FIELDS, required=("name", "model"))
        body: Body = {
            "name": _read_name(given["name"]),
            "model": read_model(given["model"], "model"),
            "system": None,
            "description": None,
            "tools": [],
            "mcp_servers": [],
            "skills": [],
            "multiagent": None,
            "metadata": {},
            "execution_identity": dict(IDENTITY),
        }
        rest = {k: v for k, v in given.items() if k not in ("name", "model", "metadata")}
        if "metadata" in given:
            body["metadata"] = read_metadata(given["metadata"], "metadata")
        return body | _read_clearable(rest, "")
    except Misfit as misfit:
        return misfit.refused


def updated_agent(body: Body, request: Any) -> Body | Refused:
    """The body after an update; equal to the one before when the update changes nothing.

    MA-A5.10: fields are replaced as a whole, null or empty clears; `name` and `model` can't be cleared. MA-A5.11: metadata is merged,
    null deletes a key. `version` in the request is the caller's to judge.
    """
    try:
        given = read_object(request, "", known=(*AGENT_FIELDS, "version"))
        changed = dict(body)
        if "name" in given:
            changed["name"] = _read_name(given["name"])
        if "model" in given:
            changed["model"] = _kept_effort(given["model"], read_model(given["model"], "model"), body["model"])
        if "metadata" in given:
            changed["metadata"] = _merged_metadata(body["metadata"], given["metadata"])
        rest = {k: v for k, v in given.items() if k not in ("name", "model", "metadata", "version")}
        return changed | _read_clearable(rest, "")
    except Misfit as misfit:
        return misfit.refused


def read_version(request: Any) -> int | Refused | None:
    """The `version` that an update names, if any. Null is no version: whoever sends it believes to be protected by one."""
    try:
        given = read_object(request, "")
        return read_whole(given["version"], "version", least=1) if "version" in given else None
    except Misfit as misfit:
        return misfit.refused


def refuse_version(named: int | None, current: int) -> Refused | None:
    """Why an update can't apply to the current version.

    MA-A5.7: without a version it applies whatever there is; with one, only to that version.
    """
    if named is None or named == current:
        return None
    message = f"version: the agent is at version {current}, not {named}: read it again and apply the change to what it is now."
    return Refused("conflict", "version_mismatch", message, "version", {"current_version": current})


def next_version(version: int, before: Body, after: Body) -> int:
    """The version after an update (MA-A5.9): one more, or the same when nothing changed."""
    return version if before == after else version + 1


def refuse_archived(*, archived: bool) -> Refused | None:
    """Why an archived agent takes no update (MA-A5.12). Archiving it again is no update and changes nothing."""
    if not archived:
        return None
    return Refused("conflict", "agent_archived", "The agent is archived and can't be changed: create a new one.")


def _read_name(value: Any) -> str:
    return read_name(value, "name", most=NAME_CHARS_MAX)


def _merged_metadata(before: dict[str, str], value: Any) -> dict[str, str]:
    if value is None:
        return before
    merged: dict[str, str | None] = {**before, **read_metadata_patch(value, "metadata")}
    kept = {k: v for k, v in merged.items() if v is not None}
    refuse_pairs(len(kept), "metadata")
    return kept


def _read_clearable(given: dict[str, Any], path: str) -> Body:
    """The fields that null or an empty value clears, as far as they are given."""
    body: Body = {}
    for field, value in given.items():
        place = join(path, field)
        match field:
            case "system" | "description":
                most = SYSTEM_CHARS_MAX if field == "system" else DESCRIPTION_CHARS_MAX
                body[field] = (None if value is None else read_text(value, place, most=most)) or None
            case "tools":
                body[field] = [] if value is None else read_tools(value, place)
            case "mcp_servers" | "skills":
                body[field] = _read_empty_list(value, place)
            case "multiagent":
                body[field] = _read_null(value, place)
            case "execution_identity":
                body[field] = _read_identity(value, place)
            case _:
                raise AssertionError(field)
    return body


def _read_empty_list(value: Any, path: str) -> list[Any]:
    if value is not None and read_array(value, path):
        raise unsupported(path, f"{path.rsplit('.', maxsplit=1)[-1]} with content")
    return []


def _read_null(value: Any, path: str) -> None:
    if value not in (None, {}, []):
        raise unsupported(path, "multiagent orchestration")


def _read_identity(value: Any, path: str) -> Body:
    if value is None:
        return dict(IDENTITY)
    kind = read_text(read_object(value, path, required=("type",))["type"], join(path, "type"))
    if kind == "aws_role":
        raise unsupported(join(path, "type"), "the execution identity aws_role")
    read_choice(kind, join(path, "type"), ("service_account", "aws_role"))
    read_object(value, path, known=("type",))
    return dict(IDENTITY)


# --------------------------------------------------------------------------------------------------------------------- model


def read_model(value: Any, path: str) -> Body:
    """A model in its object form. `effort` is null where nothing was asked: the provider's default applies."""
    if isinstance(value, str):
        value = {"id": value}
    known = ("id", "effort", "speed", "inference_geo")
    given = read_object(value, path, known=known, required=("id",), form=TEXT_OR_OBJECT)
    if given.get("inference_geo") is not None:
        raise unsupported(join(path, "inference_geo"), "the choice of a region")
    speed = given.get("speed")
    return {
        "id": read_text(given["id"], join(path, "id"), least=1, most=MODEL_CHARS_MAX),
        "effort": _read_effort(given.get("effort"), join(path, "effort")),
        "speed": "standard" if speed is None else read_choice(speed, join(path, "speed"), SPEEDS),
        "inference_geo": None,
    }


def _read_effort(value: Any, path: str) -> Body | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = read_object(value, path, known=("type",), required=("type",), form=TEXT_OR_OBJECT)["type"]
        path = join(path, "type")
    return {"type": read_choice(value, path, EFFORTS)}


def _kept_effort(request: Any, model: Body, before: Body) -> Body:
    """An update that says nothing about the effort leaves it as it is."""
    silent = not isinstance(request, dict) or "effort" not in request
    return model | {"effort": before["effort"]} if silent else model


# ------------------------------------------------------------------------------------------------------------------ snapshot


def snapshot(agent_token: str, version: int, body: Body) -> Body:
    """What a session keeps of an agent. `id` is the token alone; each face puts its prefix before it."""
    return {"id": agent_token, "version": version} | {k: v for k, v in body.items() if k != "metadata"}


def overridden(base: Body, request: dict[str, Any], path: str) -> Body | Refused:
    """A snapshot with the fields that a session asks for instead of the agent's.

    MA-A1.4: each given field replaces the agent's as a whole; left out inherits; null or empty clears. MA-A1.5: a model can't be
    cleared. MA-A1.6: an effort given with the model is ignored, the model's default applies.
    """
    try:
        given = {k: v for k, v in request.items() if k in OVERRIDE_FIELDS}
        changed = dict(base)
        if "model" in given:
            place = join(path, "model")
            if given["model"] is None:
                raise Misfit(
                    place, "must not be null: an agent needs a model; leave it out.", code="agent_model_required"
                )
            changed["model"] = read_model(given.pop("model"), place) | {"effort": None}
        return changed | _read_clearable(given, path)
    except Misfit as misfit:
        return misfit.refused


def replaced_fields(request: Any, path: str) -> Body | Refused:
    """The fields of a running session's agent that an update replaces: its tools. To clear them is to send an empty list."""
    try:
        given = read_object(request, path, known=("tools", "mcp_servers"))
        for field, value in given.items():
            if value is None:
                raise Misfit(
                    join(path, field), "must be an array, not null: send [] to clear it, or leave it out to keep it."
                )
        return _read_clearable(given, path)
    except Misfit as misfit:
        return misfit.refused


# --------------------------------------------------------------------------------------------------------------------- calls


class ModelTool(msgspec.Struct, frozen=True):
    """A tool that the model is told of. `definition` is the client's, or None for a built-in one."""

    name: str
    owner: Literal["server", "ask", "custom"]
    definition: Body | None


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a call: the server runs it, a client is asked first, a client runs it, or nobody may."""

    owner: Literal["server", "ask", "custom", "refused"]
    policy: str | None = None
    """The policy that judged it, for calls of built-in tools."""
    error: str = ""
    """What the model reads of a refused call."""
    on_lost: Literal["repeat", "ambiguous"] = "ambiguous"
    serial: bool = False
    """Shares the session's one shell."""


READ_ONLY: Final = ("read", "glob", "grep")
"""Running one of these twice does nothing that running it once does not."""

SHELL: Final = "bash"


def offered_tools(agent: Body) -> list[ModelTool]:
    """The tools that the model is told of, built-in ones first.

    MA-D1.16: web search and fetch are never among them.
    """
    offered: list[ModelTool] = []
    custom: list[ModelTool] = []
    for tool in agent["tools"]:
        if tool["type"] == "custom":
            definition = {k: tool[k] for k in ("name", "description", "input_schema")}
            custom.append(ModelTool(tool["name"], "custom", definition))
        else:
            offered += [
                ModelTool(name, "ask" if ask_policy(config) else "server", None)
                for name, config in builtin_configs(tool).items()
                if config["enabled"]
            ]
    return offered + custom


def judge_call(agent: Body, name: str, arguments: dict[str, Any] | None) -> Judged:
    """Who runs a call that the model made.

    MA-D1.2: a tool that was taken away is denied. MA-D2.1: `always_allow`, the default, runs it. MA-D2.2: `always_ask` asks first.
    MA-D2.5: a tool's own policy goes before its set's.
    """
    disabled = False
    judged: Judged | None = None
    for tool in agent["tools"]:
        if tool["type"] == "custom":
            if tool["name"] == name:
                judged = Judged(owner="custom")
                break
            continue
        config = builtin_configs(tool).get(name)
        if config is not None and config["enabled"]:
            judged = Judged(
                owner="ask" if ask_policy(config) else "server",
                policy=config["permission_policy"]["type"],
                on_lost="repeat" if name in READ_ONLY else "ambiguous",
                serial=name == SHELL,
            )
        disabled = disabled or config is not None
    if judged is None:
        return _refused_call(agent, name, disabled=disabled)
    if arguments is None:
        return Judged(
            owner="refused",
            error="The arguments of this call are not one JSON object: they were cut off or malformed. Nothing was run.",
        )
    return judged


def _refused_call(agent: Body, name: str, *, disabled: bool) -> Judged:
    """MA-D1.13: a name that nobody has is no failure of the turn: the model reads so, and which tools there are."""
    names = ", ".join(t.name for t in offered_tools(agent)) or "none"
    why = f"The tool {name!r} is not enabled in this session." if disabled else f"No tool has the name {name!r}."
    return Judged(owner="refused", error=f"{why} Nothing was run. Tools that can be called: {names}.")
