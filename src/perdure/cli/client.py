"""A thin client of the HTTP API, for the verbs of the command line: JSON requests, and a stream that resumes.

Every change carries an idempotency key, so it may be sent again after a lost answer or a restart of the server.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, cast
from uuid import uuid4

import httpx2
import msgspec

from perdure.cli.credentials import Target
from perdure.cli.exits import REFUSED, CommandFailed

Json: TypeAlias = dict[str, Any]

API_VERSION: Final = "2026-10-21"
BETA: Final = "managed-agents-2026-04-01"

CONNECT_S: Final = 5.0
ANSWER_S: Final = 60.0
"""Longer than any request that is no stream takes."""

SILENCE_S: Final = 45.0
"""A stream sends a comment every 15 s: three missed ones mean that the peer is gone."""

PAUSES_S: Final = (0.1, 0.3, 0.6, 1.0, 2.0, 3.0, 3.0, 5.0)
"""Between tries. Together longer than a server takes to restart and a lease to lapse."""

EVENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""One event may carry a message as large as a request may be, encoded."""

UNAUTHORIZED: Final = 401
FIRST_TRIES_MAX: Final = 2
"""Pauses before the first answer: a server that was never there is said to be missing soon."""

RETRIED_STATUSES: Final = frozenset({429, 502, 503, 504})
_BODY_CHARS_SHOWN: Final = 200


class ApiError(CommandFailed):
    """The server refused. `error_code` is the typed code, for those who act on it."""

    def __init__(self, message: str, *, status: int, error_code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code


class Unreachable(CommandFailed):
    """Nobody answers at the URL."""


class StreamLost(Exception):
    """The connection of a stream broke, or its server ended it."""


class StreamEvent(msgspec.Struct, frozen=True):
    """One frame. `cursor` resumes behind it; a preview has the cursor of what came before it, if anything did."""

    cursor: str | None
    type: str
    data: Json


class Client:
    """Talks to one server with one key. Close it."""

    def __init__(
        self, target: Target, *, sleep: Callable[[float], None] = time.sleep, pauses_s: Sequence[float] = PAUSES_S
    ) -> None:
        self.target = target
        self._sleep = sleep
        self._pauses_s = tuple(pauses_s)
        self._was_there = False
        self._http = httpx2.Client(
            base_url=target.url,
            headers={
                "authorization": f"Bearer {target.api_key}",
                "anthropic-version": API_VERSION,
                "anthropic-beta": BETA,
            },
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            # The server is named by the user; a proxy of the environment is not meant for it.
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, params: Mapping[str, str | int | list[str]] | None = None) -> Json:
        """Read something."""
        return self._request("GET", path, params=params or {})

    def post(self, path: str, body: Json | None = None) -> Json:
        """Change something, once however often it is sent."""
        return self._request("POST", path, body=body or {})

    def is_answering(self) -> bool:
        """Whether a Perdure is there that knows the key, be it busy or without its database. One try."""
        try:
            response = self._http.get("/v1/sessions", params={"limit": 1}, timeout=CONNECT_S)
            answer: Any = response.json()
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
            return False
        if not isinstance(answer, dict):
            return False
        return (response.is_success and "data" in answer) or (
            response.status_code in RETRIED_STATUSES and "error" in answer
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | list[str]] | None = None,
        body: Json | None = None,
    ) -> Json:
        headers = {"idempotency-key": str(uuid4())} if method == "POST" else {}
        pauses_s = self._pauses_s if self._was_there else self._pauses_s[:FIRST_TRIES_MAX]
        for pause_s in (*pauses_s, None):
            try:
                response = self._http.request(method, path, params=params, json=body, headers=headers)
            except UnicodeEncodeError:
                raise CommandFailed("The text is no UTF-8, so it can't be sent.", code=REFUSED) from None
            except httpx2.TransportError as error:
                if pause_s is None:
                    raise self._unreachable(error) from None
            else:
                self._was_there = True
                if response.status_code not in RETRIED_STATUSES or pause_s is None:
                    return _answer_of(response)
            self._sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"No answer from {self.target.url} ({type(error).__name__}: {error}). Is it running? Start it with `perdure up`."
        )

    # -------------------------------------------------------------------------------------------------------------- streams

    @contextmanager
    def open_stream(self, session_id: str, *, after: str | None) -> Generator[Iterator[StreamEvent]]:
        """The events of a session from now on, or from behind a cursor. Once it is open, nothing that commits is missed.

        The iterator raises `StreamLost` when the connection breaks or ends.
        """
        headers = {} if after is None else {"last-event-id": after}
        try:
            with self._http.stream(
                "GET",
                f"/v1/sessions/{session_id}/events/stream",
                params={"event_deltas[]": ["agent.message"]},
                headers=headers,
                timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            ) as response:
                if response.status_code in RETRIED_STATUSES:
                    raise StreamLost(f"status {response.status_code}")
                if not response.is_success:
                    response.read()
                    _answer_of(response)
                yield _events_of(response)
        except httpx2.TransportError as error:
            raise StreamLost(f"{type(error).__name__}: {error}") from None


def _events_of(response: httpx2.Response) -> Iterator[StreamEvent]:
    try:
        for frame in httpx2.EventSource(response, max_event_size=EVENT_BYTES_MAX):
            if frame.data:
                yield StreamEvent(frame.id or None, frame.event, cast("Json", json.loads(frame.data)))
    except httpx2.TransportError as error:
        raise StreamLost(f"{type(error).__name__}: {error}") from None
    except ValueError:
        raise StreamLost("a frame was cut") from None
    raise StreamLost("the server ended the stream")


def _answer_of(response: httpx2.Response) -> Json:
    """The object in an answer; raises what its refusal says."""
    try:
        answer: Any = response.json()
    except ValueError:
        answer = None
    if response.is_success and isinstance(answer, dict):
        return cast("Json", answer)
    error: Any = cast("Json", answer).get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        shown = response.text[:_BODY_CHARS_SHOWN]
        raise ApiError(
            f"{response.url} answered {response.status_code}, not as a Perdure server does: {shown!r}. Check the URL.",
            status=response.status_code,
            error_code=None,
        )
    fields = cast("Json", error)
    details: Json = fields.get("details") or {}
    message = str(fields.get("message", "the server gave no reason"))
    if response.status_code == UNAUTHORIZED:
        message += " Give a valid key with --api-key or PERDURE_API_KEY."
    request_id = response.headers.get("request-id")
    suffix = "" if request_id is None else f" (request {request_id})"
    raise ApiError(
        f"The server answered {response.status_code}: {message}{suffix}",
        status=response.status_code,
        error_code=details.get("error_code"),
    )
