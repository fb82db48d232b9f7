"""The built-in tools: what the model is told of them, and the check of what it sends."""

import re
from typing import Any, Final, cast

from perdure.environments.files import ToolRefused
from perdure.environments.workspace import PATH_CHARACTERS_MAX

# Long enough for a test suite, short enough that a forgotten prompt for input does not hold a turn for long.
BASH_TIMEOUT_MS_DEFAULT: Final = 120_000
BASH_TIMEOUT_MS_MAX: Final = 600_000
# Shells read a command byte by byte; larger data belongs into a file.
COMMAND_CHARACTERS_MAX: Final = 128 * 1024
PATTERN_CHARACTERS_MAX: Final = 4_096

READ_ONLY_TOOLS: Final = frozenset({"read", "glob", "grep"})

_PATH_RULE: Final = "Relative to /workspace, or absolute below it."

# JSON Schema for the model; `check_arguments` reads the same dictionaries.
TOOL_DEFINITIONS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": "bash",
        "description": (
            "Run a command in a persistent bash shell in a sandbox; it starts in /workspace. Working directory,"
            " variables and background processes last from call to call. Standard input is empty. Standard output and"
            " standard error come back together, the last 100 KiB of them. A command that takes too long is killed"
            " together with the shell; the next call gets a fresh one, files are kept."
        ),
        "input_schema": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command. Leave it out only with `restart`."},
                "restart": {"type": "boolean", "description": "Replace the shell by a fresh one; run nothing."},
                "timeout_ms": {
                    "type": "integer",
                    "description": "Milliseconds before the command is killed. Default 120000, at most 600000.",
                },
            },
            "additionalProperties": False,
        },
    },
    {
        "name": "read",
        "description": (
            "Read a file: text up to 256 KiB, PNG, JPEG, GIF or WebP images up to 5 MiB in base64, PDF documents up to"
            " 20 MiB."
            " Larger text files are read in parts with view_range."
        ),
        "input_schema": {
            "type": "object",
            "properties": {
                "file_path": {"type": "string", "description": f"The file. {_PATH_RULE}"},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "First and last line, counted from 1; a last line of 0 or less is the file's end.",
                },
            },
            "required": ["file_path"],
            "additionalProperties": False,
        },
    },
    {
        "name": "write",
        "description": "Write a whole file. Makes missing folders; replaces what was there.",
        "input_schema": {
            "type": "object",
            "properties": {
                "file_path": {"type": "string", "description": f"The file. {_PATH_RULE}"},
                "content": {"type": "string", "description": "The whole new content."},
            },
            "required": ["file_path", "content"],
            "additionalProperties": False,
        },
    },
    {
        "name": "edit",
        "description": "Replace exact text in a file. The text must appear exactly once, unless replace_all is set.",
        "input_schema": {
            "type": "object",
            "properties": {
                "file_path": {"type": "string", "description": f"The file. {_PATH_RULE}"},
                "old_string": {"type": "string", "description": "The text to replace, spaces and newlines included."},
                "new_string": {"type": "string", "description": "The text to put in its place."},
                "replace_all": {"type": "boolean", "description": "Replace every occurrence."},
            },
            "required": ["file_path", "old_string", "new_string"],
            "additionalProperties": False,
        },
    },
    {
        "name": "glob",
        "description": (
            "Find paths by a pattern with `*`, `?`, `[...]`, `{a,b}`, and `**` for any folders. Newest first,"
            " at most 200."
        ),
        "input_schema": {
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "description": "A relative pattern, for example `**/*.py`."},
                "path": {
                    "type": "string",
                    "description": f"The folder to search; /workspace if left out. {_PATH_RULE}",
                },
            },
            "required": ["pattern"],
            "additionalProperties": False,
        },
    },
    {
        "name": "grep",
        "description": (
            "Search file contents for a regular expression (Python's syntax), line by line. Gives path:line:text."
            " Skips binary files, .git, node_modules, symbolic links and lines above 2,000 characters."
        ),
        "input_schema": {
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "description": "The regular expression."},
                "path": {
                    "type": "string",
                    "description": f"The folder or file to search; /workspace if left out. {_PATH_RULE}",
                },
            },
            "required": ["pattern"],
            "additionalProperties": False,
        },
    },
)

_SCHEMAS: Final[dict[str, dict[str, Any]]] = {tool["name"]: tool["input_schema"] for tool in TOOL_DEFINITIONS}
_NO_NUL: Final = frozenset({"command", "file_path", "path", "pattern"})
_CHARACTERS_MAX: Final = {
    "command": COMMAND_CHARACTERS_MAX,
    "pattern": PATTERN_CHARACTERS_MAX,
    "file_path": PATH_CHARACTERS_MAX,
    "path": PATH_CHARACTERS_MAX,
}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def check_arguments(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without nulls. Raises `ToolRefused` that names the tool, the field and the rule."""
    schema = _SCHEMAS.get(tool)
    if schema is None:
        raise ToolRefused(f"there is no built-in tool {tool!r}; there are {', '.join(_SCHEMAS)}")
    properties: dict[str, dict[str, Any]] = schema["properties"]
    for field in arguments:
        if field not in properties:
            raise ToolRefused(f"{tool}: {field}: unknown field; known are {', '.join(properties)}")
    # Models write null for "left out".
    given = {field: value for field, value in arguments.items() if value is not None}
    for field in schema.get("required", ()):
        if field not in given:
            raise ToolRefused(f"{tool}: {field}: is required")
    for field, value in given.items():
        rule = _broken_rule(field, properties[field]["type"], value)
        if rule is not None:
            raise ToolRefused(f"{tool}: {field}: {rule}")
    if tool == "bash":
        _check_bash(given)
    return given


def _broken_rule(field: str, kind: str, value: object) -> str | None:
    """The rule that a value breaks; None when it is fine."""
    if kind == "string":
        return _broken_text_rule(field, value)
    if kind == "boolean":
        return None if isinstance(value, bool) else "must be true or false"
    if kind == "integer":
        return None if _is_integer(value) else "must be an integer"
    return None if _is_range(value) else "must be an array of two integers, [first line, last line]"


def _broken_text_rule(field: str, value: object) -> str | None:
    if not isinstance(value, str):
        return "must be a string"
    if _SURROGATE.search(value):
        return "must not contain lone surrogates"
    if field in _NO_NUL and "\0" in value:
        return "must not contain U+0000"
    characters_max = _CHARACTERS_MAX.get(field)
    if characters_max is not None and len(value) > characters_max:
        return f"must have at most {characters_max} characters, has {len(value)}"
    return None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(value: object) -> bool:
    if not isinstance(value, list):
        return False
    parts = cast(list[object], value)
    return len(parts) == 2 and all(_is_integer(part) for part in parts)


def _check_bash(given: dict[str, Any]) -> None:
    if not given.get("restart") and not given.get("command", "").strip():
        raise ToolRefused("bash: command: is required, unless restart is true")
    if given.get("restart") and given.get("command"):
        raise ToolRefused("bash: command: must be left out when restart is true; send it in the next call")
    timeout_ms = given.get("timeout_ms", 0)
    if timeout_ms < 0 or timeout_ms > BASH_TIMEOUT_MS_MAX:
        raise ToolRefused(f"bash: timeout_ms: must be from 0 (the default) to {BASH_TIMEOUT_MS_MAX}")
