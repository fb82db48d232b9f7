"""Refusals in the form of the OpenAI API: status, type and code by the kind of refusal, and whether a client may try again."""

from typing import Final

import msgspec

from perdure.domain.errors import RefusalKind, Refused

_STATUS: Final[dict[RefusalKind, tuple[int, str]]] = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "invalid_request_error"),
    "forbidden": (403, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "conflict": (409, "conflict_error"),
    "precondition": (412, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "not_built": (501, "server_error"),
    "too_large": (413, "invalid_request_error"),
    "rate_limited": (429, "rate_limit_error"),
    "unavailable": (503, "server_error"),
}

_WORTH_RETRYING: Final = frozenset({"rate_limited", "unavailable"})


def to_wire_error(refused: Refused, request_id: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers. The SDK retries 409, 429 and 5xx by itself, so what can't change is marked."""
    status, kind = _STATUS[refused.kind]
    headers = {} if refused.kind in _WORTH_RETRYING else {"x-should-retry": "false"}
    if refused.kind in _WORTH_RETRYING:
        headers["retry-after"] = "1"
    error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
    return status, msgspec.json.encode({"error": error, "request_id": request_id}), headers
