"""Following one session over broken connections and restarts of its server, each event once and in order."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final, Self

from perdure.cli.client import PAUSES_S, Client, StreamEvent, StreamLost
from perdure.cli.exits import CommandFailed

BEGINNING: Final = "1.0"
"""The cursor of the first row, the making of the session: behind it comes everything that a client ever sees."""

PREVIEW_TYPES: Final = frozenset({"event_start", "event_delta"})


class Following:
    """The stream of a session. Enter it, and what commits from then on is seen; iterate it as long as it lasts.

    Without a cursor it starts at the present. It ends after `session.deleted`, and raises `CommandFailed` when the server stays away.
    """

    def __init__(
        self,
        client: Client,
        session_id: str,
        *,
        after: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._client = client
        self._session_id = session_id
        self._cursor = after
        self._sleep = sleep
        self._pauses_s = pauses_s
        self._stack = ExitStack()
        self._events: Iterator[StreamEvent] | None = None
        self._anchor: str | None = None
        self._skipping = False
        self._was_open = False

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def cursor(self) -> str | None:
        """Where to go on from: behind the last event that was handed out."""
        return self._cursor

    def began_with(self, event_id: str) -> None:
        """Name the first event that matters, sent after the stream was open: where to begin again if it breaks before it had a cursor."""
        if self._anchor is None:
            self._anchor = event_id

    def __iter__(self) -> Iterator[StreamEvent]:
        while True:
            if self._events is None:
                self._open()
            assert self._events is not None
            try:
                event = next(self._events)
            except StreamLost:
                self._events = None
                self._stack.close()
                continue
            if self._is_wanted(event):
                yield event
                if event.type == "session.deleted":
                    return

    def _is_wanted(self, event: StreamEvent) -> bool:
        if self._skipping and event.data.get("id") == self._anchor:
            self._skipping = False
        if self._skipping:
            return False
        self._cursor = event.cursor or self._cursor
        return True

    def _open(self) -> None:
        after = self._cursor
        if after is None and self._anchor is not None:
            # It broke before anything came. What is older than the anchor is skipped while it is read again.
            after, self._skipping = BEGINNING, True
        for pause_s in (*self._pauses_s, None):
            try:
                self._events = self._stack.enter_context(self._client.open_stream(self._session_id, after=after))
            except StreamLost as lost:
                if pause_s is None:
                    raise self._given_up(lost) from None
                self._sleep(pause_s)
            else:
                self._was_open = True
                return

    def _given_up(self, lost: StreamLost) -> CommandFailed:
        url = self._client.target.url
        if not self._was_open:
            return CommandFailed(
                f"The events of {self._session_id} can't be read: no answer from {url} ({lost}). "
                "Is it running? Start it with `perdure up`."
            )
        return CommandFailed(
            f"The stream of {self._session_id} was lost ({lost}) and {url} does not come back. "
            f"The session goes on by itself: `perdure chat --session {self._session_id}` returns to it."
        )
