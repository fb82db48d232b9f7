"""What the Messages API accepts: the rules by which the scripted provider refuses a request.

Pure: bytes and headers in, a parsed body or a `Refused` out. The rules are at least as strict as the real
provider's, so that a request which passes here is one the provider would take.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, TypeAlias, cast

Json: TypeAlias = dict[str, Any]

# The provider's own limits.
BODY_BYTES_MAX: Final = 32 * 1024 * 1024
IMAGE_BYTES_MAX: Final = 5 * 1024 * 1024
CACHE_MARKS_MAX: Final = 4
MODEL_CHARS_MAX: Final = 256

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

_IMAGE_MEDIA: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})

_BODY_FIELDS: Final = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "system",
        "tools",
        "tool_choice",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "stop_sequences",
        "metadata",
        "thinking",
        "output_config",
        "service_tier",
        "speed",
        "cache_control",
        "container",
        "context_management",
        "inference_geo",
        "mcp_servers",
        "diagnostics",
    ]
)
_TOOL_FIELDS: Final = frozenset(
    [
        "name",
        "description",
        "input_schema",
        "type",
        "cache_control",
        "strict",
        "eager_input_streaming",
        "defer_loading",
        "input_examples",
        "allowed_callers",
    ]
)
_BLOCK_FIELDS: Final[dict[str, frozenset[str]]] = {
    "text": frozenset({"type", "text", "citations", "cache_control"}),
    "image": frozenset({"type", "source", "cache_control"}),
    "document": frozenset({"type", "source", "title", "context", "citations", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller", "cache_control"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
}
_USER_BLOCKS: Final = frozenset({"text", "image", "document", "tool_result", "search_result", "container_upload"})
_ASSISTANT_BLOCKS: Final = frozenset({"text", "tool_use", "thinking", "redacted_thinking", "server_tool_use"})
_RESULT_BLOCKS: Final = frozenset({"text", "image", "document", "search_result", "tool_reference"})


class Refused(Exception):
    """The request breaks a rule. `status` and `error_type` are the provider's own."""

    def __init__(self, message: str, *, status: int = 400, error_type: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type


class SentThinking:
    """The thinking this provider sent: only these bytes may come back."""

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._redacted: set[str] = set()

    def add(self, thinking: str, signature: str) -> None:
        """Remember one signed block."""
        self._pairs.add((thinking, signature))

    def add_redacted(self, data: str) -> None:
        """Remember one redacted block."""
        self._redacted.add(data)

    def knows(self, block: Json) -> bool:
        """Whether `block` is byte for byte one that was sent."""
        if block["type"] == "redacted_thinking":
            return block.get("data") in self._redacted
        return (block.get("thinking"), block.get("signature")) in self._pairs


def check_headers(headers: Mapping[str, str]) -> None:
    """Authentication, version and content type. Header names are in lower case."""
    key, bearer = headers.get("x-api-key", ""), headers.get("authorization", "")
    if not key.strip() and not bearer.lower().startswith("bearer "):
        raise Refused("x-api-key header is required", status=401, error_type="authentication_error")
    version = headers.get("anthropic-version", "")
    if not version:
        _refuse("anthropic-version: header is required")
    if not _VERSION.fullmatch(version):
        _refuse(f'anthropic-version: "{version}" is not a valid version')
    if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        _refuse("content-type: must be application/json")


def parse_body(raw: bytes) -> Json:
    """The body as an object, or the reason why it isn't one."""
    if len(raw) > BODY_BYTES_MAX:
        raise Refused("Request exceeds the maximum size", status=413, error_type="request_too_large")
    try:
        body: object = json.loads(raw.decode("utf-8"), parse_constant=_not_a_number)
    except UnicodeDecodeError as error:
        raise Refused(f"The request body is not valid UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"The request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        _refuse("The request body must be a JSON object")
    if any(_UNSTORABLE.search(text) for text in _strings(cast("Json", body))):
        _refuse("The request body is not valid JSON: no low surrogate in string, or U+0000")
    return cast("Json", body)


def check_request(body: Json, sent: SentThinking, *, counting: bool = False) -> None:
    """Every rule on a parsed body. `counting` is for token counts, which need no `max_tokens`."""
    for field in body:
        if field not in _BODY_FIELDS:
            _refuse(f"{field}: Extra inputs are not permitted")
    _check_model(body.get("model"))
    if not counting:
        _check_max_tokens(body.get("max_tokens"))
    if not isinstance(body.get("stream", False), bool):
        _refuse("stream: Input should be a valid boolean")
    _check_system(body.get("system"))
    _check_tools(body.get("tools"))
    _check_messages(body.get("messages"), sent)
    marks = sum(isinstance(node, dict) and "cache_control" in node for node in _nodes(body))
    if marks > CACHE_MARKS_MAX:
        _refuse(f"A maximum of {CACHE_MARKS_MAX} blocks with cache_control may be provided. Found {marks}.")


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def _not_a_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _nodes(root: object) -> Iterator[object]:
    """Every value inside `root`, itself and the keys of objects included. Iterative, for bodies of any depth."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, dict):
            fields = cast("Json", node)
            stack.extend(fields.keys())
            stack.extend(fields.values())
        elif isinstance(node, list):
            stack.extend(cast("list[object]", node))


def _strings(root: object) -> Iterator[str]:
    return (node for node in _nodes(root) if isinstance(node, str))


def _check_model(model: object) -> None:
    if model is None:
        _refuse("model: Field required")
    if not isinstance(model, str):
        _refuse("model: Input should be a valid string")
    if not 1 <= len(model) <= MODEL_CHARS_MAX:
        _refuse(f"model: String should have 1 to {MODEL_CHARS_MAX} characters")
    if not _MODEL.fullmatch(model):
        raise Refused(f"model: {model}", status=404, error_type="not_found_error")


def _check_max_tokens(max_tokens: object) -> None:
    if max_tokens is None:
        _refuse("max_tokens: Field required")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        _refuse("max_tokens: Input should be a valid integer")
    if max_tokens < 1:
        _refuse("max_tokens: Input should be greater than or equal to 1")


def _check_system(system: object) -> None:
    if system is None:
        return
    if isinstance(system, str):
        if not system.strip():
            _refuse("system: text content blocks must contain non-whitespace text")
        return
    if not isinstance(system, list) or not system:
        _refuse("system: Input should be a valid string or a non-empty list")
    for index, block in enumerate(cast("list[object]", system)):
        _check_block(block, f"system.{index}", frozenset({"text"}))


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        _refuse("tools: Input should be a valid list")
    names: set[str] = set()
    for index, tool in enumerate(cast("list[object]", tools)):
        name = _check_tool(tool, f"tools.{index}")
        if name in names:
            _refuse("tools: Tool names must be unique.")
        names.add(name)


def _check_tool(tool: object, path: str) -> str:
    if not isinstance(tool, dict):
        _refuse(f"{path}: Input should be an object")
    fields = cast("Json", tool)
    name = fields.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        _refuse(f"{path}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
    if fields.get("type", "custom") != "custom":
        return name  # the provider's own tools bring their own schema
    for field in fields:
        if field not in _TOOL_FIELDS:
            _refuse(f"{path}.custom.{field}: Extra inputs are not permitted")
    if not isinstance(fields.get("description", ""), str):
        _refuse(f"{path}.custom.description: Input should be a valid string")
    schema = fields.get("input_schema")
    if schema is None:
        _refuse(f"{path}.custom.input_schema: Field required")
    if not isinstance(schema, dict) or cast("Json", schema).get("type") != "object":
        _refuse(f"{path}.custom.input_schema.type: Input should be 'object'")
    return name


def _check_messages(messages: object, sent: SentThinking) -> None:
    if messages is None:
        _refuse("messages: Field required")
    if not isinstance(messages, list):
        _refuse("messages: Input should be a valid list")
    if not messages:
        _refuse("messages: at least one message is required")
    parsed = [_check_message(message, index, sent) for index, message in enumerate(cast("list[object]", messages))]
    if parsed[0][0] != "user":
        _refuse("messages: first message must use the user role")
    merged = _merge(parsed)
    _check_pairs(merged)
    role, blocks = merged[-1]
    if role == "assistant":
        _check_prefill(blocks[-1])


def _check_message(message: object, index: int, sent: SentThinking) -> tuple[str, list[Json]]:
    """The role and the blocks of one message."""
    path = f"messages.{index}"
    if not isinstance(message, dict):
        _refuse(f"{path}: Input should be an object")
    fields = cast("Json", message)
    for field in fields:
        if field not in ("role", "content"):
            _refuse(f"{path}.{field}: Extra inputs are not permitted")
    role = fields.get("role")
    if role not in ("user", "assistant"):
        _refuse(f'messages: Unexpected role "{role}". Allowed roles are "user" or "assistant"')
    content = fields.get("content")
    if content is None:
        _refuse(f"{path}.content: Field required")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        _refuse(f"{path}.content: Input should be a valid string or list")
    if not content:
        _refuse(f"{path}: all messages must have non-empty content")
    allowed = _USER_BLOCKS if role == "user" else _ASSISTANT_BLOCKS
    blocks: list[Json] = []
    for number, block in enumerate(cast("list[object]", content)):
        checked = _check_block(block, f"{path}.content.{number}", allowed)
        if checked["type"] in ("thinking", "redacted_thinking"):
            _check_thinking(checked, f"{path}.content.{number}", sent)
        blocks.append(checked)
    return cast("str", role), blocks


def _check_block(block: object, path: str, allowed: frozenset[str]) -> Json:
    if not isinstance(block, dict):
        _refuse(f"{path}: Input should be an object")
    fields = cast("Json", block)
    kind = fields.get("type")
    if not isinstance(kind, str):
        _refuse(f"{path}.type: Field required")
    provider_result = kind.endswith("_tool_result") and "server_tool_use" in allowed
    if kind not in allowed and not provider_result:
        _refuse(f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags")
    for field in fields:
        if kind in _BLOCK_FIELDS and field not in _BLOCK_FIELDS[kind]:
            _refuse(f"{path}.{kind}.{field}: Extra inputs are not permitted")
    match kind:
        case "text":
            _check_text(fields.get("text"), path)
        case "image":
            _check_source(fields.get("source"), path, _IMAGE_MEDIA)
        case "document":
            _check_source(fields.get("source"), path, frozenset({"application/pdf"}))
        case "tool_use" | "server_tool_use":
            _check_call(fields, path)
        case "tool_result":
            _check_result(fields, path)
        case _:
            pass
    return fields


def _check_text(text: object, path: str) -> None:
    if not isinstance(text, str):
        _refuse(f"{path}.text.text: Input should be a valid string")
    if not text:
        _refuse(f"{path}: text content blocks must be non-empty")
    if not text.strip():
        _refuse(f"{path}: text content blocks must contain non-whitespace text")


def _check_source(source: object, path: str, media: frozenset[str]) -> None:
    if not isinstance(source, dict):
        _refuse(f"{path}.source: Field required")
    fields = cast("Json", source)
    match fields.get("type"):
        case "base64":
            if fields.get("media_type") not in media:
                _refuse(f"{path}.source.base64.media_type: Input should be one of {', '.join(sorted(media))}")
            _check_base64(fields.get("data"), path, IMAGE_BYTES_MAX if media is _IMAGE_MEDIA else BODY_BYTES_MAX)
        case "text":
            _check_text(fields.get("data"), f"{path}.source")
        case "url" | "file" | "content":
            key = {"url": "url", "file": "file_id", "content": "content"}[fields["type"]]
            if not fields.get(key):
                _refuse(f"{path}.source.{fields['type']}.{key}: Field required")
        case other:
            _refuse(f"{path}.source: Input tag '{other}' found using 'type' does not match any of the expected tags")


def _check_base64(data: object, path: str, bytes_max: int) -> None:
    if not isinstance(data, str) or not data:
        _refuse(f"{path}.source.base64.data: Field required")
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        _refuse(f"{path}.source.base64: invalid base64 data")
    if len(decoded) > bytes_max:
        _refuse(f"{path}.source.base64: image exceeds 5 MB maximum: {len(decoded)} bytes > {bytes_max} bytes")


def _check_call(fields: Json, path: str) -> None:
    identity, name = fields.get("id"), fields.get("name")
    if not isinstance(identity, str) or not _CALL_ID.fullmatch(identity):
        _refuse(f"{path}.{fields['type']}.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        _refuse(f"{path}.{fields['type']}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
    if not isinstance(fields.get("input"), dict):
        _refuse(f"{path}.{fields['type']}.input: Input should be an object")


def _check_result(fields: Json, path: str) -> None:
    if not isinstance(fields.get("tool_use_id"), str):
        _refuse(f"{path}.tool_result.tool_use_id: Field required")
    is_error = fields.get("is_error", False)
    if not isinstance(is_error, bool):
        _refuse(f"{path}.tool_result.is_error: Input should be a valid boolean")
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        _refuse(f"{path}.tool_result.content: Input should be a valid string or list")
    for index, block in enumerate(cast("list[object]", content)):
        checked = _check_block(block, f"{path}.tool_result.content.{index}", _RESULT_BLOCKS)
        if is_error and checked["type"] != "text":
            _refuse(f"{path}.tool_result: all content must be type text if is_error is true")


def _check_thinking(block: Json, path: str, sent: SentThinking) -> None:
    if block["type"] == "thinking" and not block.get("signature"):
        _refuse(f"{path}.thinking.signature: Field required")
    if not sent.knows(block):
        _refuse(f"{path}: Invalid `signature` in `{block['type']}` block")


def _merge(messages: list[tuple[str, list[Json]]]) -> list[tuple[str, list[Json]]]:
    """Join consecutive messages of one role, as the provider does."""
    merged: list[tuple[str, list[Json]]] = []
    for role, blocks in messages:
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(blocks)
        else:
            merged.append((role, list(blocks)))
    return merged


def _check_pairs(messages: list[tuple[str, list[Json]]]) -> None:
    """Each call answered once, at the start of the very next user message, and nothing answered that was not called."""
    called: list[str] = []
    seen: set[str] = set()
    for index, (role, blocks) in enumerate(messages):
        if role == "assistant":
            called = [block["id"] for block in blocks if block["type"] == "tool_use"]
            repeated = [call for number, call in enumerate(called) if call in seen or call in called[:number]]
            if repeated:
                _refuse(f"messages.{index}: `tool_use` ids must be unique: {repeated[0]}")
            seen.update(called)
            continue
        _check_answers(blocks, called, index)
        called = []
    if called:
        _refuse_unanswered(len(messages) - 1, called)


def _check_answers(blocks: list[Json], called: list[str], index: int) -> None:
    answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    for number, call in enumerate(answered):
        if call not in called:
            _refuse(
                f"messages.{index}.content: unexpected `tool_use_id` found in `tool_result` blocks: {call}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
        if call in answered[:number]:
            _refuse(f"messages.{index}: each tool_use must have a single result. Found multiple with id: {call}")
    missing = [call for call in called if call not in answered]
    if missing:
        _refuse_unanswered(index - 1, missing)
    kinds = [block["type"] == "tool_result" for block in blocks]
    if kinds != sorted(kinds, reverse=True):
        _refuse(f"messages.{index}: `tool_result` blocks must come first in the content of a user message")


def _refuse_unanswered(index: int, calls: list[str]) -> NoReturn:
    _refuse(
        f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(calls)}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def _check_prefill(block: Json) -> None:
    if block["type"] in ("thinking", "redacted_thinking"):
        _refuse("messages: The final block in an assistant message cannot be `thinking`.")
    if block["type"] == "text" and block["text"] != block["text"].rstrip():
        _refuse("messages: final assistant content cannot end with trailing whitespace")


def estimate_tokens(body: Json) -> int:
    """A stable stand-in for a token count: a quarter of the characters."""
    counted = {field: body.get(field) for field in ("system", "messages", "tools")}
    return max(1, sum(len(text) for text in _strings(counted)) // 4)
