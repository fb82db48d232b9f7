"""The border between the ASGI layer and the faces: what a handler gets, what it gives back, and how it is found.

A face exports `ROUTES: tuple[Route | StreamRoute, ...]` from each of its modules. The ASGI layer authenticates, reads the body within
its limit, takes `beta` out of the query, strips a forced prefix (`/claude`) from the path, and turns `Refused` into the face's error
body. `perdure.domain.errors.Unavailable` may be raised anywhere and becomes 503.
"""

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.submission import SubmissionKey
from perdure.http.services import Services

HttpMethod: TypeAlias = Literal["GET", "POST", "DELETE", "PATCH", "PUT"]

JSON_HEADERS = {"content-type": "application/json"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One authenticated request. `params` are the parts of the path that the template names, percent-decoded."""

    method: str
    path: str
    params: dict[str, str]
    query: list[tuple[str, str]]
    """Decoded pairs in the order sent; percent-encoded brackets are plain here. Without `beta`."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    workspace_id: UUID
    key_id: UUID
    submission: SubmissionKey | None
    """Present on routes that are submitted once."""
    request_id: str


class Response(msgspec.Struct, frozen=True):
    """A whole answer. The ASGI layer adds the request ids, the length, and `content-type: application/json` when none is given."""

    status: int
    body: bytes
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class SendStream(Protocol):
    """An answer that is written piece by piece. It ends when the handler returns.

    The handler is cancelled when the client goes, its key is revoked, or the server stops; clean up in `finally`.
    """

    async def start(self, headers: dict[str, str]) -> None:
        """Send status 200 and the headers (`content-type` included). At most once; after it the handler returns None."""
        ...

    async def write(self, data: bytes) -> None:
        """Send one piece. Raises ConnectionError when the peer is gone or takes nothing for `WRITE_DEADLINE_S`."""
        ...

    async def closed(self) -> None:
        """Return once the peer is gone."""
        ...


Handler: TypeAlias = Callable[[Services, Request], Awaitable[Response | Refused]]
StreamHandler: TypeAlias = Callable[[Services, Request, SendStream], Awaitable[Refused | None]]
"""Refused only before `start`."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of the SDK. `template` looks like `/v1/sessions/{session_id}/events`."""

    method: HttpMethod
    template: str
    handler: Handler
    sdk_method: str
    """As the compatibility page writes it: `sessions.events.send`."""
    submits_once: bool = False
    """Whether a repeated request is recognised; the handler gets `request.submission` then."""


class StreamRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route whose answer is a stream."""

    method: HttpMethod
    template: str
    handler: StreamHandler
    sdk_method: str


AnyRoute: TypeAlias = Route | StreamRoute
