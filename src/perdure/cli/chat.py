"""Talking with one session through the HTTP API: send a message, show its turn, answer what it asks for."""

import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from perdure.cli.asking import AGAIN_S, Asker, CtrlC
from perdure.cli.client import ApiError, Client, Json, StreamEvent
from perdure.cli.exits import FAILED, OK, CommandFailed, Left
from perdure.cli.following import Following
from perdure.cli.screen import Screen
from perdure.cli.text import compact, one_line

ARGUMENT_CHARS_MAX: Final = 2_000
"""Who allows a call wants to see what is allowed."""

PAGE_EVENTS: Final = 1_000
YES: Final = frozenset({"y", "yes"})
NO: Final = frozenset({"n", "no", ""})


_ENDINGS: Final = {
    "end_turn": "The turn ended",
    "interrupted": "The turn was interrupted",
    "refusal": "The model refused to go on",
    "retries_exhausted": "The turn was given up",
    "terminated": "The session was terminated and takes no more input",
    "deleted": "The session was deleted",
}


class Ending(msgspec.Struct, frozen=True):
    """How a turn came to rest: the stop reason, or `interrupted` by us, `terminated`, `deleted`; and the error that ended it, if any."""

    reason: str
    error: str | None

    @property
    def is_good(self) -> bool:
        """Whether the agent ended its turn by itself."""
        return self.reason == "end_turn" and self.error is None

    @property
    def is_last(self) -> bool:
        """Whether the session takes no more input."""
        return self.reason in ("terminated", "deleted")

    def explain(self) -> str:
        """One line for the person."""
        what = _ENDINGS.get(self.reason, f"The turn ended with the reason {self.reason}")
        return f"{what}." if self.error is None else f"{what}: {self.error}"


class Chat:
    """One session, one person."""

    def __init__(self, client: Client, session_id: str, screen: Screen, asker: Asker) -> None:
        self._client = client
        self.session_id = session_id
        self._path = f"/v1/sessions/{session_id}"
        self._screen = screen
        self._asker = asker
        self._cursor: str | None = None
        self._calls: dict[str, Json] = {}
        self._interrupted = False

    def say(self, text: str) -> Ending:
        """Send a message and attend its turn. Raises `Left`."""
        self._interrupted = False
        with CtrlC(self._interrupt) as ctrl_c, self._follow() as following:
            input_id = self._send({"type": "user.message", "content": [{"type": "text", "text": text}]})
            self._screen.own(input_id)
            following.began_with(input_id)
            return self._attend(following, ctrl_c, input_id)

    def resume(self) -> Ending | None:
        """Attend what the session is doing or waiting for; None when it rests."""
        with CtrlC(self._interrupt) as ctrl_c, self._follow() as following:
            # Opened before asking, so that nothing is missed between the two.
            status = self._client.get(self._path)["status"]
            if status == "terminated":
                raise CommandFailed(f"The session {self.session_id} is terminated and takes no more input.")
            if status == "idle":
                owed = self._owed()
                if not owed:
                    return None
                self._answer(owed, ctrl_c)
            else:
                self._screen.tell(f"The session is {status}.")
            return self._attend(following, ctrl_c, None)

    def _follow(self) -> Following:
        return Following(self._client, self.session_id, after=self._cursor)

    def _send(self, *events: Json) -> str:
        answer = self._client.post(f"{self._path}/events", {"events": list(events)})
        return str(answer["data"][0]["id"])

    def _interrupt(self) -> None:
        self._screen.tell("Interrupting the turn; press Ctrl-C again to leave it running and go.")
        # Said first: the turn may be over before the answer is here.
        self._interrupted = True
        try:
            self._send({"type": "user.interrupt"})
        except CommandFailed as failed:
            self._interrupted = False
            self._screen.tell(str(failed))

    # ------------------------------------------------------------------------------------------------------------ the turn

    def _attend(self, following: Following, ctrl_c: CtrlC, input_id: str | None) -> Ending:
        """Show events until the session rests with the input processed. An earlier turn's end is not ours."""
        is_processed = input_id is None
        error: str | None = None
        for event in following:
            self._cursor = following.cursor
            self._screen.show(event)
            if event.data.get("id") == input_id and event.data.get("processed_at") is not None:
                is_processed = True
            match event.type:
                case "agent.tool_use" | "agent.custom_tool_use":
                    self._calls[str(event.data["id"])] = event.data
                case "session.status_running":
                    error = None
                case "session.error":
                    error = _final_error(event)
                case "session.status_idle":
                    owed = _owed_by(event.data)
                    if owed and self._is_idle():
                        self._answer(owed, ctrl_c)
                    elif not owed and is_processed:
                        reason = str(event.data["stop_reason"]["type"])
                        return Ending("interrupted" if self._interrupted else reason, error)
                case "session.status_terminated":
                    return Ending("terminated", error)
                case _:
                    pass
        return Ending("deleted", None)

    def _is_idle(self) -> bool:
        """False when the stream shows what is past already, and somebody answered in between."""
        return self._client.get(self._path)["status"] == "idle"

    # ------------------------------------------------------------------------------------------------------------- answers

    def _owed(self) -> list[str]:
        """The required actions of a session at rest."""
        page = self._client.get(f"{self._path}/events", _LAST_IDLE)["data"]
        return _owed_by(page[0]) if page else []

    def _answer(self, action_ids: list[str], ctrl_c: CtrlC) -> None:
        with ctrl_c.paused():
            answers = [self._ask(action_id) for action_id in action_ids]
        try:
            self._send(*answers)
        except ApiError as error:
            # Somebody else was quicker, or the session was interrupted: the stream goes on either way.
            self._screen.tell(str(error))

    def _ask(self, action_id: str) -> Json:
        call = self._call(action_id)
        shown = f"{call['name']} {one_line(compact(call['input']), ARGUMENT_CHARS_MAX)}"
        if call["type"] == "agent.custom_tool_use":
            text = self._answer_to(f"Result of {shown}: ")
            content = [{"type": "text", "text": text}] if text else []
            return {"type": "user.custom_tool_result", "custom_tool_use_id": action_id, "content": content}
        text = self._answer_to(f"Allow {shown} ? [y]es, [n]o, or say why not: ").strip()
        if text.lower() in YES:
            return {"type": "user.tool_confirmation", "tool_use_id": action_id, "result": "allow"}
        denial: Json = {"type": "user.tool_confirmation", "tool_use_id": action_id, "result": "deny"}
        return denial if text.lower() in NO else {**denial, "deny_message": text}

    def _answer_to(self, question: str) -> str:
        # The question starts on a line of its own.
        self._screen.tell("The session waits for you.")
        try:
            answer = self._asker.ask(question)
        except KeyboardInterrupt:
            answer = None
        if answer is None:
            self._screen.tell(f"It goes on waiting; `perdure chat --session {self.session_id}` asks again.")
            raise Left
        return answer

    def _call(self, action_id: str) -> Json:
        known = self._calls.get(action_id)
        if known is not None:
            return known
        for data in self._client.get(f"{self._path}/events", _LAST_CALLS)["data"]:
            self._calls[str(data["id"])] = data
        found = self._calls.get(action_id)
        if found is None:
            raise CommandFailed(f"The session waits for an answer to {action_id}, which is not among its last calls.")
        return found


_LAST_IDLE: Final[dict[str, str | int | list[str]]] = {"types[]": ["session.status_idle"], "order": "desc", "limit": 1}
_LAST_CALLS: Final[dict[str, str | int | list[str]]] = {
    "types[]": ["agent.tool_use", "agent.custom_tool_use"],
    "order": "desc",
    "limit": PAGE_EVENTS,
}


def _owed_by(idle: Json) -> list[str]:
    stop_reason: Json = idle["stop_reason"]
    return list(stop_reason["event_ids"]) if stop_reason["type"] == "requires_action" else []


def _final_error(event: StreamEvent) -> str | None:
    """The message of an error that ended something; None while the server tries again."""
    error: Json = event.data["error"]
    return None if error["retry_status"]["type"] == "retrying" else str(error["message"])


class Talker(Protocol):
    """Takes one message after another."""

    def say(self, text: str) -> Ending:
        """Send a message and attend its turn."""
        ...


def converse(
    talker: Talker,
    asker: Asker,
    screen: Screen,
    *,
    first: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Message after message, until the person leaves or the session ends. Without a person a bad end fails the command.

    `first` is a message that was read already.
    """
    pressed_s: float | None = None
    code = OK
    while True:
        try:
            text, first = asker.ask("> ") if first is None else first, None
        except KeyboardInterrupt:
            now_s = clock()
            if pressed_s is not None and now_s - pressed_s <= AGAIN_S:
                return code
            pressed_s = now_s
            screen.tell("\nPress Ctrl-C again, or Ctrl-D, to leave. The session stays.")
            continue
        if text is None:
            return code
        if not text.strip():
            continue
        ending = talker.say(text)
        if not ending.is_good:
            screen.tell(ending.explain())
            code = OK if asker.is_interactive else FAILED
        if ending.is_last:
            return FAILED
