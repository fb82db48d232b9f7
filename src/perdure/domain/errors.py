"""What a transaction may answer instead of doing what it was asked."""

from typing import Any, Literal, TypeAlias

import msgspec

RefusalKind: TypeAlias = Literal[
    "invalid",
    "unauthenticated",
    "forbidden",
    "not_found",
    "conflict",
    "precondition",
    "unsupported",
    "not_built",
    "too_large",
    "rate_limited",
    "unavailable",
]


class Refused(msgspec.Struct, frozen=True):
    """The command was understood and not done; nothing was written.

    `code` is stable and machine-readable, `message` names the object, the rule and what to do, `param` the place in the request.
    """

    kind: RefusalKind
    code: str
    message: str
    param: str | None = None
    details: dict[str, Any] | None = None


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The caller no longer owns the turn: drop everything and stop. News, not an error."""


class InvariantViolation(Exception):
    """Our own bug. The command fails, its session's neighbours do not."""


class Unavailable(Exception):
    """The ledger can't be reached now; nothing of the command was kept."""
