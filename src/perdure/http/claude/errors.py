"""Refusals on this face: one table, total over the kinds, from what was refused to status and error type."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from perdure.domain.errors import RefusalKind, Refused

ERRORS: Final[Mapping[RefusalKind, tuple[int, str]]] = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    # The SDK sends a 409 three times. A conflict with the state of a resource is as final as any other bad request.
    "conflict": (400, "invalid_request_error"),
    "precondition": (412, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "not_built": (501, "api_error"),
    "too_large": (413, "request_too_large"),
    "rate_limited": (429, "rate_limit_error"),
    "unavailable": (503, "api_error"),
}

RETRY_HELPS: Final[frozenset[RefusalKind]] = frozenset({"rate_limited", "unavailable"})

UNTYPED: Final = "invalid_request_error"
"""The code of refusals that have none of their own."""


def to_wire_error(refused: Refused, request_id: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers. A typed code is at `error.details.error_code`, where the SDK looks for it."""
    status, kind = ERRORS[refused.kind]
    details: dict[str, Any] = {}
    if refused.code != UNTYPED:
        details["error_code"] = refused.code
    if refused.param is not None:
        details["param"] = refused.param
    details |= refused.details or {}
    error: dict[str, Any] = {"type": kind, "message": refused.message}
    if details:
        error["details"] = details
    body = msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
    headers = {"content-type": "application/json"}
    if refused.kind not in RETRY_HELPS:
        headers["x-should-retry"] = "false"
    if refused.kind == "unavailable":
        headers["retry-after"] = "1"
    return status, body, headers
