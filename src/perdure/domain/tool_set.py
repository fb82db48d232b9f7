"""The tools of an agent as configuration: sets of built-in ones and the client's own, and the rules between them."""

import re
from typing import Any, Final

from perdure.domain.shape import Misfit, join, read_array, read_choice, read_flag, read_object, read_text, unsupported

TOOL_SET: Final = "agent_toolset_20260401"
BUILTIN_NAMES: Final = ("bash", "read", "write", "edit", "glob", "grep")
WEB_NAMES: Final = ("web_search", "web_fetch")
"""Known to the set, run by nobody here."""

TOOLS_MAX: Final = 256
CUSTOM_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

POLICIES: Final = ("always_allow", "always_ask", "auto")
POLICY_DEFAULT: Final = "always_allow"

_CONFIG_FIELDS: Final = ("name", "type", "enabled", "permission_policy")
_WEB_FIELDS: Final = {
    "web_search": ("allowed_domains", "blocked_domains", "user_location"),
    "web_fetch": ("allowed_domains", "blocked_domains", "max_content_tokens", "url_sources"),
}

Config = dict[str, Any]


def read_tools(value: Any, path: str) -> list[Config]:
    """The tools, resolved. Raises `Misfit`.

    MA-F5: at most 256 tools over all sets. MA-D5.1: a custom tool may not take the name of another one, or of an enabled built-in one.
    MA-A5.17: MCP tool sets and the policy `auto` are refused by name.
    """
    tools: list[Config] = []
    names: set[str] = set()
    for index, row in enumerate(read_array(value, path)):
        place = join(path, index)
        kind = read_text(read_object(row, place, required=("type",))["type"], join(place, "type"))
        match kind:
            case "custom":
                tool = _read_custom(row, place)
                taken = [tool["name"]]
            case _ if kind == TOOL_SET:
                if any(t["type"] == TOOL_SET for t in tools):
                    raise Misfit(place, f"{TOOL_SET} may be given once.")
                tool = _read_set(row, place)
                taken = [name for name, config in builtin_configs(tool).items() if config["enabled"]]
            case "mcp_toolset":
                raise unsupported(join(place, "type"), "the MCP tool set (mcp_toolset)")
            case _:
                read_choice(kind, join(place, "type"), ("custom", TOOL_SET, "mcp_toolset"))
                raise AssertionError(kind)
        for name in taken:
            if name in names:
                raise Misfit(place, f"{name!r} is the name of another tool of this agent; names must be unique.")
            names.add(name)
        tools.append(tool)
    if len(names) > TOOLS_MAX:
        raise Misfit(path, f"must have at most {TOOLS_MAX} tools over all sets, not {len(names)}.")
    return tools


def _read_custom(row: Any, path: str) -> Config:
    """One tool of the client.

    MA-A5.5: name, description and an object schema are needed. MA-F6: a name has 1 to 128 letters, digits, `_` and `-`.
    """
    given = read_object(row, path)
    if "permission_policy" in given:
        raise Misfit(join(path, "permission_policy"), "does not apply to custom tools: the client runs them itself.")
    fields = ("type", "name", "description", "input_schema")
    read_object(row, path, known=fields, required=fields)
    name = read_text(given["name"], join(path, "name"))
    if not CUSTOM_NAME.fullmatch(name):
        raise Misfit(join(path, "name"), "must have 1 to 128 characters: letters, digits, underscores and hyphens.")
    description = read_text(given["description"], join(path, "description"), least=1)
    if not description.strip():
        raise Misfit(join(path, "description"), "must not be blank: the model chooses a tool by it.")
    return {
        "type": "custom",
        "name": name,
        "description": description,
        "input_schema": _read_schema(given["input_schema"], join(path, "input_schema")),
    }


def _read_schema(value: Any, path: str) -> Config:
    schema = read_object(value, path, required=("type",))
    read_choice(schema["type"], join(path, "type"), ("object",))
    if schema.get("properties") is not None:
        properties = read_object(schema["properties"], join(path, "properties"))
        for name, part in properties.items():
            if not isinstance(part, bool):
                read_object(part, join(join(path, "properties"), name))
    if schema.get("required") is not None:
        for index, name in enumerate(read_array(schema["required"], join(path, "required"))):
            read_text(name, join(join(path, "required"), index))
    return {k: v for k, v in schema.items() if v is not None or k not in ("properties", "required")}


def _read_set(row: Any, path: str) -> Config:
    """The built-in tools: a default, and what single tools have instead.

    MA-D1.3: an unknown name in `configs`, or one given twice, is refused.
    """
    given = read_object(row, path, known=("type", "configs", "default_config"))
    default = _read_default(given.get("default_config"), join(path, "default_config"))
    configs: list[Config] = []
    seen: set[str] = set()
    rows = given.get("configs")
    for index, config in enumerate([] if rows is None else read_array(rows, join(path, "configs"))):
        place = join(join(path, "configs"), index)
        resolved = _read_config(config, place, default)
        if resolved["name"] in seen:
            raise Misfit(join(place, "name"), f"{resolved['name']!r} is configured twice in this set.")
        seen.add(resolved["name"])
        configs.append(resolved)
    return {"type": TOOL_SET, "default_config": default, "configs": configs}


def _read_default(value: Any, path: str) -> Config:
    given: Config = {} if value is None else read_object(value, path, known=("enabled", "permission_policy"))
    return _resolved(given, path, {"enabled": True, "permission_policy": {"type": POLICY_DEFAULT}})


def _read_config(value: Any, path: str, default: Config) -> Config:
    name = read_choice(
        read_object(value, path, required=("name",))["name"], join(path, "name"), (*BUILTIN_NAMES, *WEB_NAMES)
    )
    given = read_object(value, path, known=(*_CONFIG_FIELDS, *_WEB_FIELDS.get(name, ())))
    if given.get("type") is not None:
        read_choice(given["type"], join(path, "type"), (name,))
    for field in _WEB_FIELDS.get(name, ()):
        if given.get(field) is not None:
            raise unsupported(join(path, field), f"the setting {field} of {name}")
    resolved = _resolved(given, path, default)
    if name in WEB_NAMES and resolved["enabled"]:
        raise Misfit(
            path,
            f"the tool {name} is not built yet; leave it out, or set enabled to false.",
            kind="unsupported",
            code="unsupported",
        )
    return {"type": name, "name": name, **resolved}


def _resolved(given: Config, path: str, default: Config) -> Config:
    enabled = given.get("enabled")
    policy = given.get("permission_policy")
    return {
        "enabled": default["enabled"] if enabled is None else read_flag(enabled, join(path, "enabled")),
        "permission_policy": default["permission_policy"]
        if policy is None
        else _read_policy(policy, join(path, "permission_policy")),
    }


def _read_policy(value: Any, path: str) -> Config:
    given = read_object(value, path, known=("type",), required=("type",))
    kind = read_choice(given["type"], join(path, "type"), POLICIES)
    if kind == "auto":
        raise unsupported(join(path, "type"), "the policy auto")
    return {"type": kind}


def builtin_configs(tool_set: Config) -> dict[str, Config]:
    """What holds for each built-in tool of a resolved set: its own configuration, or the set's default."""
    own = {config["name"]: config for config in tool_set["configs"]}
    return {name: own.get(name, tool_set["default_config"]) for name in BUILTIN_NAMES}


def ask_policy(config: Config) -> bool:
    """Whether a client is asked before the tool runs."""
    return bool(config["permission_policy"]["type"] == "always_ask")
