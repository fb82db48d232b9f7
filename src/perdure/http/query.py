"""Reading a query string: one function for each form, each answering a value or the refusal that names the key and the rule."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

from perdure.domain.errors import Refused

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 100
"""MA-F9."""

LIMIT_DIGITS_MAX: Final = 9

Query = list[tuple[str, str]]


def refuse_unknown(query: Query, known: Collection[str]) -> Refused | None:
    """Why this query can't be read: a key that the route does not know, or one given twice (array keys end in `[]`)."""
    seen: set[str] = set()
    for key, _ in query:
        if key not in known:
            return invalid(key, f"Unknown query parameter {key!r}.")
        if key in seen and not key.endswith("[]"):
            return invalid(key, f"Query parameter {key!r} may be given once.")
        seen.add(key)
    return None


def read_text(query: Query, key: str) -> str | None:
    """The value of a key that is given at most once."""
    return next((value for name, value in query if name == key), None)


def read_all(query: Query, key: str) -> list[str]:
    """The values of `key[]`, in order; a bare `key` counts as one of them."""
    return [value for name, value in query if name in (key, key + "[]")]


def read_limit(query: Query, *, default: int = LIMIT_DEFAULT, most: int = LIMIT_MAX) -> int | Refused:
    """`limit`: a whole number from 1 to `most`."""
    return read_whole(query, "limit", default=default, most=most)


def read_whole(query: Query, key: str, *, default: int, most: int | None = None) -> int | Refused:
    """A whole number from 1 on."""
    text = read_text(query, key)
    if text is None:
        return default
    rule = f"from 1 to {most or 10**LIMIT_DIGITS_MAX - 1:,}"
    if not (text.isascii() and text.isdigit() and len(text) <= LIMIT_DIGITS_MAX):
        return invalid(key, f"{key}: must be a whole number {rule}, not {text[:40]!r}.")
    value = int(text)
    if value < 1 or (most is not None and value > most):
        return invalid(key, f"{key}: must be a whole number {rule}, not {text!r}.")
    return value


def read_flag(query: Query, key: str) -> bool | Refused:
    """`true` or `false`; false when left out."""
    text = read_text(query, key)
    if text in (None, "false"):
        return False
    return True if text == "true" else invalid(key, f"{key}: must be true or false, not {str(text)[:40]!r}.")


def read_instant(query: Query, key: str) -> datetime | Refused | None:
    """An RFC 3339 time, in UTC; its `T` and `Z` may be small."""
    text = read_text(query, key)
    if text is None:
        return None
    try:
        # An unescaped plus sign of the offset comes as a space.
        instant = datetime.fromisoformat(text.upper().replace(" ", "+"))
        if instant.tzinfo is None or "T" not in text.upper():
            raise ValueError
        return instant.astimezone(UTC)
    except (ValueError, OverflowError):
        return invalid(key, f"{key}: must be an RFC 3339 time such as 2026-01-31T09:00:00Z, not {text[:40]!r}.")


def invalid(param: str, message: str) -> Refused:
    """A refusal of one place in the request."""
    return Refused("invalid", "invalid_request_error", message, param)
