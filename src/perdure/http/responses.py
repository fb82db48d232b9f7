"""Answers that the ASGI layer makes itself, in the envelope of the face that was asked."""

from typing import Final

import msgspec

from perdure.domain.errors import Refused
from perdure.http.asgi import BODY_BYTES_MAX
from perdure.http.claude.errors import to_wire_error as to_claude_error
from perdure.http.openai.errors import to_wire_error as to_openai_error
from perdure.http.requests import JSON_HEADERS, Response
from perdure.http.router import Face

UNAVAILABLE: Final = 503
RETRY_AFTER_S: Final = "1"
"""A restarted database is back within seconds."""


def refusal(face: Face, refused: Refused, request_id: str, *, status: int | None = None) -> Response:
    """A refusal as the face writes it; `status` replaces the one that its kind has."""
    write = to_openai_error if face == "openai" else to_claude_error
    own_status, body, headers = write(refused, request_id)
    if own_status == UNAVAILABLE:
        headers = {**headers, "retry-after": RETRY_AFTER_S}
    return Response(own_status if status is None else status, body, {**JSON_HEADERS, **headers})


def refusal_for_either(refused: Refused, request_id: str) -> Response:
    """A 400 before a face is chosen: each SDK finds its own fields in it."""
    error = {"type": "invalid_request_error", "message": refused.message, "param": refused.param, "code": refused.code}
    body = msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
    return Response(400, body, {**JSON_HEADERS, "x-should-retry": "false"})


def unavailable(face: Face, request_id: str) -> Response:
    """The database is away (MA-A0.25)."""
    return refusal(
        face,
        Refused(
            "unavailable",
            "unavailable",
            "The database can't be reached right now; nothing of the request was kept. Try again.",
        ),
        request_id,
        status=503,
    )


def failed(face: Face, request_id: str) -> Response:
    """Our own bug. The log has the details under the request id."""
    return refusal(
        face,
        Refused("unavailable", "internal_error", f"The server failed on this request; its log names {request_id}."),
        request_id,
        status=500,
    )


def wrong_method(face: Face, method: str, path: str, allowed: tuple[str, ...], request_id: str) -> Response:
    """MA-A0.17."""
    refused = Refused(
        "not_found", "method_not_allowed", f"{method} is not a method of {path}; it has {', '.join(allowed)}."
    )
    answer = refusal(face, refused, request_id, status=405)
    return Response(answer.status, answer.body, {**answer.headers, "allow": ", ".join(allowed)})


def too_large(face: Face, request_id: str) -> Response:
    """MA-A0.12."""
    return refusal(
        face,
        Refused(
            "too_large",
            "request_too_large",
            f"The request body is over the limit of {BODY_BYTES_MAX // (1024 * 1024)} MB: send less at once.",
        ),
        request_id,
        status=413,
    )


def too_slow(face: Face, request_id: str) -> Response:
    """The body did not come in time. The connection is of no more use."""
    refused = Refused(
        "invalid", "request_timeout", "The request body took too long to arrive: send it again, in one go."
    )
    answer = refusal(face, refused, request_id, status=408)
    headers = {k: v for k, v in answer.headers.items() if k != "x-should-retry"}
    return Response(answer.status, answer.body, {**headers, "connection": "close"})
