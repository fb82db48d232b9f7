"""What a refusal of the Messages API means to us: which failure, whether to retry, and when."""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.models.strictness import clean_text
from perdure.ports.model import FailureCode, ModelFailed, Usage

if TYPE_CHECKING:
    from anthropic import APIStatusError

# A longer wait is a broken header; whoever retries has a deadline long before.
RETRY_AFTER_MS_MAX: Final = 24 * 60 * 60 * 1000

# The provider's text goes into our ledger and to clients.
MESSAGE_CHARS_MAX: Final = 2_000

_BY_STATUS: Final[dict[int, tuple[FailureCode, bool]]] = {
    401: ("authentication", False),
    402: ("billing", False),
    403: ("authentication", False),
    408: ("request_failed", True),
    409: ("request_failed", True),
    413: ("request_too_large", False),
    429: ("rate_limited", True),
    529: ("overloaded", True),
}

_BY_TYPE: Final[dict[str, tuple[FailureCode, bool]]] = {
    "authentication_error": ("authentication", False),
    "billing_error": ("billing", False),
    "invalid_request_error": ("request_failed", False),
    "not_found_error": ("request_failed", False),
    "overloaded_error": ("overloaded", True),
    "permission_error": ("authentication", False),
    "rate_limit_error": ("rate_limited", True),
    "request_too_large": ("request_too_large", False),
}


class BrokenStream(Exception):
    """The reply's stream is not what the protocol says. Another try may bring a good one, unless told otherwise."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


def failure_of_status(error: "APIStatusError", *, now_s: float) -> ModelFailed:
    """The failure behind an HTTP status. `now_s` is the time of day, for a Retry-After that is a date."""
    status = error.status_code
    code, retryable = _BY_STATUS.get(status, ("request_failed", status >= 500))
    if error.type == "billing_error":
        code, retryable = "billing", False
    # The provider's own word that the same request will not fare better.
    if error.response.headers.get("x-should-retry") == "false":
        retryable = False
    detail = clean_text(str(error.api_message or error.message))[:MESSAGE_CHARS_MAX]
    reference = f" (request {error.request_id})" if error.request_id else ""
    return ModelFailed(
        code,
        f"anthropic answered {status}: {detail}{reference}",
        retryable=retryable,
        retry_after_ms=retry_after_ms(error.response.headers, now_s=now_s) if retryable else None,
    )


def failure_of_stream_error(data: Mapping[str, Any], usage: Usage) -> ModelFailed:
    """The failure behind an `error` event. An unknown kind may be retried: the request itself had been taken."""
    raw: object = data.get("error")
    detail: dict[str, Any] = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    kind = str(detail.get("type", "unknown"))
    code, retryable = _BY_TYPE.get(kind, ("request_failed", True))
    words = clean_text(str(detail.get("message", "no reason given")))[:MESSAGE_CHARS_MAX]
    return ModelFailed(code, f"anthropic broke off the reply: {kind}: {words}", retryable=retryable, usage=usage)


def retry_after_ms(headers: Mapping[str, str], *, now_s: float) -> int | None:
    """How long the provider asks us to wait, in seconds or as an HTTP date; None where it asks for nothing that can be waited for.

    Zero or a time that has passed is no wish: taken at its word, all tries would be spent at once.
    """
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    if not wait_s > 0:
        return None
    return int(min(wait_s * 1000, RETRY_AFTER_MS_MAX))
